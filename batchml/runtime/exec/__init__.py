"""Run a command or a shell inside a run: the part of `batchml shell` that runs in the container."""
