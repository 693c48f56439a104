"""The folder of an export: it appears when it is whole, and replaces nothing but an export."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchml.errors import UsageError

MANIFEST = "batchml-export.json"  # names the files of an export
_LOCK = ".lock"


class ExportFolder:
    """The files of an export that is being written. `name` of a file has slashes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: set[str] = set()
        self.size = 0  # bytes

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file. May be called by several threads, for different names."""
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self._names.add(name)
        self.size += len(data)

    def seal(self) -> None:
        """Write the list of the files, by which the next export knows that it may replace them."""
        names = sorted(self._names)
        (self._path / MANIFEST).write_text(json.dumps({"files": names}, indent=0), "utf-8")
        (self._path / _LOCK).unlink()


@contextmanager
def export_folder(target: Path) -> Iterator[ExportFolder]:
    """A folder beside `target`, which takes its place at the end, and is removed on any error.

    Raises UsageError if `target` exists and is neither empty nor an export, has files that are not
    of the export, or cannot be written, or a folder that the export needs beside it is not its own.
    """
    target = Path(os.path.realpath(target))
    check_target(target)
    part, old = (target.parent / f".{target.name}.{each}" for each in ("part", "old"))
    try:
        _check_left(part, target)
        _check_left(old, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(exist_ok=True)
        with (part / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"--export {target}: another export is writing it.") from error
            try:
                _clear(part)  # what an export left behind that was killed
                folder = ExportFolder(part)
                yield folder
                folder.seal()
                _replace(part, target, old)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"--export {target}: {error.strerror or error}.") from error


def check_target(target: Path) -> None:
    """Raises UsageError if an export must not be written there."""
    for each in target.parents:
        if each.exists() and not each.is_dir():
            raise UsageError(f"--export {target}: {each} is a file.")
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"--export {target}: it is a file. Name a folder.")
    if not any(target.iterdir()):
        return
    try:
        document = json.loads((target / MANIFEST).read_bytes())
        own = {MANIFEST, *document["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--export {target}: the folder is neither empty nor an export. Name another one."
        ) from error
    for folder, below, names in os.walk(target):
        links = [each for each in below if Path(folder, each).is_symlink()]
        for name in (*names, *links):
            path = Path(folder, name).relative_to(target).as_posix()
            if path not in own:
                raise UsageError(
                    f"--export {target}: {path} is not of the export, and would be lost. Move it, "
                    "or name another folder."
                )


def _check_left(folder: Path, target: Path) -> None:
    """Raises UsageError if a folder that the export needs is there, and no export has left it."""
    names = {each.name for each in folder.iterdir()} if folder.is_dir() else set()
    is_left = folder.is_dir() and (not names or names & {_LOCK, MANIFEST})
    if folder.is_symlink() or (folder.exists() and not is_left):
        raise UsageError(
            f"--export {target}: {folder} is in the way, and would be lost. Move it, or name "
            "another folder."
        )


def _clear(part: Path) -> None:
    for each in part.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name != _LOCK:
            each.unlink()


def _replace(part: Path, target: Path, old: Path) -> None:
    """Put the new folder in place of the old one, which stays if that fails."""
    shutil.rmtree(old, ignore_errors=True)
    had_old = target.exists()
    if had_old:
        target.rename(old)
    try:
        part.rename(target)
    except OSError:
        if had_old:
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
