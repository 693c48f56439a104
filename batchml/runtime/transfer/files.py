"""One file to its place: a part file that can be gone on with, and its name when it is whole.

The part lies at the top of the tree, named by the file it will be and the one it is of. What is in
it already is compared with what is to be there, never believed; the whole is read back before it
gets its name. Holes stay holes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from contextlib import contextmanager
from typing import Callable, Iterator, Tuple

from batchml.runtime.transfer.tree import PARTS, CarryError, Entry, Tree, joined

BLOCK = 1 << 20  # bytes
OLD = 7 * 86_400.0  # seconds
RESTORING = f"{PARTS}/restoring"  # there while not all of an archive is back yet
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_PART = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Read = Callable[[int, int], bytes]  # from a place on, so many bytes; fewer where it ends
Moved = Callable[[int, bool], None]  # bytes that are done, and whether they were there already


CHANGES = "it changes while it is read"
_RACES = 100  # with those who remove the folder of parts as we look for it


class Damaged(CarryError):
    """What was read back is not what was written, or not what it should be."""


class Changed(CarryError):
    """The source is not what it was when it was begun."""


def make_folder(tree: Tree, path: str, mode: int = 0o777) -> None:
    """A folder and those above it. Raises OSError where something else is in the way."""
    made = ""
    os.makedirs(tree.root, exist_ok=True)
    for part in path.split("/") if path else ():
        with tree.folder(made) as at:
            made = joined(made, part)
            try:
                os.mkdir(part, mode if made == path else 0o777, dir_fd=at)
            except FileExistsError:
                pass
    with tree.folder(path):  # a link or a file of that name
        pass


def place(
    tree: Tree,
    entry: Entry,
    read: Read,
    moved: Moved,
    settled: Callable[[], bool],
    keeps: bool = False,
) -> str:
    """Write a file below `tree`; its SHA-256.

    `entry.sha256` is what it must have, where that is known; otherwise it gets what `read` gives,
    which `settled` afterwards has to call one and the same. `keeps`: not where something has come
    to be meanwhile. Raises Changed, Damaged and OSError; the part stays then, unless it is known to
    be wrong.
    """
    above = entry.path.rpartition("/")[0]
    with tree.folder(above) as folder, _part(tree, entry) as (parts, name, fd):
        digest = _fill(fd, entry, read, moved)
        if not settled():
            raise Changed(CHANGES)
        if entry.sha256 and digest != entry.sha256:
            os.ftruncate(fd, 0)
            raise Damaged("its SHA-256 is another than the archive's: it was damaged or changed")
        os.fchmod(fd, entry.mode)
        os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        os.fsync(fd)
        if digest_of(fd, entry.size) != digest:
            os.ftruncate(fd, 0)
            raise Damaged("what was written was not what is read back: look at the disk")
        end = entry.path.rpartition("/")[2]
        if keeps and _exists(folder, end):
            raise Changed("another has come here meanwhile, and stays")
        os.replace(name, end, src_dir_fd=parts, dst_dir_fd=folder)
    return digest


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _fill(fd: int, entry: Entry, read: Read, moved: Moved) -> str:
    """Make a part what the source is: what it has already is compared, the rest is written."""
    there, at, digest = os.fstat(fd).st_size, 0, hashlib.sha256()
    if there > entry.size:
        os.ftruncate(fd, 0)
        there = 0
    if entry.sha256:  # to be had from far away: known by the whole, so what is there is kept
        while at < there:
            block = os.pread(fd, min(BLOCK, there - at), at)
            digest.update(block)
            at += len(block)
            moved(len(block), True)
    while at < entry.size:
        block = read(at, min(BLOCK, entry.size - at))
        if not block:
            break
        digest.update(block)
        was_there = at < there and os.pread(fd, len(block), at) == block
        if not was_there:
            _write(fd, block, at, there)
        at += len(block)
        moved(len(block), was_there)
    os.ftruncate(fd, at)
    if at < entry.size:
        raise Changed(f"it ends after {at} of {entry.size} bytes")
    return digest.hexdigest()


def _write(fd: int, block: bytes, at: int, there: int) -> None:
    if at >= there and not block.strip(b"\0"):
        os.ftruncate(fd, at + len(block))  # a hole
        return
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def digest_of(fd: int, size: int) -> str:
    digest, at = hashlib.sha256(), 0
    while at < size:
        block = os.pread(fd, min(BLOCK, size - at), at)
        if not block:
            break
        digest.update(block)
        at += len(block)
    return digest.hexdigest()


@contextmanager
def _part(tree: Tree, entry: Entry) -> Iterator[Tuple[int, str, int]]:
    """The part of a file: the folder of parts, its name there, and itself, which is ours alone."""
    parts, name, fd = _opened(tree, part_name(entry))
    try:
        yield parts, name, fd
    finally:
        os.close(fd)
        os.close(parts)


def _opened(tree: Tree, name: str) -> Tuple[int, str, int]:
    """The folder of parts, which another that ends now may remove at any moment, and a part."""
    for left in reversed(range(_RACES)):
        try:
            make_folder(tree, PARTS, 0o700)
            with tree.folder(PARTS) as folder:
                own, fd = _taken(folder, name)
                return os.dup(folder), own, fd
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _taken(parts: int, name: str) -> Tuple[str, int]:
    own = ""
    while True:
        fd = os.open(own or name, _PART, 0o600, dir_fd=parts)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another writes it now, or nobody can know: then one of our own
            if own:
                return own, fd
            os.close(fd)
            own = f"{name[:32]}.{os.urandom(8).hex()}"
            continue
        if _is_named(parts, own or name, fd):
            return own or name, fd
        os.close(fd)  # it got its place before we got the lock: it is no part any more


def _is_named(parts: int, name: str, fd: int) -> bool:
    try:
        return os.stat(name, dir_fd=parts, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def part_name(entry: Entry) -> str:
    """By what it will be, and what it is of: that of an older version is not gone on with."""
    words = f"{entry.path}\0{entry.size}\0{entry.mtime_ns}\0{entry.sha256 or entry.stamp}"
    return hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:40]


def mark_restoring(tree: Tree, begins: bool) -> None:
    """Say in a tree that what it lacks is on its way back, and was deleted by nobody; or no more.

    Raises OSError.
    """
    if begins:
        make_folder(tree, PARTS, 0o700)
        with tree.above(RESTORING) as (at, name):
            os.close(os.open(name, _PART, 0o600, dir_fd=at))
    elif is_restoring(tree):
        with tree.above(RESTORING) as (at, name):
            os.unlink(name, dir_fd=at)
        clear_parts(tree, 0.0)


def is_restoring(tree: Tree) -> bool:
    return tree.look(RESTORING) is not None


def clear_parts(tree: Tree, now: float) -> None:
    """Remove what nobody has gone on with for a week, and the folder if that was all."""
    try:
        with tree.folder("") as top, tree.folder(PARTS) as parts:
            for name in os.listdir(parts):
                # Not by its mtime: a part that is whole has its source's already.
                since = os.stat(name, dir_fd=parts, follow_symlinks=False).st_ctime
                if since < now - OLD and joined(PARTS, name) != RESTORING:
                    os.unlink(name, dir_fd=parts)
            os.rmdir(PARTS, dir_fd=top)
    except OSError:
        pass  # there is none, or there are others
