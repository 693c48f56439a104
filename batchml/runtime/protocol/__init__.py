"""What client and container must agree on: variables, exit codes, marks in logs, messages."""
