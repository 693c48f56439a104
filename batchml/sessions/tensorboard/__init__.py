"""TensorBoard for runs: the folder of event files that it reads, and its server."""
