"""A folder and all below it, reached without ever following a link: programs may have made those.

Whatever is opened is opened part by part from the folder down, so a link that is put in the way
meanwhile is an error and leads nowhere. Of things that are neither file, folder nor link nothing
is taken along; nor are owners, extended attributes, and which names are one file.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import stat
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

PARTS = ".batchml-parts"  # at the top of a folder: what is on its way into it
OWN = ".batchml/archive"  # the archive's papers; FSx shows those of a linked bucket, too

FILE, FOLDER, LINK = "file", "folder", "link"
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # a part of the path is no folder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe would be waited for, was it not for O_NONBLOCK.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class CarryError(Exception):
    """A transfer that did not come to its end; the text says what, where and what next."""


class Entry(NamedTuple):
    """One thing of a tree; `path` is below its top, and "" the top itself.

    `stamp` changes with the content even where size and time were set back: inode and ctime.
    """

    path: str
    kind: str = FILE
    mode: int = 0o644
    size: int = 0  # bytes of a file
    mtime_ns: int = 0
    sha256: str = ""
    target: str = ""  # of a link
    stamp: str = ""
    away: str = ""  # of an archive's: `freed` or `deleted` from the folder since

    @property
    def is_file(self) -> bool:
        return self.kind == FILE


class LeftOut(NamedTuple):
    """What does not travel, and why. `is_loss`: somebody would miss it."""

    path: str
    why: str
    is_loss: bool = True
    is_link: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class Tree:
    """A folder. Paths are below it. All methods raise OSError."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    @contextmanager
    def folder(self, below: str) -> Iterator[int]:
        """A descriptor of a folder."""
        at = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts_of(below):
                inner = os.open(part, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)

    @contextmanager
    def above(self, path: str) -> Iterator[Tuple[int, str]]:
        """A descriptor of the folder that something is in, and its name there."""
        below, _, name = path.rpartition("/")
        with self.folder(below) as at:
            yield at, name

    def look(self, path: str) -> Optional[Entry]:
        """What is there; None where nothing is, or a link is on the way."""
        try:
            if not path:
                return _entry("", os.stat(self.root))
            with self.above(path) as (at, name):
                found = os.stat(name, dir_fd=at, follow_symlinks=False)
                target = os.readlink(name, dir_fd=at) if stat.S_ISLNK(found.st_mode) else ""
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        return _entry(path, found, target)

    def open(self, path: str) -> int:
        """A descriptor to read a file."""
        with self.above(path) as (at, name):
            return os.open(name, _READ, dir_fd=at)

    def walk(self, below: str, left_out: List[LeftOut]) -> Iterator[Entry]:
        """All below a folder, each folder before what is in it, in the order of names.

        Paths are from `below` on, which a link must not leave. What is gone again meanwhile is
        passed over, what cannot be looked into goes to `left_out`.
        """
        top = os.path.realpath(os.path.join(self.root, below))
        left = [""]
        while left:
            at = left.pop()
            folders = []
            for entry in self._inside(below, at, left_out):
                if entry.kind == LINK and leads_out(entry, top):
                    left_out.append(led_out(entry))
                    continue
                if entry.kind == FOLDER:
                    folders.append(entry.path)
                yield entry
            left += reversed(folders)

    def inside(self, below: str, left_out: List[LeftOut]) -> List[Entry]:
        """What lies in one folder; links are not judged."""
        return self._inside(below, "", left_out)

    def _inside(self, below: str, at: str, left_out: List[LeftOut]) -> List[Entry]:
        try:
            with self.folder(joined(below, at)) as fd:
                return self._named(fd, sorted(os.listdir(fd)), at, left_out)
        except OSError as error:
            if error.errno not in ABSENT or not at:
                left_out.append(LeftOut(at or ".", error.strerror or str(error)))
            return []

    def _named(self, fd: int, names: List[str], at: str, left_out: List[LeftOut]) -> List[Entry]:
        found = []
        for name in names:
            path = joined(at, name)
            if name == PARTS or path == OWN:
                continue
            try:
                seen = os.stat(name, dir_fd=fd, follow_symlinks=False)
                target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(seen.st_mode) else ""
            except FileNotFoundError:
                continue
            except OSError as error:
                left_out.append(LeftOut(path, error.strerror or str(error)))
                continue
            entry = _entry(path, seen, target)
            if entry is None:
                left_out.append(LeftOut(path, _odd(seen.st_mode), is_loss=False))
            else:
                found.append(entry)
        return found


