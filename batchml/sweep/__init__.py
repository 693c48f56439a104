"""Search: what to try next, what to stop, what came of it. Pure but for the board it is given."""
