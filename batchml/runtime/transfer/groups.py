"""Write small files of this machine in groups: one sync for a group, then each gets its name.

A sync of each file costs more than all else of it. `syncfs` syncs all files of a file system at
once, and waits for the data of all programs. So it is used for many files, on file systems of which
it is known to do the same as a sync of each file, with a kernel that reports its write errors.
Source: syncfs(2): "Since Linux 5.8, syncfs() also reports errors of writing back".
"""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Set

from batchml.runtime.transfer.files import (
    BLOCK,
    CHANGED_WHILE_READ,
    OnBytes,
    SourceChanged,
    clear_group,
    exists,
    make_group_folder,
    write_block,
)
from batchml.runtime.transfer.tree import NearTree, OpenedFile, Tree, TreeEntry

SMALL = BLOCK  # bytes; larger files are synced one by one
AT_ONCE = 2  # groups in parallel: one is synced while the other is written
FEWEST_FILES = 32  # in a group; syncs of fewer files cost less than to wait for other programs
_MOST_FILES = 1024  # in a group
_MOST_BYTES = 16 * BLOCK  # in a group, which are in memory until the files have their names
_REPORTS_ERRORS = (5, 8)  # the first such version of Linux
# Their journals keep the order of changes: a file that gets its mode and then its name has both
# after a power cut, or neither. Network file systems and FUSE may only seem to have a disk.
_WRITE_THROUGH = ("ext4", "xfs")

SyncFileSystem = Callable[[int], None]  # of an open file. Raises OSError


def open_syncfs(root: str) -> Optional[SyncFileSystem]:
    """Return `syncfs` if one call of it does what a sync of each file below `root` does."""
    system = os.uname()
    try:
        version = tuple(map(int, system.release.split(".")[:2]))
        if system.sysname != "Linux" or version < _REPORTS_ERRORS:
            return None
        if _file_system_of(root) not in _WRITE_THROUGH:
            return None
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).syncfs
    except (ImportError, OSError, ValueError, AttributeError):
        return None

    def sync(fd: int) -> None:
        if call(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return sync


def _file_system_of(folder: str) -> str:
    """Return the type of the file system of a folder; "" if it is unknown. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as info:
            mount = next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
    finally:
        os.close(fd)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        return find_type(mount, mounts)


def find_type(mount: str, mounts: Iterable[str]) -> str:
    """Return the type of the file system of a mount, by its id; "" if it is not in `mounts`.

    `mounts`: lines of a mountinfo. Source: proc_pid_mountinfo(5): the id is the first field, the
    type follows the separator.
    """
    for line in mounts:
        if line.partition(" ")[0] == mount:
            return line.partition(" - ")[2].partition(" ")[0]
    return ""


def split_groups(entries: List[TreeEntry]) -> Iterator[List[TreeEntry]]:
    """Split small files into groups, in their order."""
    group: List[TreeEntry] = []
    size = 0
    for entry in entries:
        if group and (len(group) == _MOST_FILES or size + entry.size > _MOST_BYTES):
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.size
    if group:
        yield group


class _Part(NamedTuple):
    """A part file that is written, and not yet synced."""

    path: str  # of the file in the source
    target: str  # its path below the tree
    name: str
    mode: int  # which it gets with its name: before, a mode could forbid to read it back
    content: bytes


class FileGroup:
    """The files of a group. One that fails here is to be written alone, which tells the reason.

    The part files are in a locked folder of this group. If another transfer could write into them
    after the sync, its bytes would get a name and were synced by nobody.
    """

    def __init__(self, tree: NearTree, sync: SyncFileSystem, keeps: bool) -> None:
        self._tree, self._sync, self._keeps = tree, sync, keeps
        self._parts: List[_Part] = []
        self._folder, self._fd = "", -1
        self._count = self._size = 0  # files that were begun, and bytes in memory

    def __enter__(self) -> "FileGroup":
        return self

    def __exit__(self, *_: Any) -> None:
        """Remove the part files that did not get their names."""
        if self._fd >= 0:
            os.close(self._fd)
            clear_group(Tree(self._tree.root), self._folder)

    def write(self, path: str, file: OpenedFile, on_bytes: OnBytes) -> None:
        """Write a part file of this group. Raises SourceChanged and OSError."""
        entry = file.entry
        if entry.size > SMALL or self._size + entry.size > _MOST_BYTES:
            raise SourceChanged("it has grown since it was listed")
        if self._fd < 0:
            self._folder, self._fd = make_group_folder(Tree(self._tree.root))
        self._count += 1
        name, flags = str(self._count), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            content = file.read(0, entry.size)
            write_block(fd, content, 0, 0)
            on_bytes(len(content), False)
            if len(content) < entry.size or not file.is_unchanged():
                raise SourceChanged(CHANGED_WHILE_READ)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)  # so that a group needs few descriptors
        self._size += entry.size
        self._parts.append(_Part(path, entry.path, name, entry.mode, content))

    def finish(self) -> Set[str]:
        """Sync, read each file back, and name it; return the paths of those that are complete."""
        if not self._parts:
            return set()
        try:
            self._sync(self._fd)
        except OSError:
            return set()
        return {part.path for part in self._parts if self._name(part)}

    def _name(self, part: _Part) -> bool:
        """Give a part file the name of its file if it is what was written."""
        above, _, end = part.target.rpartition("/")
        try:
            fd = os.open(part.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                if os.pread(fd, len(part.content) + 1, 0) != part.content:
                    return False
                os.fchmod(fd, part.mode)
            finally:
                os.close(fd)
            with self._tree.folder(above) as folder:
                if self._keeps and exists(folder, end):
                    return False
                os.replace(part.name, end, src_dir_fd=self._fd, dst_dir_fd=folder)
        except OSError:
            return False
        return True
