"""Run commands and shells inside a run: the part of `batchml shell` that runs in the container."""
