"""Archives in S3, also those whose objects FSx for Lustre imports. Files keep their paths as keys.

A large file is uploaded in parts, and a file beside it lists the parts that have arrived.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Tuple

from batchml.runtime.storage.s3 import MOST_PARTS, S3Client, S3Store
from batchml.runtime.transfer.archives import ODD
from batchml.runtime.transfer.files import CHANGED_WHILE_READ, OnBytes, SourceChanged
from batchml.runtime.transfer.tree import ARCHIVE_FOLDER, FOLDER, LINK, OpenedFile, TreeEntry

PART = 16 << 20  # bytes in memory for each of the files that are sent in parallel

_Part = Tuple[str, str]  # ETag, SHA-256 of the content


class S3Archive(S3Store):
    """An archive below a prefix of a bucket. It implements `ArchiveStore`.

    S3 checks each request against the SHA-256 in its signature.
    """

    verifies = False

    def sizes(self) -> Dict[str, int]:
        sizes: Dict[str, int] = {}
        for found in self._client.list_objects(self._prefix):
            key = found.key[len(self._prefix) :]
            is_ours = key.startswith(f"{ARCHIVE_FOLDER}/") and not key.startswith(f"{ODD}/")
            if key and not key.endswith("/") and not is_ours:  # a key with "/" is a folder of FSx
                sizes[key] = found.size
        return sizes

    def send(self, key: str, file: OpenedFile, on_bytes: OnBytes) -> str:
        size = file.entry.size
        if size > PART:
            return _Upload(self, key, size).run(file, on_bytes)
        body = file.read(0, size)
        if len(body) < size:
            raise SourceChanged(f"it ends after {len(body)} of {size} bytes")
        if not file.is_unchanged():
            raise SourceChanged(CHANGED_WHILE_READ)
        self.put(key, body)
        on_bytes(len(body), False)
        return hashlib.sha256(body).hexdigest()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Do nothing: a bucket has no locks. `ManifestWriter.complete` notices another writer."""
        yield

    def tidy(self) -> None:
        """Do nothing: a lifecycle rule of the bucket ends old uploads."""

    def begin(self, key: str) -> str:
        """Begin a multipart upload; return its id."""
        return self._client.begin_upload(self._key(key))

    def send_part(self, key: str, upload: str, number: int, body: bytes) -> str:
        """Send a part; return its ETag, "" if the upload is gone."""
        return self._client.send_part(self._key(key), upload, number, body)

    def end(self, key: str, upload: str, tags: List[str]) -> bool:
        """Make one object of the parts; return False if the upload does not exist any more."""
        return self._client.end_upload(self._key(key), upload, tags) is None


