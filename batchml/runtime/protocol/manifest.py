"""The manifest of a batch of trials: line i is what child i of its array job runs.

All lines have the same width, so that a child reads only its own. Each begins with a checksum over
sweep, batch, index and content: lines that were cut, changed or belong elsewhere are refused.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Dict, Iterable, NamedTuple, Tuple

from batchml.runtime.protocol.sweep_store import Scalar, batch_key
from batchml.runtime.storage.store import Store

_CRC = 8  # characters, followed by a space


class BadManifest(ValueError):
    """The manifest is missing, or not what the controller wrote."""


class TrialEntry(NamedTuple):
    """A line of the manifest: the trial that one child runs."""

    trial: int
    params: Dict[str, Scalar]
    seed: int
    target: int = 0  # the step at which the trial ends; 0: when the program ends
    resumes: bool = False  # from its checkpoint; otherwise it starts from the beginning
    full: bool = False  # no early stopping: it runs to its target whatever the others do


def encode(key: str, wave: int, entries: Iterable[TrialEntry]) -> Tuple[bytes, int]:
    """The manifest of a batch of the sweep `key`, and the width of its lines in bytes."""
    contents = [json.dumps(_fields(entry), separators=(",", ":")) for entry in entries]
    longest = max(map(len, contents), default=0)
    lines = []
    for index, content in enumerate(contents):
        padded = content.ljust(longest)
        lines.append(f"{_checksum(key, wave, index, padded)} {padded}\n")
    return "".join(lines).encode("ascii"), longest + _CRC + 2


def read(store: Store, key: str, wave: int, index: int, width: int) -> TrialEntry:
    """Read what child `index` runs. Raises BadManifest and StoreError."""
    where = f"{batch_key(wave)}, line {index + 1}"
    if width <= _CRC + 2:
        raise BadManifest(f"{where}: no line has {width} bytes. Check BATCHML_WAVE_WIDTH.")
    line = store.read(batch_key(wave), index * width, width)
    if line is None:
        raise BadManifest(f"{where}: the manifest is missing from the sweep's store.")
    return decode(line, key, wave, index, width)


def decode(line: bytes, key: str, wave: int, index: int, width: int) -> TrialEntry:
    """The trial in a line. Raises BadManifest."""
    where = f"{batch_key(wave)}, line {index + 1}"
    if len(line) < width or not line.endswith(b"\n"):
        raise BadManifest(f"{where}: the manifest ends before this line, or was changed.")
    try:
        text = line[:-1].decode("ascii")
        if text[: _CRC + 1] != _checksum(key, wave, index, text[_CRC + 1 :]) + " ":
            raise BadManifest(f"{where}: the checksum is wrong: the manifest was changed.")
        return _entry(json.loads(text[_CRC + 1 :]))
    except BadManifest:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadManifest(f"{where}: the manifest was changed: {error}") from error


def _fields(entry: TrialEntry) -> Dict[str, Any]:
    """The fields without those that have their default value."""
    return {
        name: value
        for name, value in entry._asdict().items()
        if name not in TrialEntry._field_defaults or value != TrialEntry._field_defaults[name]
    }


def _entry(found: Dict[str, Any]) -> TrialEntry:
    return TrialEntry(
        **{name: value for name, value in found.items() if name in TrialEntry._fields}
    )


def _checksum(key: str, wave: int, index: int, content: str) -> str:
    return f"{zlib.crc32(f'{key}/{wave}/{index}/{content}'.encode()):08x}"
