"""How the dashboard is reached, and the threads on which it answers."""