class _Upload:
    """The upload of one large file. Parts that arrived earlier are compared by SHA-256."""

    def __init__(self, store: S3Archive, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        self._step = max(PART, -(-size // MOST_PARTS))  # bytes of a part
        self._record = (
            f"{ARCHIVE_FOLDER}/uploads/{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
        )
        self._upload, self._parts = self._read_record()

    def run(self, file: OpenedFile, on_bytes: OnBytes) -> str:
        """Send the file; return the SHA-256 of its content."""
        digest = hashlib.sha256()
        for number, start in enumerate(range(0, self._size, self._step), 1):
            length = min(self._step, self._size - start)
            body = file.read(start, length)
            if len(body) < length:
                raise SourceChanged(f"it ends after {start + len(body)} of {self._size} bytes")
            digest.update(body)
            on_bytes(length, self._send_part(number, body))
        if not file.is_unchanged():
            raise SourceChanged(CHANGED_WHILE_READ)
        if not self._store.end(self._key, self._upload, [tag for tag, _ in self._parts]):
            self._forget()
            # Perhaps only a response was lost. If the size is right, the content is compared later.
            if self._store.sizes().get(self._key) != self._size:
                raise SourceChanged("its upload was ended by another process or a bucket rule")
        self._forget()
        return digest.hexdigest()

    def _send_part(self, number: int, body: bytes) -> bool:
        """Send a part unless it arrived earlier; return whether it had."""
        digest = hashlib.sha256(body).hexdigest()
        if number <= len(self._parts):
            if self._parts[number - 1][1] == digest:
                return True
            del self._parts[number - 1 :]  # the file has changed
        if not self._upload:
            self._upload = self._store.begin(self._key)
        tag = self._store.send_part(self._key, self._upload, number, body)
        if not tag:
            self._forget()
            raise SourceChanged("its upload is gone: a bucket rule ends uploads that are days old")
        self._parts.append((tag, digest))
        document = {"upload": self._upload, "step": self._step, "parts": self._parts}
        self._store.put(self._record, json.dumps(document).encode())
        return False

    def _read_record(self) -> Tuple[str, List[_Part]]:
        try:
            record: Any = json.loads(self._store.get(self._record) or b"{}")
            if record.get("step") == self._step:
                return str(record["upload"]), [(str(tag), str(sha)) for tag, sha in record["parts"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        return "", []

    def _forget(self) -> None:
        """Begin a new upload next time."""
        self._upload, self._parts = "", []
        self._store.delete(self._record)


# --- Files of FSx for Lustre ----------------------------------------------------------------------
# FSx for Lustre imports objects with POSIX metadata (kind, mode, owner, time) as files.
#
# Source: FSx for Lustre User Guide, "POSIX metadata support for data repositories".


OWNER = "1000"  # the user of images/*/Dockerfile; see also aws/naming.py
META = "x-amz-meta-"

_KINDS = {FOLDER: 0o040000, LINK: 0o120000}
_FILE = 0o100000


def posix_headers(entry: TreeEntry) -> Dict[str, str]:
    """Return the headers of an object that stands for a file, folder or link. Pure."""
    kind = _KINDS.get(entry.kind, _FILE)
    return {
        f"{META}user-agent": "aws-fsx-lustre",
        f"{META}file-owner": OWNER,
        f"{META}file-group": OWNER,
        f"{META}file-permissions": f"0{kind | entry.mode:o}",
        f"{META}file-atime": f"{entry.mtime_ns}ns",
        f"{META}file-mtime": f"{entry.mtime_ns}ns",
    }


def from_metadata(entry: TreeEntry, metadata: Mapping[str, str]) -> TreeEntry:
    """Complete an entry from the metadata of its object, whose keys lack `x-amz-meta-`. Pure.

    Missing and malformed metadata change nothing.
    """
    try:
        mode = int(metadata["file-permissions"], 8)
    except (KeyError, ValueError):
        mode = _FILE | entry.mode
    kinds = {number: kind for kind, number in _KINDS.items()}
    completed = entry._replace(mode=mode & 0o777, kind=kinds.get(mode & 0o170000, entry.kind))
    mtime = metadata.get("file-mtime", "")
    digits = mtime[:-2] if mtime.endswith("ns") else f"{mtime}000000000"
    return completed._replace(mtime_ns=int(digits)) if mtime and digits.isdigit() else completed


class PosixArchive(S3Archive):
    """An archive in S3 whose objects have POSIX metadata. It implements `ArchiveStore`."""

    def __init__(self, client: S3Client, prefix: str) -> None:
        super().__init__(client, prefix)
        # key -> headers with metadata, of the objects that are being sent
        self._meta: Dict[str, Dict[str, str]] = {}

    def send(self, key: str, file: OpenedFile, on_bytes: OnBytes) -> str:
        self._meta[key] = posix_headers(file.entry)
        try:
            return super().send(key, file, on_bytes)
        finally:
            del self._meta[key]

    def put(self, key: str, data: bytes) -> None:
        self._client.send("PUT", self._key(key), headers=self._meta.get(key), body=data)

    def begin(self, key: str) -> str:
        return self._client.begin_upload(self._key(key), self._meta.get(key))

    def put_entry(self, entry: TreeEntry) -> None:
        """Write an object without content of its own: a folder or a link."""
        body = entry.target.encode("utf-8", "surrogateescape") if entry.kind == LINK else b""
        end = "/" if entry.kind == FOLDER else ""
        key = self._key(entry.path) + end
        self._client.send("PUT", key, headers=posix_headers(entry), body=body)
