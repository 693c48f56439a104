"""Copy data sets into the cache of a host: one run copies, the others on the host wait for it."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.data.cache import (
    CopyJournal,
    DataCache,
    Lock,
    StagedFile,
    block_count,
    find_damage,
    key_of,
    read_boot,
    space_of,
    writable,
)
from batchml.runtime.data.sources import (
    BLOCK,
    DataChanged,
    DataDamaged,
    DataError,
    DataFolder,
    DataListing,
    DataSource,
    SourceFile,
    open_source,
)
from batchml.runtime.entry.folders import size_text
from batchml.runtime.health.checks import NOTICE
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import data_variable
from batchml.runtime.storage.store import StoreError

THREADS = 16  # requests at once
_REPORT_EVERY = 15.0  # seconds between two lines about the progress
_WAIT = 0.5  # seconds between two looks at another run's copy
_MOST_REPAIRED = 100  # files; with more damage, all are copied again
_TRIES = 2  # of a data set whose source changes meanwhile
_FULL = (errno.ENOSPC, errno.EDQUOT)

# Waits for so many seconds; raises when the run is to stop.
Wait = Callable[[float], None]


class StagingContext(NamedTuple):
    """The things that staging needs of its attempt."""

    environ: Mapping[str, str]
    say: Callable[[str], None]
    check: Callable[[], None]  # raises when the run is to stop
    wait: Wait
    clock: Callable[[], float] = time.monotonic
    threads: int = THREADS


class StagedData(NamedTuple):
    """The data sets of an attempt: the path of each, and the seconds that staging took.

    `locks` keep the data sets in the cache until this process ends.
    """

    paths: Dict[str, str]
    seconds: float
    locks: List[Lock]

    def variables(self) -> Dict[str, str]:
        return {data_variable(name): path for name, path in self.paths.items()}


def choose_cache(root: str, fallback: Callable[[], str], say: Callable[[str], None]) -> str:
    """The cache of the host, or the folder `fallback()`, which is the run's own, without one."""
    if not root:
        return fallback()
    try:
        cache = DataCache(root, "")
        cache.prepare()
        if os.access(cache.set_path(""), os.W_OK | os.X_OK):
            return root
        why = "it may not be written"
    except OSError as error:
        why = error.strerror or str(error)
    say(f"{NOTICE}data: this host's cache, {root}, cannot be used: {why}. Copying for this run")
    return fallback()


def stage_data(sources: Mapping[str, str], root: str, context: StagingContext) -> StagedData:
    """Make the data sets available on this host: name -> address, in the order of their names.

    Raises DataError.
    """
    began = context.clock()
    staged = StagedData({}, 0.0, [])
    cache = DataCache(root, read_boot())
    try:
        cache.prepare()
        for name in sorted(sources):
            staged.paths[name] = _Stager(cache, name, sources[name], context, staged.locks).stage()
    except StoreError as error:
        raise DataError(f"data.{name}: {error}", error.temporary) from error
    except OSError as error:
        raise DataError(
            f"data: the cache {root} cannot be used: {error_line(error)}", temporary=True
        ) from error
    return staged._replace(seconds=context.clock() - began)


