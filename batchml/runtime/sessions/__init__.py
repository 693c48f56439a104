"""Programs that hold a run open for a person: an allocation, a notebook."""
