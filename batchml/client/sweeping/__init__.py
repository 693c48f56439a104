"""What `sweep` and `sweeps` do beside flags and output."""
