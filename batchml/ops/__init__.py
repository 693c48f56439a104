"""Verbs: functions that are given their collaborators. No printing, no environment."""
