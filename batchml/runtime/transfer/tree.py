"""A folder tree that is read without following links, since programs may have put links anywhere.

A path is opened part by part from the top. So if a part of it is replaced by a link meanwhile, that
is an error, and no file outside of the tree is read or written. Sockets, pipes and devices are left
out of transfers, and so are owners, extended attributes and hard links.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import stat
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

PARTS_FOLDER = ".batchml-parts"  # at the top of a tree: files that are being received
ARCHIVE_FOLDER = ".batchml/archive"  # an archive's own files; FSx also shows those of its bucket

FILE, FOLDER, LINK = "file", "folder", "link"
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # no such path, or a part of it is no folder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

ReadAt = Callable[[int, int], bytes]  # position, length -> bytes; fewer at the end of the file


class TransferError(Exception):
    """A transfer that failed. The text says what failed, where, and what to do next."""


class TreeEntry(NamedTuple):
    """A file, folder or link of a tree. `path` is relative to the top of the tree, which is "".

    `stamp` is inode and ctime: it changes with the content even if size and time were set back.
    """

    path: str
    kind: str = FILE
    mode: int = 0o644
    size: int = 0  # bytes of a file
    mtime_ns: int = 0
    sha256: str = ""
    target: str = ""  # of a link
    stamp: str = ""
    away: str = ""  # in a manifest, why the tree lacks it: `freed` or `deleted`; else empty

    @property
    def is_file(self) -> bool:
        return self.kind == FILE

    @property
    def version(self) -> Tuple[int, int, str]:
        """Values that change when a file changes."""
        return self.size, self.mtime_ns, self.stamp


class LeftOut(NamedTuple):
    """A path that is not transferred, and why."""

    path: str
    why: str
    is_loss: bool = True  # the user would miss it
    is_link: bool = False  # it is a link

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class Tree:
    """A folder. Paths are relative to it. All methods raise OSError."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def folder(self, below: str) -> ContextManager[int]:
        """Yield a descriptor of a folder."""
        return self._open_folder(below)

    @contextmanager
    def _open_folder(self, below: str) -> Iterator[int]:
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in split_path(below):
                inner = os.open(part, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    def parent(self, path: str) -> ContextManager[Tuple[int, str]]:
        """Yield a descriptor of the folder that contains a path, and the name in it."""
        return self._open_parent(path)

    @contextmanager
    def _open_parent(self, path: str) -> Iterator[Tuple[int, str]]:
        below, _, name = path.rpartition("/")
        with self.folder(below) as at:
            yield at, name

    def lookup(self, path: str) -> Optional[TreeEntry]:
        """Return the entry at a path; None if there is none, or a link is on the way."""
        try:
            if not path:
                return _entry("", os.stat(self.root))
            with self.parent(path) as (at, name):
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                target = os.readlink(name, dir_fd=at) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        return _entry(path, found, target)

    def open(self, path: str) -> int:
        """Return a descriptor to read a file."""
        with self.parent(path) as (at, name):
            return os.open(name, _READ, dir_fd=at)

    def walk(self, below: str, left_out: List[LeftOut]) -> Iterator[TreeEntry]:
        """Yield all entries below a folder by name, each folder before its contents.

        Paths are relative to `below`. Unreadable entries, and links to a path outside of `below`,
        are added to `left_out`. Entries that vanish meanwhile are skipped.
        """
        top = os.path.realpath(os.path.join(self.root, below))
        unvisited = [""]
        while unvisited:
            folders = []
            for entry in self.list_folder(below, unvisited.pop(), left_out):
                if entry.kind == LINK and leads_out(entry, top):
                    left_out.append(describe_leading_out(entry))
                    continue
                if entry.kind == FOLDER:
                    folders.append(entry.path)
                yield entry
            unvisited += reversed(folders)

    def list_folder(self, below: str, at: str, left_out: List[LeftOut]) -> List[TreeEntry]:
        """Return the entries of the folder `at` in `below`, with all its links.

        Paths are relative to `below`. Unreadable entries are added to `left_out`.
        """
        try:
            with self.folder(join_path(below, at)) as fd:
                return self._entries_of(fd, sorted(os.listdir(fd)), at, left_out)
        except OSError as error:
            if error.errno not in ABSENT or not at:
                left_out.append(LeftOut(at or ".", describe_os_error(error)))
            return []

    def _entries_of(
        self, fd: int, names: List[str], at: str, left_out: List[LeftOut]
    ) -> List[TreeEntry]:
        entries = []
        for name in names:
            path = join_path(at, name)
            if name == PARTS_FOLDER or path == ARCHIVE_FOLDER:
                continue
            try:
                state = os.stat(name, dir_fd=fd, follow_symlinks=False)
                target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(state.st_mode) else ""
            except FileNotFoundError:
                continue
            except OSError as error:
                left_out.append(LeftOut(path, describe_os_error(error)))
                continue
            entry = _entry(path, state, target)
            if entry is None:
                left_out.append(LeftOut(path, _describe_kind(state.st_mode), is_loss=False))
            else:
                entries.append(entry)
        return entries


class NearTree(Tree):
    """A tree that keeps the folders open that it has opened last, for files of the same folders.

    Use it briefly: it does not notice that another folder takes the place of one. A descriptor is
    valid until 64 other folders have been opened.
    """

    _MOST = 64  # open folders; a process may often have 1,024 files open, for all its threads

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree.root)
        self._tree = tree
        self._opened: Dict[str, int] = {}

    def folder(self, below: str) -> ContextManager[int]:
        return nullcontext(self._open(below))

    def parent(self, path: str) -> ContextManager[Tuple[int, str]]:
        below, _, name = path.rpartition("/")
        return nullcontext((self._open(below), name))

    def _open(self, below: str) -> int:
        fd = self._opened.pop(below, None)
        if fd is None:
            if len(self._opened) >= self._MOST:
                os.close(self._opened.pop(next(iter(self._opened))))
            with self._tree.folder(below) as found:
                fd = os.dup(found)
        self._opened[below] = fd  # at the end: the first one is the longest unused
        return fd

    def __enter__(self) -> "NearTree":
        return self

    def __exit__(self, *_: object) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])


