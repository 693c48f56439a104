"""Measure the space that a state folder takes, and free what no run needs.

No run needs an environment that was not used for a while: the next one that does makes it again
from the image's files, which are small and are kept. An environment that a process runs in, or that
is being made, is not removed. A package in uv's cache is needed by the environments that share its
files, so that one without other links can go, too. A copy of a data set that no run uses now is
made again as well.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from batchml.local.environments import ARCHIVE, CACHE, COMPLETE, add_up
from batchml.local.home import Home, read_record
from batchml.runtime.data.cache import DataCache, read_boot
from batchml.runtime.entry.folders import size_text
from batchml.runtime.storage.files import is_locked, write_json

_SIZES = ".sizes.json"  # in the folder of environments
_UV_WAITS = "20"  # seconds for uv's lock of its cache, which another uv may hold


class DiskUse(Struct, frozen=True):
    """Bytes on the disk. `environments` includes the packages that they share, `runs` is outputs
    and checkpoints, `jobs` the journal and the logs, `copies` the copies of data sets. `free` is
    left on the state folder's disk.
    """

    environments: int
    runs: int
    jobs: int
    code: int
    free: int
    copies: int = 0

    def describe(self) -> str:
        """`environments 954 MiB, runs 12 MiB, jobs and logs 3.1 MiB, code 210 KiB`"""
        parts = {
            "environments": self.environments,
            "runs": self.runs,
            "jobs and logs": self.jobs,
            "code": self.code,
        }
        if self.copies:
            parts["copies of data sets"] = self.copies
        return ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())


class OldEnvironment(Struct, frozen=True):
    """An environment that no run needs. `used` is the time of its last use, in seconds since the
    epoch, or 0 if it was never completed. `size`: the bytes that only it has.
    """

    path: Path
    used: float
    size: int


class CachedPackage(Struct, frozen=True):
    """A package in uv's cache that no environment shares. `size` is in bytes."""

    path: Path
    name: str
    size: int


class OldCopy(Struct, frozen=True):
    """A copy of a data set that no run uses. `source` is its address, or "" if it is unfinished.

    `used` is the time of its last use, in seconds since the epoch, `size` in bytes.
    """

    key: str
    source: str
    used: float
    size: int


class Waste(Struct, frozen=True):
    """What no run needs."""

    environments: tuple[OldEnvironment, ...] = ()
    packages: tuple[CachedPackage, ...] = ()
    copies: tuple[OldCopy, ...] = ()

    @property
    def size(self) -> int:
        parts = (self.environments, self.packages, self.copies)
        return sum(each.size for part in parts for each in part)


# --- measuring ------------------------------------------------------------------------------------


def measure(home: Home) -> DiskUse:
    """The space that the parts of a state folder take. A file with several links counts once."""
    return DiskUse(
        environments=_measure_environments(home.envs),
        runs=add_up(str(home.runs), {})[0],
        jobs=add_up(str(home.local), {})[0],
        code=sum(add_up(str(each), {})[0] for each in (home.code, home.images, home.runtimes)),
        free=free_space(home.root),
        copies=add_up(str(home.cache), {})[0],
    )


def free_space(path: Path) -> int:
    """The free bytes on the disk of a path, which need not exist."""
    existing = next(each for each in (path, *path.parents) if each.exists())
    return shutil.disk_usage(existing).free


def _measure_environments(envs: Path) -> int:
    """The space of all environments and of the packages that they share.

    Packages do not change, and environments only when they are used, which their marks tell. So
    their sizes are kept: an environment has ten thousands of files.
    """
    kept = read_record(envs / _SIZES, dict[str, tuple[float, int]]) or {}
    sizes: dict[str, tuple[float, int]] = {}
    for folder in (*_environments(envs), *_packages(envs)):
        name, at = str(folder.relative_to(envs)), _last_use(folder)
        is_known = at > 0 and name in kept and kept[name][0] == at
        sizes[name] = kept[name] if is_known else (at, _size(folder))
    if sizes != kept:
        try:
            write_json(str(envs / _SIZES), sizes)
        except OSError:
            pass  # it only saves time
    return sum(size for _, size in sizes.values())


def _size(folder: Path) -> int:
    """The bytes of a package in the cache, or those of an environment that the cache has not."""
    size, own = add_up(str(folder), {})
    is_uvs = folder.parent.name != ARCHIVE and not (folder / "conda-meta").is_dir()
    return own if is_uvs else size


def _environments(envs: Path) -> list[Path]:
    """All environments, including leftovers of a removal that was killed."""
    if not envs.is_dir():
        return []
    return sorted(path for path in envs.iterdir() if path.is_dir() and path.name != CACHE)


def _packages(envs: Path) -> list[Path]:
    """The folders of unpacked packages in the cache."""
    archive = envs / CACHE / ARCHIVE
    return sorted(path for path in archive.iterdir() if path.is_dir()) if archive.is_dir() else []


def _last_use(folder: Path) -> float:
    """The time of an environment's last use; 0 for one that is not complete.

    For a package, the time at which it was stored.
    """
    mark = folder if folder.parent.name == ARCHIVE else folder / COMPLETE
    try:
        return mark.stat().st_mtime
    except OSError:
        return 0.0


