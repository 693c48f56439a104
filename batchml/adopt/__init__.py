"""Propose a job.toml for a program: from its source, and from one short attempt."""
