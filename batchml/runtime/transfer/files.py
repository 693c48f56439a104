"""Write one file atomically: into a part file that a later attempt continues, then under its name.

Part files are in a folder at the top of the tree. Their name is a digest of the path and the
version of the file. The blocks that a part file already contains are compared with the source or
by the digest of the whole file. Before it gets its name, the file is synced, read back and compared
in the same way. Holes stay holes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Tuple

from batchml.runtime.transfer.tree import (
    PARTS_FOLDER,
    OpenedFile,
    ReadAt,
    TransferError,
    Tree,
    TreeEntry,
    join_path,
)

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

BLOCK = 1 << 20  # bytes of one read; of another machine, that is a request
# Of a file of this machine. To compare larger blocks takes six times the CPU: the C library returns
# the memory of each to the system, which clears it again for the next.
NEAR_BLOCK = 1 << 18
WINDOW = 64 * BLOCK  # bytes of a large file that are read back while the next ones are written
PART_EXPIRES = 7 * 86_400.0  # seconds after which an unused part file is removed
RESTORING = f"{PARTS_FOLDER}/restoring"  # exists until an archive is restored completely
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_PART = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GROUP = "group-"  # begins the name of a folder with the part files of a group

# number of finished bytes; whether the target had them already
OnBytes = Callable[[int, bool], None]


CHANGED_WHILE_READ = "it changes while it is read"
DAMAGED = "the content read back is not what was written: check the disk"
_MAX_RACES = 100  # attempts to open a part file while other processes remove its folder


class ContentDamaged(TransferError):
    """The content read back is not the content written, or has the wrong digest."""


class SourceChanged(TransferError):
    """The source changed after its transfer began."""


def ignore_bytes(count: int, was_there: bool) -> None:
    """Default callback: does nothing."""


def make_folder(tree: Tree, path: str, mode: int = 0o777) -> None:
    """Make a folder and the folders above it. Raises OSError if something else has its name."""
    above = ""
    os.makedirs(tree.root, exist_ok=True)
    for part in path.split("/") if path else ():
        with tree.folder(above) as at:
            above = join_path(above, part)
            try:
                os.mkdir(part, mode if above == path else 0o777, dir_fd=at)
            except FileExistsError:
                pass
    with tree.folder(path):  # fails on a link or a file of that name
        pass


def write_file(
    tree: Tree, file: OpenedFile, on_bytes: OnBytes, keeps: bool = False, is_digested: bool = False
) -> str:
    """Write a file below `tree` at its own path; return its SHA-256 if that was computed, else "".

    A file of this machine is read again to compare what was written; that of another by its
    SHA-256. If `file.entry.sha256` is known, the content must have that digest. `keeps`: fail if
    the target exists when the content is complete. Raises SourceChanged, ContentDamaged and
    OSError. The part file stays, unless its content is known to be wrong.
    """
    entry = file.entry
    above, _, end = entry.path.rpartition("/")
    digest = hashlib.sha256() if is_digested or not file.is_near else None
    with tree.folder(above) as folder, _open_part(tree, entry) as (parts, name, fd):
        with _Comparison(fd, file) as comparison:
            _fill(fd, file, on_bytes, digest, comparison.begin)
            if not file.is_unchanged():
                raise SourceChanged(CHANGED_WHILE_READ)
            found = digest.hexdigest() if digest is not None else ""
            if entry.sha256 and found != entry.sha256:
                os.ftruncate(fd, 0)
                raise ContentDamaged(
                    "its SHA-256 differs from the archive's: it was damaged or changed"
                )
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            os.fsync(fd)
            comparison.finish(found)
        if keeps and exists(folder, end):
            raise SourceChanged("another file has been created at its path meanwhile, and stays")
        os.replace(name, end, src_dir_fd=parts, dst_dir_fd=folder)
    return found


class _Comparison:
    """Compares a part file with its source after it was synced.

    In a large file, a thread syncs and compares what is written while the rest is written.
    """

    def __init__(self, fd: int, file: OpenedFile) -> None:
        self._fd, self._file = fd, file
        self._begun = 0  # bytes for which the comparison has begun
        self._thread: Optional[ThreadPoolExecutor] = None
        self._windows: "List[Future[None]]" = []

    def __enter__(self) -> "_Comparison":
        return self

    def begin(self, written: int) -> None:
        """Begin to compare what was written since the last call, if that is much."""
        if self._file.is_near and written - self._begun >= WINDOW:
            # Imported late: most submissions copy no large file, and it imports logging.
            from concurrent.futures import ThreadPoolExecutor

            self._thread = self._thread or ThreadPoolExecutor(1)
            self._windows.append(self._thread.submit(self._sync_and_compare, self._begun, written))
            self._begun = written

    def _sync_and_compare(self, start: int, end: int) -> None:
        os.fdatasync(self._fd)
        self._compare(start, end)

    def _compare(self, start: int, end: int) -> None:
        if not has_same_bytes(self._file, partial(_read_at, self._fd), start, end):
            if not self._file.is_unchanged():
                raise SourceChanged(CHANGED_WHILE_READ)
            raise ContentDamaged(DAMAGED)

    def finish(self, digest: str) -> None:
        """Compare what is left of the synced file: with its source, or by its SHA-256.

        Raises SourceChanged, ContentDamaged.
        """
        size = self._file.entry.size
        try:
            if self._file.is_near:
                self._compare(self._begun, size)
                for window in self._windows:
                    window.result()
            elif digest_of(partial(_read_at, self._fd), size) != digest:
                raise ContentDamaged(DAMAGED)
        except ContentDamaged:
            os.ftruncate(self._fd, 0)
            raise

    def __exit__(self, *_: Any) -> None:
        for window in self._windows:
            window.cancel()
        if self._thread is not None:
            self._thread.shutdown()


def exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _fill(
    fd: int,
    file: OpenedFile,
    on_bytes: OnBytes,
    digest: "Optional[hashlib._Hash]",
    on_written: Callable[[int], None],
) -> None:
    """Complete a part file: compare the blocks that it has, write the rest."""
    entry, unit = file.entry, _block_size(file)
    there, at = os.fstat(fd).st_size, 0
    if there > entry.size:
        os.ftruncate(fd, 0)
        there = 0
    if entry.sha256 and digest is not None:  # from an archive: it proves the blocks that are kept
        while at < there:
            block = os.pread(fd, min(BLOCK, there - at), at)
            digest.update(block)
            at += len(block)
            on_bytes(len(block), True)
    while at < entry.size:
        block = file.read(at, min(unit, entry.size - at))
        if not block:
            break
        if digest is not None:
            digest.update(block)
        was_there = at < there and os.pread(fd, len(block), at) == block
        if not was_there:
            write_block(fd, block, at, there)
        at += len(block)
        on_bytes(len(block), was_there)
        on_written(at)
    os.ftruncate(fd, at)
    if at < entry.size:
        raise SourceChanged(f"it ends after {at} of {entry.size} bytes")


def write_block(fd: int, block: bytes, at: int, there: int) -> None:
    """Write a block into a file of `there` bytes; zeros after its end become a hole."""
    if at >= there and not block.strip(b"\0"):
        os.ftruncate(fd, at + len(block))  # a hole
        return
    view = memoryview(block)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def _read_at(fd: int, start: int, length: int) -> bytes:
    return os.pread(fd, length, start)


def _block_size(file: OpenedFile) -> int:
    return NEAR_BLOCK if file.is_near else BLOCK


def has_same_bytes(file: OpenedFile, other: ReadAt, start: int, end: int) -> bool:
    """Say whether two files have the same bytes from `start` to `end`."""
    unit = _block_size(file)
    for at in range(start, end, unit):
        block = file.read(at, min(unit, end - at))
        if len(block) < min(unit, end - at) or block != other(at, len(block)):
            return False
    return True


def digest_of(
    read: ReadAt, size: int, on_bytes: OnBytes = ignore_bytes, block_size: int = BLOCK
) -> str:
    """Return the SHA-256 of the first `size` bytes, or of fewer if the content ends before."""
    digest, at = hashlib.sha256(), 0
    while at < size:
        block = read(at, min(block_size, size - at))
        if not block:
            break
        digest.update(block)
        at += len(block)
        on_bytes(len(block), True)
    return digest.hexdigest()


@contextmanager
def _open_part(tree: Tree, entry: TreeEntry) -> Iterator[Tuple[int, str, int]]:
    """Open and lock a part file. Yield the folder of parts, the part's name in it, and the file."""
    parts, name, fd = _find_part(tree, part_name(entry))
    try:
        yield parts, name, fd
    finally:
        os.close(fd)
        os.close(parts)


