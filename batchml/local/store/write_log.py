"""Whether all of SQLite's write-ahead log is there.

SQLite takes a log that was cut off or damaged for one that ends before the damage: what was
acknowledged after it would be gone without a word. Two things give it away. The index of the log
(`-shm`) is written after what it counts was synced, so it never counts more than there is; and each
commit is synced before the next begins, so at most one can be torn by a power cut.

Formats: https://www.sqlite.org/fileformat2.html#walformat and https://www.sqlite.org/walformat.html
"""

import struct
import sys
from typing import NamedTuple

_HEADER = 32
_FRAME_HEADER = 24
_MAGIC = 0x377F0682  # with a last bit that says how checksums read the bytes
_INDEX = struct.Struct("=12xBBHII8s8sII")  # in the order of this machine, as all of the index
_MOVED_AT = 96


class Index(NamedTuple):
    """What the index of a log counts: its frames, and those already in the main file."""

    frames: int
    moved: int
    salts: bytes


def read_index(data: bytes) -> Index | None:
    """What an index says, if it is one. The first to open a journal makes it anew."""
    if len(data) < _MOVED_AT + 4 or data[:48] != data[48:96]:
        return None
    is_made, _, _, frames, _, _, salts, *checksum = _INDEX.unpack(data[:48])
    if not is_made or list(_checksum(data[:40], sys.byteorder)) != checksum:
        return None
    (moved,) = struct.unpack_from("=I", data, _MOVED_AT)
    return Index(frames, moved, salts)


def missing(log: bytes, before: Index | None, recovered: int) -> str:
    """What of a log is missing, empty if nothing is known to be.

    `before` is the index that was there before the journal was opened, `recovered` how many frames
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
    """The salts of a log, which each frame of it repeats; empty if its header is none."""
    if len(log) < _HEADER:
        return b""
    magic, first, second = struct.unpack(">I20xII", log[:_HEADER])
    order = "big" if magic & 1 else "little"
    is_one = magic & ~1 == _MAGIC and _checksum(log[:24], order) == (first, second)
    return log[16:24] if is_one else b""


def _commits(log: bytes, after: int, salts: bytes) -> int:
    """How many commits the log holds beyond its first `after` frames."""
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
