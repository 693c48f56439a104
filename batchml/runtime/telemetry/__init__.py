"""Measurements of a run: metrics, use of the machine, spent budget, spot notices."""
