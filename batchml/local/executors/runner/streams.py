"""A container's output: the engine's frames to lines, and what a log does not hold yet.

Standard library only: runners import it.
"""

import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from batchml.runtime.protocol.log_marks import MARK, LineSplitter

_HEADER = 8  # stream, three zeros, length
_STDERR = 2
_BLOCK = 65_536


class Demux:
    """Frames of the engine in, lines out; a line of one stream never breaks one of the other."""

    def __init__(self, escape: bool) -> None:
        self._escape = escape
        self._rest = b""
        self._splitters = (LineSplitter(escape), LineSplitter(escape))

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data if self._rest else data
        lines: list[bytes] = []
        at = 0
        while len(data) - at >= _HEADER:
            end = at + _HEADER + int.from_bytes(data[at + 4 : at + _HEADER], "big")
            if end > len(data):
                break
            lines += self._take(data[at] == _STDERR, data[at + _HEADER : end])
            at = end
        self._rest = data[at:]
        return lines

    def recorded(self) -> "Recorded":
        """One like it, for the engine's record of the same output, from its start."""
        return Recorded(self._escape)

    def _take(self, stream: bool, data: bytes) -> list[bytes]:
        return self._splitters[stream].feed(data)

    def finish(self) -> list[bytes]:
        return [line for splitter in self._splitters for line in splitter.finish()]


class Recorded(Demux):
    """The same for output that the engine has recorded, with times.

    It cuts lines of more than 16 KiB into records of one and the same time, and some versions lose
    the end of such a line: so a record of another time begins a line.
    """

    def __init__(self, escape: bool) -> None:
        super().__init__(escape)
        self._open = [b"", b""]  # the time of a record that did not end its line

    def _take(self, stream: bool, data: bytes) -> list[bytes]:
        time, _, text = data.partition(b" ")
        if self._open[stream] not in (b"", time):
            text = b"\n" + text
        self._open[stream] = b"" if text.endswith(b"\n") else time
        return super()._take(stream, text)


class Unseen:
    """Lets through those lines of a whole output that a log does not hold, each exactly once.

    Standard output and errors may be woven differently here and there. Both are walked side by
    side, so what is remembered is only by how much one is ahead of the other.
    """

    def __init__(self, held: Iterator[bytes]) -> None:
        self._held = held
        self._ahead: Counter[bytes] = Counter()  # in the log, not met in the output yet
        self._waiting: list[bytes] = []  # in the output, not met in the log yet
        self._at_end = False

    def feed(self, lines: list[bytes]) -> list[bytes]:
        new: list[bytes] = []
        for line in lines:
            mine = None if self._at_end else next(self._held, None)
            if mine == line and not self._waiting:
                continue
            if mine is not None:
                self._meet_held(mine)
            else:
                new += self.finish()
            if self._ahead[line]:
                self._ahead[line] -= 1
                continue
            del self._ahead[line]
            (new if self._at_end else self._waiting).append(line)
        return new

    def finish(self) -> list[bytes]:
        """What was met in the output alone, once the log has been read to its end."""
        for mine in self._held:
            self._meet_held(mine)
        self._at_end = True
        waiting, self._waiting = self._waiting, []
        return waiting

    def _meet_held(self, mine: bytes) -> None:
        if mine in self._waiting:
            self._waiting.remove(mine)
        else:
            self._ahead[mine] += 1


def held_lines(path: str) -> Iterator[bytes]:
    """The messages of an attempt's log as it is now, without the first one where that is ours."""
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed below)
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        for line in file:
            size -= len(line)
            if size < 0 or not line.endswith(b"\n"):
                return
            message = line[:-1].partition(b" ")[2]
            if not message.startswith(f"{MARK}host ".encode()):
                yield message


def cut_torn_line(path: str) -> None:
    """Cut off a last line without its end: its writer was killed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end = os.fstat(file).st_size
        while end:
            start = max(0, end - _BLOCK)
            newline = os.pread(file, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        os.ftruncate(file, end)
    finally:
        os.close(file)


# --- blocking calls in a thread -------------------------------------------------------------------
# Calls that take their time, beside a loop that must not wait for them.


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
