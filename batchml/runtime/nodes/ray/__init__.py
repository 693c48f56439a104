"""A Ray cluster on the nodes of a group run."""
