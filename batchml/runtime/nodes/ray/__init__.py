"""Run a Ray cluster on the nodes of a group run: a head and its workers, which are jobs."""
