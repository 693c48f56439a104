"""The files in which an archive records its contents, and how far an interrupted archive got.

.batchml/archive/complete.json      written last: names a manifest and its SHA-256
.batchml/archive/manifest-ID.jsonl  a header line, and a line for each entry
.batchml/archive/begun.jsonl        entries that an unfinished archive is to hold
.batchml/archive/going/ID-N.jsonl   entries that it has sent and read back so far
.batchml/archive/uploads/           large files that were sent in part
.batchml/archive/odd/               files whose names cannot be S3 keys
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
    "its files still exist, but their expected contents are unknown. Archive to another place with "
    f"--to; or remove {COMPLETE} from the archive: then the next archive starts over, and a "
    "restore does not bring back files that were freed before"
)

FREED, DELETED = "freed", "deleted"

TreeEntries = Dict[str, TreeEntry]


class ArchiveManifest(NamedTuple):
    """The entries of an archive."""

    entries: TreeEntries  # entries that were read back, by path
    is_complete: bool = False
    # entries that an interrupted archive is to hold; None if it is complete or does not exist
    planned: Optional[TreeEntries] = None
    at: float = 0.0  # the archive holds the state of this time, in seconds since the epoch
    manifest: str = ""  # key of the manifest file

    @property
    def exists(self) -> bool:
        return self.is_complete or self.planned is not None

    def missing(self) -> List[str]:
        """Return the files that the archive should hold and does not."""
        return sorted(
            path
            for path, entry in (self.planned or {}).items()
            if entry.is_file and not entry.away
            if path not in self.entries or self.entries[path].version != entry.version
        )


def read_manifest(store: Store) -> ArchiveManifest:
    """Read an archive's manifest. Raises StoreError, and TransferError for a damaged one."""
    text = store.get(COMPLETE)
    if text is not None:
        return _read_complete(store, text)
    begun = store.get(BEGUN)
    if begun is None:
        return ArchiveManifest({})
    head, planned = _parse_lines(begun, BEGUN)
    before = str(head.get("before") or "")
    entries = _parse_lines(store.get(before) or b"", before)[1] if before else {}
    return ArchiveManifest({**entries, **_read_sent(store)}, False, planned)


def _read_complete(store: Store, text: bytes) -> ArchiveManifest:
    try:
        document = json.loads(text)
        key, digest = str(document["manifest"]), str(document["sha256"])
        at = float(document["at"])
    except (ValueError, TypeError, KeyError) as error:
        raise TransferError(
            f"{COMPLETE} of the archive is damaged: {error}; {_START_OVER}"
        ) from error
    if int(document.get("format", 0)) > FORMAT:
        raise TransferError("a newer batchml wrote the archive: use that version")
    manifest = store.get(key)
    if manifest is None or hashlib.sha256(manifest).hexdigest() != digest:
        problem = "is missing" if manifest is None else "was changed"
        raise TransferError(f"the archive's {key} {problem}: {_START_OVER}")
    return ArchiveManifest(_parse_lines(manifest, key)[1], True, None, at, key)


def _read_sent(store: Store) -> TreeEntries:
    """Read the entries sent since the start, without those on which two records disagree."""
    sent: TreeEntries = {}
    doubtful = set()
    for key in store.keys(SENT):
        for path, entry in _parse_lines(store.get(key) or b"", key)[1].items():
            if path in sent and sent[path].sha256 != entry.sha256:
                doubtful.add(path)
            sent[path] = entry
    return {path: entry for path, entry in sent.items() if path not in doubtful}


def _parse_lines(text: bytes, key: str) -> Tuple[Dict[str, Any], TreeEntries]:
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
        self._id = os.urandom(6).hex()
        self._count = 0
        self._has_begun = False

    def begin(self, planned: Iterable[TreeEntry]) -> None:
        """Record what the archive will hold. From now on it is not complete."""
        if self._before.is_complete:  # old records may exist that could not be deleted
            self._store.delete(*self._store.keys(SENT))
        head = {"id": self._id, "before": self._before_key()}
        self._store.put(BEGUN, _to_lines(head, planned))
        self._store.delete(COMPLETE)
        self._has_begun = True

    def record(self, entries: List[TreeEntry]) -> None:
        """Record entries that were sent and read back."""
        if entries:
            self._store.put(f"{SENT}{self._id}-{self._count:06d}.jsonl", _to_lines({}, entries))
            self._count += 1

    def confirm(self, at: float) -> None:
        """Record a later time whose state a complete archive still holds."""
        document = json.loads(self._store.get(COMPLETE) or b"{}")
        if document:
            self._store.put(COMPLETE, json.dumps({**document, "at": round(at, 3)}).encode())

    def complete(self, entries: Iterable[TreeEntry], left_out: int, at: float) -> None:
        """Record that the archive is complete, with the state of the time `at`.

        `left_out`: how many paths were left out. Raises TransferError if another process has begun
        to write this archive meanwhile.
        """
        entries = list(entries)
        if self._has_begun:
            head = _parse_lines(self._store.get(BEGUN) or b"", BEGUN)[0]
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
        old = [old_key for old_key in self._store.keys(MANIFEST) if old_key != key]
        self._store.delete(BEGUN, *self._store.keys(SENT), *old)

    def _before_key(self) -> str:
        """Return the key of the manifest of the last complete archive, whose files still exist."""
        if self._before.manifest:
            return self._before.manifest
        begun = self._store.get(BEGUN)
        return str(_parse_lines(begun, BEGUN)[0].get("before") or "") if begun else ""
