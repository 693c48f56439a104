"""Runs: submit, follow, find, cancel, rerun; their logs, metrics and outputs."""
