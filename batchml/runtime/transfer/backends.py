"""Where an archive is: a folder, or a prefix in S3. Plain files at plain keys, and its papers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple

from batchml.runtime.storage.s3 import MOST_PARTS, PAGE, S3Store, Wire
from batchml.runtime.storage.store import FolderStore, Store, StoreError, go_on
from batchml.runtime.transfer.files import (
    CHANGES,
    Changed,
    Damaged,
    clear_parts,
    make_folder,
    place,
)
from batchml.runtime.transfer.manifest import OTHERS
from batchml.runtime.transfer.tree import (
    FOLDER,
    LINK,
    OWN,
    CarryError,
    Entry,
    LeftOut,
    Tree,
    joined,
)

try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]

READ = 8 << 20  # bytes of one read
_ODD = f"{OWN}/odd"  # files whose names are no keys of S3
_LOCK = f"{OWN}/lock"
_LONGEST = 1024 - 200  # bytes of a key, less those of a prefix

Moved = Callable[[int, bool], None]
Read = Callable[[int, int], bytes]


class Vault(Store, Protocol):
    """A store that tells sizes, and to which a file can be sent that was half sent before.

    `proves`: what `send` returns was read back there.
    """

    proves: bool

    def sizes(self) -> Dict[str, int]:
        """Bytes of all files of the archive, by key; its papers are none."""

    def send(
        self, key: str, entry: Entry, read: Read, moved: Moved, settled: Callable[[], bool]
    ) -> str:
        """Write what `read(start, length)` gives for a file; the SHA-256 of what was written.

        Raises OSError, and Changed where it ends early or is not `settled` afterwards: what was
        there before is there still.
        """

    def alone(self) -> ContextManager[None]:
        """While nobody else changes the archive, as far as that can be had.

        Raises CarryError where another does.
        """

    def tidy(self) -> None:
        """All has arrived: what was left of old attempts may go."""


def open_vault(url: str, environ: Mapping[str, str], check: Callable[[], None] = go_on) -> Vault:
    """The archive at `s3://BUCKET/PREFIX`, or in a folder of this path. Raises StoreError."""
    if url.startswith("s3://"):
        return S3Vault.open(url, environ, check)
    if not url or "://" in url:
        raise StoreError(
            f"{url!r} is no place for an archive: give a folder, or s3://BUCKET/PREFIX"
        )
    return FolderVault(url)


class FolderVault(FolderStore):
    """A folder. The methods are `Vault`'s."""

    proves = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._tree = Tree(folder)

    def sizes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        for below in ("", _ODD):
            if self._tree.look(below) is None:
                continue
            left_out: List[LeftOut] = []
            for entry in self._tree.walk(below, left_out):
                if entry.is_file:
                    found[joined(below, entry.path)] = entry.size
            for each in left_out:
                if each.is_loss and not each.is_link:
                    raise StoreError(f"cannot list {self._tree.root}: {each}")
        return found

    def send(
        self, key: str, entry: Entry, read: Read, moved: Moved, settled: Callable[[], bool]
    ) -> str:
        make_folder(self._tree, key.rpartition("/")[0])
        # Who makes the archive must be able to replace it; what was sent says what it is.
        there = entry._replace(path=key, mode=entry.mode | 0o600, sha256="")
        return place(self._tree, there, read, moved, settled)

    @contextmanager
    def alone(self) -> Iterator[None]:
        make_folder(self._tree, OWN)
        with self._tree.above(_LOCK) as (at, name):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                         dir_fd=at)  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(fd)
                raise CarryError(OTHERS) from None
        try:  # on a disk without locks the papers tell, at the end
            yield
        finally:
            os.close(fd)

    def delete(self, *keys: str) -> None:
        """Folders that get empty go, too: a file may be to have the name of one."""
        super().delete(*keys)
        for key in keys:
            above = key.rpartition("/")[0]
            while above:
                try:
                    with self._tree.above(above) as (at, name):
                        os.rmdir(name, dir_fd=at)
                except OSError:
                    break
                above = above.rpartition("/")[0]

    def tidy(self) -> None:
        clear_parts(self._tree, time.time())


def key_of(path: str) -> str:
    """The key of a file: its path, unless S3 could not have or list such a key."""
    try:
        size = len(path.encode("utf-8"))
        plain = size <= _LONGEST and all(character >= " " for character in path)
        plain = plain and not any(character in "\x7f\ufffe\uffff" for character in path)
    except UnicodeEncodeError:
        plain = False
    if plain:
        return path
    return f"{_ODD}/{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()}"


def digest_stored(vault: Vault, key: str, size: int, moved: Moved) -> str:
    """SHA-256 of what is stored, as it is read back. Raises Damaged where that ends early."""
    digest, at = hashlib.sha256(), 0
    while at < size:
        block = vault.read(key, at, min(READ, size - at))
        if not block:
            raise Damaged("it is not there" if block is None else f"it ends after {at} bytes")
        digest.update(block)
        at += len(block)
        moved(len(block), True)
    return digest.hexdigest()


# --- archives in S3 -------------------------------------------------------------------------------
# An archive in S3. A large file goes in parts, and a paper beside it says which are there.


PART = 16 << 20  # bytes that are held in memory, for each of the files that go at once

_Part = Tuple[str, str]  # its ETag, and the SHA-256 of what was sent


