"""Folders for attempts, made before they are needed.

A new file waits for the journal of the file system, which each commit of ours keeps busy: making a
folder and a file takes 0.4 ms then, and 0.1 ms otherwise. Moving a folder does not wait. So a
thread makes them in stock, and an attempt's start only moves one to its place.
"""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

_LEAST = 32  # in stock; below that, more are made
_MOST = 96
_FILES = ("runner.json",)


class Folders:
    def __init__(self, stock: str) -> None:
        """`stock` is a folder of the same file system, which is ours alone."""
        self._path = stock
        os.makedirs(stock, 0o700, exist_ok=True)
        self._ready = deque(_left_by_an_earlier_server(stock))
        self._next = max((int(name) for name in self._ready), default=0) + 1
        self._maker = ThreadPoolExecutor(1, "folders")
        self._making: Future[None] | None = None

    def put(self, path: str) -> None:
        """See to it that the folder `path` is there. Raises OSError."""
        try:
            ready = self._ready.popleft()
        except IndexError:
            _make(path)
        else:
            try:
                os.rename(f"{self._path}/{ready}", path)
            except OSError:
                self._ready.append(ready)  # the folder is there already, or cannot be made
                _make(path)
        if len(self._ready) < _LEAST:
            self.fill()

    def fill(self) -> None:
        """Have more made, unless that is being done."""
        if self._making is None or self._making.done():
            self._making = self._maker.submit(self._fill)

    def close(self) -> None:
        self._maker.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ready) < _MOST:
            name = str(self._next)
            self._next += 1
            try:
                _make(f"{self._path}/{name}")
            except OSError:
                return  # disk full: whoever needs one will be told
            self._ready.append(name)


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    for name in _FILES:
        os.close(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _left_by_an_earlier_server(stock: str) -> Iterable[str]:
    """Those that are whole. One that is not was being made when the server was killed."""
    for name in os.listdir(stock):
        if name.isdecimal() and sorted(os.listdir(f"{stock}/{name}")) == sorted(_FILES):
            yield name
