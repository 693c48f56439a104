"""The command line: the root command, completion, output, the terminal, help texts."""
