"""An attempt in its runner: the link to the server, its output streams, and requests to stop.

Standard library only, few imports: a first attempt waits for the runner to start.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from batchml import __version__
from batchml.local.executors.runner.files import AttemptLog, RecordFile, until_it_works
from batchml.runtime.processes import signal_file, signals_in
from batchml.runtime.protocol.log_marks import MARK, LineSplitter

VERSION = f"{__version__}/4"  # of the runner's code, and of the messages between it and the server
INLINE = 32_768  # bytes of a message; a larger spec comes in an anonymous file beside it
HOST_LOST = "Host EC2 (instance this-machine) terminated: "  # begins the reason, in AWS's words
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)  # that a runner handles
_FD_BYTES = socket.CMSG_SPACE(2 * 4)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT)


class AttemptWithdrawn(Exception):
    """This runner must not start the program of an attempt.

    The text names what this machine lacks for it; empty when the server has withdrawn the attempt
    or has ended.
    """


class AttemptKind(Protocol):
    """A way to run attempts: as processes, or as containers.

    `run` returns the exit record without `stopped_at` and `log`. It calls
    `AttemptIo.wait_to_begin` before it starts the program, and raises AttemptWithdrawn.

    `to_delete` is a folder that is deleted once the end has been reported.

    `keeps_process`: the only process that is left waits for another attempt. `rest` ends it.
    """

    to_delete: str

    @property
    def keeps_process(self) -> bool: ...
    def rest(self) -> None: ...
    def run(self, spec: dict[str, Any], io: AttemptIo) -> dict[str, Any]: ...
    def close(self) -> None: ...


class ServerLink:
    """Messages of the server and signals of the system. `wake` is readable when one has come."""

    def __init__(self, server: socket.socket) -> None:
        self.server: socket.socket | None = server
        self._socket = server.fileno()
        self._signals = signal_file(*SIGNALS)
        self._epoll = select.epoll(2)
        self._epoll.register(self._signals, select.EPOLLIN)
        self._epoll.register(self._socket, select.EPOLLIN)
        self.wake = self._epoll.fileno()
        self.children = 0  # grows when SIGCHLD comes
        self.terminated = False
        self.killed = False
        self.begun: set[str] = set()
        self.withdrawn: set[str] = set()
        self.stops: set[str] = set()
        self.kills: set[str] = set()
        self.attempts: list[tuple[dict[str, Any], list[int]]] = []

    def drain(self, timeout: float | None = 0) -> bool:
        """Receive everything that has come; False for nothing within `timeout`. None: wait for
        something.
        """
        ready = self._epoll.poll(timeout)
        for source, _ in ready:
            if source == self._signals:
                received = signals_in(self._signals)
                self.children += signal.SIGCHLD in received
                self.terminated |= signal.SIGTERM in received
                self.killed |= signal.SIGUSR1 in received
            else:
                self._receive()
        return bool(ready)

    def _receive(self) -> None:
        while self.server is not None:
            try:
                data, ancillary, _, _ = self.server.recvmsg(
                    INLINE + 1024, _FD_BYTES, _RECEIVE_FLAGS
                )
            except BlockingIOError:
                return
            except ConnectionError:
                data, ancillary = b"", []
            if not data:
                self._epoll.unregister(self._socket)
                self.server.close()
                self.server = None
                return
            message = json.loads(data)
            if "folder" in message:
                self.attempts.append((message, _descriptors(ancillary)))
                return  # the next attempt comes only after the end of this one
            if "begin" in message:
                self.begun.add(message["begin"])
            elif "withdraw" in message:
                self.withdrawn.add(message["withdraw"])
            elif "stop" in message:
                self.stops.add(message["stop"])
            elif "kill" in message:
                self.kills.add(message["kill"])

    def forget(self, task_id: str) -> None:
        for tasks in (self.begun, self.withdrawn, self.stops, self.kills):
            tasks.discard(task_id)

    def send(self, message: dict[str, Any], *, wait: bool = False) -> None:
        """Send a message, if the server lives. Without `wait` the message is dropped if the socket
        is full.
        """
        if self.server is None:
            return
        try:
            self.server.send(json.dumps(message).encode(), 0 if wait else _SEND_FLAGS)
        except OSError:
            pass  # the server has ended, or it is slow and reads the files


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        int.from_bytes(data[at : at + 4], sys.byteorder)
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for at in range(0, len(data) // 4 * 4, 4)
    ]


class AttemptIo:
    """The log, the record and the server of one attempt, and the request to stop it.

    `stopping_since` is on the monotonic clock; minus infinity for a stop without a grace period.
    `wake` is readable when a message or a signal has come; `drain` receives it. `children` grows
    when children have ended. `while_waiting` is called while a write waits for space on a full
    disk.

    `is_quick`: the server counts the attempt as prepared already.
    """

    def __init__(
        self,
        link: ServerLink,
        folder: str,
        task_id: str,
        record: RecordFile,
        is_quick: bool = False,
    ) -> None:
        self._is_quick = is_quick
        self.folder = folder
        self.wake = link.wake
        self.stopping_since: float | None = None
        self.while_waiting: Callable[[], object] = lambda: None
        self._link = link
        self._task_id = task_id
        self._record = record
        self._log = AttemptLog(record.folder, self._wait)
        self._note_stop()

    @property
    def children(self) -> int:
        return self._link.children

    def drain(self) -> None:
        self._link.drain()
        self._note_stop()

    def wait_to_begin(self) -> None:
        """Return once the program may start, or a stop is requested. Raises AttemptWithdrawn."""
        link, task_id = self._link, self._task_id
        if not self._is_quick and task_id not in link.begun:
            link.send({"task_id": task_id, "prepared": True}, wait=True)
        while task_id not in link.begun:
            if link.server is None or task_id in link.withdrawn:
                raise AttemptWithdrawn
            if self.stopping_since is not None:
                return
            link.drain(None)
            self._note_stop()
        self._record.note_begun()

    def write(self, lines: list[bytes]) -> None:
        """Append lines to the log, waiting while the disk is full.

        Once the log has reached the largest file size, the program is stopped, and further output
        is lost.
        """
        if lines:
            self._log.must_persist = True
            self._log.write(lines)
        if self._log.full and self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def write_preamble(self, text: str) -> None:
        """Write the first line of the log, which comes from batchml, unless `text` is empty."""
        if text and self._log.is_empty:
            self._log.write([text.encode("utf-8", "replace")])

    def report_progress(self, text: str) -> None:
        """Report the current step of the preparation."""
        try:
            with open(os.path.join(self.folder, "progress"), "ab") as file:
                file.write(text.encode("utf-8", "replace") + b"\n")
        except OSError:
            return  # disk full: progress is only for display
        self._link.send({"task_id": self._task_id, "progress": text})

    def report_started(self, at_ms: int, address: str = "") -> None:
        """Report that the program runs, with the address of its own if it has one.

        A caller may omit this for a program that has ended already.
        """
        until_it_works(
            lambda: self._record.add({"started_at": at_ms, "address": address}), self._wait
        )
        self._link.send({"task_id": self._task_id, "started": at_ms, "address": address})

    def close(self) -> tuple[dict[str, Any], str]:
        """Close the log. Returns its proof, and a reason if the log itself has stopped the
        program.
        """
        if self.stopping_since == -math.inf:
            self._log_injected_fault()
        return self._log.close(), self._log.full

    def _log_injected_fault(self) -> None:
        """Name the fault in the log, if one was injected, so that nobody takes it for a real
        one.
        """
        try:
            with open(os.path.join(self.folder, "rehearsal"), "rb") as file:
                self.write([file.read()])
        except OSError:
            pass

    def _wait(self) -> None:
        self.drain()
        self.while_waiting()

    def _note_stop(self) -> None:
        link, task_id = self._link, self._task_id
        if link.killed or task_id in link.kills or task_id in link.withdrawn:
            self.stopping_since = -math.inf
        elif self.stopping_since is None and (link.terminated or task_id in link.stops):
            self.stopping_since = time.monotonic()


# --- The output of a container --------------------------------------------------------------------

_HEADER = 8  # bytes in the header of a frame: stream number, three zeros, length
_STDERR = 2


class EngineFrames:
    """Decodes the engine's frames: (whether it is standard error, bytes)."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bool, bytes]]:
        self._rest += data
        while len(self._rest) >= _HEADER:
            end = _HEADER + int.from_bytes(self._rest[4:_HEADER], "big")
            if len(self._rest) < end:
                return
            content, is_error = bytes(self._rest[_HEADER:end]), self._rest[0] == _STDERR
            del self._rest[:end]
            yield is_error, content


