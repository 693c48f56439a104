"""Detect whether SQLite's write-ahead log is complete.

SQLite treats a truncated or damaged log as one that ends before the damage: acknowledged commits
after it would be lost silently. Two facts reveal that. The index of the log (`-shm`) is written
after the frames that it counts were synced, so it never counts more than there are. And each commit
is synced before the next begins, so a power cut can tear one commit at most.

Formats: https://www.sqlite.org/fileformat2.html#walformat and https://www.sqlite.org/walformat.html
"""

import struct
import sys
from typing import NamedTuple

_HEADER = 32
_FRAME_HEADER = 24
_MAGIC = 0x377F0682  # its last bit is the byte order of the checksums
_INDEX = struct.Struct("=12xBBHII8s8sII")  # in this machine's byte order, like the whole index
_MOVED_AT = 96


class LogIndex(NamedTuple):
    """The index's counts: frames of the log, and frames that were moved to the main file."""

    frames: int
    moved: int
    salts: bytes


def read_index(data: bytes) -> LogIndex | None:
    """Parse an index; None for an invalid one. The first process to open a journal makes it
    anew.
    """
    if len(data) < _MOVED_AT + 4 or data[:48] != data[48:96]:
        return None
    is_made, _, _, frames, _, _, salts, *checksum = _INDEX.unpack(data[:48])
    if not is_made or list(_checksum(data[:40], sys.byteorder)) != checksum:
        return None
    (moved,) = struct.unpack_from("=I", data, _MOVED_AT)
    return LogIndex(frames, moved, salts)


def missing(log: bytes, before: LogIndex | None, recovered: int) -> str:
    """The missing part of a log; empty if none is known to be missing.

    `before` is the index from before the journal was opened, `recovered` the number of frames that
    SQLite has found since.
    """
    salts = _salts(log)
    if before is not None and before.salts == (salts or before.salts):
        lacking = before.frames - max(recovered, before.moved)
        if lacking > 0:
            return f"the last {lacking} of {before.frames} frames of its write-ahead log are gone"
    if _commits(log, recovered, salts) > 1:
        return f"its write-ahead log is damaged after frame {recovered}"
    return ""


def _salts(log: bytes) -> bytes:
    """The salts of a log, which each of its frames repeats; empty if its header is invalid."""
    if len(log) < _HEADER:
        return b""
    magic, first, second = struct.unpack(">I20xII", log[:_HEADER])
    order = "big" if magic & 1 else "little"
    is_valid = magic & ~1 == _MAGIC and _checksum(log[:24], order) == (first, second)
    return log[16:24] if is_valid else b""


def _commits(log: bytes, after: int, salts: bytes) -> int:
    """The number of commits in the log beyond its first `after` frames."""
    size = _FRAME_HEADER + (_page_size(log) if salts else 4096)
    salts = salts or log[_HEADER + 8 : _HEADER + 16]
    count = 0
    for at in range(_HEADER + after * size, len(log) - _FRAME_HEADER, size):
        is_commit = log[at + 4 : at + 8] != bytes(4)
        count += is_commit and log[at + 8 : at + 16] == salts != bytes(8)
    return count


def _page_size(log: bytes) -> int:
    return int.from_bytes(log[8:12], "big")


def _checksum(data: bytes, order: str) -> tuple[int, int]:
    first = second = 0
    words = struct.unpack(f"{'>' if order == 'big' else '<'}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        first = (first + words[at] + second) & 0xFFFFFFFF
        second = (second + words[at + 1] + first) & 0xFFFFFFFF
    return first, second
