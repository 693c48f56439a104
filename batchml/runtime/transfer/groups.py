"""Write small files of this machine in groups: one sync for a group, then each gets its name.

A sync of each file costs more than all else of it. `syncfs` syncs all files of a file system at
once. It is used on file systems of block devices, with a kernel that reports its write errors.
Source: syncfs(2): "Since Linux 5.8, syncfs() also reports errors of writing back".
"""

from __future__ import annotations

import os
from typing import Callable, Iterator, List, NamedTuple, Optional, Set

from batchml.runtime.transfer.files import (
    BLOCK,
    CHANGED_WHILE_READ,
    OnBytes,
    SourceChanged,
    exists,
    lock_existing,
    lock_part,
    make_folder,
    part_name,
    write_block,
)
from batchml.runtime.transfer.tree import PARTS_FOLDER, NearTree, OpenedFile, TreeEntry

SMALL = BLOCK  # bytes; larger files are synced one by one
AT_ONCE = 2  # groups in parallel: one is synced while the other is written
_MOST_FILES = 1024  # in a group
_MOST_BYTES = 16 * BLOCK  # in a group, which are in memory until the files have their names
_REPORTS_ERRORS = (5, 8)  # the first such version of Linux

SyncFileSystem = Callable[[int], None]  # of an open file. Raises OSError


def open_syncfs(root: str) -> Optional[SyncFileSystem]:
    """Return `syncfs` if one call of it does what a sync of each file below `root` does."""
    system = os.uname()
    try:
        version = tuple(map(int, system.release.split(".")[:2]))
        # Network file systems, and those that consist of others, have no block device.
        if system.sysname != "Linux" or version < _REPORTS_ERRORS or not _has_device(root):
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


def _has_device(root: str) -> bool:
    return os.major(os.stat(root).st_dev) != 0


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
    content: bytes


class FileGroup:
    """The files of a group. One that fails here is to be written alone, which tells the reason."""

    def __init__(self, tree: NearTree, sync: SyncFileSystem, keeps: bool) -> None:
        self._tree, self._sync, self._keeps = tree, sync, keeps
        self._parts: List[_Part] = []

    def write(self, path: str, file: OpenedFile, on_bytes: OnBytes) -> None:
        """Write a part file of this group. Raises SourceChanged and OSError."""
        if not self._parts:
            make_folder(self._tree, PARTS_FOLDER, 0o700)
        entry = file.entry
        content = file.read(0, entry.size)
        with self._tree.folder(PARTS_FOLDER) as parts:
            name, fd = lock_part(parts, part_name(entry))
        try:
            if os.fstat(fd).st_size:  # of an attempt that was interrupted
                os.ftruncate(fd, 0)
            write_block(fd, content, 0, 0)
            on_bytes(len(content), False)
            if len(content) < entry.size or not file.is_unchanged():
                raise SourceChanged(CHANGED_WHILE_READ)
            os.fchmod(fd, entry.mode)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)  # so that a group needs few descriptors
        self._parts.append(_Part(path, entry.path, name, content))

    def finish(self) -> Set[str]:
        """Sync, read each file back, and name it; return the paths of those that are complete."""
        if not self._parts:
            return set()
        try:
            with self._tree.folder(PARTS_FOLDER) as parts:
                self._sync(parts)
                return {part.path for part in self._parts if self._name(part, parts)}
        except OSError:
            return set()

    def _name(self, part: _Part, parts: int) -> bool:
        """Give a part file the name of its file if it is what was written."""
        above, _, end = part.target.rpartition("/")
        try:
            fd = lock_existing(parts, part.name)
            try:
                if os.pread(fd, len(part.content) + 1, 0) != part.content:
                    os.ftruncate(fd, 0)
                    return False
                with self._tree.folder(above) as folder:
                    if self._keeps and exists(folder, end):
                        return False
                    os.replace(part.name, end, src_dir_fd=parts, dst_dir_fd=folder)
            finally:
                os.close(fd)
        except OSError:
            return False
        return True