class Reader:
    """A file that is read from place to place, and must stay what it is meanwhile."""

    def __init__(self, tree: Tree, path: str) -> None:
        self.fd = tree.open(path)
        found = _entry(path, os.fstat(self.fd))
        if found is None or not found.is_file:
            os.close(self.fd)
            raise OSError(errno.EINVAL, "it is no file any more", path)
        self.entry = found

    def read(self, start: int, length: int) -> bytes:
        """As many bytes; fewer where the file ends."""
        parts = []
        while length:
            block = os.pread(self.fd, length, start)
            if not block:
                break
            parts.append(block)
            start, length = start + len(block), length - len(block)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def has_changed(self) -> bool:
        """Whether it is another than when it was opened."""
        return _entry(self.entry.path, os.fstat(self.fd)) != self.entry

    def close(self) -> None:
        os.close(self.fd)


def _entry(path: str, found: os.stat_result, target: str = "") -> Optional[Entry]:
    mode, stamp = stat.S_IMODE(found.st_mode), f"{found.st_ino:x}-{found.st_ctime_ns:x}"
    if stat.S_ISREG(found.st_mode):
        # Set-user-id bits do not travel: whose they are is not known at the other end.
        return Entry(path, FILE, mode & 0o777, found.st_size, found.st_mtime_ns, stamp=stamp)
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, FOLDER, mode & 0o3777, 0, found.st_mtime_ns)
    if stat.S_ISLNK(found.st_mode):
        return Entry(path, LINK, 0o777, 0, found.st_mtime_ns, target=target)
    return None


def _odd(mode: int) -> str:
    kinds: List[Tuple[Callable[[int], bool], str]] = [
        (stat.S_ISSOCK, "a socket"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ]  # fmt: skip
    return next((words for test, words in kinds if test(mode)), "no file")


def joined(above: str, name: str) -> str:
    return f"{above}/{name}" if above and name else above or name


def parts_of(path: str) -> List[str]:
    """The parts of a path below a folder. Raises OSError for one that is not below it."""
    if not path:
        return []
    found = path.split("/")
    if any(part in ("", ".", "..") for part in found) or "\0" in path:
        raise OSError(errno.EINVAL, "no path below the folder", path)
    return found


def is_proper(path: str) -> bool:
    """Whether this may be the path of something below a folder."""
    try:
        return bool(parts_of(path)) and path != OWN and not path.startswith(f"{OWN}/")
    except OSError:
        return False


def leads_out(link: Entry, top: str) -> bool:
    """Whether a link leads out of the folder `top`, by its words or where it really ends."""
    if os.path.isabs(link.target):
        words = posixpath.normpath(link.target)
        inside = words == top or words.startswith(f"{top}/")
    else:
        words = posixpath.normpath(posixpath.join(posixpath.dirname(link.path), link.target))
        inside = words != ".." and not words.startswith("../")
    if not inside:
        return True
    end = os.path.realpath(os.path.join(top, link.path))
    return end != top and not end.startswith(f"{top}/")


def led_out(link: Entry) -> LeftOut:
    return LeftOut(link.path, f"a link that leads out, to {link.target}", is_link=True)


def is_as_before(one: Entry, other: Entry) -> bool:
    """Whether two are the same by size and time, as rsync judges.

    A file system may keep less of a time than another: microseconds of it are compared.
    """
    if one.kind != other.kind:
        return False
    if one.kind == LINK:
        return one.target == other.target
    if one.kind == FOLDER:
        return True
    return (one.size, one.mtime_ns // 1000) == (other.size, other.mtime_ns // 1000)


def to_line(entry: Entry) -> str:
    """An entry as a line of JSON, without what has its default. Any name of a file can be told."""
    kept = {
        name: value
        for name, value in entry._asdict().items()
        if name not in Entry._field_defaults or value != Entry._field_defaults[name]
    }
    return json.dumps(kept, separators=(",", ":"))


def from_line(line: str) -> Entry:
    """What `to_line` made. Raises ValueError."""
    try:
        found: Dict[str, Any] = json.loads(line)
        entry = Entry(**{name: found[name] for name in Entry._fields if name in found})
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"no entry: {error}") from None
    for name, value in entry._asdict().items():
        if not isinstance(value, int if name in ("mode", "size", "mtime_ns") else str):
            raise ValueError(f"no entry: {name} is {value!r}")
    if entry.size < 0 or not 0 <= entry.mode <= 0o7777:
        raise ValueError(f"no entry: {entry.size} bytes, mode {entry.mode}")
    if not is_proper(entry.path) or entry.kind not in (FILE, FOLDER, LINK):
        raise ValueError(f"no entry: {entry.path!r}, {entry.kind!r}")
    return entry
