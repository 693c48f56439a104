"""What goes where: output on stdout, words for people on stderr. Imports next to nothing."""

import sys
from typing import Any

_documents = 0  # that were printed

_END = 300  # characters of each end of an error's line that are always shown


def print_json(value: Any) -> None:
    """Exactly one JSON document on stdout."""
    import json

    global _documents
    _documents += 1
    print(json.dumps(value, indent=2))


def print_error(message: str, code: int) -> None:
    """What went wrong, as the one document on stdout; nothing where that was printed already."""
    if not _documents:
        print_json({"error": message, "exitCode": code})
        sys.stdout.flush()


def print_line(text: str) -> None:
    print(text, flush=True)


def say_error(error: Exception) -> None:
    """An error as a person can read it. It may quote what they gave, or what others wrote."""
    from batchml.cli.render import printable

    lines = (printable(line.replace("\r", " ")) for line in str(error).split("\n"))
    say("batchml: " + "\n".join(map(_shortened, lines)))


def _shortened(line: str) -> str:
    """A line that is far too long without its middle: its end says what to do."""
    left_out = len(line) - 2 * _END
    if left_out <= _END:
        return line
    return f"{line[:_END]} [... {left_out:,} characters ...] {line[-_END:]}"


def say_lost(error: str) -> None:
    """Contact stays lost. The error may quote what others wrote."""
    from batchml.cli.render import printable

    say(f"No contact, but what runs goes on. Still trying: {printable(error)}")


def say(text: str) -> None:
    """For people: never on stdout, which is for output."""
    print(text, file=sys.stderr, flush=True)
