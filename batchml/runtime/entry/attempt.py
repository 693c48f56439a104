"""A running attempt: its log, how it is stopped, and its plug-ins."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Callable, Deque, List, Optional, Protocol, Tuple

from batchml.runtime.entry.stopping import STOPS, Signals, make_stop_file
from batchml.runtime.processes import descendants, send
from batchml.runtime.protocol.log_marks import MARK, error_line
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store

_FOR_OUTPUTS = 10.0  # seconds of the grace in which outputs are sent; at most a fifth of the grace
_NOTICE = b"batchml: "  # begins the lines of the ranks' supervisor
_LAST_LINES = 40  # lines of the program that are kept, for the cause of its end
_BEFORE_LOSS = 5.0  # seconds between the KILL and the loss of the host; also the least grace


class Output:
    """The log of one attempt: lines of program and runtime, which are counted, and marks."""

    def __init__(self, stream: BinaryIO, progress_every: float) -> None:
        self._stream = stream
        self._every = progress_every
        self._last = time.monotonic()
        self.lines = 0
        self.last_output = self._last  # when the program printed its last line
        self.notice = ""  # the last line of the ranks' supervisor since then
        self.last_lines: Deque[bytes] = deque(maxlen=_LAST_LINES)  # of the program
        # Called with the lines of the program, but not with the runtime's.
        self.listener: Optional[Callable[[Sequence[bytes]], None]] = None

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines of the program."""
        self._put(lines)
        self.last_lines.extend(lines[-_LAST_LINES:])
        if any(not line.startswith(_NOTICE) for line in lines):
            self.last_output, self.notice = self._last, ""
        elif lines:
            self.notice = lines[-1][len(_NOTICE) :].decode("utf-8", "replace")
        if lines and self.listener is not None:
            self.listener(lines)

    def _put(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._stream.write(b"".join(line + b"\n" for line in lines))
            self._stream.flush()
            self.lines += len(lines)
            self._last = time.monotonic()

    def until_progress(self) -> float:
        """Seconds until a progress bar is printed as a line, if no line comes before."""
        return max(0.0, self._last + self._every - time.monotonic())

    def say(self, text: str) -> None:
        """Write one line of the runtime for people."""
        self._put([" ".join(text.splitlines()).encode("utf-8", "replace")])

    def mark(self, text: str) -> None:
        """Write a mark: one line for batchml's clients, which never print it."""
        line = MARK + " ".join(text.splitlines())
        self._stream.write(line.encode("utf-8", "replace") + b"\n")
        self._stream.flush()


def grace_within(grace: float, left: float) -> float:
    """Seconds from TERM to KILL on a host that will be lost in `left` seconds.

    These are at least a few seconds, even if the announced time is over: the host still works.
    """
    return min(grace, max(left - _BEFORE_LOSS, _BEFORE_LOSS))


class RunningAttempt:
    """The attempt while its command runs. It implements `AttemptHandle`."""

    def __init__(
        self,
        env: RuntimeEnv,
        environ: Mapping[str, str],
        output: Output,
        signals: Signals,
        store: Optional[Store],
        sends_outputs: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.env = env
        self.environ = environ
        self.store = store
        self.forced: Optional[int] = None  # the exit code, if a plug-in ended the run
        self.code: Optional[int] = None  # the command's exit code, once it has ended
        self._output = output
        self._signals = signals
        self._sends_outputs = sends_outputs
        self._clock = clock
        self._stopping = False
        self._kill_at = float("inf")
        self._supervisor: Optional[int] = None
        self._entry_makes_stop_file = True  # False if the supervisor makes it
        self._stop_request = ""  # the file that tells the supervisor how the run is to end

    def delegate_to(self, pid: int, stop_request: str, makes_stop_file: bool) -> None:
        """Signal only the supervisor of ranks, which ends the processes of all nodes itself.

        The supervisor reads from the file `stop_request` with which exit code the run is to end,
        and how soon. With `makes_stop_file` the supervisor makes the stop file after it has got the
        signal. If this process made the file, all ranks could find it, save and exit with 0 before
        the supervisor knows of the stop, and the run would end with 0.
        """
        self._supervisor, self._stop_request = pid, stop_request
        self._entry_makes_stop_file = not makes_stop_file

    def pids(self) -> List[int]:
        return descendants(os.getpid())

    @property
    def last_output(self) -> float:
        return self._output.last_output

    @property
    def notice(self) -> str:
        return self._output.notice

    def last_lines(self) -> List[str]:
        return [line.decode("utf-8", "replace") for line in self._output.last_lines]

    def mark(self, text: str) -> None:
        self._output.mark(text)

    def say(self, text: str) -> None:
        self._output.say(text)

    def stop(self, reason: str, code: int, within: float = float("inf")) -> None:
        grace, is_first = grace_within(self.env.grace, within), not self._stopping
        if is_first:
            self.forced = code
            self.say(f"batchml: {reason}")
            if self._stop_request:
                _write_stop_request(self._stop_request, code, reason, grace)
        self._begin_stop(grace)
        if is_first:
            self._signal(signal.SIGTERM)

    def request_stop(self) -> None:
        """Make the stop file, but send no signal: a program that checks the file saves and ends."""
        if self.env.stop_file:
            make_stop_file(self.env.stop_file)

    def forward_signals(self) -> None:
        """Forward the signals that have come to every process, whatever its session."""
        for number in self._signals.take():
            if number in STOPS:
                # The sender of the signal ends the container after the grace, even if outputs are
                # not sent yet.
                time_for_outputs = min(_FOR_OUTPUTS, self.env.grace / 5)
                limit = self.env.grace - time_for_outputs if self._sends_outputs else float("inf")
                self._begin_stop(limit)
            self._signal(number)

    def until_kill(self) -> float:
        """Seconds until the KILL; infinite while no stop was requested."""
        return max(0.0, self._kill_at - self._clock())

    def kill_when_due(self) -> None:
        if self._clock() >= self._kill_at:
            send(self.pids(), signal.SIGKILL)

    def _signal(self, number: int) -> None:
        pids = self.pids()
        send(pids if self._supervisor is None else [self._supervisor], number)
        if number in STOPS:
            send(pids, signal.SIGCONT)  # a stopped process would get nothing before the KILL

    def _begin_stop(self, grace: float) -> None:
        self._stopping = True
        self._kill_at = min(self._kill_at, self._clock() + grace)
        if self._entry_makes_stop_file:
            self.request_stop()


def _write_stop_request(path: str, code: int, why: str, grace: float) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "grace": grace}, file)
    except OSError:
        pass  # the supervisor then ends the run as after any other signal


