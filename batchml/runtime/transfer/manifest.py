"""The files in which an archive records its contents, and how far an interrupted archive got.

.batchml/archive/complete.json      written last: names a manifest and its SHA-256
.batchml/archive/manifest-ID.jsonl  a header line, and a line for each entry
.batchml/archive/begun.jsonl        what an archive in progress, or an interrupted one, will hold
.batchml/archive/going/ID-N.jsonl   what it has sent and read back so far
.batchml/archive/uploads/, odd/     half sent large files; files whose names cannot be S3 keys
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from batchml.runtime.storage.store import Store
from batchml.runtime.transfer.tree import (
    ARCHIVE_FOLDER,
    TransferError,
    TreeEntry,
    from_line,
    to_line,
)

FORMAT = 1
COMPLETE = f"{ARCHIVE_FOLDER}/complete.json"
BEGUN = f"{ARCHIVE_FOLDER}/begun.jsonl"
SENT = f"{ARCHIVE_FOLDER}/going/"
MANIFEST = f"{ARCHIVE_FOLDER}/manifest-"

OTHER_WRITER = "another archive to the same place is in progress: try again when it has ended"
_START_OVER = (
    "its files are still there, but nothing says any more what they should contain. Archive to "
    f"another place with --to; or remove {COMPLETE} there: then the next archive starts over, and "
    "restore does not bring back files that were freed before"
)

FREED, DELETED = "freed", "deleted"

TreeEntries = Dict[str, TreeEntry]


class ArchiveManifest(NamedTuple):
    """What an archive records about itself.

    `entries` are the entries that were read back, by path. `planned` are the entries that an
    interrupted archive was to hold: None for a complete archive, and where none exists.
    """

    entries: TreeEntries
    is_complete: bool = False
    planned: Optional[TreeEntries] = None
    at: float = 0.0  # it holds the state of this time: seconds since the epoch
    manifest: str = ""  # key of the manifest file

    @property
    def exists(self) -> bool:
        return self.is_complete or self.planned is not None

    def missing(self) -> List[str]:
        """Return the files that the archive should hold and does not."""
        return sorted(
            path
            for path, entry in (self.planned or {}).items()
            if entry.is_file and not entry.away and not _has(self.entries.get(path), entry)
        )


def _has(there: Optional[TreeEntry], wanted: TreeEntry) -> bool:
    same = there is not None and (there.size, there.mtime_ns) == (wanted.size, wanted.mtime_ns)
    return same and there is not None and there.stamp == wanted.stamp


def new_id() -> str:
    return os.urandom(6).hex()


def read_manifest(store: Store) -> ArchiveManifest:
    """Read an archive's manifest. Raises StoreError, and TransferError for a damaged one."""
    complete = _complete(store)
    if complete is not None:
        key, at = complete
        return ArchiveManifest(_manifest(store, key), True, None, at, key)
    begun = store.get(BEGUN)
    if begun is None:
        return ArchiveManifest({})
    head, planned = _lines(begun, BEGUN)
    before = str(head.get("before") or "")
    known = _manifest(store, before) if before and store.get(before) is not None else {}
    return ArchiveManifest({**known, **_sent(store)}, False, planned)


def _complete(store: Store) -> Optional[Tuple[str, float]]:
    text = store.get(COMPLETE)
    if text is None:
        return None
    try:
        found = json.loads(text)
        key, digest, at = str(found["manifest"]), str(found["sha256"]), float(found["at"])
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError(
            f"{COMPLETE} of the archive is damaged: {error}; {_START_OVER}"
        ) from error
    if int(found.get("format", 0)) > FORMAT:
        raise TransferError("a newer batchml wrote the archive: use that version")
    manifest = store.get(key)
    if manifest is None or hashlib.sha256(manifest).hexdigest() != digest:
        problem = "is missing" if manifest is None else "was changed"
        raise TransferError(f"the archive's {key} {problem}: {_START_OVER}")
    return key, at


