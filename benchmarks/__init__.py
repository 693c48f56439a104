"""Benchmarks: each prints ratios beside a floor or a peer, measured in the same run."""
