"""Data sets of `[data]` in a job.toml: copied once to a host's disk, shared by its runs."""