def _find_part(tree: Tree, name: str) -> Tuple[int, str, int]:
    """Open the folder of parts, which another process may remove at any moment, and lock a part.

    Return the folder, the part's name in it, and the file.
    """
    for left in reversed(range(_MAX_RACES)):
        try:
            make_folder(tree, PARTS_FOLDER, 0o700)
            with tree.folder(PARTS_FOLDER) as folder:
                locked_name, fd = _lock_part(folder, name)
                return os.dup(folder), locked_name, fd
        except FileNotFoundError:
            if not left:
                raise
    raise AssertionError("unreachable")


def _lock_part(parts: int, name: str) -> Tuple[str, int]:
    """Lock a part file, or one with a random name if that is impossible; return name and file."""
    own, is_new_mode = "", False
    while True:
        try:
            fd = os.open(own or name, _PART, 0o600, dir_fd=parts)
        except PermissionError:
            if own:
                raise
            if is_new_mode or not _make_writable(parts, name):
                own = f"{name[:32]}.{os.urandom(8).hex()}"
            is_new_mode = True
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process has locked it, or this disk has no locks
            if own:
                return own, fd
            os.close(fd)
            own = f"{name[:32]}.{os.urandom(8).hex()}"
            continue
        if _is_named(parts, own or name, fd):
            return own or name, fd
        os.close(fd)  # it was completed and renamed before we got the lock


