"""Submit a run again: the same request, a part of an array, or onward from a checkpoint."""
