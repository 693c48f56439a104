"""The cache of data sets on a host: its folders, its locks, and what is removed from it.

    sets/KEY/            the files of a complete data set, read-only
    sets/KEY.files       its manifest: a header, then a line of JSON for each file
    staging/KEY/         a data set that is being copied
    staging/KEY.journal  the blocks of it that are complete
    locks/KEY            locked by the runs that use it, or by the one that copies it
    limit                the most bytes that the cache may take; without it, most of the disk

KEY is a digest of the source's address and of the name, size and version of each file: a changed
source has another key, and a data set never changes. A run holds a shared lock of each data set
that it uses, as long as its runtime lives, so that none in use is removed. Nothing here is durable
at a power cut: the manifest names the boot in which its files were written or last read back, and
after another boot they are compared with their digests once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from batchml.runtime.data.sources import BLOCK, SourceFile
from batchml.runtime.storage.files import temporary_name

SETS, STAGING, LOCKS, LIMIT = "sets", "staging", "locks", "limit"
_BOOT = "/proc/sys/kernel/random/boot_id"
_FREE = 0.05  # of the disk: the part that stays free without a limit
_LEAST_FREE = 1 << 30  # bytes that stay free at least, unless the disk is small
_PAGE = 4096  # bytes; a file takes whole pages
_SHARED = 0o777  # runs of other users of this host use the same folders


class StagedFile(NamedTuple):
    """A file in the cache, with the SHA-256 of each of its blocks."""

    path: str
    size: int  # bytes
    version: str
    changed: int  # its time of change, in ns since the epoch, here and at its source
    digests: Tuple[str, ...]

    @classmethod
    def of(cls, file: SourceFile, digests: Tuple[str, ...]) -> "StagedFile":
        return cls(file.path, file.size, file.version, file.changed, digests)

    @classmethod
    def read(cls, row: List[Any]) -> "StagedFile":
        """Read a line of a manifest. Raises ValueError."""
        path, size, version, changed, digests = row
        return cls(path, size, version, changed, tuple(digests))


class Header(NamedTuple):
    """The first line of a manifest."""

    source: str
    size: int  # bytes that the files take, in whole pages
    files: int
    boot: str  # the boot in which the files were written or read back


def key_of(source: str, files: List[SourceFile]) -> str:
    """The key of the data set with these files."""
    digest = hashlib.sha256(f"{source}\n{BLOCK}\n".encode())
    for file in files:
        digest.update(json.dumps([file.path, file.size, file.version]).encode())
    return digest.hexdigest()[:40]


def block_count(size: int) -> int:
    return -(-size // BLOCK)


def space_of(files: List[SourceFile]) -> int:
    """The bytes that files take on the disk, without folders."""
    return sum(-(-file.size // _PAGE) * _PAGE for file in files)


def read_boot(path: str = _BOOT) -> str:
    """The id of this boot of the host."""
    with open(path, encoding="ascii") as file:
        return file.read().strip()


class Lock:
    """The lock of a data set. It is released when it is closed, or when the process ends."""

    def __init__(self, path: str) -> None:
        # Read-write, but not inherited: programs of the run do not prolong it.
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        _open_to_all(path, 0o666)

    def share(self) -> bool:
        """Lock it together with others. False if one copies or removes it. Keeps what it holds."""
        return self._try(fcntl.LOCK_SH)

    def own(self) -> bool:
        """Lock it alone. False if others have it."""
        return self._try(fcntl.LOCK_EX)

    def release(self) -> None:
        """Unlock it."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def last_use(self) -> float:
        """The time of the last use, in seconds since the epoch."""
        return os.fstat(self.fd).st_mtime

    def write_progress(self, done: int, total: int) -> None:
        """Tell those who wait for the lock how many bytes are copied."""
        os.pwrite(self.fd, f"{done:>20} {total:>20}".encode(), 0)

    def read_progress(self) -> Optional[Tuple[int, int]]:
        """The bytes that are copied, and all bytes; None if they are unknown."""
        words = os.pread(self.fd, 41, 0).split()
        try:
            return (int(words[0]), int(words[1])) if len(words) == 2 else None
        except ValueError:
            return None

    def mark_use(self) -> None:
        """Remember the time of this use, by which data sets are removed: the oldest first."""
        try:
            os.utime(self.fd)
        except OSError:
            pass  # another user's

    def close(self) -> None:
        os.close(self.fd)


