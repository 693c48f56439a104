"""Output on stdout, messages on stderr. Imports next to nothing."""

import sys
from collections.abc import Sequence
from typing import Any

from batchml.cli.render import printable
from batchml.errors import UsageError

_documents = 0  # printed JSON documents

_END = 300  # characters at each end of an error's line that are always shown


def print_json(value: Any) -> None:
    """Exactly one JSON document on stdout."""
    import json

    global _documents
    _documents += 1
    print(json.dumps(value, indent=2))


def print_error(message: str, code: int) -> None:
    """The error as the one JSON document on stdout; nothing if one was printed already."""
    if not _documents:
        print_json({"error": message, "exitCode": code})
        sys.stdout.flush()


def print_line(text: str) -> None:
    print(text, flush=True)


def say_error(error: Exception) -> None:
    """Print an error on stderr without control characters: it may quote other people's text."""

    lines = (printable(line.replace("\r", " ")) for line in str(error).split("\n"))
    say("batchml: " + "\n".join(map(_shortened, lines)))


def _shortened(line: str) -> str:
    """A very long line without its middle: its end says what to do."""
    left_out = len(line) - 2 * _END
    if left_out <= _END:
        return line
    return f"{line[:_END]} [... {left_out:,} characters ...] {line[-_END:]}"


def say_lost(error: str) -> None:
    """Report that contact stays lost. The error may quote other people's text."""

    say(f"No contact, but what runs goes on. Still trying: {printable(error)}")


def say(text: str) -> None:
    """Print a message on stderr: stdout is for output."""
    print(text, file=sys.stderr, flush=True)


def confirm(question: str, flag: str, *, yes: bool, expected: Sequence[str] = ("y", "yes")) -> bool:
    """Ask a question on the terminal. Without one, raise UsageError that names the flag."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"Nothing was changed. This needs a confirmation: add {flag}.")
    print(f"{question} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {answer.lower() for answer in expected}
