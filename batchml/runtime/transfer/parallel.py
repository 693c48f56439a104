"""Some at a time, with an account of how far they are; what ends one soon ends all."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterable, Iterator, List, NamedTuple, Tuple, TypeVar

from batchml.runtime.transfer.tree import CarryError

AT_ONCE = 8  # files; a small one is mostly waiting
ROUND = 64  # files; after each the account of what was sent is written

T = TypeVar("T")
R = TypeVar("R")


class Progress(NamedTuple):
    """How far a transfer is; `moved` are the bytes that travelled, `size` those that are done."""

    doing: str = ""
    path: str = ""
    files: int = 0
    of_files: int = 0
    size: int = 0
    of_size: int = 0
    moved: int = 0


Tell = Callable[[Progress], None]


def quiet(_: Progress) -> None:
    """Nobody looks."""


class Stopped(CarryError):
    """Another thread failed, or the user has stopped it."""


class Account:
    """What is done, for those who look; and the word to stop, for those who work."""

    def __init__(self, tell: Tell = quiet) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._now = Progress()

    def begin(self, doing: str, files: int, size: int) -> None:
        with self._lock:
            self._now = Progress(doing, "", 0, files, 0, size)
            self._tell(self._now)

    def moved(self, path: str, size: int, was_there: bool = False) -> None:
        """So many bytes of a file are done. Raises Stopped."""
        if self._stop.is_set():
            raise Stopped("stopped")
        with self._lock:
            now = self._now
            travelled = now.moved + (0 if was_there else size)
            self._now = now._replace(path=path, size=now.size + size, moved=travelled)
            self._tell(self._now)

    def took_back(self, size: int) -> None:
        """Those bytes have to travel again."""
        with self._lock:
            self._now = self._now._replace(size=max(0, self._now.size - size))

    def done(self, path: str, size: int = 0) -> None:
        """A file is done; `size` of its bytes without a word so far."""
        with self._lock:
            now = self._now
            self._now = now._replace(path=path, files=now.files + 1, size=now.size + size)
            self._tell(self._now)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[List[Tuple[T, R]]]:
        """The results of `work`, a round at a time. What one raises ends the others soon."""

        def both(item: T) -> Tuple[T, R]:
            return item, work(item)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for some in _rounds(items):
                    yield list(pool.map(both, some))
            except BaseException:
                self._stop.set()
                raise


def _rounds(items: Iterable[T]) -> Iterator[List[T]]:
    some: List[T] = []
    for item in items:
        some.append(item)
        if len(some) == ROUND:
            yield some
            some = []
    if some:
        yield some
