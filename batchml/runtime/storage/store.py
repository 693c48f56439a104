"""Where a run keeps what outlives it: claims, outputs, accounts. A folder, or a prefix in S3."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from typing import BinaryIO, Callable, List, NamedTuple, Optional, TypeVar

from batchml.runtime.storage.files import sync_folder, write_atomically, write_new
from batchml.runtime.transfer.files import make_folder
from batchml.runtime.transfer.tree import ABSENT, Tree

try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]


T = TypeVar("T")


class StoreError(OSError):
    """The store did not do what it was asked for; the text says what, where and why.

    `temporary` when the same may succeed later or from another host; `code` is S3's, of a refusal.
    """

    def __init__(self, text: str, temporary: bool = False, code: str = "") -> None:
        super().__init__(text)
        self.temporary = temporary
        self.code = code


class Patience(NamedTuple):
    """How long S3 is waited for."""

    tries: int
    timeout: float  # seconds without a byte


PATIENT = Patience(7, 20.0)  # the waits between the tries add up to 25 s at most
BRIEF = Patience(2, 3.0)  # where a program's output waits meanwhile


class Store(Protocol):
    """Small values and files by key. A key is parts with `/` between, none of them `.` or `..`.

    Every method raises StoreError when the store cannot be had.
    """

    def get(self, key: str) -> Optional[bytes]:
        """The value, or None when there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Write a value; it is whole and durable, or the old one is still there."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a value unless there is one; whether this call wrote it.

        Where an answer was lost and the call sent again, an equal value counts as this call's.
        """

    def keys(self, prefix: str) -> List[str]:
        """The keys that begin so, sorted."""

    def delete(self, *keys: str) -> None:
        """Remove values; those that are not there are passed over."""

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        """Bytes of a value, fewer or none where it ends before; None when there is no value."""

    def put_file(self, key: str, path: str) -> None:
        """Write a file's content."""

    def get_file(self, key: str, path: str) -> bool:
        """Write a value to a new or existing file; False, and no file, when there is none."""


def go_on() -> None:
    """What is asked often while something takes long; others raise, to give up."""


def open_store(
    url: str,
    environ: Mapping[str, str],
    check: Callable[[], None] = go_on,
    patience: Patience = PATIENT,
) -> Store:
    """The store at `s3://BUCKET/PREFIX`, or in a folder of this path.

    `check` is called often while S3 is waited for, and may raise to end that. Raises StoreError for
    any other kind of address. Nothing is sent and nothing made.
    """
    if url.startswith("s3://"):
        from batchml.runtime.storage.s3 import S3Store

        return S3Store.open(url, environ, check, patience)
    if not url or "://" in url:
        raise StoreError(f"{url!r} is no store: give a folder, or s3://BUCKET/PREFIX")
    return FolderStore(url)


class FolderStore:
    """A folder; a key is a path below it.

    Programs of several runs may write to it, in containers, and its reader may be somebody else: a
    link that one of them puts in the place of a folder, or of a file, is not followed.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tree = Tree(folder)

    def get(self, key: str) -> Optional[bytes]:
        return self._read(key, lambda file: file.read())

    def put(self, key: str, data: bytes) -> None:
        self._write("write", key, lambda path: write_atomically(path, data, 0o644, exact=True))

    def create(self, key: str, data: bytes) -> bool:
        made = []

        def link(path: str) -> None:
            temporary = f"{path}.{os.urandom(8).hex()}.tmp"
            if os.path.lexists(path):
                return
            try:
                write_new(temporary, data, 0o644, exact=True)
                # A link appears whole, or fails when the name is taken: on NFS, too.
                os.link(temporary, path)
                made.append(path)
            except FileExistsError:
                return
            finally:
                if os.path.exists(temporary):
                    os.unlink(temporary)
            sync_folder(os.path.dirname(path))

        self._write("create", key, link)
        return bool(made)

    def keys(self, prefix: str) -> List[str]:
        found = []
        within = prefix.rpartition("/")[0]  # other folders may hold many
        top = os.path.join(self._folder, checked(within)) if within else self._folder
        try:
            for folder, _, names in os.walk(top):
                below = os.path.relpath(folder, self._folder)
                for name in names:
                    key = name if below == "." else f"{below}/{name}"
                    if key.startswith(prefix) and not name.endswith(".tmp"):
                        found.append(key)
        except OSError as error:
            raise self._failed("list", prefix, error) from error
        return sorted(found)

    def delete(self, *keys: str) -> None:
        for key in keys:
            checked(key)
            try:
                with self._tree.above(key) as (at, name):
                    os.unlink(name, dir_fd=at)
            except IsADirectoryError:
                continue
            except OSError as error:
                if error.errno not in ABSENT:
                    raise self._failed("remove", key, error) from error

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        def part(file: BinaryIO) -> bytes:
            file.seek(start)
            return file.read(length)

        return self._read(key, part)

    def put_file(self, key: str, path: str) -> None:
        def copy(target: str) -> None:
            temporary = f"{target}.{os.urandom(8).hex()}.tmp"
            try:
                shutil.copyfile(path, temporary)
                os.replace(temporary, target)
            finally:
                if os.path.exists(temporary):
                    os.unlink(temporary)

        self._write("write", key, copy)

    def get_file(self, key: str, path: str) -> bool:
        def copy(file: BinaryIO) -> bool:
            with open(path, "wb") as target:
                shutil.copyfileobj(file, target)
            return True

        return bool(self._read(key, copy))

    def _read(self, key: str, read: Callable[[BinaryIO], T]) -> Optional[T]:
        """What `read` makes of a file; None where there is none."""
        checked(key)
        try:
            found = self._tree.open(key)
            try:
                if not stat.S_ISREG(os.fstat(found).st_mode):
                    return None
                with os.fdopen(found, "rb", closefd=False) as file:
                    return read(file)
            finally:
                os.close(found)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise self._failed("read", key, error) from error

    def _write(self, verb: str, key: str, write: Callable[[str], None]) -> None:
        """Have a file written. Its path leads through a descriptor of its folder."""
        above, _, name = checked(key).rpartition("/")
        try:
            make_folder(self._tree, above)
            with self._tree.folder(above) as at:
                write(f"/proc/self/fd/{at}/{name}")
        except OSError as error:
            raise self._failed(verb, key, error) from error

    def _failed(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreError(f"cannot {verb} {key!r} in {self._folder}: {error.strerror or error}")


def checked(key: str) -> str:
    """The key, when it is one. Raises StoreError."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise StoreError(f"{key!r} is no key of a store")
    return key
