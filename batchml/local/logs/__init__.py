"""Logs of attempts: their files, the proof of their content, and the calls that read them."""
