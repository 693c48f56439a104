"""Measurements of a run: metrics, progress, usage of the machine, spent budget, spot notices."""