class CopyJournal:
    """The finished blocks of a copy, by which another run continues it after a kill.

    The first line has the boot and the space that all files will take; then a line for each block.
    """

    def __init__(self, path: str, boot: str, space: int) -> None:
        self._path, self._boot, self._space = path, boot, space
        self._blocks: Dict[Tuple[str, str], Dict[int, str]] = {}
        self._fd = -1
        self.size = 0  # bytes of the finished blocks

    def resume(self) -> bool:
        """Read the journal of an unfinished copy. False if there is none of this boot."""
        try:
            with open(self._path, encoding="utf-8") as file:
                lines = file.read().split("\n")
            if json.loads(lines[0])[:2] != [self._boot, BLOCK]:
                return False
        except (OSError, ValueError, TypeError):
            return False
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if lines[-1]:  # a line was cut off by the kill
            os.write(self._fd, b"\n")
        for line in lines[1:]:
            try:
                path, version, index, digest, size = json.loads(line)
            except (ValueError, TypeError):
                continue
            self._blocks.setdefault((path, version), {})[index] = digest
            self.size += size
        return True

    def begin(self) -> None:
        """Begin an empty journal. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o644)
        self._blocks, self.size = {}, 0
        self._write([self._boot, BLOCK, self._space])

    def add(self, file: SourceFile, index: int, digest: str) -> None:
        """Add a finished block. Raises OSError."""
        size = min(BLOCK, file.size - index * BLOCK)
        self._write([file.path, file.version, index, digest, size])
        self._blocks.setdefault((file.path, file.version), {})[index] = digest
        self.size += size

    def _write(self, row: List[object]) -> None:
        os.write(self._fd, json.dumps(row).encode() + b"\n")

    def has(self, file: SourceFile, index: int) -> bool:
        return index in self._blocks.get((file.path, file.version), ())

    def is_complete(self, file: SourceFile) -> bool:
        found = self._blocks.get((file.path, file.version), ())
        return len(found) == block_count(file.size)

    def bytes_of(self, file: SourceFile) -> int:
        found = self._blocks.get((file.path, file.version), ())
        return sum(min(BLOCK, file.size - index * BLOCK) for index in found)

    def digests(self, file: SourceFile) -> Tuple[str, ...]:
        found = self._blocks.get((file.path, file.version), {})
        return tuple(found[index] for index in range(block_count(file.size)))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Room(NamedTuple):
    """The bytes for data sets: `free` now, and the `most` if nothing else were in the cache.

    `has_removed`: whether data sets were removed to make this room.
    """

    free: int
    most: int
    has_removed: bool = False


class DataCache:
    """The cache in `root`."""

    def __init__(self, root: str, boot: str) -> None:
        self.root, self.boot = root, boot

    def prepare(self) -> None:
        """Make the folders. Raises OSError."""
        for folder in (self.root, *(os.path.join(self.root, n) for n in (SETS, STAGING, LOCKS))):
            os.makedirs(folder, exist_ok=True)
            _open_to_all(folder, _SHARED)

    def set_path(self, key: str) -> str:
        return os.path.join(self.root, SETS, key)

    def staging_path(self, key: str) -> str:
        return os.path.join(self.root, STAGING, key)

    def lock(self, key: str) -> Lock:
        return Lock(os.path.join(self.root, LOCKS, key))

    # --- Manifests --------------------------------------------------------------------------------

    def header(self, key: str) -> Optional[Header]:
        """The header of a complete data set; None if there is none, or it is damaged."""
        try:
            with open(self._manifest(key), encoding="utf-8") as file:
                return Header(*json.loads(file.readline()))
        except (OSError, ValueError, TypeError):
            return None

    def files(self, key: str) -> Optional[List[StagedFile]]:
        """The files of a complete data set; None if its manifest is missing or damaged."""
        try:
            with open(self._manifest(key), encoding="utf-8") as file:
                header = Header(*json.loads(file.readline()))
                found = [StagedFile.read(json.loads(line)) for line in file]
        except (OSError, ValueError, TypeError):
            return None
        return found if len(found) == header.files else None

    def write_manifest(self, key: str, source: str, files: List[StagedFile]) -> None:
        """Write the manifest, which makes the data set complete. Raises OSError."""
        path = self._manifest(key)
        size = space_of([SourceFile(*file[:4]) for file in files])
        with temporary_name(path) as temporary:
            with open(temporary, "w", encoding="utf-8") as file:
                for row in (Header(source, size, len(files), self.boot), *files):
                    file.write(json.dumps(row) + "\n")
            os.replace(temporary, path)

    def _manifest(self, key: str) -> str:
        return f"{self.set_path(key)}.files"

    def keys(self) -> List[str]:
        """The keys of all complete data sets."""
        names = _names(os.path.join(self.root, SETS))
        return [name[: -len(".files")] for name in names if name.endswith(".files")]

    def keys_of(self, source: str) -> List[str]:
        """The keys of the complete data sets from this source, which may have changed since."""
        found = ((key, self.header(key)) for key in self.keys())
        return [key for key, header in found if header is not None and header.source == source]

    def complete(self, key: str, source: str, files: List[StagedFile]) -> None:
        """Make a finished copy a complete data set, whose folders are read-only. Raises OSError."""
        target = self.set_path(key)
        os.replace(self.staging_path(key), target)
        for folder, _, _ in os.walk(target, topdown=False):
            os.chmod(folder, 0o555)
        self.write_manifest(key, source, files)
        _unlink(self._journal(key))

    def _journal(self, key: str) -> str:
        return f"{self.staging_path(key)}.journal"

    # --- Room -------------------------------------------------------------------------------------

    def room(self, key: str = "", has_reserve: bool = True) -> Room:
        """The room for data sets; the unfinished copy of `key` takes none of it. Raises OSError.

        `has_reserve`: a part of the disk stays free.
        """
        state = os.statvfs(self.root)
        total, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
        own, linked = self._copied(key)
        used = sum(header.size for header in filter(None, map(self.header, self.keys())))
        others = [each for each in self._unfinished() if each != key]
        reserve = min(max(int(_FREE * total), _LEAST_FREE), total // 10) if has_reserve else 0
        most = free + own + used + sum(self._copied(each)[0] for each in others) - reserve
        room = Room(free + own - reserve, most)
        limit = self._limit()
        if limit is not None:
            used += sum(map(self._planned, others))
            room = Room(min(room.free, limit - used + linked), min(room.most, limit))
        return room

    def _copied(self, key: str) -> Tuple[int, int]:
        """The bytes that an unfinished copy takes on the disk, and those that it shares."""
        found = linked = 0
        for folder, _, names in os.walk(self.staging_path(key)) if key else ():
            for name in names:
                try:
                    state = os.lstat(os.path.join(folder, name))
                except OSError:
                    continue  # its copy has just ended
                found += state.st_blocks * 512
                linked += state.st_blocks * 512 if state.st_nlink > 1 else 0
        return found, linked

    def _unfinished(self) -> List[str]:
        names = _names(os.path.join(self.root, STAGING))
        return [name[: -len(".journal")] for name in names if name.endswith(".journal")]

    def _planned(self, key: str) -> int:
        """The bytes that an unfinished copy will take."""
        try:
            with open(self._journal(key), encoding="utf-8") as file:
                return int(json.loads(file.readline())[2])
        except (OSError, ValueError, TypeError, LookupError):
            return 0

    def _limit(self) -> Optional[int]:
        try:
            with open(os.path.join(self.root, LIMIT), encoding="ascii") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def make_room(
        self, needed: int, key: str, say: Callable[[str], None], is_full: bool = False
    ) -> Room:
        """Remove data sets that no run uses, the longest unused first, until `needed` bytes fit.

        Copies that nobody continues are removed first. The data set `key` stays. `is_full`: its
        copy has met a full disk, and may use the last bytes. Return the room then. Raises OSError.
        """
        room = self.room(key, not is_full)
        if room.most < needed and not is_full:
            return room  # in vain
        for other in self.last_uses():
            if room.free >= needed and (room.has_removed or not is_full):
                break
            if other != key and self.remove(other):
                say(f"a data set that no run uses is removed from this host's cache ({other[:8]})")
                room = self.room(key, not is_full)._replace(has_removed=True)
        return room

    def last_uses(self) -> Dict[str, float]:
        """The last uses of all data sets by their keys: unfinished copies first, then the oldest.

        A time is in seconds since the epoch, or 0 if it is unknown.
        """
        ages: Dict[str, Tuple[bool, float]] = {}
        complete = set(self.keys())
        names = (*_names(os.path.join(self.root, STAGING)), *_names(os.path.join(self.root, SETS)))
        for key in {name.partition(".")[0] for name in names}:
            try:
                used = os.stat(os.path.join(self.root, LOCKS, key)).st_mtime
            except OSError:
                used = 0.0
            ages[key] = (key in complete, used)
        return {key: ages[key][1] for key in sorted(ages, key=ages.__getitem__)}

    def remove(self, key: str, last_use: float = 0.0) -> bool:
        """Remove a data set. False if a run uses or copies it, or it is another user's.

        `last_use`: it also stays if it was used since then; 0 if that is unknown. Raises OSError.
        """
        lock = self.lock(key)
        try:
            if not lock.own() or (last_use and lock.last_use() > last_use):
                return False
            self.discard(key)
            return not os.path.exists(self.set_path(key))
        finally:
            lock.close()

    def is_in_use(self, key: str) -> bool:
        """Whether a run uses or copies a data set now. Raises OSError."""
        lock = self.lock(key)
        try:
            return not lock.own()
        finally:
            lock.close()

    def discard(self, key: str) -> None:
        """Remove a data set that this process has locked alone, and its unfinished copy."""
        self.discard_complete(key)
        _unlink(self._journal(key))
        remove_tree(self.staging_path(key))

    def discard_complete(self, key: str) -> None:
        """Remove a data set that this process has locked alone, but not its unfinished copy."""
        _unlink(self._manifest(key))
        remove_tree(self.set_path(key))


@contextmanager
def writable(folder: str) -> Iterator[None]:
    """Let this process change a read-only folder."""
    mode = stat.S_IMODE(os.stat(folder).st_mode)
    os.chmod(folder, mode | 0o700)
    try:
        yield
    finally:
        os.chmod(folder, mode)


def remove_tree(folder: str) -> None:
    """Remove a folder with read-only folders in it, as far as possible."""
    for above, _, _ in os.walk(folder):
        try:
            os.chmod(above, 0o700)
        except OSError:
            pass
    shutil.rmtree(folder, ignore_errors=True)


def find_damage(
    folder: str, files: List[StagedFile], reads: bool, check: Callable[[], None]
) -> List[StagedFile]:
    """The files that are missing, or have another size or time than in the manifest.

    `reads`: compare all contents with their digests, too.
    """
    damaged = []
    for number, file in enumerate(files):
        if number % 1000 == 0 or reads:
            check()
        path = os.path.join(folder, file.path)
        try:
            state = os.lstat(path)
            is_whole = stat.S_ISREG(state.st_mode) and state.st_size == file.size
            is_same = is_whole and state.st_mtime_ns == file.changed
            if is_same and reads:
                is_same = tuple(digests_of(path, file.size, check)) == file.digests
        except OSError:
            is_same = False
        if not is_same:
            damaged.append(file)
    return damaged


def digests_of(path: str, size: int, check: Callable[[], None]) -> Iterator[str]:
    """The SHA-256 of each block of a file."""
    with open(path, "rb", buffering=0) as file:
        for _ in range(block_count(size)):
            digest, left = hashlib.sha256(), BLOCK
            while left:
                check()
                data = file.read(min(1 << 20, left))
                if not data:
                    break
                digest.update(data)
                left -= len(data)
            yield digest.hexdigest()


def _names(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _open_to_all(path: str, mode: int) -> None:
    try:
        if stat.S_IMODE(os.stat(path).st_mode) != mode:
            os.chmod(path, mode)
    except OSError:
        pass  # another user's, who has made it so


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it is gone, or another user's
