"""What client and container have to agree on: variables, exit codes, marks in logs, messages."""
