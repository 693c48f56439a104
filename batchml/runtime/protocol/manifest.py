"""The manifest of a wave: line i is what child i of its array is to run.

All lines have one width, so that a child reads its own and no more, and each begins with a
checksum over sweep, wave, index and content: a line that was cut, changed, or belongs to another
sweep or place is refused.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Dict, Iterable, NamedTuple, Tuple

from batchml.runtime.protocol.sweep_store import Scalar, wave_key
from batchml.runtime.storage.store import Store

_CRC = 8  # characters, and a space behind them


class BadManifest(ValueError):
    """The manifest is not there, or not what the controller wrote."""


class Entry(NamedTuple):
    """What one child is to run."""

    trial: int
    params: Dict[str, Scalar]
    seed: int
    target: int = 0  # the step at which it ends; 0: its own end
    resumes: bool = False  # from its checkpoint; otherwise it begins anew
    full: bool = False  # it is not judged: it runs to its target whatever others do


def encode(key: str, wave: int, entries: Iterable[Entry]) -> Tuple[bytes, int]:
    """The manifest of a wave of the sweep `key`, and the width of its lines in bytes."""
    contents = [json.dumps(_fields(entry), separators=(",", ":")) for entry in entries]
    longest = max(map(len, contents), default=0)
    lines = []
    for index, content in enumerate(contents):
        padded = content.ljust(longest)
        lines.append(f"{_checksum(key, wave, index, padded)} {padded}\n")
    return "".join(lines).encode("ascii"), longest + _CRC + 2


def read(store: Store, key: str, wave: int, index: int, width: int) -> Entry:
    """What child `index` is to run. Raises BadManifest; StoreError when the board is away."""
    where = f"{wave_key(wave)}, line {index + 1}"
    if width <= _CRC + 2:
        raise BadManifest(f"{where}: lines of {width} bytes cannot be. Look at BATCHML_WAVE_WIDTH.")
    line = store.read(wave_key(wave), index * width, width)
    if line is None:
        raise BadManifest(f"{where}: the manifest is missing from the sweep's board.")
    return decode(line, key, wave, index, width)


def decode(line: bytes, key: str, wave: int, index: int, width: int) -> Entry:
    """What a line says. Raises BadManifest."""
    where = f"{wave_key(wave)}, line {index + 1}"
    if len(line) < width or not line.endswith(b"\n"):
        raise BadManifest(f"{where}: the manifest ends before it, or was changed.")
    try:
        text = line[:-1].decode("ascii")
        if text[: _CRC + 1] != _checksum(key, wave, index, text[_CRC + 1 :]) + " ":
            raise BadManifest(f"{where}: its checksum is wrong: the manifest was changed.")
        return _entry(json.loads(text[_CRC + 1 :]))
    except BadManifest:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadManifest(f"{where}: the manifest was changed: {error}") from error


def _fields(entry: Entry) -> Dict[str, Any]:
    """Without what has its default."""
    return {
        name: value
        for name, value in entry._asdict().items()
        if name not in Entry._field_defaults or value != Entry._field_defaults[name]
    }


def _entry(found: Dict[str, Any]) -> Entry:
    return Entry(**{name: value for name, value in found.items() if name in Entry._fields})


def _checksum(key: str, wave: int, index: int, content: str) -> str:
    return f"{zlib.crc32(f'{key}/{wave}/{index}/{content}'.encode()):08x}"
