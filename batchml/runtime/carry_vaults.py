"""Where an archive is: a folder, or a prefix in S3. Plain files at plain keys, and its papers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Callable, ContextManager, Dict, Iterator, List

from batchml.runtime.carry_book import OTHERS
from batchml.runtime.carry_place import Damaged, clear_parts, make_folder, place
from batchml.runtime.carry_tree import OWN, CarryError, Entry, LeftOut, Tree, joined
from batchml.runtime.store import FolderStore, Store, StoreError, go_on

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
        from batchml.runtime.carry_s3 import S3Vault

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
