"""The journal on disk, and the state folder that it belongs to."""