def describe_remaining(use: DiskUse, age: str) -> list[str]:
    """Lines about the space that was not freed, with the reasons.

    `age`: the time, such as `30d`, for which an environment had to be unused; "" for all of them.
    """
    lines = [f"Left: {use.describe()}."]
    if use.environments and age:
        lines.append(
            f"Environments that a run used in the last {age} stay: --older-than chooses another "
            "time, --all all that no process uses now."
        )
    elif use.environments:
        lines.append("A process uses these environments, for example one that waits for runs.")
    if use.runs or use.jobs or use.code:
        lines.append(
            "Runs keep their outputs, logs and code, which rerun and diff need: batchml local "
            "reset deletes all runs with them."
        )
    return lines


# --- freeing --------------------------------------------------------------------------------------


def find_waste(home: Home, before: float) -> Waste:
    """The unused environments and copies of data sets whose last use was before a time, and the
    packages that no other environment shares. While an environment is being made, packages stay,
    since it may need them.
    """
    used = _in_use(home.envs)
    old = [
        OldEnvironment(folder, _last_use(folder), _size(folder))
        for folder in _environments(home.envs)
        if folder not in used and _last_use(folder) < before and not _is_being_made(folder)
    ]
    copies = tuple(_old_copies(DataCache(str(home.cache), read_boot()), before))
    if _is_any_being_made(home.envs):
        return Waste(tuple(old), copies=copies)
    links = Counter(inode for each in old for inode in _inodes(each.path))
    return Waste(tuple(old), tuple(_unshared(home.envs, links)), copies)


def _old_copies(cache: DataCache, before: float) -> Iterator[OldCopy]:
    for key, used in cache.last_uses().items():
        if used < before and _is_unused(cache, key):
            header = cache.header(key)
            size = sum(
                add_up(path, {})[0] for path in (cache.set_path(key), cache.staging_path(key))
            )
            yield OldCopy(key, header.source if header else "", used, size)


def _is_unused(cache: DataCache, key: str) -> bool:
    """Whether nobody uses a data set. False if that is unknown: it may be another user's."""
    try:
        return not cache.is_in_use(key)
    except OSError:
        return False


def _unshared(envs: Path, links: Mapping[int, int]) -> Iterator[CachedPackage]:
    """The packages whose files have no links but those that are going to be removed."""
    for folder in _packages(envs):
        found = [
            status
            for parent, _, names in os.walk(folder)
            for status in (os.lstat(os.path.join(parent, name)) for name in names)
        ]
        if all(status.st_nlink - links.get(status.st_ino, 0) <= 1 for status in found):
            names = [path.name.partition("-")[0] for path in folder.glob("*.dist-info")]
            size = sum(status.st_blocks * 512 for status in found)
            yield CachedPackage(folder, names[0] if names else folder.name, size)


def _inodes(folder: Path) -> Iterator[int]:
    """The files of an environment that have several links."""
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            if status.st_nlink > 1:
                yield status.st_ino


def free(home: Home, waste: Waste, uv: str) -> Waste:
    """Remove what was found, except for what is used or made meanwhile. Returns what was removed.

    `uv`: the path of uv, which removes packages; without it they stay.
    """
    removed = tuple(each for each in waste.environments if _remove(each.path))
    if uv and waste.packages and not _is_any_being_made(home.envs):
        _remove_packages(home.envs, {each.path for each in _unshared(home.envs, {})}, uv)
    gone = tuple(each for each in waste.packages if not each.path.exists())
    cache = DataCache(str(home.cache), read_boot())
    return Waste(removed, gone, tuple(each for each in waste.copies if _remove_copy(cache, each)))


def _remove_copy(cache: DataCache, copy: OldCopy) -> bool:
    """Remove a copy of a data set; False when it was used since it was found, or cannot be."""
    try:
        return cache.remove(copy.key, copy.used)
    except OSError:
        return False


def _remove(path: Path) -> bool:
    """Remove an environment; False when it is being made or in use.

    It is renamed first, so that others find all of it or nothing.
    """
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        if path in _in_use(path.parent):
            return False
        aside = Path(tempfile.mkdtemp(prefix=".old.", dir=path.parent))
        path.rename(aside / "it")
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _remove_packages(envs: Path, unshared: Collection[Path], uv: str) -> None:
    """Have uv remove packages: it removes those to which no link in its cache leads.

    Without any environment it empties the cache, with the answers of indexes.
    """
    cache = envs / CACHE
    for link in cache.glob("wheels-v*/**/*"):
        if link.is_symlink() and link.resolve() in unshared:
            link.unlink(missing_ok=True)
    command = "prune" if _environments(envs) else "clean"
    subprocess.run(
        [uv, "cache", command, "--cache-dir", str(cache), "--no-config"],
        env={**os.environ, "UV_LOCK_TIMEOUT": _UV_WAITS}, stdin=subprocess.DEVNULL,
        capture_output=True, check=False,
    )  # fmt: skip


def _is_being_made(environment: Path) -> bool:
    return is_locked(f"{environment}.lock")


def _is_any_being_made(envs: Path) -> bool:
    return any(is_locked(str(path)) for path in envs.glob("*.lock"))


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