def _make_writable(parts: int, name: str) -> bool:
    """Make a part file writable that had got the mode of its file when its transfer was killed.

    False if that is impossible, or another process uses it.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parts)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_named(parts, name, fd):
            os.fchmod(fd, 0o600)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _is_named(parts: int, name: str, fd: int) -> bool:
    """Say whether the open file still has this name in the folder of parts."""
    try:
        return os.stat(name, dir_fd=parts, follow_symlinks=False).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def make_group_folder(tree: Tree) -> Tuple[str, int]:
    """Make and lock a folder for the part files of a group, which no other group uses.

    Return its path, and the folder. The lock ends when that is closed. Raises OSError.
    """
    for left in reversed(range(_MAX_RACES)):
        name = f"{_GROUP}{os.urandom(8).hex()}"
        try:
            make_folder(tree, PARTS_FOLDER, 0o700)
            with tree.folder(PARTS_FOLDER) as parts:
                os.mkdir(name, 0o700, dir_fd=parts)
                fd = os.open(name, _FOLDER, dir_fd=parts)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.stat(name, dir_fd=parts)  # another process may have removed it unlocked
                except BaseException:
                    os.close(fd)
                    raise
                return join_path(PARTS_FOLDER, name), fd
        except (FileNotFoundError, BlockingIOError):
            if not left:
                raise
    raise AssertionError("unreachable")


def clear_group(tree: Tree, path: str) -> None:
    """Remove the folder of a group, with its part files, unless a process still has it locked."""
    try:
        with tree.parent(path) as (parts, name):
            fd = os.open(name, _FOLDER, dir_fd=parts)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for part in os.listdir(fd):
                    os.unlink(part, dir_fd=fd)
                os.rmdir(name, dir_fd=parts)
            finally:
                os.close(fd)
    except OSError:
        pass


def part_name(entry: TreeEntry) -> str:
    """Name a part file by path and version, so that parts of older versions are not continued."""
    words = f"{entry.path}\0{entry.size}\0{entry.mtime_ns}\0{entry.sha256 or entry.stamp}"
    return hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:40]


def mark_restoring(tree: Tree, begins: bool) -> None:
    """Mark a tree as being restored (`begins`), or remove the mark. Raises OSError.

    While the mark exists, an archive does not count missing files as deleted.
    """
    if begins:
        make_folder(tree, PARTS_FOLDER, 0o700)
        with tree.parent(RESTORING) as (at, name):
            os.close(os.open(name, _PART, 0o600, dir_fd=at))
    elif is_restoring(tree):
        with tree.parent(RESTORING) as (at, name):
            os.unlink(name, dir_fd=at)
        clear_parts(tree, 0.0)


def is_restoring(tree: Tree) -> bool:
    return tree.lookup(RESTORING) is not None


def clear_parts(tree: Tree, now: float) -> None:
    """Remove part files that nobody has used for a week, those of groups whose transfer was killed,
    and the folder if it is empty.
    """
    try:
        with tree.folder("") as top, tree.folder(PARTS_FOLDER) as parts:
            for name in os.listdir(parts):
                if name.startswith(_GROUP):
                    clear_group(tree, join_path(PARTS_FOLDER, name))
                    continue
                # not mtime, because a complete part already has the mtime of its source
                since = os.stat(name, dir_fd=parts, follow_symlinks=False).st_ctime
                if since < now - PART_EXPIRES and join_path(PARTS_FOLDER, name) != RESTORING:
                    os.unlink(name, dir_fd=parts)
            os.rmdir(PARTS_FOLDER, dir_fd=top)
    except OSError:
        pass  # the folder does not exist, or still has parts
