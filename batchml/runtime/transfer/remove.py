"""Delete files and folders of a tree, without following links."""

from __future__ import annotations

import os
import stat
from typing import Iterable, List, Tuple

from batchml.runtime.transfer.receive import TransferResult
from batchml.runtime.transfer.tree import LeftOut, Tree, is_valid_path


def remove(tree: Tree, paths: Iterable[str]) -> TransferResult:
    """Delete files and folders, each with everything in it. A link itself is deleted.

    `missing` names the paths that do not exist or that could not be deleted, with the reason.
    """
    removed = 0
    missing: List[LeftOut] = []
    for path in paths:
        if not is_valid_path(path):
            missing.append(LeftOut(path or ".", "it is not a path in the workspace"))
            continue
        try:
            with tree.parent(path) as (at, name):
                removed += _remove_path(at, name, path, missing)
        except OSError as error:
            missing.append(LeftOut(path, error.strerror or str(error)))
    return TransferResult(removed=removed, missing=tuple(missing))


def _remove_path(at: int, name: str, path: str, missing: List[LeftOut]) -> int:
    """Delete one path; return the number of files and links deleted. Raises OSError."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return 1
    count = 0

    def failed(error: OSError) -> None:
        missing.append(LeftOut(path, f"{error.filename!r}: {error.strerror}"))

    for folder, folders, files, fd in os.fwalk(name, topdown=False, onerror=failed, dir_fd=at):
        for each, is_folder in [*_each(files, False), *_each(folders, True)]:
            try:
                if is_folder and not _is_link(each, fd):
                    os.rmdir(each, dir_fd=fd)
                    continue
                os.unlink(each, dir_fd=fd)
                count += 1
            except OSError as error:
                inner = os.path.join(os.path.dirname(path), folder, each)
                missing.append(LeftOut(inner, error.strerror or str(error)))
    os.rmdir(name, dir_fd=at)
    return count


def _each(names: Iterable[str], is_folder: bool) -> List[Tuple[str, bool]]:
    return [(name, is_folder) for name in names]


def _is_link(name: str, at: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
