"""Seats: runs that hold a machine for a person to sit at, and do nothing of their own. No I/O."""

SEAT_TAG = "batchml:seat"  # "alloc" or "notebook": what the run is held for