class FrameDecoder:
    """Decodes frames of the engine to lines; lines of one stream never split lines of the other."""

    def __init__(self, escape: bool) -> None:
        self._escape = escape
        self._frames = EngineFrames()
        self._splitters = (LineSplitter(escape), LineSplitter(escape))

    def feed(self, data: bytes) -> list[bytes]:
        frames = self._frames.feed(data)
        return [line for is_error, content in frames for line in self._take(is_error, content)]

    def recorded(self) -> RecordedFrameDecoder:
        """A decoder like this one for the engine's record of the same output, from its start."""
        return RecordedFrameDecoder(self._escape)

    def _take(self, is_error: bool, data: bytes) -> list[bytes]:
        return self._splitters[is_error].feed(data)

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

    def _take(self, is_error: bool, data: bytes) -> list[bytes]:
        time, _, text = data.partition(b" ")
        if self._open[is_error] not in (b"", time):
            text = b"\n" + text
        self._open[is_error] = b"" if text.endswith(b"\n") else time
        return super()._take(is_error, text)


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
    """A call in a thread. Its pipe is readable when the call has reported progress or passed on
    data, and ends when the call ends.
    """

    def __init__(self, work: Callable[[BackgroundCall], Any]) -> None:
        self.reports: list[str] = []
        self.abandoned = False
        self.error: BaseException | None = None
        self._value: Any = None
        self.pipe, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[BackgroundCall], Any]) -> None:
        try:
            self._value = work(self)
        except BaseException as error:
            self.error = error
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

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
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
