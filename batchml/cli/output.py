"""Print output on stdout and messages on stderr, and ask for confirmation."""

import sys
from collections.abc import Sequence
from typing import Any

from batchml.cli.render import printable
from batchml.errors import UsageError

_documents = 0  # JSON documents that this process has printed

_END_SIZE = 300  # characters at each end of an error's line that are always shown


def print_json(value: Any) -> None:
    """Print a JSON document on stdout."""
    import json

    global _documents
    _documents += 1
    print(json.dumps(value, indent=2))


def print_error(message: str, code: int) -> None:
    """Print the error as a JSON document on stdout, unless the command printed a document."""
    if not _documents:
        print_json({"error": message, "exitCode": code})
        sys.stdout.flush()


def print_line(text: str) -> None:
    print(text, flush=True)


def say_error(error: Exception) -> None:
    """Print an error on stderr without control characters: it may quote other people's text."""
    lines = (printable(line.replace("\r", " ")) for line in str(error).split("\n"))
    say("batchml: " + "\n".join(map(_shorten, lines)))


def _shorten(line: str) -> str:
    """Leave out the middle of a very long line: its end says what to do."""
    left_out = len(line) - 2 * _END_SIZE
    if left_out <= _END_SIZE:
        return line
    return f"{line[:_END_SIZE]} [... {left_out:,} characters ...] {line[-_END_SIZE:]}"


def say_lost(error: str) -> None:
    """Report that contact stays lost. The error may quote other people's text."""
    say(f"Contact is lost; runs continue. Still trying: {printable(error)}")


def say(text: str) -> None:
    """Print a message on stderr: stdout is for output."""
    print(text, file=sys.stderr, flush=True)


def confirm(question: str, flag: str, *, yes: bool, expected: Sequence[str] = ("y", "yes")) -> bool:
    """Ask on the terminal; return whether the answer is expected. `yes`: do not ask.

    Raises UsageError, which names the flag that answers, without a terminal.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"Nothing was changed, because this needs a confirmation: add {flag}.")
    print(f"{question} ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {answer.lower() for answer in expected}
