"""Colours that can be read on light and on dark, and how wide the window is.

Only the terminal's own green, red, cyan and magenta: its theme makes them readable, where yellow
and white vanish on light and blue on dark. Colour never says what words do not.
"""

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, TextIO

_CODES = {"good": "32", "bad": "31", "busy": "36", "odd": "35", "dim": "2", "strong": "1"}

# What words of ours mean, wherever they stand alone in a cell.
_KINDS = {
    "SUCCEEDED": "good", "FAILED": "bad", "RUNNING": "busy", "STARTING": "busy",
    "succeeded": "good", "app-error": "bad", "out-of-memory": "bad", "timed-out": "bad",
    "image-error": "bad", "dependency-failed": "bad", "unschedulable": "bad", "unknown": "bad",
    "host-lost": "odd", "cancelled": "odd",
}  # fmt: skip


class Screen(NamedTuple):
    """Where text goes: a terminal's width in cells, or 0 for what has none; colours or not."""

    width: int = 0
    colour: bool = False


def screen(stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> Screen:
    """What `stream`, or else stdout, can show.

    NO_COLOR takes colours away (no-color.org), FORCE_COLOR gives them to a pipe.
    """
    stream = stream or sys.stdout
    is_terminal = stream.isatty()
    plain = bool(environ.get("NO_COLOR")) or is_dumb(environ)
    forced = environ.get("FORCE_COLOR", "0") not in ("", "0")
    return Screen(_width(stream, environ) if is_terminal else 0, not plain and is_terminal | forced)


def is_dumb(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the terminal can only print: no colours, no line that changes."""
    return environ.get("TERM", "") in ("", "dumb", "unknown")


def _width(stream: TextIO, environ: Mapping[str, str]) -> int:
    columns = environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 6 and int(columns):
        return int(columns)
    return window_width(stream)


def window_width(stream: TextIO) -> int:
    """Cells of the window as it is now; 80 where nobody knows."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def kind_of(word: str) -> str:
    """`good`, `bad`, `busy`, `odd`, or nothing for a word that has no colour."""
    return _KINDS.get(word, "")


def paint(text: str, kind: str) -> str:
    """The text in a colour, for a terminal."""
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m" if kind else text
