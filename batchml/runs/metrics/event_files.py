"""Write TensorBoard's event files without TensorFlow: protocol buffers in records with checksums.

Sources: tensorboard/compat/proto/{event,summary}.proto (field numbers), tensorflow/core/lib/io/
record_writer.h (record: length, its masked CRC, data, its masked CRC), RFC 3720 B.4 (CRC-32C).
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batchml.runtime.storage.files import write_atomically

if TYPE_CHECKING:
    from batchml.runs.metrics.series import Series

_VERSION = b"brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers


class CurvePoint(NamedTuple):
    """A point of a curve; `time` in seconds since the epoch."""

    tag: str
    step: int
    value: float
    time: float


def write_events(folder: Path, series: "Mapping[str, Series]", name: str = "batchml") -> Path:
    """Write metrics into one event file in `folder`, replacing an older one; return its path.

    `name` distinguishes runs whose files are in one folder. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = min((s.time for each in series.values() for s in each.samples), default=0.0)
    values = point_records(_values(series.values()))
    path = folder / file_name(first, name)
    write_atomically(str(path), file_header(first) + values, 0o644)
    return path


def file_name(first: float, name: str = "batchml") -> str:
    """Name an event file: TensorBoard looks for `tfevents`.

    The time of the first value gives a run the same name again: two files would draw each curve
    twice.
    """
    return f"events.out.tfevents.{int(first)}.{name}"


def file_header(first: float) -> bytes:
    """Return the first record of a file."""
    return _record(_event(first, 0, _field(3, _VERSION)))


def point_records(values: Iterable[CurvePoint]) -> bytes:
    """Encode points as records to append to a file."""
    return b"".join(_record(_event(v.time, v.step, _field(5, _point(v)))) for v in values)


def session_start(step: int, time: float) -> bytes:
    """Encode the start of an attempt at `step`: later steps before this record no longer count.

    TensorBoard ignores the first such record of a file, and acts on later ones. Source:
    tensorboard/backend/event_processing/plugin_event_accumulator.py.
    """
    start = bytes([1 << 3 | _VARINT, 1])  # SessionLog.START
    return _record(_event(time, step, _field(7, start)))


def _values(series: "Iterable[Series]") -> Iterator[CurvePoint]:
    for each in series:
        for step, sample in zip(each.steps, each.samples, strict=True):
            yield CurvePoint(each.name, int(step), sample.value, sample.time)


def _point(value: CurvePoint) -> bytes:
    tag = _field(1, value.tag.encode())
    return _field(1, tag + struct.pack("<Bf", 2 << 3 | _FLOAT, _single(value.value)))


def _event(time: float, step: int, content: bytes) -> bytes:
    clock = struct.pack("<Bd", 1 << 3 | _DOUBLE, time)
    at = bytes([2 << 3 | _VARINT]) + _varint(step) if step else b""  # absent: 0
    return clock + at + content


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF  # two's complement of a negative int64
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _single(value: float) -> float:
    """Return infinity for a value that is too large for four bytes."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    """Return the CRC rotated and shifted, as the format requires for data that contains CRCs."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def crc32c(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli), which `zlib` lacks."""
    table = _table()
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF


@cache
def _table() -> list[int]:
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        table.append(number)
    return table
