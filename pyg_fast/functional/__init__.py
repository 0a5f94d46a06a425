"""Functions of a graph given in any form, plain or prepared; users find them in pyg_fast.ops."""
