"""Runs, sweeps and comparisons in a notebook: the panels of the dashboard, without scripts."""