class _Stager:
    """Makes one data set available."""

    def __init__(
        self,
        cache: DataCache,
        name: str,
        url: str,
        context: StagingContext,
        locks: List[Lock],
    ) -> None:
        self._cache, self._name, self._url = cache, name, url
        self.context, self._locks = context, locks
        self._reported = context.clock()

    def _say(self, text: str) -> None:
        self.context.say(f"{NOTICE}data.{self._name}: {text}")

    def stage(self) -> str:
        """Return the path of the data set. Raises DataError, StoreError and OSError."""
        source = open_source(self._name, self._url, self.context.environ, self.context.check)
        before = ""
        for _ in range(_TRIES):
            listing = source.list()
            if isinstance(source, DataFolder) and source.is_on(self._cache.root):
                self._say(f"{source.path} is on the disk of the cache, and is used where it is")
                return source.path
            key = key_of(self._url, listing.files)
            try:
                self._locks.append(self._acquire(key, source, listing, before))
                return os.path.join(self._cache.set_path(key), listing.only).rstrip("/")
            except DataChanged as error:
                before = key
                self._say(f"{str(error)!r} in {self._url} has changed while it was copied")
        raise DataError(
            f"data.{self._name}: {self._url} keeps changing while it is copied. Write new versions "
            f"to a new prefix.",
            temporary=True,
        )

    # --- Locks ------------------------------------------------------------------------------------

    def _acquire(self, key: str, source: DataSource, listing: DataListing, before: str) -> Lock:
        """Return the shared lock of the complete data set."""
        lock, cache = self._cache.lock(key), self._cache
        copied = False
        try:
            while True:
                if not lock.share():
                    self._wait_for(lock, "another run on this host copies it")
                    continue
                files = self._usable(key)
                if files is not None and self._is_sound(key, source, files):
                    lock.mark_use()
                    if not copied:
                        told = f"{_count(listing.files)}, {size_text(listing.size)}"
                        self._say(f"{told}, in this host's cache already")
                    return lock
                lock.release()  # two that share it could both never own it
                if not lock.own():
                    self._wait_for(lock, "another run on this host uses it")
                    continue
                if not self._read_back(key):
                    cache.discard_complete(key)
                    self._copy(key, source, listing, lock, before)
                copied = True
        except BaseException:
            lock.close()
            raise

    def _wait_for(self, lock: Lock, why: str) -> None:
        progress = lock.read_progress()
        if self._is_time_to_report():
            told = f": {size_text(progress[0])} of {size_text(progress[1])}" if progress else ""
            self._say(f"waiting, {why}{told}")
        self.context.wait(_WAIT)

    def _is_time_to_report(self) -> bool:
        now = self.context.clock()
        if now - self._reported < _REPORT_EVERY:
            return False
        self._reported = now
        return True

    # --- Data sets that are there -----------------------------------------------------------------

    def _usable(self, key: str) -> Optional[List[StagedFile]]:
        """The files of a data set that is complete since this boot; else None."""
        header = self._cache.header(key)
        is_new = header is not None and header.boot == self._cache.boot
        return self._cache.files(key) if is_new else None

    def _is_sound(self, key: str, source: DataSource, files: List[StagedFile]) -> bool:
        """Whether all files have their size and time. A few others are copied again."""
        damaged = find_damage(self._cache.set_path(key), files, False, self.context.check)
        if len(damaged) > _MOST_REPAIRED:
            self._say(f"{len(damaged)} of {_count(files)} in this host's cache are damaged")
            return False
        if damaged:
            self._repair(key, source, damaged)
        return True

    def _read_back(self, key: str) -> bool:
        """Whether a data set is as it was written: that of an earlier boot is read."""
        header, files = self._cache.header(key), self._cache.files(key)
        if header is None or files is None:
            return False
        is_old = header.boot != self._cache.boot
        if is_old:
            self._say("is in this host's cache, which was restarted since: it is read back")
        if find_damage(self._cache.set_path(key), files, is_old, self.context.check):
            self._say("was damaged, and is copied again")
            return False
        self._cache.write_manifest(key, self._url, files)
        return True

    def _repair(self, key: str, source: DataSource, damaged: List[StagedFile]) -> None:
        """Copy damaged files again, while other runs may use the data set."""
        names = ", ".join(file.path for file in damaged[:3])
        self._say(f"{_count(damaged)} in this host's cache, damaged: copied again ({names})")
        for file in damaged:
            target = os.path.join(self._cache.set_path(key), file.path)
            temporary = f"{self._cache.staging_path(key)}.{os.urandom(4).hex()}"
            try:
                plain = SourceFile(*file[:4])
                found = tuple(
                    self.read_block(source, plain, temporary, index)
                    for index in range(block_count(file.size))
                )
                if found != file.digests:
                    raise DataError(f"data.{self._name}: {file.path} has other content than before")
                _finish_file(temporary, plain)
                with writable(os.path.dirname(target)):
                    os.replace(temporary, target)
            finally:
                if os.path.exists(temporary):
                    os.unlink(temporary)

    # --- The copy ---------------------------------------------------------------------------------

    def _copy(
        self, key: str, source: DataSource, listing: DataListing, lock: Lock, before: str
    ) -> None:
        cache, began = self._cache, self.context.clock()
        needed = space_of(listing.files)
        cache.make_room(0, key, self._say)  # for the journal, if others have filled the disk
        journal = CopyJournal(f"{cache.staging_path(key)}.journal", cache.boot, needed)
        folder = cache.staging_path(key)
        if not journal.resume():
            cache.discard(key)
            journal.begin()
        os.makedirs(folder, exist_ok=True)
        self._take_over(before, listing.files, folder, journal)
        self._make_room(needed, key)  # of which linked files need none
        there = sum(journal.bytes_of(file) for file in listing.files)
        if there:
            self._say(f"{size_text(there)} of {size_text(listing.size)} are here already")
        copy = _Copy(self, source, listing, folder, journal, lock)
        for is_last in (False, True):
            try:
                copy.run()
                break
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if is_last or not self._make_room(needed, key, is_full=True):
                    raise self._full(needed, key) from error
        files = [StagedFile.of(file, journal.digests(file)) for file in listing.files]
        cache.complete(key, self._url, files)
        journal.close()
        seconds = max(self.context.clock() - began, 1e-3)
        moved = listing.size - there
        self._say(
            f"{_count(listing.files)}, {size_text(listing.size)} from {self._url} copied to this "
            f"host's cache in {seconds:.1f} s ({size_text(moved / seconds)}/s)"
        )

    def _make_room(self, needed: int, key: str, is_full: bool = False) -> bool:
        """Make room for so many bytes. Raises DataError if they do not fit; with `is_full`, when
        the disk was full before the room was used up, returns whether data sets were removed.
        """
        room = self._cache.make_room(needed, key, self._say, is_full)
        if is_full:
            return room.has_removed
        if room.free < needed:
            raise self._full(needed, key)
        return True

    def _full(self, needed: int, key: str) -> DataError:
        room = self._cache.room(key)
        text = f"data.{self._name}: {size_text(needed)} of {self._url} do not fit into this host's "
        if needed > room.most:
            return DataError(
                f"{text}cache, which may take {size_text(max(0, room.most))}. Use hosts with more "
                f"NVMe storage or a larger `disk`, or read less."
            )
        return DataError(
            f"{text}cache: {size_text(max(0, room.free))} are free, and other runs use the rest.",
            temporary=True,
        )

    def _take_over(
        self, before: str, files: List[SourceFile], folder: str, journal: CopyJournal
    ) -> None:
        """Link files that an older version of the data set has, too, instead of copying them.

        `before`: the key of the version that changed while this process copied it; its finished
        files are moved.
        """
        wanted = {(file.path, file.version, file.size): file for file in files if file.size}
        if before:
            self._move(before, wanted, folder, journal)
        for key in self._cache.keys_of(self._url):
            lock = self._cache.lock(key)
            try:
                if lock.share():
                    self._link(key, wanted, folder, journal)
            finally:
                lock.close()

    def _link(
        self,
        key: str,
        wanted: Dict[Tuple[str, str, int], SourceFile],
        folder: str,
        journal: CopyJournal,
    ) -> None:
        files = self._usable(key) or []
        same = [each for each in files if (each.path, each.version, each.size) in wanted]
        bad = set(find_damage(self._cache.set_path(key), same, False, self.context.check))
        for each in same:
            file = wanted[each.path, each.version, each.size]
            if each in bad or journal.is_complete(file):
                continue
            target = os.path.join(folder, each.path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                if os.path.lexists(target):
                    os.unlink(target)
                os.link(os.path.join(self._cache.set_path(key), each.path), target)
            except OSError:
                continue  # it is copied
            for index, digest in enumerate(each.digests):
                journal.add(file, index, digest)

    def _move(
        self,
        key: str,
        wanted: Dict[Tuple[str, str, int], SourceFile],
        folder: str,
        journal: CopyJournal,
    ) -> None:
        lock = self._cache.lock(key)
        try:
            old = CopyJournal(f"{self._cache.staging_path(key)}.journal", self._cache.boot, 0)
            if not lock.own() or not old.resume():
                return
            for file in wanted.values():
                path = os.path.join(self._cache.staging_path(key), file.path)
                if not old.is_complete(file) or not os.path.isfile(path):
                    continue
                target = os.path.join(folder, file.path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(path, target)
                for index, digest in enumerate(old.digests(file)):
                    journal.add(file, index, digest)
            old.close()
            self._cache.discard(key)
        finally:
            lock.close()

    def read_block(self, source: DataSource, file: SourceFile, path: str, index: int) -> str:
        """Write a block of a file to the file `path`, and return its SHA-256."""
        start = index * BLOCK
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            sink = _BlockSink(fd, start)
            source.read(file, start, min(BLOCK, file.size - start), sink)
        except DataDamaged as error:
            raise DataError(
                f"data.{self._name}: {file.path} arrived damaged, twice: {error}", temporary=True
            ) from error
        except _WriteError as error:
            raise error.cause from error
        finally:
            os.close(fd)
        return sink.hexdigest()

    def report(self, done: int, total: int, speed: float) -> None:
        """Print the progress of the copy, now and then."""
        if self._is_time_to_report():
            left = f", {(total - done) / speed:.0f} s left" if speed > 0 else ""
            self._say(
                f"{size_text(done)} of {size_text(total)}, {size_text(max(0.0, speed))}/s{left}"
            )


class _WriteError(Exception):
    """A block could not be written. It is no OSError, which a source may take for a failed request
    and repeat.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _BlockSink:
    """Writes a block into a file, from `start`, and computes its SHA-256."""

    def __init__(self, fd: int, start: int) -> None:
        self._fd, self._start = fd, start
        self._at, self._digest = start, hashlib.sha256()

    def restart(self) -> None:
        self._at, self._digest = self._start, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._digest.update(data)
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, self._at)
                self._at += written
                view = view[written:]
        except OSError as error:
            raise _WriteError(error) from error

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class _Copy:
    """Copies the missing blocks in threads."""

    def __init__(
        self,
        stager: _Stager,
        source: DataSource,
        listing: DataListing,
        folder: str,
        journal: CopyJournal,
        lock: Lock,
    ) -> None:
        self._stager, self._source, self._listing = stager, source, listing
        self._folder, self._journal, self._lock = folder, journal, lock
        self._guard = threading.Lock()
        self._error: Optional[BaseException] = None
        self._blocks: Iterator[Tuple[SourceFile, int]] = iter(())

    def run(self) -> None:
        """Copy. Raises the first error of a thread, after all threads have ended."""
        context = self._stager.context
        self._error, self._blocks = None, self._missing()
        for folder in {os.path.dirname(file.path) for file in self._listing.files}:
            os.makedirs(os.path.join(self._folder, folder), exist_ok=True)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(context.threads)]
        began, before = context.clock(), self._journal.size
        for thread in threads:
            thread.start()
        pause = 0.005
        try:
            while any(thread.is_alive() for thread in threads):
                context.wait(pause)
                pause = min(2 * pause, 0.05)
                done, seconds = self._journal.size, context.clock() - began
                self._lock.write_progress(done, self._listing.size)
                speed = (done - before) / seconds if seconds > 0 else 0.0
                self._stager.report(done, self._listing.size, speed)
        except BaseException as error:
            self._error = error
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        for file in self._listing.files:
            path = os.path.join(self._folder, file.path)
            if not file.size:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
            if os.lstat(path).st_size != file.size:
                raise DataChanged(file.path)
            _finish_file(path, file)

    def _missing(self) -> Iterator[Tuple[SourceFile, int]]:
        for file in self._listing.files:
            for index in range(block_count(file.size)):
                if not self._journal.has(file, index):
                    yield file, index

    def _work(self) -> None:
        try:
            while self._error is None:
                with self._guard:
                    block = next(self._blocks, None)
                if block is None:
                    return
                file, index = block
                path = os.path.join(self._folder, file.path)
                digest = self._stager.read_block(self._source, file, path, index)
                with self._guard:
                    self._journal.add(file, index, digest)
        except BaseException as error:
            with self._guard:
                self._error = self._error or error


def _finish_file(path: str, file: SourceFile) -> None:
    """Make a file read-only, with the time that the manifest has."""
    os.chmod(path, 0o444)
    os.utime(path, ns=(file.changed, file.changed))


def _count(files: Sequence[object]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files):,} files"
