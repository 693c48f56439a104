"""Interactive work inside a run: shells, port forwarding, allocations, notebooks, TensorBoard."""
