"""Start the processes of several nodes together, connect them, and end them together."""
