"""The runner: the process that runs attempts, and outlives the server."""