class OpenedFile(NamedTuple):
    """A file that is ready to be read."""

    entry: TreeEntry  # as it was when it was opened
    read: ReadAt
    is_unchanged: Callable[[], bool]  # whether the file has not changed since it was opened
    is_near: bool = False  # it is on this machine, and can be read again


class Reader:
    """Reads a file at any position, and notices if the file changes meanwhile."""

    def __init__(self, tree: Tree, path: str) -> None:
        self._fd = tree.open(path)
        entry = _entry(path, os.fstat(self._fd))
        if entry is None or not entry.is_file:
            os.close(self._fd)
            raise OSError(errno.EINVAL, "it is not a file any more", path)
        self.entry = entry

    def read(self, start: int, length: int) -> bytes:
        """Read that many bytes; fewer at the end of the file."""
        parts = []
        while length:
            block = os.pread(self._fd, length, start)
            if not block:
                break
            parts.append(block)
            start, length = start + len(block), length - len(block)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def is_unchanged(self) -> bool:
        return _entry(self.entry.path, os.fstat(self._fd)) == self.entry

    def as_file(self, path: str) -> OpenedFile:
        """This file under another path."""
        return OpenedFile(self.entry._replace(path=path), self.read, self.is_unchanged, True)

    def close(self) -> None:
        os.close(self._fd)


