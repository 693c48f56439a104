"""Atomic file writes, locks, and other small operations on files."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO


@contextmanager
def temporary_name(path: str) -> Iterator[str]:
    """An unused name beside `path`. A file that still has this name at the end is removed."""
    # A random name, because containers that share a folder may have equal process ids.
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    try:
        yield temporary
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def write_atomically(path: str, content: bytes, mode: int = 0o600, exact: bool = False) -> None:
    """Write a file so that readers, also after a power cut, see the old content or the new one.

    With `exact` the file gets `mode` whatever the umask is, because other users have to read it.
    """
    with temporary_name(path) as temporary:
        write_new(temporary, content, mode, exact)
        os.replace(temporary, path)
    sync_path(os.path.dirname(path) or ".")


def write_new(path: str, content: bytes, mode: int = 0o600, exact: bool = False) -> None:
    """Write a file that does not exist yet. Its content is durable; its name is not yet."""
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


def sync_path(path: str) -> None:
    """Make the content of a file durable; of a folder its renames and new names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str) -> BinaryIO:
    """Open a file for reading, unbuffered. Raises OSError if it is not a regular file.

    A plain `open` would wait for ever if another program has put a pipe there.
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
