"""AWS seen from the client: the only place that knows AWS's JSON."""
