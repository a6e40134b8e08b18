"""Linear algebra by products: Krylov methods, least squares with the linear unknowns eliminated, and over all
operators of linear attention."""
