"""The journal on disk, and which state folder it belongs to."""
