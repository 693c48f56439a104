"""TensorBoard's event files, without TensorFlow: records of protocol buffers, framed and summed.

Sources: tensorboard/compat/proto/{event,summary}.proto (field numbers), tensorflow/core/lib/io/
record_writer.h (frame: length, masked CRC of it, data, masked CRC of it), RFC 3720 B.4 (CRC-32C).
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from batchml.ops.metrics import Series

_VERSION = b"brain.Event:2"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers


class Value(NamedTuple):
    """One point of a curve: `time` in seconds since the epoch."""

    tag: str
    step: int
    value: float
    time: float


def write_events(folder: Path, series: "Mapping[str, Series]", name: str = "batchml") -> Path:
    """Write the metrics into one event file in `folder`, and return it; an older one is replaced.

    `name` tells runs apart whose files lie in one folder. Raises OSError.
    """
    from batchml.runtime.storage.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    first = min((s.time for each in series.values() for s in each.samples), default=0.0)
    values = records(_values(series.values()))
    path = folder / file_name(first, name)
    write_atomically(str(path), beginning(first) + values, 0o644)
    return path


def file_name(first: float, name: str = "batchml") -> str:
    """TensorBoard takes files by `tfevents` in their name. The time of the first value, so that the
    same run gives the same name: a second file would draw each curve twice."""
    return f"events.out.tfevents.{int(first)}.{name}"


def beginning(first: float) -> bytes:
    """What a file begins with."""
    return _record(_event(first, 0, _field(3, _VERSION)))


def records(values: Iterable[Value]) -> bytes:
    """These points, to be added to a file."""
    return b"".join(_record(_event(v.time, v.step, _field(5, _point(v)))) for v in values)


def started(step: int, time: float) -> bytes:
    """An attempt begins at `step`: what is in the file from there on does not count any more.

    TensorBoard takes the first of a file for its beginning, and heeds those after it. Source:
    tensorboard/backend/event_processing/plugin_event_accumulator.py.
    """
    start = bytes([1 << 3 | _VARINT, 1])  # SessionLog.START
    return _record(_event(time, step, _field(7, start)))


def _values(series: "Iterable[Series]") -> Iterator[Value]:
    for each in series:
        for step, sample in zip(each.steps, each.samples, strict=True):
            yield Value(each.name, int(step), sample.value, sample.time)


def _point(value: Value) -> bytes:
    tag = _field(1, value.tag.encode())
    return _field(1, tag + struct.pack("<Bf", 2 << 3 | _FLOAT, _single(value.value)))


def _event(time: float, step: int, what: bytes) -> bytes:
    clock = struct.pack("<Bd", 1 << 3 | _DOUBLE, time)
    at = bytes([2 << 3 | _VARINT]) + _varint(step) if step else b""  # 0 is what absence means
    return clock + at + what


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF  # a negative int64 is its two's complement
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _single(value: float) -> float:
    """What is too great for four bytes is infinite in them."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    """The sum is rotated and shifted, so that sums of data that holds sums stay good."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFF_FFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), which `zlib` does not have."""
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
