"""The commands `sweep` and `sweeps`: parse the command line, make one call, print the result."""
