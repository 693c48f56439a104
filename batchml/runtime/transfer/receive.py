"""Copy a tree from a source into a folder: the entries that are missing in it or differ.

Nothing is removed. A file with the same size and time counts as unchanged, as with rsync;
`checksum` compares contents.
"""

from __future__ import annotations

import copy
import errno
import operator
import os
import time
from contextlib import contextmanager
from functools import partial
from typing import (
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Set,
    Tuple,
)

from batchml.runtime.entry.folders import size_text
from batchml.runtime.transfer.files import (
    NO_SPACE,
    ContentDamaged,
    OnBytes,
    SourceChanged,
    clear_parts,
    digest_of,
    has_same_bytes,
    make_folder,
    write_file,
)
from batchml.runtime.transfer.groups import AT_ONCE as GROUPS_AT_ONCE
from batchml.runtime.transfer.groups import (
    FEWEST_FILES,
    SMALL,
    FileGroup,
    SyncFileSystem,
    open_syncfs,
    split_groups,
)
from batchml.runtime.transfer.parallel import TransferProgress
from batchml.runtime.transfer.tree import (
    FOLDER,
    LINK,
    LeftOut,
    NearTree,
    OpenedFile,
    Reader,
    TransferError,
    Tree,
    TreeEntry,
    describe_os_error,
    join_path,
    looks_unchanged,
)

_Outcome = Tuple[str, bool]  # why a file failed, or ""; whether it was copied


class TreeSource(Protocol):
    """A tree to copy from."""

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        """Yield all entries, folders before their contents. The path of a single file is ""."""

    def open(self, entry: TreeEntry) -> ContextManager[OpenedFile]:
        """Open a file. Raises OSError."""


class TransferResult(NamedTuple):
    """The result of a transfer."""

    files: int = 0  # transferred ones
    size: int = 0  # bytes of these files
    unchanged: int = 0  # files that the target had already
    left_out: Tuple[LeftOut, ...] = ()
    missing: Tuple[LeftOut, ...] = ()  # files that should have been transferred and were not
    removed: int = 0  # files


def combine(one: TransferResult, other: TransferResult) -> TransferResult:
    """Add up the results of two transfers."""
    return TransferResult(*map(operator.add, one, other))


