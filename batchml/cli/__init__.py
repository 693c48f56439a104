"""The shell of the command line: the root command, completion, the terminal, help texts."""
