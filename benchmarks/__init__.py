"""Benchmarks of pyg_fast against the rivals one would use instead, all timed in the same run."""
