"""Copy a tree from a source into a folder: what is missing there, and what differs.

Nothing is removed. A file that has the same size and time counts as unchanged, as with rsync;
`checksum` compares contents.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from typing import (
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Tuple,
)

from batchml.runtime.entry.folders import size_text
from batchml.runtime.transfer.files import (
    NO_SPACE,
    ContentDamaged,
    ReadAt,
    SourceChanged,
    clear_parts,
    digest_of,
    make_folder,
    write_file,
)
from batchml.runtime.transfer.parallel import TransferProgress, TransferStopped
from batchml.runtime.transfer.tree import (
    FOLDER,
    LINK,
    LeftOut,
    Reader,
    TransferError,
    Tree,
    TreeEntry,
    join_path,
    looks_unchanged,
)

_TRIES = 2  # for a file that changes while it is read


class OpenedFile(NamedTuple):
    """A file of a source, ready to be read."""

    entry: TreeEntry  # as it is now
    read: ReadAt
    is_unchanged: Callable[[], bool]  # whether the source has not changed since it was opened


class TreeSource(Protocol):
    """The files and folders to copy from."""

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        """Yield all entries, folders before their contents. The top, "", is an entry only as a
        file.
        """

    def open(self, entry: TreeEntry) -> ContextManager[OpenedFile]:
        """Open a file. Raises OSError."""


class TransferResult(NamedTuple):
    """What a transfer did. `missing` names files that should have been transferred and were not."""

    files: int = 0
    size: int = 0  # bytes
    unchanged: int = 0
    left_out: Tuple[LeftOut, ...] = ()
    missing: Tuple[LeftOut, ...] = ()
    removed: int = 0


def combine(one: TransferResult, other: TransferResult) -> TransferResult:
    """Add up the results of two transfers."""
    return TransferResult(
        one.files + other.files,
        one.size + other.size,
        one.unchanged + other.unchanged,
        one.left_out + other.left_out,
        one.missing + other.missing,
        one.removed + other.removed,
    )


class FolderSource:
    """A folder or file of this machine."""

    def __init__(self, tree: Tree, below: str) -> None:
        self._tree, self._below = tree, below

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        found = self._tree.lookup(self._below)
        if found is not None and found.kind != FOLDER:
            return iter([found._replace(path="")])
        return self._tree.walk(self._below, left_out)

    @contextmanager
    def open(self, entry: TreeEntry) -> Iterator[OpenedFile]:
        reader = Reader(self._tree, join_path(self._below, entry.path))
        try:
            now = reader.entry._replace(path=entry.path)
            yield OpenedFile(now, reader.read, lambda: not reader.has_changed())
        finally:
            reader.close()


class NoSpaceLeft(TransferError):
    """The disk is full. The text says which files are missing because of that."""


def receive(
    source: TreeSource,
    tree: Tree,
    below: str = "",
    progress: Optional[TransferProgress] = None,
    doing: str = "copying",
    checksum: bool = False,
    keeps: bool = False,
) -> TransferResult:
    """Copy all entries of `source` to `below` in `tree`.

    `keeps`: an existing file or link stays; if it differs it is reported as missing. Raises
    NoSpaceLeft: then no file is half written, and the same call continues. Raises OSError if
    `below` cannot be a folder, and StoreError if the source is unreachable.
    """
    progress = progress or TransferProgress()
    left_out: List[LeftOut] = []
    entries = list(source.entries(left_out))
    coming = [entry for entry in entries if entry.is_file]
    progress.begin(doing, len(coming), sum(entry.size for entry in coming))
    work = _Receiver(source, tree, below, progress, checksum, keeps)
    if entries != coming or any(entry.path for entry in entries) or not entries:
        make_folder(tree, below)
    missing: List[LeftOut] = []
    for entry in entries:
        if not entry.is_file:
            why = work.make(entry)
            missing += [LeftOut(entry.path, why)] if why else []
    files = size = unchanged = 0
    try:
        for some in progress.each(work.bring, coming):
            for entry, (why, did) in some:
                if why:
                    missing.append(LeftOut(entry.path or below, why))
                elif did is None:
                    unchanged += 1
                else:
                    files, size = files + 1, size + did
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise no_space_left(error, tree.root, work.left(coming)) from error
    finally:
        work.finish([entry for entry in entries if entry.kind == FOLDER])
    clear_parts(tree, time.time())
    return TransferResult(files, size, unchanged, tuple(left_out), tuple(missing))


def no_space_left(error: OSError, where: str, left: List[TreeEntry]) -> NoSpaceLeft:
    """Make the error of a full disk, with the files that are missing because of it."""
    size = size_text(sum(entry.size for entry in left))
    files = "1 file" if len(left) == 1 else f"{len(left)} files"
    first = f", first {left[0].path!r}" if left else ""
    return NoSpaceLeft(
        f"{error.strerror} in {where}: {files}, {size}, still missing{first}. "
        "Free that much space; then the same command continues"
    )


class _Receiver:
    """Writes the entries of one source; its threads share this."""

    def __init__(
        self, source: TreeSource, tree: Tree, below: str, progress: TransferProgress,
        checksum: bool, keeps: bool,
    ) -> None:  # fmt: skip
        self._source, self._tree, self._below = source, tree, below
        self._progress, self._checksum, self._keeps = progress, checksum, keeps
        self._here: Dict[str, bool] = {}

    def left(self, coming: List[TreeEntry]) -> List[TreeEntry]:
        return [entry for entry in coming if entry.path not in self._here]

    def make(self, entry: TreeEntry) -> str:
        """Make a folder or a link; return why that failed, or ""."""
        path = join_path(self._below, entry.path)
        try:
            if entry.kind == LINK:
                return self._link(entry, path)
            make_folder(self._tree, path, entry.mode | 0o700)
            self._make_writable(path)
        except OSError as error:
            return _in_the_way(self._tree, path) or error.strerror or str(error)
        return ""

    def _make_writable(self, path: str) -> None:
        """Let us write into a read-only folder until `finish`."""
        with self._tree.folder(path) as at:
            mode = os.fstat(at).st_mode & 0o3777
            if mode & 0o300 != 0o300:
                os.fchmod(at, mode | 0o300)

    def _link(self, entry: TreeEntry, path: str) -> str:
        there = self._tree.lookup(path)
        if there is not None and looks_unchanged(there, entry):
            return ""
        if there is not None and there.kind == FOLDER:
            return "a folder of that name is in the way"
        if there is not None and self._keeps:
            return _differs(there, entry)
        make_folder(self._tree, path.rpartition("/")[0])
        with self._tree.parent(path) as (at, name):
            temporary = f".batchml-{os.urandom(8).hex()}"
            os.symlink(entry.target, temporary, dir_fd=at)
            try:
                times = (entry.mtime_ns, entry.mtime_ns)
                os.utime(temporary, ns=times, dir_fd=at, follow_symlinks=False)
                os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                os.unlink(temporary, dir_fd=at)
                raise
        return ""

    def bring(self, entry: TreeEntry) -> Tuple[str, Optional[int]]:
        """Copy a file. Return why that failed, and the size; None where it existed already.

        Raises an error that ends the whole transfer: no space, an unreachable source.
        """
        path = join_path(self._below, entry.path)
        try:
            there = self._tree.lookup(path)
            if there is not None and there.kind == FOLDER:
                return "a folder of that name is in the way", None
            if there is not None and self._is_same(entry, there, path):
                self._progress.done(path, entry.size)
                self._here[entry.path] = True
                return "", None
            if there is not None and self._keeps:
                return _differs(there, entry), None
            make_folder(self._tree, path.rpartition("/")[0])
            why = self._copy(entry, path)
        except OSError as error:
            if error.errno in NO_SPACE or getattr(error, "temporary", False):
                raise
            return _in_the_way(self._tree, path) or error.strerror or str(error), None
        if not why:
            self._here[entry.path] = True
            self._progress.done(path)
        return why, entry.size

    def _copy(self, entry: TreeEntry, path: str) -> str:
        why = ""
        for _ in range(_TRIES):
            done = 0

            def moved(size: int, was_there: bool) -> None:
                nonlocal done
                done += size
                self._progress.moved(path, size, was_there)

            try:
                with self._source.open(entry) as found:
                    write_file(self._tree, found.entry._replace(path=path), found.read, moved,
                          found.is_unchanged, self._keeps)  # fmt: skip
                return ""
            except TransferStopped:
                raise
            except (SourceChanged, ContentDamaged) as error:
                why = str(error)
                self._progress.undo(done)
        return why

    def _is_same(self, entry: TreeEntry, there: TreeEntry, path: str) -> bool:
        if not looks_unchanged(entry, there):
            # Only its time may differ: compare contents before reporting a difference.
            same_size = there.is_file and there.size == entry.size
            return self._keeps and same_size and self._has_content(entry, path)
        if self._checksum and not self._has_content(entry, path):
            return False
        if there.mode != entry.mode:
            with self._tree.parent(path) as (at, name):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                try:
                    os.fchmod(fd, entry.mode)
                finally:
                    os.close(fd)
        return True

    def _has_content(self, entry: TreeEntry, path: str) -> bool:
        fd = self._tree.open(path)
        try:
            return digest_of(fd, entry.size) == self._expected_digest(entry)
        finally:
            os.close(fd)

    def _expected_digest(self, entry: TreeEntry) -> str:
        if entry.sha256:
            return entry.sha256
        import hashlib

        digest, at = hashlib.sha256(), 0
        with self._source.open(entry) as found:
            while True:
                block = found.read(at, 1 << 20)
                if not block:
                    return digest.hexdigest()
                digest.update(block)
                at += len(block)

    def finish(self, folders: List[TreeEntry]) -> None:
        """Set modes and times of folders, innermost first, now that their contents are written."""
        for entry in reversed(folders):
            try:
                with self._tree.folder(join_path(self._below, entry.path)) as at:
                    os.fchmod(at, entry.mode)
                    os.utime(at, ns=(entry.mtime_ns, entry.mtime_ns))
            except OSError:
                continue  # another user's folder, or one that was reported already


def _differs(there: TreeEntry, entry: TreeEntry) -> str:
    newer = " and is newer" if there.mtime_ns > entry.mtime_ns else ""
    return f"the file here differs{newer}: it stays. To replace it: --overwrite"


def _in_the_way(tree: Tree, path: str) -> str:
    """Describe what stands where a folder has to be; "" if nothing does."""
    above = ""
    for part in path.split("/")[:-1]:
        above = join_path(above, part)
        try:
            found = tree.lookup(above)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
        if found is not None and found.kind != FOLDER:
            return f"{above} is a {found.kind} and in the way"
    return ""
