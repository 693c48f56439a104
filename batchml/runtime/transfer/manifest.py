"""The papers of an archive: what it holds, whether it is complete, and what one that goes on did.

.batchml/archive/complete.json      written last: names a manifest and its SHA-256
.batchml/archive/manifest-ID.jsonl  a line for each thing; the first one says what it is
.batchml/archive/begun.jsonl        what an archive that goes on, or was cut off, is to hold
.batchml/archive/going/ID-N.jsonl   what it has sent so far, read back
.batchml/archive/uploads/, odd/     large files half sent; files whose names are no keys
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from batchml.runtime.storage.store import Store
from batchml.runtime.transfer.tree import OWN, CarryError, Entry, from_line, to_line

FORMAT = 1
COMPLETE = f"{OWN}/complete.json"
BEGUN = f"{OWN}/begun.jsonl"
GOING = f"{OWN}/going/"
MANIFEST = f"{OWN}/manifest-"

OTHERS = "another archive to the same place goes on: try again after it"
_ANEW = (
    "its files lie there, but what they should be is not known any more. Archive to another place "
    f"with --to; or remove {COMPLETE} there: then the next archive begins anew, and what was freed "
    "before it does not come back by restore"
)

FREED, DELETED = "freed", "deleted"

Entries = Dict[str, Entry]


class Book(NamedTuple):
    """What is known of an archive.

    `entries` are those whose content was read back, by path. `planned` are what one that was cut
    off was to hold; where it is None, the archive is complete, or there is none: `is_complete`.
    """

    entries: Entries
    is_complete: bool = False
    planned: Optional[Entries] = None
    at: float = 0.0  # of what time it has all; seconds since the epoch
    manifest: str = ""  # the key

    @property
    def exists(self) -> bool:
        return self.is_complete or self.planned is not None

    def missing(self) -> List[str]:
        """The files that it should hold, and does not."""
        return sorted(
            path
            for path, entry in (self.planned or {}).items()
            if entry.is_file and not entry.away and not _has(self.entries.get(path), entry)
        )


def _has(there: Optional[Entry], wanted: Entry) -> bool:
    same = there is not None and (there.size, there.mtime_ns) == (wanted.size, wanted.mtime_ns)
    return same and there is not None and there.stamp == wanted.stamp


def new_id() -> str:
    return os.urandom(6).hex()


def read_book(store: Store) -> Book:
    """Read an archive's papers. Raises StoreError, and CarryError for papers that are damaged."""
    complete = _complete(store)
    if complete is not None:
        key, at = complete
        return Book(_manifest(store, key), True, None, at, key)
    begun = store.get(BEGUN)
    if begun is None:
        return Book({})
    head, planned = _lines(begun, BEGUN)
    before = str(head.get("before") or "")
    known = _manifest(store, before) if before and store.get(before) is not None else {}
    return Book({**known, **_going(store)}, False, planned)


def _complete(store: Store) -> Optional[Tuple[str, float]]:
    text = store.get(COMPLETE)
    if text is None:
        return None
    try:
        found = json.loads(text)
        key, digest, at = str(found["manifest"]), str(found["sha256"]), float(found["at"])
    except (ValueError, TypeError, KeyError) as error:
        raise CarryError(f"{COMPLETE} of the archive is damaged: {error}; {_ANEW}") from error
    if int(found.get("format", 0)) > FORMAT:
        raise CarryError("the archive is of a newer batchml: use that one")
    manifest = store.get(key)
    if manifest is None or hashlib.sha256(manifest).hexdigest() != digest:
        what = "is missing" if manifest is None else "was changed"
        raise CarryError(f"the archive's {key} {what}: {_ANEW}")
    return key, at


def _manifest(store: Store, key: str) -> Entries:
    return _lines(store.get(key) or b"", key)[1]


def _going(store: Store) -> Entries:
    """What was sent since; of two accounts that contradict each other none is believed."""
    found: Entries = {}
    doubtful = set()
    for key in store.keys(GOING):
        for path, entry in _lines(store.get(key) or b"", key)[1].items():
            if path in found and found[path].sha256 != entry.sha256:
                doubtful.add(path)
            found[path] = entry
    return {path: entry for path, entry in found.items() if path not in doubtful}


def _lines(text: bytes, key: str) -> Tuple[Dict[str, Any], Entries]:
    lines = text.decode("ascii", "replace").splitlines()
    try:
        head = json.loads(lines[0]) if lines else {}
        entries = [from_line(line) for line in lines[1:]]
    except ValueError as error:
        raise CarryError(f"{key} of the archive is damaged: {error}") from error
    return head, {entry.path: entry for entry in entries}


def _paper(head: Dict[str, Any], entries: Iterable[Entry]) -> bytes:
    lines = [json.dumps({"format": FORMAT, **head}), *map(to_line, entries)]
    return ("\n".join(lines) + "\n").encode("ascii")


class Writer:
    """Writes the papers of one archive that goes on."""

    def __init__(self, store: Store, before: Book) -> None:
        self._store, self._before = store, before
        self._id = new_id()
        self._count = 0
        self._has_begun = False

    def begin(self, planned: Iterable[Entry]) -> None:
        """Say what is to be there. From now on the archive is not complete."""
        if self._before.is_complete:  # of what is in its manifest: left where a disk failed
            self._store.delete(*self._store.keys(GOING))
        head = {"id": self._id, "before": self._before_key()}
        self._store.put(BEGUN, _paper(head, planned))
        self._store.delete(COMPLETE)
        self._has_begun = True

    def sent(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        if entries:
            self._store.put(f"{GOING}{self._id}-{self._count:06d}.jsonl", _paper({}, entries))
            self._count += 1

    def confirm(self, at: float) -> None:
        """Say that the archive, which was complete, has all that there was at another time."""
        told = json.loads(self._store.get(COMPLETE) or b"{}")
        if told:
            self._store.put(COMPLETE, json.dumps({**told, "at": round(at, 3)}).encode())

    def complete(self, entries: Iterable[Entry], left_out: int, at: float) -> None:
        """Say that all is there that there was at a time, in seconds since the epoch.

        Raises CarryError where another has begun meanwhile.
        """
        entries = list(entries)
        if self._has_begun:
            head = _lines(self._store.get(BEGUN) or b"", BEGUN)[0]
            if head.get("id") != self._id:
                raise CarryError(OTHERS)
        text, key = _paper({"id": self._id}, entries), f"{MANIFEST}{self._id}.jsonl"
        self._store.put(key, text)
        files = [entry for entry in entries if entry.is_file and entry.away != DELETED]
        told = {
            "format": FORMAT, "manifest": key, "sha256": hashlib.sha256(text).hexdigest(),
            "at": round(at, 3), "files": len(files),
            "bytes": sum(entry.size for entry in files), "leftOut": left_out,
        }  # fmt: skip
        self._store.put(COMPLETE, json.dumps(told).encode())
        old = [each for each in self._store.keys(MANIFEST) if each != key]
        self._store.delete(BEGUN, *self._store.keys(GOING), *old)

    def _before_key(self) -> str:
        """The manifest whose entries still hold: that of the last complete archive."""
        if self._before.manifest:
            return self._before.manifest
        begun = self._store.get(BEGUN)
        return str(_lines(begun, BEGUN)[0].get("before") or "") if begun else ""
