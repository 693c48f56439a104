"""A running attempt: what its plug-ins may use, and how it is stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from _thread import get_ident
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable, Deque, Dict, List, Optional, Protocol, Tuple

from batchml.runtime.entry.output import Output
from batchml.runtime.processes import descendants, send
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store

# --- stopping -------------------------------------------------------------------------------------
# Stop signals: how the entry receives them, and how a program learns of them (`should_stop`).
#
# A signal handler only records its signal and wakes the loop, which does the rest. So it does not
# matter between which two instructions a signal comes.


STOPS = (signal.SIGTERM, signal.SIGINT)
_HEARD = (*STOPS, signal.SIGUSR1)


class StopRequested(Exception):
    """A stop signal came before the command began."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals for a child that is started meanwhile, until it calls `Signals.listen`.

    Before that, a signal would end the child unnoticed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """The signals that have come. `wake` is a descriptor that is readable after one has come."""

    def __init__(self) -> None:
        self.wake = -1
        self.stop_asked = 0  # the first signal that requested a stop
        self._pending: Deque[int] = deque()

    def listen(self) -> None:
        self.wake, wake_end = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_end, False)
        # A full pipe wakes the loop as well.
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        for number in _HEARD:
            signal.signal(number, self._record)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)  # see `signals_blocked`

    def take(self) -> List[int]:
        """The signals since the last call, in order, without SIGCHLD."""
        found = []
        while self._pending:
            found.append(self._pending.popleft())
        return found

    def check(self) -> None:
        """Raises StopRequested if a stop has been requested."""
        if self.stop_asked:
            raise StopRequested(signal.Signals(self.stop_asked).name)

    def wait_for_stop(self, seconds: float) -> bool:
        """Wait until a stop is requested, or for so long. Whether one was."""
        until = time.monotonic() + seconds
        while not self.stop_asked and time.monotonic() < until:
            select.select([self.wake], [], [], max(0.0, until - time.monotonic()))
            try:
                os.read(self.wake, 4096)
            except BlockingIOError:
                pass
        return bool(self.stop_asked)

    def ignore(self) -> None:
        """Ignore signals from here on: the exit code of this process is decided.

        Python resets handlers while it exits, and a TERM at that moment would replace the code.
        """
        for number in _HEARD:
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def _record(self, number: int, _frame: object) -> None:
        if number in STOPS and not self.stop_asked:
            self.stop_asked = number
        self._pending.append(number)