class FolderSource:
    """A folder or file of this machine."""

    def __init__(self, tree: Tree, below: str) -> None:
        self.tree, self._below = tree, below

    def on(self, tree: Tree) -> "FolderSource":
        """The same source, opened by way of another object."""
        return FolderSource(tree, self._below)

    def entries(self, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        top = self.tree.lookup(self._below)
        if top is not None and top.kind != FOLDER:
            return iter([top._replace(path="")])
        return self.tree.walk(self._below, left_out)

    @contextmanager
    def open(self, entry: TreeEntry) -> Iterator[OpenedFile]:
        reader = Reader(self.tree, join_path(self._below, entry.path))
        try:
            yield reader.as_file(entry.path)
        finally:
            reader.close()


class NoSpaceLeft(TransferError):
    """The disk is full. The text says how many files are missing because of that."""


def receive(
    source: TreeSource,
    tree: Tree,
    below: str = "",
    progress: Optional[TransferProgress] = None,
    doing: str = "copying",
    checksum: bool = False,
    keeps: bool = False,
    open_sync: Callable[[str], Optional[SyncFileSystem]] = open_syncfs,
) -> TransferResult:
    """Copy all entries of `source` to `below` in `tree`.

    `keeps`: existing files and links stay; those that differ are reported as missing. Raises
    NoSpaceLeft: no file is half written, and a repeated call continues. Raises OSError if
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
        for entry, (why, was_copied) in work.copy_all(coming, open_sync(tree.root)):
            if why:
                missing.append(LeftOut(entry.path or below, why))
            elif was_copied:
                files, size = files + 1, size + entry.size
            else:
                unchanged += 1
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise no_space_left(error, tree.root, work.list_missing(coming)) from error
    finally:
        work.finish([entry for entry in entries if entry.kind == FOLDER])
    clear_parts(tree, time.time())
    return TransferResult(files, size, unchanged, tuple(left_out), tuple(missing))


def no_space_left(error: OSError, where: str, left: List[TreeEntry]) -> NoSpaceLeft:
    """Make the error of a full disk. `left`: the files that are missing because of that."""
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
        self._finished: Set[str] = set()  # paths of files that the target has now

    def _target(self, entry: TreeEntry) -> str:
        """Return the path that an entry gets in the target."""
        return join_path(self._below, entry.path)

    def list_missing(self, coming: List[TreeEntry]) -> List[TreeEntry]:
        return [entry for entry in coming if entry.path not in self._finished]

    def make(self, entry: TreeEntry) -> str:
        """Make a folder or a link; return why that failed, or ""."""
        path = self._target(entry)
        try:
            if entry.kind == LINK:
                return self._make_link(entry, path)
            make_folder(self._tree, path, entry.mode | 0o700)
            self._make_writable(path)
        except OSError as error:
            return _find_obstacle(self._tree, path) or describe_os_error(error)
        return ""

    def _make_writable(self, path: str) -> None:
        """Make a read-only folder writable for this process, until `finish`."""
        with self._tree.folder(path) as at:
            mode = os.fstat(at).st_mode & 0o3777
            if mode & 0o300 != 0o300:
                os.fchmod(at, mode | 0o300)

    def _make_link(self, entry: TreeEntry, path: str) -> str:
        there = self._tree.lookup(path)
        if there is not None and looks_unchanged(there, entry):
            return ""
        if there is not None and there.kind == FOLDER:
            return "a folder has this path"
        if there is not None and self._keeps:
            return _describe_difference(there, entry)
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

    def copy_all(
        self, coming: List[TreeEntry], sync: Optional[SyncFileSystem]
    ) -> Iterator[Tuple[TreeEntry, _Outcome]]:
        """Copy all files, small ones of this machine in groups; yield why each failed, or "", and
        whether it was copied.

        Raises an error that ends the whole transfer: no space, or an unreachable source.
        """
        alone, source = coming, self._source
        small = [entry for entry in coming if entry.size <= SMALL]
        if sync is not None and isinstance(source, FolderSource) and len(small) >= FEWEST_FILES:
            alone = [entry for entry in coming if entry.size > SMALL]
            work = partial(self._copy_group, source, sync)
            for done in self._progress.each(work, split_groups(small), GROUPS_AT_ONCE):
                for entries, outcomes in done:
                    alone += [entry for entry in entries if entry.path not in outcomes]
                    yield from (
                        (entry, outcomes[entry.path]) for entry in entries if entry.path in outcomes
                    )
        for batch in self._progress.each(self._copy, alone):
            yield from batch

    def _copy_group(
        self, source: FolderSource, sync: SyncFileSystem, entries: List[TreeEntry]
    ) -> Dict[str, _Outcome]:
        """Copy small files, if those that the target lacks are many.

        Return outcomes by the paths of files. One without outcome is to be copied alone.
        """
        outcomes: Dict[str, _Outcome] = {}
        counted: Dict[str, int] = {}  # bytes of the files of this group
        lacking: List[TreeEntry] = []
        complete: Set[str] = set()
        with NearTree(source.tree) as here, NearTree(self._tree) as there:
            near = self._by_way_of(source.on(here), there)
            for entry in entries:
                try:
                    outcome = near._compare(entry)
                except OSError:
                    continue
                if outcome is None:
                    lacking.append(entry)
                else:
                    outcomes[entry.path] = outcome
            if len(lacking) < FEWEST_FILES:
                return outcomes
            with FileGroup(there, sync, self._keeps) as group:
                for entry in lacking:
                    try:
                        near._add_to(group, entry, counted)
                    except (SourceChanged, OSError):
                        continue
                complete = group.finish()
        self._finished |= complete
        outcomes.update((path, ("", True)) for path in complete)
        self._progress.take_back(sum(counted[path] for path in counted if path not in complete))
        if complete:
            self._progress.finish_file(max(complete), files=len(complete))
        return outcomes

    def _add_to(self, group: FileGroup, entry: TreeEntry, counted: Dict[str, int]) -> None:
        """Write the part file of a small file. Raises SourceChanged and OSError."""
        path = self._target(entry)

        def on_bytes(size: int, was_there: bool) -> None:
            self._progress.count(path, size, was_there)
            counted[entry.path] = size

        with self._source.open(entry) as file:
            target = file._replace(entry=file.entry._replace(path=path))
            group.write(entry.path, target, on_bytes)

    def _by_way_of(self, source: FolderSource, tree: Tree) -> "_Receiver":
        """The same, with other objects for the same trees."""
        other = copy.copy(self)
        other._source, other._tree = source, tree
        return other

    def _copy(self, entry: TreeEntry) -> _Outcome:
        """Copy a file unless the target has it."""
        path = self._target(entry)
        try:
            outcome = self._compare(entry)
            if outcome is not None:
                return outcome
            make_folder(self._tree, path.rpartition("/")[0])
            self._progress.try_file(path, lambda on_bytes: self._write(entry, path, on_bytes))
        except (SourceChanged, ContentDamaged) as error:
            return str(error), False
        except OSError as error:
            if error.errno in NO_SPACE or getattr(error, "temporary", False):
                raise
            return _find_obstacle(self._tree, path) or describe_os_error(error), False
        self._finished.add(entry.path)
        self._progress.finish_file(path)
        return "", True

    def _compare(self, entry: TreeEntry) -> Optional[_Outcome]:
        """Return the outcome for a file that has not to be copied, else None. Raises OSError."""
        path = self._target(entry)
        there = self._tree.lookup(path)
        if there is None:
            return None
        if there.kind == FOLDER:
            return "a folder has this path", False
        if self._is_same(entry, there, path):
            self._progress.finish_file(path, entry.size)
            self._finished.add(entry.path)
            return "", False
        return (_describe_difference(there, entry), False) if self._keeps else None

    def _write(self, entry: TreeEntry, path: str, on_bytes: OnBytes) -> None:
        with self._source.open(entry) as file:
            target = file._replace(entry=file.entry._replace(path=path))
            write_file(self._tree, target, on_bytes, self._keeps)

    def _is_same(self, entry: TreeEntry, there: TreeEntry, path: str) -> bool:
        if not looks_unchanged(entry, there):
            # Perhaps only the time differs: compare contents before a difference is reported.
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
        reader = Reader(self._tree, path)
        try:
            if entry.sha256:
                return digest_of(reader.read, entry.size) == entry.sha256
            with self._source.open(entry) as file:
                return has_same_bytes(file, reader.read, 0, entry.size)
        finally:
            reader.close()

    def finish(self, folders: List[TreeEntry]) -> None:
        """Set modes and times of folders, innermost first, now that their contents are written."""
        for entry in reversed(folders):
            try:
                with self._tree.folder(join_path(self._below, entry.path)) as at:
                    os.fchmod(at, entry.mode)
                    os.utime(at, ns=(entry.mtime_ns, entry.mtime_ns))
            except OSError:
                continue  # another user's folder, or a folder whose failure was reported already


def _describe_difference(there: TreeEntry, entry: TreeEntry) -> str:
    newer = " and is newer" if there.mtime_ns > entry.mtime_ns else ""
    return f"the existing file differs{newer}: it stays. To replace it: --overwrite"


def _find_obstacle(tree: Tree, path: str) -> str:
    """Describe the first entry above a path that is not a folder; "" without one."""
    above = ""
    for part in path.split("/")[:-1]:
        above = join_path(above, part)
        try:
            entry = tree.lookup(above)
        except OSError as error:
            return errno.errorcode.get(error.errno or 0, str(error))
        if entry is not None and entry.kind != FOLDER:
            return f"{above} is a {entry.kind}, not a folder"
    return ""
