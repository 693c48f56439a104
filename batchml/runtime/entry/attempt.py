"""One attempt while it runs: what its companions are given, and how it is asked to stop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from typing import Callable, List, Optional

from batchml.runtime.entry.output import Output
from batchml.runtime.entry.stopping import STOPS, Signals, make_stop_file
from batchml.runtime.processes import descendants, send
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store

_SENDING = 10.0  # seconds of the grace that are kept for the outputs, or a fifth of it
_LEAVING = 5.0  # the same of the time that a host has left; but so much is given in any case


def grace_within(grace: float, left: float) -> float:
    """Seconds from TERM to KILL on a host that is gone in `left` seconds.

    One that should be gone already is not: whatever its clock says, a few seconds may do.
    """
    return min(grace, max(left - _LEAVING, _LEAVING))


class Running:
    """The `Attempt` of attempt.py."""

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
        self.forced: Optional[int] = None  # the exit code, when a companion ended the run
        self._output = output
        self._signals = signals
        self._sends_outputs = sends_outputs
        self._clock = clock
        self._stopping = False
        self._kill_at = float("inf")
        self._leader: Optional[int] = None
        self._makes_stop_file = True  # this process does; else the supervisor
        self._asked = ""

    def led_by(self, pid: int, asked: str, makes_stop_file: bool) -> None:
        """The command is a supervisor's: it alone is signalled, and tells its processes, and those
        of the other nodes, itself. In the file `asked` it finds with what code the run is to end,
        and how soon. `makes_stop_file`: the supervisor makes the stop file when it has heard the
        signal. If this process made the file, all ranks could find it, save and end with 0 before
        the supervisor knows of the stop, and the run would end with 0.
        """
        self._leader, self._asked = pid, asked
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
            if self._asked:
                _write_down(self._asked, code, reason, grace)
        self._begin_stop(grace)
        if is_first:
            self._tell(signal.SIGTERM)

    def ask(self) -> None:
        """Let the program end by itself, if it looks: no signal is sent."""
        if self.env.stop_file:
            make_stop_file(self.env.stop_file)

    def hear(self) -> None:
        """Pass on the signals that have come, to every process whatever its session."""
        for number in self._signals.take():
            if number in STOPS:
                # Whoever sent it ends the container after the grace, outputs or not.
                keep = min(_SENDING, self.env.grace / 5) if self._sends_outputs else -float("inf")
                self._begin_stop(self.env.grace - keep)
            self._tell(number)

    def until_kill(self) -> float:
        """Seconds; infinite while no end is due."""
        return max(0.0, self._kill_at - self._clock())

    def kill_when_due(self) -> None:
        if self._clock() >= self._kill_at:
            send(self.pids(), signal.SIGKILL)

    def _tell(self, number: int) -> None:
        pids = self.pids()
        send(pids if self._leader is None else [self._leader], number)
        if number in STOPS:
            send(pids, signal.SIGCONT)  # who is stopped would not hear it until the KILL

    def _begin_stop(self, grace: float) -> None:
        self._stopping = True
        self._kill_at = min(self._kill_at, self._clock() + grace)
        if self._makes_stop_file:
            self.ask()


def _write_down(path: str, code: int, why: str, grace: float) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "grace": grace}, file)
    except OSError:
        pass  # then it is a plain stop


# --- plug-ins of an attempt -----------------------------------------------------------------------
# What goes along with an attempt while it runs: metrics, use of the machine, the money guard.
#
# A companion looks in about once a second, from the loop that copies the output: no threads. One
# that fails is reported in one line and left out from then on; it never fails the run.


try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]

EVERY = 1.0  # seconds between two ticks


class Companion(Protocol):
    """Made with `NAME(attempt)` before the command starts, which it may refuse by raising."""

    def tick(self, now: float) -> None:
        """Called about once a second; `now` is `time.monotonic()`. It should take milliseconds."""

    def finish(self) -> None:
        """Called once, after the command and all it left behind have ended, before the end mark."""


class Attempt(Protocol):
    """What a companion is given: the attempt that it goes along with."""

    env: RuntimeEnv
    environ: Mapping[str, str]  # what the command sees
    store: Optional[Store]  # where the run's claims, outputs and accounts are; None without one

    def pids(self) -> List[int]:
        """The processes of the attempt that live now, parents before children."""

    def mark(self, text: str) -> None:
        """Write one line for our clients, `::batchml TEXT`. Not counted among the lines."""

    def say(self, text: str) -> None:
        """Write one line for people, which is counted."""

    def stop(self, reason: str, code: int, within: float = float("inf")) -> None:
        """Ask the run to save and stop: say `reason`, make the stop file, TERM, and KILL after the
        grace, or so that the end is told `within` so many seconds, after which the host is gone.
        The attempt then exits with `code`. Later calls can only bring the KILL forward."""


class Companions:
    """Those of one attempt, each cut off from the run and from the others."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._members: List[Companion] = []
        self._next = 0.0

    def add(self, name: str, make: Callable[[], Companion]) -> None:
        """Make one, unless that fails."""
        try:
            self._members.append(make())
        except Exception as error:
            self._fell_out(name, error)

    def until_tick(self, now: float) -> float:
        """Seconds until the next tick is due."""
        return max(0.0, self._next - now)

    def tick(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + EVERY
        for member in list(self._members):
            try:
                member.tick(now)
            except Exception as error:
                self._members.remove(member)
                self._fell_out(type(member).__name__.lower(), error)

    def finish(self) -> None:
        members, self._members = self._members, []
        for member in members:
            try:
                member.finish()
            except Exception as error:
                self._fell_out(type(member).__name__.lower(), error)

    def __bool__(self) -> bool:
        return bool(self._members)

    def _fell_out(self, name: str, error: Exception) -> None:
        words = " ".join(str(error).split()) or type(error).__name__
        self._say(f"batchml: {name} is left out, the run goes on: {words[:300]}")
