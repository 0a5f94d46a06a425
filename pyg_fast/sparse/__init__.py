"""Sparse matrices as kernels read them, immutable values, and the sorts that make them."""
