"""A line that stays at the bottom of a terminal while others are printed above it."""

import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

ERASE = "\r\x1b[J"  # from the start of the line to the end of the screen
TICK = 0.25  # seconds


class Bottom:
    """Draws what `draw(width)` returns, four times a second and after what is printed.

    The cursor rests in the first cell, which is left blank. When the window gets narrower a
    terminal may break the line into several, or cut it: the cursor is at their beginning either
    way, so that erasing from there takes all of them and nothing else.
    """

    def __init__(
        self, stream: TextIO, draw: Callable[[int], str], width: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._draw = draw
        self._width = width
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._is_shown = False
        self._drawn = ""
        self._drawn_for = -1  # cells
        self._thread: threading.Thread | None = None
        self._stderr: Any = None

    def start(self) -> None:
        """Draw from now on. What is said on stderr goes above the line, too."""
        self._stderr = sys.stderr
        if sys.stderr.isatty():
            sys.stderr = Above(self, sys.stderr)
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the terminal as if there had been no such line."""
        self._over.set()
        sys.stderr = self._stderr
        with self._lock:
            self.erase()
            self._stream.flush()

    def print(self, text: str, stream: TextIO | None = None) -> None:
        """Print above the line. Output may come in floods, so what was drawn last is used again."""
        with self._lock:
            below = self._below(self._is_shown)
            if stream is None:
                self._stream.write(f"{ERASE if below else ''}{text}{below}")
            else:
                self.erase()
                stream.write(text)
                stream.flush()
                self._stream.write(below if text.endswith("\n") else "")
                self._is_shown = bool(below) and text.endswith("\n")
            self._stream.flush()

    def erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._stream.write(ERASE)
            self._stream.flush()

    def refresh(self) -> None:
        """Draw it anew, by one write, so that it does not flicker."""
        with self._lock:
            if not self._over.is_set():
                self._drawn_for = -1
                self._stream.write(ERASE + self._below(True))
                self._stream.flush()
                self._is_shown = True

    def _below(self, is_shown: bool) -> str:
        """The line, as it fits the window now; nothing while there is none."""
        width = self._width()
        if is_shown and width != self._drawn_for:
            self._drawn, self._drawn_for = self._draw(width - 2), width
        return f" {self._drawn}\r" if is_shown else ""

    def _tick(self) -> None:
        while not self._over.wait(TICK):
            try:
                self.refresh()
            except (OSError, ValueError):  # the terminal has gone, or stdout was closed
                return


class Above:
    """A stream to the same terminal, whose text goes above the line, whole lines at once.

    `print` writes a line and its end one after the other: between them the line could be drawn over
    what was written.
    """

    def __init__(self, bottom: Bottom, stream: TextIO) -> None:
        self._bottom = bottom
        self._stream = stream
        self._begun = ""

    def write(self, text: str) -> int:
        lines, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            self._bottom.print(lines + end, self._stream)
        return len(text)

    def flush(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            self._bottom.print(begun, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
