"""Linear algebra by products: Krylov methods, and least squares with the linear unknowns eliminated."""
