"""Programs that keep a run open for a person: an allocation, a notebook."""
