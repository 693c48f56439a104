"""A container's output: decode the engine's frames, and find lines that the log lacks.

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


class FrameDecoder:
    """Decodes frames of the engine to lines; lines of one stream never split lines of the other."""

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

    def recorded(self) -> "RecordedFrameDecoder":
        """A decoder like this one for the engine's record of the same output, from its start."""
        return RecordedFrameDecoder(self._escape)

    def _take(self, stream: bool, data: bytes) -> list[bytes]:
        return self._splitters[stream].feed(data)

    def finish(self) -> list[bytes]:
        return [line for splitter in self._splitters for line in splitter.finish()]


class RecordedFrameDecoder(FrameDecoder):
    """Decodes output that the engine has recorded, with times.

    The engine splits lines of more than 16 KiB into records of the same time, and some versions
    lose the end of such a line: so a record with another time begins a line.
    """

    def __init__(self, escape: bool) -> None:
        super().__init__(escape)
        self._open = [b"", b""]  # the time of a record without the end of its line

    def _take(self, stream: bool, data: bytes) -> list[bytes]:
        time, _, text = data.partition(b" ")
        if self._open[stream] not in (b"", time):
            text = b"\n" + text
        self._open[stream] = b"" if text.endswith(b"\n") else time
        return super()._take(stream, text)


class UnloggedLines:
    """Filters the lines of the whole output: passes lines that the log lacks, each exactly once.

    Standard output and errors may be interleaved differently in both. Both are read in parallel, so
    that only their difference is kept in memory.
    """

    def __init__(self, logged: Iterator[bytes]) -> None:
        self._logged = logged
        self._only_logged: Counter[bytes] = Counter()  # in the log, not in the output so far
        self._only_output: list[bytes] = []  # in the output, not in the log so far
        self._at_end = False

    def feed(self, lines: list[bytes]) -> list[bytes]:
        new: list[bytes] = []
        for line in lines:
            logged = None if self._at_end else next(self._logged, None)
            if logged == line and not self._only_output:
                continue
            if logged is not None:
                self._match_logged(logged)
            else:
                new += self.finish()
            if self._only_logged[line]:
                self._only_logged[line] -= 1
                continue
            del self._only_logged[line]
            (new if self._at_end else self._only_output).append(line)
        return new

    def finish(self) -> list[bytes]:
        """The lines that only the output has, once the log has been read to its end."""
        for logged in self._logged:
            self._match_logged(logged)
        self._at_end = True
        waiting, self._only_output = self._only_output, []
        return waiting

    def _match_logged(self, logged: bytes) -> None:
        if logged in self._only_output:
            self._only_output.remove(logged)
        else:
            self._only_logged[logged] += 1


def logged_lines(path: str) -> Iterator[bytes]:
    """The messages in an attempt's log, without the first line if that is batchml's."""
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


# --- Blocking calls in a thread -------------------------------------------------------------------

_READ = 1 << 18


class BackgroundCall:
    """A call in a thread; its pipe is readable when there is news.

    `report` reports progress; the end of the pipe is the end of the call.
    """

    def __init__(self, work: Callable[["BackgroundCall"], Any]) -> None:
        self.reports: list[str] = []
        self.abandoned = False
        self._value: Any = None
        self._error: BaseException | None = None
        self.pipe, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[["BackgroundCall"], Any]) -> None:
        try:
            self._value = work(self)
        except BaseException as error:
            self._error = error
        finally:
            os.close(self._end)

    def report(self, text: str) -> None:
        self.reports.append(text)
        self.pass_on(b".")

    def last_report(self) -> str:
        text = self.reports[-1]
        self.reports.clear()
        return text

    def pass_on(self, data: bytes) -> None:
        while data and not self.abandoned:
            data = data[os.write(self._end, data) :]

    def close(self) -> None:
        """Close the pipe: a thread that still writes finds it closed, and ends."""
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
    """The bytes that can be read now; None when there are none yet, b"" at the end."""
    try:
        return os.read(fd, _READ)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def read_next(fd: int) -> bytes:
    """The next bytes; b"" at the end."""
    select.select([fd], [], [])
    return read_now(fd) or b""
