"""What can be wrong with this machine and an account: facts are gathered, then judged."""
