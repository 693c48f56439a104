"""What surrounds a run's command: code, folders, output, stop signals."""
