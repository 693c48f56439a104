"""A trial of a sweep: its parameters, its reports, its early end."""
