"""Checks of a host before and during a run, and what happens to unfit hosts."""
