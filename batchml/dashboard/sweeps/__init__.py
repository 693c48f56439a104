"""The sweeps of an environment, and the page of one sweep: its trials, plots and actions."""
