"""Run transfers of files in parallel, count their progress, and stop all after a failure."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterable, Iterator, List, NamedTuple, Tuple, TypeVar

from batchml.runtime.transfer.tree import TransferError

AT_ONCE = 8  # files; a small file spends most of its time on round trips
BATCH = 64  # files; after each batch the archive's manifest is updated

T = TypeVar("T")
R = TypeVar("R")


class ProgressState(NamedTuple):
    """How far a transfer is. `size` counts finished bytes, `moved` the transferred ones."""

    doing: str = ""
    path: str = ""
    files: int = 0
    of_files: int = 0
    size: int = 0
    of_size: int = 0
    moved: int = 0


OnProgress = Callable[[ProgressState], None]


def ignore_progress(_: ProgressState) -> None:
    """Default callback: does nothing."""


class TransferStopped(TransferError):
    """Another thread failed, or the user stopped the transfer."""


class TransferProgress:
    """Counts what the threads of a transfer have done, and notifys them to stop."""

    def __init__(self, notify: OnProgress = ignore_progress) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._now = ProgressState()

    def begin(self, doing: str, files: int, size: int) -> None:
        with self._lock:
            self._now = ProgressState(doing, "", 0, files, 0, size)
            self._notify(self._now)

    def moved(self, path: str, size: int, was_there: bool = False) -> None:
        """Count bytes of a file; `was_there`: without a transfer. Raises TransferStopped."""
        if self._stop.is_set():
            raise TransferStopped("stopped")
        with self._lock:
            now = self._now
            travelled = now.moved + (0 if was_there else size)
            self._now = now._replace(path=path, size=now.size + size, moved=travelled)
            self._notify(self._now)

    def undo(self, size: int) -> None:
        """Uncount bytes that have to be transferred again."""
        with self._lock:
            self._now = self._now._replace(size=max(0, self._now.size - size))

    def done(self, path: str, size: int = 0) -> None:
        """Count a finished file, and `size` bytes of it that were not counted yet."""
        with self._lock:
            now = self._now
            self._now = now._replace(path=path, files=now.files + 1, size=now.size + size)
            self._notify(self._now)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[List[Tuple[T, R]]]:
        """Yield the results of `work` in batches. An error in one call stops the others soon."""

        def with_item(item: T) -> Tuple[T, R]:
            return item, work(item)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for batch in _batches(items):
                    yield list(pool.map(with_item, batch))
            except BaseException:
                self._stop.set()
                raise


def _batches(items: Iterable[T]) -> Iterator[List[T]]:
    batch: List[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
