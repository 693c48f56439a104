"""The messages of one attempt at a trial, on their way to the sweep's inbox."""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

from batchml.runtime import messages
from batchml.runtime.judge import Decision
from batchml.runtime.readings import Point
from batchml.runtime.store import Store

# The first so many steps are told each, and then ever fewer: a curve of a million is 2,400 points.
DENSE = 256

_Told = Tuple[int, Tuple[float, ...], float]  # step, values, at


class Post:
    """What is new is collected until a message is made of it.

    One that was tried stays as it is, for it may have arrived: what comes meanwhile goes into the
    next.
    """

    def __init__(self, sender: messages.Sender, clock: Callable[[], float]) -> None:
        self.seq = 0  # of the next message
        self._sender, self._clock = sender, clock
        self._points: List[_Told] = []
        self._decisions: List[Decision] = []
        self._waiting: List[Tuple[str, bytes]] = []
        self._kept = 0  # the last step that is told
        self._skipped: Optional[_Told] = None  # the last step, if it is not

    @property
    def has_news(self) -> bool:
        return bool(self._points or self._decisions or self._waiting)

    def add(self, point: Point, decision: Optional[Decision], must: bool) -> None:
        """A step that was reached; one that `must` be told is not thinned away."""
        told = (point.step, point.values, round(self._clock(), 3))
        if must or decision is not None or (point.step - self._kept) * DENSE >= self._kept:
            self._points.append(told)
            self._kept, self._skipped = point.step, None
        else:
            self._skipped = told
        if decision is not None:
            self._decisions.append(decision)

    def close(self, metrics: Dict[str, float]) -> None:
        """Make a message of what is new, unless one waits."""
        if not self._waiting:
            kind = messages.REPORT if self.has_news else messages.START
            self._seal(messages.make(*self._next(kind), metrics))

    def end(
        self,
        state: str,
        code: int,
        why: str,
        tail: Sequence[str],
        metrics: Dict[str, float],
        again: bool = False,
    ) -> None:
        """Make the last message, with the last step."""
        if self._skipped is not None:
            self._points.append(self._skipped)
        message = messages.make(*self._next(messages.END), metrics)
        self._seal(messages.with_end(message, state, code, why, tail, again))

    def deliver(self, board: Store) -> None:
        """Send what waits, in order. Raises StoreError; what was not sent waits on."""
        while self._waiting:
            board.put(*self._waiting[0])
            del self._waiting[0]

    def _next(
        self, kind: str
    ) -> Tuple[messages.Sender, int, str, float, List[_Told], List[Decision]]:
        return self._sender, self.seq, kind, self._clock(), self._points, self._decisions

    def _seal(self, message: Dict[str, object]) -> None:
        key = messages.message_key(
            self._sender.wave, self._sender.trial, self._sender.attempt, self.seq
        )
        self._waiting.append((key, messages.write(message)))
        self._points, self._decisions = [], []
        self.seq += 1
