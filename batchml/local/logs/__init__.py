"""Logs of attempts: files, their proof, and the calls that read them."""
