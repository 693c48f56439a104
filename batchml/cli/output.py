"""What goes where: output on stdout, words for people on stderr. Imports next to nothing."""

import sys
from typing import Any


def print_json(value: Any) -> None:
    """Exactly one JSON document on stdout."""
    import json

    print(json.dumps(value, indent=2))


def print_line(text: str) -> None:
    print(text, flush=True)


def say(text: str) -> None:
    """For people: never on stdout, which is for output."""
    print(text, file=sys.stderr, flush=True)
