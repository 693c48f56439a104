"""Write an attempt's log: the lines of program and runtime, which are counted, and marks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import BinaryIO, Callable, Optional

from batchml.runtime.protocol.log_marks import MARK


class Output:
    """The log of one attempt."""

    def __init__(self, stream: BinaryIO, progress_every: float) -> None:
        self._stream = stream
        self._every = progress_every
        self._last = time.monotonic()
        self.lines = 0
        # Called with the lines of the program, but not with ours.
        self.listener: Optional[Callable[[Sequence[bytes]], None]] = None

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines of the program."""
        self._put(lines)
        if lines and self.listener is not None:
            self.listener(lines)

    def _put(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._stream.write(b"".join(line + b"\n" for line in lines))
            self._stream.flush()
            self.lines += len(lines)
            self._last = time.monotonic()

    def until_progress(self) -> float:
        """Seconds until a progress bar is printed as a line, if no line comes before."""
        return max(0.0, self._last + self._every - time.monotonic())

    def say(self, text: str) -> None:
        """Write one line of the runtime, for people."""
        self._put([" ".join(text.splitlines()).encode("utf-8", "replace")])

    def mark(self, text: str) -> None:
        """Write one line for our clients, which never print it."""
        line = MARK + " ".join(text.splitlines())
        self._stream.write(line.encode("utf-8", "replace") + b"\n")
        self._stream.flush()
