"""Benchmarks: each prints ratios to a lower bound or to another tool, measured in the same run."""