def _entry(path: str, state: os.stat_result, target: str = "") -> Optional[TreeEntry]:
    """The entry of a file, folder or link; None for anything else."""
    mode, stamp = stat.S_IMODE(state.st_mode), f"{state.st_ino:x}-{state.st_ctime_ns:x}"
    if stat.S_ISREG(state.st_mode):
        # without set-user-id bits, because the owner of the copy is another user
        return TreeEntry(path, FILE, mode & 0o777, state.st_size, state.st_mtime_ns, stamp=stamp)
    if stat.S_ISDIR(state.st_mode):
        return TreeEntry(path, FOLDER, mode & 0o3777, 0, state.st_mtime_ns)
    if stat.S_ISLNK(state.st_mode):
        return TreeEntry(path, LINK, 0o777, 0, state.st_mtime_ns, target=target)
    return None


def describe_os_error(error: OSError) -> str:
    return error.strerror or str(error)


def name_some(paths: Sequence[str], most: int) -> str:
    """`'a', 'b' and 3 more`"""
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(map(repr, paths[:most])) + more


def _describe_kind(mode: int) -> str:
    kinds: List[Tuple[Callable[[int], bool], str]] = [
        (stat.S_ISSOCK, "a socket"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ]  # fmt: skip
    return next((words for test, words in kinds if test(mode)), "not a file")


def join_path(above: str, name: str) -> str:
    return f"{above}/{name}" if above and name else above or name


def split_path(path: str) -> List[str]:
    """Return the parts of a relative path. Raises OSError if it is not a path below a folder."""
    if not path:
        return []
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise OSError(errno.EINVAL, "not a path below the folder", path)
    return parts


def is_valid_path(path: str) -> bool:
    """Say whether this may be the path of an entry below a folder."""
    try:
        return bool(split_path(path)) and not f"{path}/".startswith(f"{ARCHIVE_FOLDER}/")
    except OSError:
        return False


def leads_out(link: TreeEntry, top: str) -> bool:
    """Say whether a link leads out of the folder `top`, as written or after following links."""
    if os.path.isabs(link.target):
        target = posixpath.normpath(link.target)
        is_inside = f"{target}/".startswith(f"{top}/")
    else:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.target))
        is_inside = not f"{target}/".startswith("../")
    end = os.path.realpath(os.path.join(top, link.path))
    return not is_inside or not f"{end}/".startswith(f"{top}/")


def describe_leading_out(link: TreeEntry) -> LeftOut:
    return LeftOut(link.path, f"a link that leads out, to {link.target}", is_link=True)


def looks_unchanged(one: TreeEntry, other: TreeEntry) -> bool:
    """Compare two entries by size and time, as rsync does.

    Times are compared in microseconds, since some file systems store no more.
    """
    if one.kind != other.kind:
        return False
    if one.kind == LINK:
        return one.target == other.target
    if one.kind == FOLDER:
        return True
    return (one.size, one.mtime_ns // 1000) == (other.size, other.mtime_ns // 1000)


def to_line(entry: TreeEntry) -> str:
    """Encode an entry as a line of JSON without default values. Any file name can be encoded."""
    defaults = TreeEntry._field_defaults
    document = {
        name: value
        for name, value in entry._asdict().items()
        if name not in defaults or value != defaults[name]
    }
    return json.dumps(document, separators=(",", ":"))


def from_line(line: str) -> TreeEntry:
    """Decode a line that `to_line` has written. Raises ValueError."""
    try:
        document: Dict[str, Any] = json.loads(line)
        fields = {name: document[name] for name in TreeEntry._fields if name in document}
        entry = TreeEntry(**fields)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"not an entry: {error}") from None
    for name, value in entry._asdict().items():
        if not isinstance(value, int if name in ("mode", "size", "mtime_ns") else str):
            raise ValueError(f"not an entry: {name} is {value!r}")
    if entry.size < 0 or not 0 <= entry.mode <= 0o7777:
        raise ValueError(f"not an entry: {entry.size} bytes, mode {entry.mode}")
    if not is_valid_path(entry.path) or entry.kind not in (FILE, FOLDER, LINK):
        raise ValueError(f"not an entry: {entry.path!r}, {entry.kind!r}")
    return entry
