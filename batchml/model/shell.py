"""Commands as a POSIX shell takes them, in one line that a terminal shows as it is."""

import shlex
from collections.abc import Sequence


def join(words: Sequence[str]) -> str:
    """The words as one line. Typed into a shell, it runs exactly these words."""
    return one_line(shlex.join(words))


def one_line(command: str) -> str:
    """A command that may hold newlines, tabs and other control characters, in one printable line.

    POSIX has no escape for a control character in a word, and `$(...)` cuts newlines at its end. So
    the whole command is written with printf's escapes, and evaluated.
    """
    if command.isprintable():
        return command
    escaped = "".join(
        char if char.isprintable() and char not in "\\'%" else _octal(char) for char in command
    )
    return f"""eval "$(printf '{escaped}')\""""


def _octal(char: str) -> str:
    if char == "%":
        return "%%"
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="surrogateescape"))
