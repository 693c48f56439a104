"""A proof of what a log holds, made while the log is written: its lines, its bytes and a digest.

Beside the digest of the whole there are checkpoints: the digest of the first `stride` lines, of
twice as many, and so on. They name the first line that differs: of a log of up to 64 lines exactly,
of a longer one as a range of lines, because then the stride grows.

Standard library only, few imports: runners import it.
"""

from __future__ import annotations

from typing import Any

from batchml.runtime.protocol.log_marks import MARK

MAX_CHECKPOINTS = 64
CHECKPOINT = 4  # bytes of each: they find a line, and the whole digest says whether to look for it
_MARK = b" " + MARK.encode()
_STAMP = 15  # digits, at most


class LogDigest:
    """Follows a log from its first byte."""

    def __init__(self) -> None:
        import hashlib

        self._sha = hashlib.sha256()
        self._lines = self._marks = self._size = 0
        self._stride = 1
        self._checkpoints: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def add(self, data: bytes, count: int) -> None:
        """Take in `count` whole lines, each `<ms> <message>` with its newline."""
        self._size += len(data)
        if _MARK in data:
            self._marks += count_marks(data)
        while count >= (ahead := self._stride - self._lines % self._stride):
            end = len(data) if count == ahead else line_end(data, ahead)
            self._sha.update(data[:end])
            data, count = data[end:], count - ahead
            self._lines += ahead
            self._note()
        if count:
            self._sha.update(data)
            self._lines += count

    def _note(self) -> None:
        self._checkpoints.append(self._sha.digest()[:CHECKPOINT])
        if len(self._checkpoints) > MAX_CHECKPOINTS:
            self._checkpoints = self._checkpoints[1::2]
            self._stride *= 2

    def proof(self) -> dict[str, Any]:
        """The members of a LogProof (events.py). Less than 1 KiB as JSON."""
        return {
            "lines": self._lines,
            "shown": self._lines - self._marks,
            "size": self._size,
            "sha256": self._sha.hexdigest(),
            "stride": self._stride,
            "checkpoints": b"".join(self._checkpoints).hex(),
        }


def line_end(data: bytes, number: int) -> int:
    """The offset behind the line `number`, from 1, of data that has so many."""
    end = 0
    for _ in range(number):
        end = data.index(b"\n", end) + 1
    return end


def count_marks(data: bytes) -> int:
    """How many of the lines are marks of batchml, which no user is shown."""
    count, at = 0, data.find(_MARK)
    while at >= 0:
        before = data[max(0, at - _STAMP - 1) : at]
        stamp = before[before.rfind(b"\n") + 1 :]
        count += stamp.isdigit() and len(stamp) <= _STAMP
        at = data.find(_MARK, at + 1)
    return count
