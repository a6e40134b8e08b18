"""A run is a folder: what is kept in it, and what its trace says."""
