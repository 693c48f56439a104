"""Nouns: what the files say and what the service answers, as frozen values. No I/O."""
