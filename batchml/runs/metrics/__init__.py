"""Metrics, progress and resource usage of runs, read from marks in their logs."""
