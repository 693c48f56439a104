"""Port forwarding: from a port of this machine to a port inside a run."""
