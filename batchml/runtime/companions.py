"""What goes along with an attempt while it runs: metrics, use of the machine, the money guard.

A companion looks in about once a second, from the loop that copies the output: no threads. One that
fails is told of in one line and left out from then on; it never fails the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable, List, Optional

from batchml.runtime.env import RuntimeEnv
from batchml.runtime.store import Store

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
