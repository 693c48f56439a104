"""The store of an archive, and an archive in a folder. Files keep their paths as keys."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from contextlib import contextmanager
from typing import ContextManager, Dict, Iterator, List, Protocol

from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store, StoreError
from batchml.runtime.transfer.files import (
    ContentDamaged,
    OnBytes,
    clear_parts,
    digest_of,
    ignore_bytes,
    make_folder,
    write_file,
)
from batchml.runtime.transfer.manifest import OTHER_WRITER
from batchml.runtime.transfer.tree import (
    ARCHIVE_FOLDER,
    LeftOut,
    OpenedFile,
    TransferError,
    join_path,
)

READ = 8 << 20  # bytes of one read
ODD = f"{ARCHIVE_FOLDER}/odd"  # the folder of files whose names cannot be S3 keys
_LOCK = f"{ARCHIVE_FOLDER}/lock"
_MAX_KEY = 1024 - 200  # bytes of a key without its prefix; S3 allows 1024 together


class ArchiveStore(Store, Protocol):
    """A store that lists the sizes of its files and can continue an interrupted upload."""

    verifies: bool  # `send` itself reads the content back before it returns the digest

    def sizes(self) -> Dict[str, int]:
        """Return the bytes of all archived files, by key, without the archive's own files."""

    def send(self, key: str, file: OpenedFile, on_bytes: OnBytes) -> str:
        """Store a file; return the SHA-256 of the stored content.

        Raises OSError, and SourceChanged if the content ends early or the file has changed
        meanwhile: then the store still has the earlier content.
        """

    def lock(self) -> ContextManager[None]:
        """Keep other processes from changing the archive, as far as the store allows it.

        Raises TransferError if another process is changing it.
        """

    def tidy(self) -> None:
        """Remove leftovers of interrupted attempts."""


class FolderArchive(FolderStore):
    """An archive in a folder. It implements `ArchiveStore`."""

    verifies = True

    def sizes(self) -> Dict[str, int]:
        sizes: Dict[str, int] = {}
        for below in ("", ODD):
            if self._tree.lookup(below) is None:
                continue
            left_out: List[LeftOut] = []
            for entry in self._tree.walk(below, left_out):
                if entry.is_file:
                    sizes[join_path(below, entry.path)] = entry.size
            for left in left_out:
                if left.is_loss and not left.is_link:
                    raise StoreError(f"cannot list {self._tree.root}: {left}")
        return sizes

    def send(self, key: str, file: OpenedFile, on_bytes: OnBytes) -> str:
        make_folder(self._tree, key.rpartition("/")[0])
        # 0o600: the archive's owner must be able to replace the file. No digest is expected: the
        # content may have changed since the digest was made.
        target = file.entry._replace(path=key, mode=file.entry.mode | 0o600, sha256="")
        return write_file(self._tree, file._replace(entry=target), on_bytes, is_digested=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        make_folder(self._tree, ARCHIVE_FOLDER)
        with self._tree.parent(_LOCK) as (at, name):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                         dir_fd=at)  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                os.close(fd)
                raise TransferError(OTHER_WRITER) from None
        try:  # on a disk without locks, `ManifestWriter.complete` notices another writer
            yield
        finally:
            os.close(fd)

    def delete(self, *keys: str) -> None:
        """Delete files, and folders that become empty, whose names a file may need."""
        super().delete(*keys)
        for key in keys:
            above = key.rpartition("/")[0]
            while above:
                try:
                    with self._tree.parent(above) as (at, name):
                        os.rmdir(name, dir_fd=at)
                except OSError:
                    break
                above = above.rpartition("/")[0]

    def tidy(self) -> None:
        clear_parts(self._tree, time.time())


def key_of(path: str) -> str:
    """Return the key of a file: its path, unless S3 cannot store or list such a key."""
    try:
        is_short = len(path.encode("utf-8")) <= _MAX_KEY
        if is_short and all(char >= " " and char not in "\x7f\ufffe\uffff" for char in path):
            return path
    except UnicodeEncodeError:
        pass
    return f"{ODD}/{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()}"


def stored_digest(
    store: ArchiveStore, key: str, size: int, on_bytes: OnBytes = ignore_bytes
) -> str:
    """Read stored content back; return its SHA-256. Raises ContentDamaged if it ends early."""

    def read(start: int, length: int) -> bytes:
        block = store.read(key, start, length)
        if not block:
            why = "it is missing" if block is None else f"it ends after {start} bytes"
            raise ContentDamaged(why)
        return block

    return digest_of(read, size, on_bytes, READ)
