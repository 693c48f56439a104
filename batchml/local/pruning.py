"""Environments of processes that nobody needs any more.

One that is removed is made again by the next run that wants it, from the image's files, which are
small and stay. One that a process of this machine runs in, or that is being made, stays as well.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from batchml.local.environments import COMPLETE
from batchml.local.home import Home


class Old(Struct, frozen=True):
    """An environment that can go. `made` is in seconds since the epoch, `size` in bytes."""

    path: Path
    made: float
    size: int


def find_old(home: Home, before: float) -> list[Old]:
    """The environments that were made before a time and that nobody runs in."""
    used = _in_use(home.envs)
    found = []
    for folder in _folders(home.envs):
        if folder in used:
            continue
        mark = folder / COMPLETE
        made = (mark if mark.exists() else folder).stat().st_mtime
        if made < before:
            found.append(Old(folder, made, _size(folder)))
    return found


def remove(old: Old) -> bool:
    """Remove it; False where it is being made, or in use by now.

    First it goes under another name: who looks for it finds all of it, or nothing.
    """
    with open(f"{old.path}.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if old.path in _in_use(old.path.parent):
            return False
        aside = Path(tempfile.mkdtemp(prefix=".old.", dir=old.path.parent))
        old.path.rename(aside / "it")
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _folders(below: Path) -> Iterator[Path]:
    """What a killed removal left is among them."""
    if below.is_dir():
        yield from sorted(path for path in below.iterdir() if path.is_dir())


def _in_use(envs: Path) -> set[Path]:
    """The environments that a process runs in, as its variables and its command line tell."""
    mark = os.fsencode(f"{envs}/")
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for name in ("environ", "cmdline"):
                try:
                    text = (entry / name).read_bytes()
                except OSError:
                    continue  # it has ended, or is another user's
                for rest in text.split(mark)[1:]:
                    path = rest.split(b"\0")[0].split(b":")[0].split(b"/")[0]
                    found.add(envs / os.fsdecode(path))
    return found


def _size(folder: Path) -> int:
    """Bytes of its files, each once: environments of one tool may share them."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(place, name))
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