def _manifest(store: Store, key: str) -> TreeEntries:
    return _lines(store.get(key) or b"", key)[1]


def _sent(store: Store) -> TreeEntries:
    """Read what was sent since the start. Two records that disagree on a path are both ignored."""
    found: TreeEntries = {}
    doubtful = set()
    for key in store.keys(SENT):
        for path, entry in _lines(store.get(key) or b"", key)[1].items():
            if path in found and found[path].sha256 != entry.sha256:
                doubtful.add(path)
            found[path] = entry
    return {path: entry for path, entry in found.items() if path not in doubtful}


def _lines(text: bytes, key: str) -> Tuple[Dict[str, Any], TreeEntries]:
    lines = text.decode("ascii", "replace").splitlines()
    try:
        head = json.loads(lines[0]) if lines else {}
        entries = [from_line(line) for line in lines[1:]]
    except ValueError as error:
        raise TransferError(f"{key} of the archive is damaged: {error}") from error
    return head, {entry.path: entry for entry in entries}


def _to_lines(head: Dict[str, Any], entries: Iterable[TreeEntry]) -> bytes:
    lines = [json.dumps({"format": FORMAT, **head}), *map(to_line, entries)]
    return ("\n".join(lines) + "\n").encode("ascii")


class ManifestWriter:
    """Records the progress and the end of one archive."""

    def __init__(self, store: Store, before: ArchiveManifest) -> None:
        self._store, self._before = store, before
        self._id = new_id()
        self._count = 0
        self._has_begun = False

    def begin(self, planned: Iterable[TreeEntry]) -> None:
        """Record what the archive will hold. From now on it is not complete."""
        if self._before.is_complete:  # records that a failed disk left behind
            self._store.delete(*self._store.keys(SENT))
        head = {"id": self._id, "before": self._before_key()}
        self._store.put(BEGUN, _to_lines(head, planned))
        self._store.delete(COMPLETE)
        self._has_begun = True

    def sent(self, entries: Iterable[TreeEntry]) -> None:
        entries = list(entries)
        if entries:
            self._store.put(f"{SENT}{self._id}-{self._count:06d}.jsonl", _to_lines({}, entries))
            self._count += 1

    def confirm(self, at: float) -> None:
        """Record a later time at which the archive, which was complete before, still holds
        everything.
        """
        document = json.loads(self._store.get(COMPLETE) or b"{}")
        if document:
            self._store.put(COMPLETE, json.dumps({**document, "at": round(at, 3)}).encode())

    def complete(self, entries: Iterable[TreeEntry], left_out: int, at: float) -> None:
        """Record that the archive holds all that existed at a time, in seconds since the epoch.

        Raises TransferError if another writer has begun meanwhile.
        """
        entries = list(entries)
        if self._has_begun:
            head = _lines(self._store.get(BEGUN) or b"", BEGUN)[0]
            if head.get("id") != self._id:
                raise TransferError(OTHER_WRITER)
        text, key = _to_lines({"id": self._id}, entries), f"{MANIFEST}{self._id}.jsonl"
        self._store.put(key, text)
        files = [entry for entry in entries if entry.is_file and entry.away != DELETED]
        document = {
            "format": FORMAT, "manifest": key, "sha256": hashlib.sha256(text).hexdigest(),
            "at": round(at, 3), "files": len(files),
            "bytes": sum(entry.size for entry in files), "leftOut": left_out,
        }  # fmt: skip
        self._store.put(COMPLETE, json.dumps(document).encode())
        old = [each for each in self._store.keys(MANIFEST) if each != key]
        self._store.delete(BEGUN, *self._store.keys(SENT), *old)

    def _before_key(self) -> str:
        """Return the key of the last complete archive's manifest, whose entries still hold."""
        if self._before.manifest:
            return self._before.manifest
        begun = self._store.get(BEGUN)
        return str(_lines(begun, BEGUN)[0].get("before") or "") if begun else ""
