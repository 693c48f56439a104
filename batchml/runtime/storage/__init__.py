"""Stores of values and files that outlive a container: a folder or S3; standard library only."""
