"""A store in a folder: a value is a file, and its key is the file's path below the folder."""

from __future__ import annotations

import os
import shutil
import stat
from typing import BinaryIO, Callable, List, Optional, TypeVar

from batchml.runtime.storage.files import (
    sync_path,
    temporary_name,
    write_atomically,
    write_new,
)
from batchml.runtime.storage.store import Store, StoreError, check_key
from batchml.runtime.transfer.files import make_folder
from batchml.runtime.transfer.tree import ABSENT, Tree

T = TypeVar("T")


class FolderStore(Store):
    """The store in `folder`, which is made at the first write.

    Programs of several runs may write to the folder, in containers, and its reader may be another
    user. So a link that one of them puts in place of a folder or file is not followed.

    `private`: only this user may read the values.
    """

    def __init__(self, folder: str, private: bool = False) -> None:
        self._folder = folder
        self._tree = Tree(folder)
        self._private = private

    def get(self, key: str) -> Optional[bytes]:
        return self._read(key, lambda file: file.read())

    def has(self, key: str) -> bool:
        return bool(self._read(key, lambda file: True))

    def put(self, key: str, data: bytes) -> None:
        self._write("write", key, lambda path: write_atomically(path, data, self._mode, exact=True))

    def create(self, key: str, data: bytes) -> bool:
        def link(path: str) -> bool:
            if os.path.lexists(path):
                return False
            try:
                with temporary_name(path) as temporary:
                    write_new(temporary, data, self._mode, exact=True)
                    # Also on NFS, `link` makes the whole file appear, or fails if there is one.
                    os.link(temporary, path)
            except FileExistsError:
                return False
            sync_path(os.path.dirname(path))
            return True

        return self._write("create", key, link)

    def keys(self, prefix: str, limit: Optional[int] = None) -> List[str]:
        found = []
        within = prefix.rpartition("/")[0]
        # Only this folder is searched, because others may have many files.
        top = os.path.join(self._folder, check_key(within)) if within else self._folder
        try:
            for folder, _, names in os.walk(top):
                below = os.path.relpath(folder, self._folder)
                for name in names:
                    key = name if below == "." else f"{below}/{name}"
                    if key.startswith(prefix) and not name.endswith(".tmp"):
                        found.append(key)
        except OSError as error:
            raise self._error("list", prefix, error) from error
        return sorted(found)[:limit]

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
            try:
                with self._tree.parent(key) as (at, name):
                    os.unlink(name, dir_fd=at)
            except IsADirectoryError:
                continue
            except OSError as error:
                if error.errno not in ABSENT:
                    raise self._error("remove", key, error) from error

    def read(self, key: str, start: int, length: int) -> Optional[bytes]:
        def part(file: BinaryIO) -> bytes:
            file.seek(start)
            return file.read(length)

        return self._read(key, part)

    def put_file(self, key: str, path: str) -> None:
        def copy(target: str) -> None:
            with temporary_name(target) as temporary:
                shutil.copyfile(path, temporary)
                _copy_time(os.stat(path), temporary)
                os.replace(temporary, target)

        self._write("write", key, copy)

    def link_file(self, key: str, path: str) -> None:
        def link(target: str) -> None:
            with temporary_name(target) as temporary:
                os.link(os.path.realpath(path), temporary)
                os.replace(temporary, target)

        try:
            self._write("link", key, link)
        except StoreError:  # another file system, or one without links
            self.put_file(key, path)

    def get_file(self, key: str, path: str) -> bool:
        def copy(file: BinaryIO) -> bool:
            with open(path, "wb") as target:
                shutil.copyfileobj(file, target)
            _copy_time(os.fstat(file.fileno()), path)
            return True

        return bool(self._read(key, copy))

    @property
    def _mode(self) -> int:
        return 0o600 if self._private else 0o644

    def _read(self, key: str, read: Callable[[BinaryIO], T]) -> Optional[T]:
        """Return `read(file)`; None if the key has no file."""
        check_key(key)
        try:
            descriptor = self._tree.open(key)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return None
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    return read(file)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise self._error("read", key, error) from error

    def _write(self, verb: str, key: str, write: Callable[[str], T]) -> T:
        """Return `write(path)`. The path leads to the key's file through an open folder."""
        above, _, name = check_key(key).rpartition("/")
        try:
            if self._private:
                os.makedirs(self._folder, 0o700, exist_ok=True)
            make_folder(self._tree, above)
            with self._tree.folder(above) as at:
                return write(f"/proc/self/fd/{at}/{name}")
        except OSError as error:
            raise self._error(verb, key, error) from error

    def _error(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreError(f"cannot {verb} {key!r} in {self._folder}: {error.strerror or error}")


def _copy_time(state: os.stat_result, path: str) -> None:
    """Give a copy the time of its file: some programs find their newest file by it."""
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
