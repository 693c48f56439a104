"""Run transfers of files in parallel, count their progress, and stop all after a failure."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Callable, Iterable, Iterator, List, NamedTuple, Tuple, TypeVar

from batchml.runtime.transfer.files import ContentDamaged, OnBytes, SourceChanged
from batchml.runtime.transfer.tree import TransferError

AT_ONCE = 8  # files in parallel; a small file spends most of its time on round trips
BATCH = 64  # files, after which the archive's manifest is updated
_TRIES = 2  # for a file that changes while it is read

T = TypeVar("T")
R = TypeVar("R")


class ProgressState(NamedTuple):
    """How far a transfer is."""

    doing: str = ""  # such as "archiving"
    path: str = ""  # of the latest file
    files: int = 0  # finished ones
    of_files: int = 0  # all files
    size: int = 0  # finished bytes
    of_size: int = 0  # bytes of all files
    moved: int = 0  # transferred bytes; finished ones may have been there before


OnProgress = Callable[[ProgressState], None]


def ignore_progress(_: ProgressState) -> None:
    """Default callback: does nothing."""


class TransferStopped(TransferError):
    """Another thread failed, or the user stopped the transfer."""


class TransferProgress:
    """Counts what the threads of a transfer have done, calls `notify` with that, and stops them."""

    def __init__(self, notify: OnProgress = ignore_progress) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._now = ProgressState()

    def begin(self, doing: str, files: int, size: int) -> None:
        """Begin to count a step of `files` files with `size` bytes together."""
        with self._lock:
            self._now = ProgressState(doing, "", 0, files, 0, size)
            self._notify(self._now)

    def count(self, path: str, size: int, was_there: bool = False) -> None:
        """Count finished bytes of a file. `was_there`: they were not transferred.

        Raises TransferStopped.
        """
        if self._stop.is_set():
            raise TransferStopped("stopped")
        with self._lock:
            now = self._now
            moved = now.moved + (0 if was_there else size)
            self._now = now._replace(path=path, size=now.size + size, moved=moved)
            self._notify(self._now)

    def try_file(self, path: str, transfer: Callable[[OnBytes], R]) -> Tuple[R, int]:
        """Call `transfer` with a callback that counts bytes; call it again if the file has changed.

        Return the result and the number of counted bytes. Raises the errors of `transfer`, of which
        SourceChanged and ContentDamaged lead to the second call.
        """
        for tries_left in reversed(range(_TRIES)):
            counted = 0

            def on_bytes(size: int, was_there: bool) -> None:
                nonlocal counted
                counted += size
                self.count(path, size, was_there)

            try:
                return transfer(on_bytes), counted
            except (SourceChanged, ContentDamaged):
                self.take_back(counted)
                if not tries_left:
                    raise
        raise AssertionError("unreachable")

    def take_back(self, size: int) -> None:
        """Count bytes no longer as finished: they have to be transferred again."""
        with self._lock:
            self._now = self._now._replace(size=max(0, self._now.size - size))

    def finish_file(self, path: str, size: int = 0, files: int = 1) -> None:
        """Count a finished file, and `size` bytes of it that were not counted yet.

        `files`: it is the last one of so many.
        """
        with self._lock:
            now = self._now
            self._now = now._replace(path=path, files=now.files + files, size=now.size + size)
            self._notify(self._now)

    def each(
        self, work: Callable[[T], R], items: Iterable[T], at_once: int = 0
    ) -> Iterator[List[Tuple[T, R]]]:
        """Call `work` for each item in parallel, and yield the items with their results in batches.

        An error in one call stops the other calls soon.
        """

        def with_item(item: T) -> Tuple[T, R]:
            return item, work(item)

        with ThreadPoolExecutor(at_once or AT_ONCE) as pool:
            try:
                for batch in _batches(items):
                    yield list(pool.map(with_item, batch))
            except BaseException:
                self._stop.set()
                raise


def _batches(items: Iterable[T]) -> Iterator[List[T]]:
    iterator = iter(items)
    while True:
        batch = list(islice(iterator, BATCH))
        if not batch:
            return
        yield batch
