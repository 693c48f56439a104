"""Bring a tree to what a source holds: what is missing or another there, and nothing else.

Nothing is removed. A file that is there with its size and time is taken for unchanged, as rsync
does, or by its content where that is asked for.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import contextmanager
from typing import Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Tuple

from batchml.runtime.transfer.files import (
    FULL,
    Changed,
    Damaged,
    Read,
    clear_parts,
    digest_of,
    make_folder,
    place,
)
from batchml.runtime.transfer.parallel import Account, Stopped
from batchml.runtime.transfer.tree import (
    FOLDER,
    LINK,
    CarryError,
    Entry,
    LeftOut,
    Reader,
    Tree,
    is_as_before,
    joined,
)

try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]

_TRIES = 2  # of a file that changes while it is read


class Opened(NamedTuple):
    """A file of a source, ready to be read."""

    entry: Entry  # as it is now
    read: Read
    settled: Callable[[], bool]


class Source(Protocol):
    """Where a tree comes from."""

    def entries(self, left_out: List[LeftOut]) -> Iterator[Entry]:
        """All of it, folders before what is in them; the top, "", is named only if it is a file."""

    def open(self, entry: Entry) -> ContextManager[Opened]:
        """A file of it. Raises OSError."""


class Result(NamedTuple):
    """What became of a transfer. `missing` should have arrived."""

    files: int = 0
    size: int = 0  # bytes
    unchanged: int = 0
    left_out: Tuple[LeftOut, ...] = ()
    missing: Tuple[LeftOut, ...] = ()
    removed: int = 0


def together(one: Result, other: Result) -> Result:
    """What two transfers did."""
    return Result(
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

    def entries(self, left_out: List[LeftOut]) -> Iterator[Entry]:
        found = self._tree.look(self._below)
        if found is not None and found.kind != FOLDER:
            return iter([found._replace(path="")])
        return self._tree.walk(self._below, left_out)

    @contextmanager
    def open(self, entry: Entry) -> Iterator[Opened]:
        reader = Reader(self._tree, joined(self._below, entry.path))
        try:
            now = reader.entry._replace(path=entry.path)
            yield Opened(now, reader.read, lambda: not reader.has_changed())
        finally:
            reader.close()


class Full(CarryError):
    """No room, and what is not there for that."""


def receive(
    source: Source,
    tree: Tree,
    below: str = "",
    account: Optional[Account] = None,
    doing: str = "copying",
    checksum: bool = False,
    keeps: bool = False,
) -> Result:
    """Bring what is below `below` in `tree` to what `source` holds.

    `keeps`: a file or link that is there already stays, and is named where it is another. Raises
    Full where there is no room: nothing half is to be seen then, and the same call goes on.
    Raises OSError where `below` cannot be a folder, and StoreError for a source out of reach.
    """
    account = account or Account()
    left_out: List[LeftOut] = []
    entries = list(source.entries(left_out))
    coming = [entry for entry in entries if entry.is_file]
    account.begin(doing, len(coming), sum(entry.size for entry in coming))
    work = _Work(source, tree, below, account, checksum, keeps)
    if entries != coming or any(entry.path for entry in entries) or not entries:
        make_folder(tree, below)
    missing: List[LeftOut] = []
    for entry in entries:
        if not entry.is_file:
            why = work.make(entry)
            missing += [LeftOut(entry.path, why)] if why else []
    files = size = unchanged = 0
    try:
        for some in account.each(work.bring, coming):
            for entry, (why, did) in some:
                if why:
                    missing.append(LeftOut(entry.path or below, why))
                elif did is None:
                    unchanged += 1
                else:
                    files, size = files + 1, size + did
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise no_room(error, tree.root, work.left(coming)) from error
    finally:
        work.finish([entry for entry in entries if entry.kind == FOLDER])
    clear_parts(tree, time.time())
    return Result(files, size, unchanged, tuple(left_out), tuple(missing))


def no_room(error: OSError, where: str, left: List[Entry]) -> Full:
    """In words, with what is not there for that."""
    from batchml.runtime.entry.folders import size_text

    size = size_text(sum(entry.size for entry in left))
    files = "1 file" if len(left) == 1 else f"{len(left)} files"
    first = f", {left[0].path!r} the first" if left else ""
    return Full(
        f"{error.strerror} in {where}: {files}, {size}, not there yet{first}. "
        "Make room for them; the same command then goes on"
    )


class _Work:
    """What the threads of one transfer share."""

    def __init__(
        self, source: Source, tree: Tree, below: str, account: Account, checksum: bool,
        keeps: bool,
    ) -> None:  # fmt: skip
        self._source, self._tree, self._below = source, tree, below
        self._account, self._checksum, self._keeps = account, checksum, keeps
        self._here: Dict[str, bool] = {}

    def left(self, coming: List[Entry]) -> List[Entry]:
        return [entry for entry in coming if entry.path not in self._here]

    def make(self, entry: Entry) -> str:
        """A folder or a link; why it cannot be."""
        path = joined(self._below, entry.path)
        try:
            if entry.kind == LINK:
                return self._link(entry, path)
            make_folder(self._tree, path, entry.mode | 0o700)
            self._open_up(path)
        except OSError as error:
            return _in_the_way(self._tree, path) or error.strerror or str(error)
        return ""

    def _open_up(self, path: str) -> None:
        """Of a folder that may not be written: until all is in it."""
        with self._tree.folder(path) as at:
            mode = os.fstat(at).st_mode & 0o3777
            if mode & 0o300 != 0o300:
                os.fchmod(at, mode | 0o300)

    def _link(self, entry: Entry, path: str) -> str:
        there = self._tree.look(path)
        if there is not None and is_as_before(there, entry):
            return ""
        if there is not None and there.kind == FOLDER:
            return "a folder of that name is in the way"
        if there is not None and self._keeps:
            return _another(there, entry)
        make_folder(self._tree, path.rpartition("/")[0])
        with self._tree.above(path) as (at, name):
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

    def bring(self, entry: Entry) -> Tuple[str, Optional[int]]:
        """A file; why it is not there, or its bytes, None where it was there.

        Raises what ends the whole transfer: no room, a source that cannot be reached now.
        """
        path = joined(self._below, entry.path)
        try:
            there = self._tree.look(path)
            if there is not None and there.kind == FOLDER:
                return "a folder of that name is in the way", None
            if there is not None and self._is_same(entry, there, path):
                self._account.done(path, entry.size)
                self._here[entry.path] = True
                return "", None
            if there is not None and self._keeps:
                return _another(there, entry), None
            make_folder(self._tree, path.rpartition("/")[0])
            why = self._copy(entry, path)
        except OSError as error:
            if error.errno in FULL or getattr(error, "temporary", False):
                raise
            return _in_the_way(self._tree, path) or error.strerror or str(error), None
        if not why:
            self._here[entry.path] = True
            self._account.done(path)
        return why, entry.size

    def _copy(self, entry: Entry, path: str) -> str:
        why = ""
        for _ in range(_TRIES):
            done = 0

            def moved(size: int, was_there: bool) -> None:
                nonlocal done
                done += size
                self._account.moved(path, size, was_there)

            try:
                with self._source.open(entry) as found:
                    place(self._tree, found.entry._replace(path=path), found.read, moved,
                          found.settled, self._keeps)  # fmt: skip
                return ""
            except Stopped:
                raise
            except (Changed, Damaged) as error:
                why = str(error)
                self._account.took_back(done)
        return why

    def _is_same(self, entry: Entry, there: Entry, path: str) -> bool:
        if not is_as_before(entry, there):
            # Before a file is called another: it may only be of another time.
            same_size = there.is_file and there.size == entry.size
            return self._keeps and same_size and self._has_content(entry, path)
        if self._checksum and not self._has_content(entry, path):
            return False
        if there.mode != entry.mode:
            with self._tree.above(path) as (at, name):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                try:
                    os.fchmod(fd, entry.mode)
                finally:
                    os.close(fd)
        return True

    def _has_content(self, entry: Entry, path: str) -> bool:
        fd = self._tree.open(path)
        try:
            return digest_of(fd, entry.size) == self._wanted(entry)
        finally:
            os.close(fd)

    def _wanted(self, entry: Entry) -> str:
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

    def finish(self, folders: List[Entry]) -> None:
        """Give folders their modes and times, the innermost first: what is made in them is over."""
        for entry in reversed(folders):
            try:
                with self._tree.folder(joined(self._below, entry.path)) as at:
                    os.fchmod(at, entry.mode)
                    os.utime(at, ns=(entry.mtime_ns, entry.mtime_ns))
            except OSError:
                continue  # somebody else's, or reported as missing already


def _another(there: Entry, entry: Entry) -> str:
    newer = ", and newer" if there.mtime_ns > entry.mtime_ns else ""
    return f"what is here is another{newer}: it stays, unless you say --overwrite"


def _in_the_way(tree: Tree, path: str) -> str:
    """What stands where a folder has to be; empty where nothing does."""
    above = ""
    for part in path.split("/")[:-1]:
        above = joined(above, part)
        try:
            found = tree.look(above)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
        if found is not None and found.kind != FOLDER:
            return f"{above} is a {found.kind}, and in the way"
    return ""
