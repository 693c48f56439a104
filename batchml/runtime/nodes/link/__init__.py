"""The nodes of a run: who they are, where they are, and authenticated messages between them."""
