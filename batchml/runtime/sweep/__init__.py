"""A trial of a sweep in its container: its parameters, its reports, its early end."""
