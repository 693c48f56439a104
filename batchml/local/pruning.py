"""Remove old virtual environments, which the runner makes for jobs that are processes.

The next run that needs a removed environment makes it again from the image's files, which are small
and are kept. An environment that a process runs in, or that is being made, is not removed.
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


class OldEnvironment(Struct, frozen=True):
    """An environment that can be removed. `made` is in seconds since the epoch, `size` in bytes."""

    path: Path
    made: float
    size: int


def find_old(home: Home, before: float) -> list[OldEnvironment]:
    """The unused environments that were made before a time."""
    used = _in_use(home.envs)
    old = []
    for folder in _folders(home.envs):
        if folder in used:
            continue
        mark = folder / COMPLETE
        made = (mark if mark.exists() else folder).stat().st_mtime
        if made < before:
            old.append(OldEnvironment(folder, made, _size(folder)))
    return old


def remove(old: OldEnvironment) -> bool:
    """Remove an environment; False when it is being made or in use.

    It is renamed first, so that others find all of it or nothing.
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
    """All folders in a folder, including leftovers of a removal that was killed."""
    if below.is_dir():
        yield from sorted(path for path in below.iterdir() if path.is_dir())


def _in_use(envs: Path) -> set[Path]:
    """The environments whose paths are in the variables or the command line of a process."""
    mark = os.fsencode(f"{envs}/")
    used = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for name in ("environ", "cmdline"):
                try:
                    text = (entry / name).read_bytes()
                except OSError:
                    continue  # it has ended, or belongs to another user
                for rest in text.split(mark)[1:]:
                    path = rest.split(b"\0")[0].split(b":")[0].split(b"/")[0]
                    used.add(envs / os.fsdecode(path))
    return used


def _size(folder: Path) -> int:
    """The size of a folder's files in bytes. A file with several hard links is counted once,
    because environments made by conda share files in this way.
    """
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
