"""Executors turn effects into processes or containers, and report events."""
