"""What the entry does before and while a command runs: code, folders, log, outputs, signals."""
