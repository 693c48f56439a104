"""Bytes in, whole lines out: what CloudWatch Logs can carry, and the marks in the output."""

from __future__ import annotations

import re

# Bytes of one log event: 256 KiB, less the 26 that CloudWatch Logs counts for it, less one.
MAX_LINE = 262_117

# Lines that start so are for batchml's clients: they use them and do not show them.
MARK = "::batchml "
_MARK = MARK.encode()
_MARKS = re.compile(r"::batchml (?=host |end code=[0-9]{1,3} lines=[0-9]{1,15}$)(\w+) (.*)$")


class LineSplitter:
    """Cuts a stream of bytes into lines, without their newline, none longer than MAX_LINE.

    An empty line becomes one space, because CloudWatch Logs has no empty events and would drop it.
    With `escape`, lines that look like marks get a space in front: a program cannot forge them.
    """

    def __init__(self, escape: bool = False) -> None:
        self._rest = b""
        self._escape = escape

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now."""
        if b"\n" not in data and len(self._rest) + len(data) <= MAX_LINE:
            self._rest += data
            return []
        parts = (self._rest + data).split(b"\n")
        self._rest = parts.pop()
        lines = [piece for part in parts for piece in _pieces(part)]
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return self._harmless(lines)

    def progress(self) -> list[bytes]:
        """What a progress bar shows now, taken as a line; nothing when there is no bar.

        A bar rewrites its line with carriage returns and may not end it for hours.
        """
        if b"\r" not in self._rest:
            return []
        shown = [text for text in self._rest.split(b"\r") if text.strip()]
        self._rest = b""
        return self._harmless(shown[-1:])

    def finish(self) -> list[bytes]:
        """What is left at the end of the stream: a last line without its newline, if any."""
        rest, self._rest = self._rest, b""
        return self._harmless(_pieces(rest)) if rest else []

    def _harmless(self, lines: list[bytes]) -> list[bytes]:
        if not self._escape:
            return lines
        return [b" " + line if line.startswith(_MARK) else line for line in lines]


def _pieces(line: bytes) -> list[bytes]:
    if len(line) <= MAX_LINE:
        return [line or b" "]
    return [line[start : start + MAX_LINE] for start in range(0, len(line), MAX_LINE)]


def end_mark(code: int, lines: int) -> str:
    """The last line of an attempt: how it ended, and how many lines it printed before this one."""
    return f"{MARK}end code={code} lines={lines}"


def parse_mark(message: str) -> tuple[str, dict[str, str]] | None:
    """`("end", {"code": "0", "lines": "12"})` for a mark of ours, None for any other line."""
    found = _MARKS.match(message)
    if not found:
        return None
    pairs = (word.partition("=") for word in found[2].split(" "))
    return found[1], {key: value for key, _, value in pairs}
