"""How the processes of several nodes find each other, start and end together."""
