"""Programs that hold a run for a person: an allocation, a notebook."""
