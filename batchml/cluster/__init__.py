"""Queues, hosts and the positions of runs in queues, for `top`, `queue` and `compute`."""
