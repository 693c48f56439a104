"""An archive in S3 whose objects say what they are as files, so that FSx for Lustre brings them in
as such: kind and permissions, owner, time.

Source: FSx for Lustre User Guide, "POSIX metadata support for data repositories".
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Callable, Dict

from batchml.runtime.carry_s3 import S3Vault
from batchml.runtime.carry_tree import FOLDER, LINK, Entry
from batchml.runtime.carry_vaults import Moved, Read, Vault, open_vault
from batchml.runtime.s3 import Wire
from batchml.runtime.store import go_on

OWNER = "1000"  # of images/*/Dockerfile; aws/site.py
META = "x-amz-meta-"

_KINDS = {FOLDER: 0o040000, LINK: 0o120000}
_FILE = 0o100000


def posix_headers(entry: Entry) -> Dict[str, str]:
    """What an object says of the file, folder or link that it is. Pure."""
    kind = _KINDS.get(entry.kind, _FILE)
    return {
        f"{META}user-agent": "aws-fsx-lustre",
        f"{META}file-owner": OWNER,
        f"{META}file-group": OWNER,
        f"{META}file-permissions": f"0{kind | entry.mode:o}",
        f"{META}file-atime": f"{entry.mtime_ns}ns",
        f"{META}file-mtime": f"{entry.mtime_ns}ns",
    }


def from_metadata(entry: Entry, metadata: Mapping[str, str]) -> Entry:
    """An entry with what the metadata of its object says; `metadata` without `x-amz-meta-`. Pure.

    What is not said, or not as FSx says it, stays.
    """
    try:
        mode = int(metadata["file-permissions"], 8)
    except (KeyError, ValueError):
        mode = _FILE | entry.mode
    kinds = {number: kind for kind, number in _KINDS.items()}
    found = entry._replace(mode=mode & 0o777, kind=kinds.get(mode & 0o170000, entry.kind))
    time = metadata.get("file-mtime", "")
    digits = time[:-2] if time.endswith("ns") else f"{time}000000000"
    return found._replace(mtime_ns=int(digits)) if digits.isdigit() and time else found


class PosixVault(S3Vault):
    """Keys below a prefix, each of which says what it is. The methods are `Vault`'s."""

    def __init__(self, wire: Wire, prefix: str) -> None:
        super().__init__(wire, prefix)
        self._meta: Dict[str, Dict[str, str]] = {}  # of what is on its way, by key

    def send(
        self, key: str, entry: Entry, read: Read, moved: Moved, settled: Callable[[], bool]
    ) -> str:
        self._meta[key] = posix_headers(entry)
        try:
            return super().send(key, entry, read, moved, settled)
        finally:
            del self._meta[key]

    def put(self, key: str, data: bytes) -> None:
        self._wire.send("PUT", self._key(key), headers=self._meta.get(key), body=data)

    def begin(self, key: str) -> str:
        answer = self._wire.send("POST", self._key(key), [("uploads", "")], self._meta.get(key))
        return ElementTree.fromstring(answer.body).findtext("{*}UploadId") or ""

    def mark(self, entry: Entry) -> None:
        """Write what no content says: a folder, a link."""
        body = entry.target.encode("utf-8", "surrogateescape") if entry.kind == LINK else b""
        end = "/" if entry.kind == FOLDER else ""
        key = self._key(entry.path) + end
        self._wire.send("PUT", key, headers=posix_headers(entry), body=body)


def open_posix(url: str, environ: Mapping[str, str], check: Callable[[], None] = go_on) -> Vault:
    """As `open_vault`; in S3, one whose objects say what they are. Raises StoreError."""
    if url.startswith("s3://"):
        return PosixVault.open(url, environ, check)
    return open_vault(url, environ, check)
