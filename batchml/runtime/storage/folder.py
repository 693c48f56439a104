"""A store in a folder: the path of a value's file below the folder is its key."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from typing import Any, BinaryIO, Callable, List, Optional, TypeVar

from batchml.runtime.storage.store import Store, StoreError, check_key
from batchml.runtime.transfer.files import make_folder
from batchml.runtime.transfer.tree import ABSENT, Tree

# --- files ----------------------------------------------------------------------------------------
# Atomic file writes, locks, and other small operations on files.


def write_atomically(path: str, content: bytes, mode: int = 0o600, exact: bool = False) -> None:
    """Write a file so that readers, also after a power cut, see the old content or the new one.

    With `exact` the file gets `mode` whatever the umask, because other users have to read it.
    """
    # A random name, because containers that share a folder may have equal process ids.
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    write_new(temporary, content, mode, exact)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path) or ".")


def write_new(path: str, content: bytes, mode: int = 0o600, exact: bool = False) -> None:
    """Write a file that does not exist yet. Its content is durable then, its name not yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if exact:
                os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)
        raise


def sync_folder(folder: str) -> None:
    """Make renames and new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str) -> BinaryIO:
    """Open a file for reading, unbuffered. Raises OSError if it is not a regular file.

    A plain `open` of a pipe that another program has put there would wait for a writer, for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return os.fdopen(descriptor, "rb", buffering=0)


def is_read_only(folder: str) -> bool:
    """Whether the file system of a folder is read-only now.

    This tries to write: after a fault a file system may refuse writes without its read-only flag.
    """
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.errno == errno.EROFS
    return False


def is_locked(path: str) -> bool:
    """Whether a process holds an exclusive `flock` of a file; False without the file.

    Raises OSError if the file cannot be opened.
    """
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_json(path: str, value: Any) -> None:
    write_atomically(path, json.dumps(value).encode())


def read_json(path: str) -> Any:
    """The value in a JSON file; None if the file is missing or not JSON."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None


# --- folder ---------------------------------------------------------------------------------------


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
        made = []

        def link(path: str) -> None:
            temporary = f"{path}.{os.urandom(8).hex()}.tmp"
            if os.path.lexists(path):
                return
            try:
                write_new(temporary, data, self._mode, exact=True)
                # `link` makes the whole file appear, or fails if the name is taken; also on NFS.
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

    def keys(self, prefix: str, limit: Optional[int] = None) -> List[str]:
        found = []
        within = prefix.rpartition("/")[0]  # other folders may hold many files
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

    @property
    def _mode(self) -> int:
        return 0o600 if self._private else 0o644

    def _read(self, key: str, read: Callable[[BinaryIO], T]) -> Optional[T]:
        """Return `read(file)`; None where there is no file."""
        check_key(key)
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
            raise self._error("read", key, error) from error

    def _write(self, verb: str, key: str, write: Callable[[str], None]) -> None:
        """Call `write` with the path of the key's file, through a descriptor of its folder."""
        above, _, name = check_key(key).rpartition("/")
        try:
            if self._private:
                os.makedirs(self._folder, 0o700, exist_ok=True)
            make_folder(self._tree, above)
            with self._tree.folder(above) as at:
                write(f"/proc/self/fd/{at}/{name}")
        except OSError as error:
            raise self._error(verb, key, error) from error

    def _error(self, verb: str, key: str, error: OSError) -> StoreError:
        return StoreError(f"cannot {verb} {key!r} in {self._folder}: {error.strerror or error}")
