"""Python functions as runs: how they are sent, and how their results come back."""
