"""Benchmarks: each yields rows, with ratios to a lower bound or to another tool of the same run."""