def make_stop_file(path: str) -> None:
    """Make the file that `should_stop()` checks. A program may not get the stop signal."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError:
        pass  # there is still the signal


def should_stop() -> bool:
    """True once the run is to save and stop: it was cancelled, its host will be lost, or its budget
    is spent.

    Call it between two steps; a call takes microseconds. Outside a run it is always False.

    The program must then end by itself: after the first call, SIGTERM no longer ends a program
    without a handler of its own, because it would end before it has saved. SIGKILL comes after the
    grace in any case.
    """
    path = os.environ.get("BATCHML_STOP_FILE")
    if not path:
        return False
    _survive_sigterm()
    if not os.path.exists(path):
        return False
    _ignore_sigterm()
    return True


_our_handler: Any = None


def _ignore_sigterm() -> None:
    """SIGTERM may come while Python exits, when our handler is reset already."""
    if _our_handler is not None and signal.getsignal(signal.SIGTERM) is _our_handler:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        except ValueError:
            pass  # not in the main thread


def _survive_sigterm() -> None:
    global _our_handler
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    is_first = _our_handler is None
    try:
        signal.signal(signal.SIGTERM, _do_nothing)
    except ValueError:
        return  # not in the main thread, which alone may set handlers
    _our_handler = _do_nothing
    if is_first:
        os.register_at_fork(
            before=_block_sigterm,
            after_in_parent=_unblock_sigterm,
            after_in_child=_reset_sigterm,
        )


def _do_nothing(_number: int, _frame: object) -> None:
    pass


# A forked worker does not call `should_stop`, so SIGTERM must end it. Python drops signals that
# come to a child before it has started, so the kernel holds SIGTERM back until then.
_masks: Dict[int, Any] = {}  # thread -> its mask before it forked


def _block_sigterm() -> None:
    _masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(get_ident()))


def _reset_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _our_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()


# --- attempt --------------------------------------------------------------------------------------


_FOR_OUTPUTS = 10.0  # seconds of the grace in which outputs are sent; at most a fifth of the grace
_BEFORE_LOSS = 5.0  # seconds between the KILL and the loss of the host; also the least grace


def grace_within(grace: float, left: float) -> float:
    """Seconds from TERM to KILL on a host that will be lost in `left` seconds.

    At least a few seconds, also when the announced time is over: the host is still there.
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
        self._output = output
        self._signals = signals
        self._sends_outputs = sends_outputs
        self._clock = clock
        self._stopping = False
        self._kill_at = float("inf")
        self._supervisor: Optional[int] = None
        self._makes_stop_file = True  # this process, not the supervisor, makes the stop file
        self._stop_request = ""

    def delegate_to(self, pid: int, stop_request: str, makes_stop_file: bool) -> None:
        """Signal only the supervisor of ranks, which ends the processes of all nodes itself.

        It reads from the file `stop_request` with which exit code the run is to end, and how soon.
        With `makes_stop_file` the supervisor makes the stop file after it has got the signal. If
        this process made the file, all ranks could find it, save and exit with 0 before the
        supervisor knows of the stop, and the run would end with 0.
        """
        self._supervisor, self._stop_request = pid, stop_request
        self._makes_stop_file = not makes_stop_file

    def pids(self) -> List[int]:
        return descendants(os.getpid())

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
        """Make the stop file, but send no signal: a program that checks it saves and ends."""
        if self.env.stop_file:
            make_stop_file(self.env.stop_file)

    def forward_signals(self) -> None:
        """Forward the signals that have come to every process, whatever its session."""
        for number in self._signals.take():
            if number in STOPS:
                # The sender ends the container after the grace, even if outputs are not sent yet.
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
        if self._makes_stop_file:
            self.request_stop()


def _write_stop_request(path: str, code: int, why: str, grace: float) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "grace": grace}, file)
    except OSError:
        pass  # then the supervisor takes it for a plain stop


# --- Plug-ins of an attempt -----------------------------------------------------------------------
# The loop that copies the output calls them about once a second, without threads. A plug-in that
# raises is reported in one line and removed; it never fails the run.


EVERY = 1.0  # seconds between two ticks


class AttemptPlugin(Protocol):
    """Made with `NAME(attempt)` before the command starts; the constructor may raise."""

    def tick(self, now: float) -> None:
        """Called about once a second; `now` is `time.monotonic()`. It should take milliseconds."""

    def finish(self) -> None:
        """Called once, after the command and all its processes have ended, before the end mark."""


class AttemptHandle(Protocol):
    """The attempt, as its plug-ins see it."""

    env: RuntimeEnv
    environ: Mapping[str, str]  # of the command
    store: Optional[Store]  # has the run's claims, outputs and accounts; None without a store

    def pids(self) -> List[int]:
        """The processes of the attempt that live now, parents before children."""

    def mark(self, text: str) -> None:
        """Write one line for our clients, `::batchml TEXT`. It is not counted as a line."""

    def say(self, text: str) -> None:
        """Write one line for people, which is counted."""

    def stop(self, reason: str, code: int, within: float = float("inf")) -> None:
        """Make the run save and stop: print `reason`, make the stop file, send TERM, and KILL after
        the grace, or earlier if the host will be lost `within` so many seconds. The attempt then
        exits with `code`. Later calls can only make the KILL come sooner."""


class AttemptPlugins:
    """The plug-ins of one attempt. An error of one affects neither the run nor the others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._members: List[Tuple[str, AttemptPlugin]] = []
        self._next = 0.0

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
        words = " ".join(str(error).split()) or type(error).__name__
        self._say(f"batchml: {name} failed and is off, the run continues: {words[:300]}")
