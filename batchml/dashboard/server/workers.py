"""Threads for the questions of pages, which may take as long as AWS takes.

They end with the process, whatever they wait for: Ctrl-C does not wait for AWS. The threads of
`concurrent.futures` would keep it. An answer that takes long is asked for again, so that slow
questions do not hold the six connections that a browser has for one server.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_KEPT = 50  # answers that nobody has fetched
_NAME_SIZE = 64  # characters of the name of a question


class Workers:
    """At most `most` daemon threads, which are started as they are needed."""

    def __init__(self, most: int, name: str = "page") -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._threads = self._pending = 0

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Do this on a thread, after what was submitted before."""
        future: Future[T] = Future()
        with self._lock:
            self._work.put((future, work))
            self._pending += 1
            if self._threads < min(self._pending, self._most):
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    async def run(self, work: Callable[[], T]) -> T:
        """The same in a loop: its result, or the error that it raises."""
        return await asyncio.wrap_future(self.submit(work))

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, work
            with self._lock:
                self._pending -= 1


class Questions:
    """Answers that take longer than one request: the page asks again with the question's name."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds for which the first request waits; later ones do not wait."""
        self._patience = patience
        self._asked: dict[tuple[str, str], asyncio.Future[Any]] = {}

    async def answer(self, name: str, about: str, ask: Callable[[], Any]) -> Any:
        """The answer, or None if it is not there yet. `ask` makes a coroutine that never raises.

        `name` is chosen by the page; `about` is what it asks for.
        """
        key = (name[:_NAME_SIZE], about)
        known = self._asked.get(key)
        if known is None:
            known = self._asked[key] = asyncio.ensure_future(ask())
            for each in list(self._asked)[:-_KEPT]:
                if self._asked[each].done():
                    del self._asked[each]
            await asyncio.wait({known}, timeout=self._patience)
        if not known.done():
            return None
        self._asked.pop(key, None)
        return known.result()
