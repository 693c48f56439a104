"""Before and around the command of a run: code, folders, output, stop signals."""
