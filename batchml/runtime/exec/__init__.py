"""A command or a shell beside a running program."""
