"""TensorBoard for runs in progress: its folder of event files, and its server."""
