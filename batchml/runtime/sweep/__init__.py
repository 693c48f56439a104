"""Run a trial of a sweep in its container: its parameters, its messages, its early end."""