# --- Plug-ins of an attempt -----------------------------------------------------------------------
# The loop that copies the output calls the plug-ins about once a second, without threads. A plug-in
# that raises is reported in one line and removed; it never fails the run.


EVERY = 1.0  # seconds between two ticks


class AttemptPlugin(Protocol):
    """A task of the runtime while the command runs. Its constructor may raise."""

    def tick(self, now: float) -> None:
        """Called about once a second; `now` is `time.monotonic()`. It should take milliseconds."""

    def finish(self) -> None:
        """Called once, after the command and all its processes have ended, before the end mark."""


class AttemptHandle(Protocol):
    """The part of `RunningAttempt` that plug-ins may use."""

    env: RuntimeEnv
    environ: Mapping[str, str]  # the variables of the command
    store: Optional[Store]  # has the run's claims, outputs and spent budget; None without a store

    @property
    def last_output(self) -> float:
        """When the program printed its last line, in seconds of CLOCK_MONOTONIC."""

    @property
    def notice(self) -> str:
        """The last line of the ranks' supervisor, if the program has printed nothing since then."""

    def pids(self) -> List[int]:
        """The processes of the attempt that live now, parents before children."""

    def mark(self, text: str) -> None:
        """Write a mark `::batchml TEXT` for batchml's clients. It is not counted as a line."""

    def say(self, text: str) -> None:
        """Write one line for people, which is counted."""

    def stop(self, reason: str, code: int, within: float = float("inf")) -> None:
        """Make the run save and stop: print `reason`, make the stop file, send TERM, and KILL after
        the grace, or earlier if the host will be lost `within` so many seconds. The attempt then
        exits with `code`. Later calls can only make the KILL come sooner.
        """


class AttemptPlugins:
    """The plug-ins of one attempt. An error in one affects neither the run nor the others."""

    def __init__(self, say: Callable[[str], None], first: float = 0.0) -> None:
        """`first`: when the first tick is due, in seconds of `time.monotonic()`."""
        self._say = say
        self._members: List[Tuple[str, AttemptPlugin]] = []
        self._next = first

    def add(self, name: str, make: Callable[[], AttemptPlugin]) -> None:
        """Make a plug-in, unless its constructor raises."""
        try:
            self._members.append((name, make()))
        except Exception as error:
            self._report(name, error)

    def until_tick(self, now: float) -> float:
        """Seconds until the next tick is due."""
        return max(0.0, self._next - now)

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + EVERY
        for name, member in list(self._members):
            try:
                member.tick(now)
            except Exception as error:
                self._members.remove((name, member))
                self._report(name, error)

    def finish(self) -> None:
        members, self._members = self._members, []
        for name, member in members:
            try:
                member.finish()
            except Exception as error:
                self._report(name, error)

    def __bool__(self) -> bool:
        return bool(self._members)

    def _report(self, name: str, error: Exception) -> None:
        self._say(f"batchml: {name} failed and is off, the run continues: {error_line(error)}")
