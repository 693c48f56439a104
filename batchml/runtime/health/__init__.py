"""Checks of a host before and while a run uses it."""
