"""The commands for interactive work: parse the command line, make one call, print the answer."""
