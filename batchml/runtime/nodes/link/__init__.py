"""The connections between the nodes of a run: their addresses, and authenticated messages."""
