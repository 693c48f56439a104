"""Calls that take their time, beside a loop that must not wait for them."""

import os
import select
import threading
from collections.abc import Callable
from typing import Any

_READ = 1 << 18


class Aside:
    """A call that takes its time, in a thread; its pipe is readable when there is news.

    `say` hands a text over; the end of the pipe is the end of the call.
    """

    def __init__(self, work: Callable[["Aside"], Any]) -> None:
        self.said: list[str] = []
        self.abandoned = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.pipe, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[["Aside"], Any]) -> None:
        try:
            self._value = work(self)
        except BaseException as error:
            self._error = error
        finally:
            os.close(self._end)

    def say(self, text: str) -> None:
        self.said.append(text)
        self.pass_on(b".")

    def last_said(self) -> str:
        text = self.said[-1]
        self.said.clear()
        return text

    def pass_on(self, data: bytes) -> None:
        while data and not self.abandoned:
            data = data[os.write(self._end, data) :]

    def close(self) -> None:
        """Whoever writes still finds the pipe closed, and ends."""
        self.abandoned = True
        os.close(self.pipe)

    @property
    def error(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def read_now(fd: int) -> bytes | None:
    """What can be read now; None when that is nothing yet, empty at the end."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def read_next(fd: int) -> bytes:
    """What comes next; nothing at the end."""
    select.select([fd], [], [])
    return read_now(fd) or b""
