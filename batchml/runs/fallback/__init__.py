"""Move a run that finds no host to another queue, so that it stays one run."""
