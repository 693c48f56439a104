"""The commands about runs: parse the command line, make one call, print the answer."""