class S3Vault(S3Store):
    """Keys below a prefix. The methods are `Vault`'s.

    S3 checks each request against the SHA-256 that it is signed with.
    """

    proves = False

    def sizes(self) -> Dict[str, int]:
        found: Dict[str, int] = {}
        token = ""
        while True:
            query = [("list-type", "2"), ("max-keys", str(PAGE)), ("prefix", self._prefix)]
            query += [("continuation-token", token)] if token else []
            root = ElementTree.fromstring(self._wire.send("GET", "", query).body)
            for each in _named(root, "Contents"):
                key = _said(each, "Key")[len(self._prefix) :]
                papers = key.startswith(f"{OWN}/") and not key.startswith(f"{_ODD}/")
                if key and not key.endswith("/") and not papers:  # FSx and consoles show folders so
                    found[key] = int(_said(each, "Size"))
            token = _said(root, "NextContinuationToken")
            if not token:
                return found

    def send(
        self, key: str, entry: Entry, read: Read, moved: Moved, settled: Callable[[], bool]
    ) -> str:
        if entry.size > PART:
            return _Upload(self, key, entry).run(read, moved, settled)
        body = read(0, entry.size)
        if len(body) < entry.size:
            raise Changed(f"it ends after {len(body)} of {entry.size} bytes")
        if not settled():
            raise Changed(CHANGES)
        self.put(key, body)
        moved(len(body), False)
        return hashlib.sha256(body).hexdigest()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody can be kept out of a bucket: the papers tell of two, at the end."""
        yield

    def tidy(self) -> None:
        """The bucket's rules end uploads that are days old."""

    def begin(self, key: str) -> str:
        """Begin an upload in parts; its id."""
        answer = self._wire.send("POST", self._key(key), [("uploads", "")])
        return _said(ElementTree.fromstring(answer.body), "UploadId")

    def send_part(self, key: str, upload: str, number: int, body: bytes) -> str:
        """The ETag of a part; empty where the upload is gone."""
        query = [("partNumber", str(number)), ("uploadId", upload)]
        answer = self._wire.send("PUT", self._key(key), query, body=body, fine=(404,))
        return "" if answer.status == 404 else str(answer.headers.get("ETag", ""))

    def end(self, key: str, upload: str, tags: List[str]) -> bool:
        """Make one object of the parts; False where the upload is gone, or was ended already."""
        listed = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        answer = self._wire.send("POST", self._key(key), [("uploadId", upload)], body=body,
                                 fine=(404,))  # fmt: skip
        if answer.status == 404:
            return False
        if answer.code:  # S3 may begin a success and then say that it failed
            raise StoreError(f"S3 refused the parts of {key}: {answer.code}", temporary=True)
        return True


class _Upload:
    """One large file. What was sent is compared with the file by its parts' SHA-256."""

    def __init__(self, vault: S3Vault, key: str, entry: Entry) -> None:
        self._vault, self._key, self._size = vault, key, entry.size
        self._step = max(PART, -(-entry.size // MOST_PARTS))
        self._paper = f"{OWN}/uploads/{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"
        self._upload, self._parts = self._recalled()

    def run(self, read: Read, moved: Moved, settled: Callable[[], bool]) -> str:
        whole = hashlib.sha256()
        for number, start in enumerate(range(0, self._size, self._step), 1):
            wanted = min(self._step, self._size - start)
            body = read(start, wanted)
            if len(body) < wanted:
                raise Changed(f"it ends after {start + len(body)} of {self._size} bytes")
            whole.update(body)
            moved(wanted, self._part(number, body))
        if not settled():
            raise Changed(CHANGES)
        if not self._vault.end(self._key, self._upload, [tag for tag, _ in self._parts]):
            self._forget()
            # Unless an answer was lost: what is read back afterwards decides.
            if self._vault.sizes().get(self._key) != self._size:
                raise Changed("its upload was ended by another, or by the bucket's rules")
        self._forget()
        return whole.hexdigest()

    def _part(self, number: int, body: bytes) -> bool:
        """Have a part there; whether it was."""
        digest = hashlib.sha256(body).hexdigest()
        if number <= len(self._parts):
            if self._parts[number - 1][1] == digest:
                return True
            del self._parts[number - 1 :]  # the file is another now
        if not self._upload:
            self._upload = self._vault.begin(self._key)
        tag = self._vault.send_part(self._key, self._upload, number, body)
        if not tag:
            self._forget()
            raise Changed("its upload is gone: bucket rules end those that are days old")
        self._parts.append((tag, digest))
        told = {"upload": self._upload, "step": self._step, "parts": self._parts}
        self._vault.put(self._paper, json.dumps(told).encode())
        return False

    def _recalled(self) -> Tuple[str, List[_Part]]:
        try:
            told: Any = json.loads(self._vault.get(self._paper) or b"{}")
            if told.get("step") == self._step:
                return str(told["upload"]), [(str(tag), str(sha)) for tag, sha in told["parts"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        return "", []

    def _forget(self) -> None:
        self._upload, self._parts = "", []
        self._vault.delete(self._paper)


def _named(root: ElementTree.Element, name: str) -> List[ElementTree.Element]:
    return [each for each in root.iter() if each.tag.rpartition("}")[2] == name]


def _said(root: ElementTree.Element, name: str) -> str:
    found = _named(root, name)
    return (found[0].text or "") if found else ""


# --- files of FSx for Lustre ----------------------------------------------------------------------
# An archive in S3 whose objects say what they are as files, so that FSx for Lustre brings them in
# as such: kind and permissions, owner, time.
#
# Source: FSx for Lustre User Guide, "POSIX metadata support for data repositories".


OWNER = "1000"  # of images/*/Dockerfile; aws/naming.py
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
