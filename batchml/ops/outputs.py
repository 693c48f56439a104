"""Copy a run's outputs to a folder: what is there unchanged is not copied again.

Names are chosen by the run, which may be anybody's program: none of them leads out of the folder,
and no link is followed or made.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec import Struct

from batchml.runtime.transfer.tree import Tree

PART = ".batchml-part"  # the ending of a file on its way; one that is found was cut off
MAX_LEFT_OUT = 20  # that are named
AT_ONCE = 8  # files
ROUND = 64  # files
MAX_PATH = 4095  # bytes; PATH_MAX of Linux, less the NUL at its end


class Entry(NamedTuple):
    """One file of the outputs: its name below them, its size in bytes, and when it was written."""

    name: str
    size: int
    at: int  # ns since the epoch


class Unreadable(Exception):
    """A file of the outputs that cannot be had, and why: the run may have deleted it meanwhile."""


class Source(Protocol):
    """Where the outputs are."""

    def entries(self) -> Iterable[Entry]:
        """Every file."""

    def fetch(self, entry: Entry, path: Path) -> None:
        """Write a file's content to `path`, which is not there. Raises Unreadable."""


class Copied(Struct, frozen=True):
    """What was done. `left_out` are names, each with the reason."""

    files: int = 0
    size: int = 0  # bytes of them
    unchanged: int = 0
    left_out: tuple[str, ...] = ()


class Folder:
    """Outputs on this machine. Links and devices are left alone: they may lead anywhere.

    Folders are opened name by name, for the run may put a link in the place of one at any moment.
    """

    def __init__(self, root: Path) -> None:
        self._tree = Tree(str(root))
        self.left_out: list[str] = []

    def entries(self) -> Iterator[Entry]:
        left = [""]
        with closing(_Last(self._tree)) as last:
            while left:  # os.walk, which calls itself, ends where folders lie deeper than the stack
                folders = []
                for below, found in self._inside(last, left.pop()):
                    if stat.S_ISDIR(found.st_mode):
                        folders.append(below)
                    elif stat.S_ISREG(found.st_mode):
                        yield Entry(below, found.st_size, found.st_mtime_ns)
                    else:
                        self.left_out.append(f"{below}: not a file")
                left += reversed(folders)

    def _inside(self, last: "_Last", folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """What lies in a folder, by paths below the root, in the order of names."""
        try:
            at = last.open(folder)
            for name in sorted(os.listdir(at)):
                # The run goes on, and may have deleted it.
                with suppress(FileNotFoundError):
                    about = os.stat(name, dir_fd=at, follow_symlinks=False)
                    yield os.path.join(folder, name), about
        except OSError as error:
            self.left_out.append(f"{folder or '.'}: {error.strerror}")

    def fetch(self, entry: Entry, path: Path) -> None:
        try:
            source = self._tree.open(entry.name)
        except OSError as error:
            raise Unreadable(error.strerror) from error
        with os.fdopen(source, "rb") as reading:
            if not stat.S_ISREG(os.fstat(source).st_mode):
                raise Unreadable("not a file")
            with open(path, "wb") as writing:
                shutil.copyfileobj(reading, writing, 1024**2)


class _Last:
    """The folder that was opened last: the next one is mostly in it, a single step away."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._path, self._at = tree, "", -1

    def open(self, folder: str) -> int:
        above, _, name = folder.rpartition("/")
        if self._at >= 0 and above == self._path:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            found = os.open(name, flags, dir_fd=self._at)
        else:
            with self._tree.folder(folder) as at:
                found = os.dup(at)
        self.close()
        self._path, self._at = folder, found
        return found

    def close(self) -> None:
        if self._at >= 0:
            os.close(self._at)
        self._at = -1


class Together:
    """The outputs of several children or nodes, each below a folder; "" for one that has none."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources
        self._shadowed: list[str] = []

    @property
    def left_out(self) -> list[str]:
        return self._shadowed + [
            _joined(folder, text)
            for folder, source in self._sources.items()
            for text in getattr(source, "left_out", [])
        ]

    def entries(self) -> Iterator[Entry]:
        for folder, source in self._sources.items():
            for entry in source.entries():
                if not folder and entry.name.partition("/")[0] in self._sources:
                    self._shadowed.append(f"{entry.name}: another node's outputs go there")
                else:
                    yield entry._replace(name=_joined(folder, entry.name))

    def fetch(self, entry: Entry, path: Path) -> None:
        folder, _, name = entry.name.partition("/")
        if folder in self._sources:
            self._sources[folder].fetch(entry._replace(name=name), path)
        else:
            self._sources[""].fetch(entry, path)


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def copy(source: Source, dest: Path) -> Iterator[Entry | Copied]:
    """Copy what is new or changed; yield each file that was copied, and at the end what was done.

    A file appears under its name when it is whole: after an interruption the same call goes on with
    the rest. Raises OSError for a folder that cannot be written.
    """
    files = size = unchanged = 0
    left_out: list[str] = []
    wanted: list[Entry] = []
    dest.mkdir(parents=True, exist_ok=True)
    for entry in source.entries():
        why = refusal(entry.name) or _in_the_way(dest, entry.name)
        if why:
            left_out.append(f"{entry.name}: {why}")
        elif _is_there(dest / entry.name, entry):
            unchanged += 1
        else:
            wanted.append(entry)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # In rounds, so that what fails ends it soon.
        for start in range(0, len(wanted), ROUND):
            some = wanted[start : start + ROUND]
            taken = pool.map(lambda entry: _take(source, dest, entry), some)
            for entry, why in zip(some, taken, strict=True):
                if why:
                    left_out.append(f"{entry.name}: {why}")
                    continue
                files, size = files + 1, size + entry.size
                yield entry
    left_out += getattr(source, "left_out", [])
    yield Copied(files, size, unchanged, tuple(left_out))


def _take(source: Source, dest: Path, entry: Entry) -> str:
    """Copy one file; why it could not be, or ""."""
    path = dest / entry.name
    part = path.with_name(path.name + PART)
    try:
        _make_folders(dest, entry.name)
        part.unlink(missing_ok=True)  # of a call that was cut off, or a link
        source.fetch(entry, part)
        os.utime(part, ns=(entry.at, entry.at))
        os.replace(part, path)
    except Unreadable as error:
        return str(error)
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        return "another of the outputs has this name, one as a folder and one as a file"
    return ""


def _make_folders(dest: Path, name: str) -> None:
    """Those above a file. One by one: Path.mkdir, which calls itself, has no such depth."""
    if (dest / name).parent.is_dir():
        return
    at = dest
    for part in name.split("/")[:-1]:
        at = at / part
        at.mkdir(exist_ok=True)


def refusal(name: str) -> str:
    """Why a name may not be a file's; empty for one that may."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
        return "no name of a file below a folder"
    if name.endswith(PART):
        return f"files on their way are called {PART}"
    if any(len(part.encode("utf-8", "surrogateescape")) > 255 - len(PART) for part in parts):
        return "the name is too long"
    return ""


def _in_the_way(dest: Path, name: str) -> str:
    """What stands where a folder has to be, or the file itself."""
    if len(os.fsencode(dest / name)) + len(PART) > MAX_PATH:
        return "the path is too long"
    *folders, last = name.split("/")
    at = dest
    for part in folders:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            return f"{at} is in the way"
    return f"{at / last} is a folder" if (at / last).is_dir() else ""


def _is_there(path: Path, entry: Entry) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    same = (found.st_size, found.st_mtime_ns) == (entry.size, entry.at)
    return stat.S_ISREG(found.st_mode) and same
