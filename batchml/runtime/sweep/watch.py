"""A trial while its command runs: its values are read, judged and sent; it stops where it should.

Everything happens in the loop that copies the output. The board is asked briefly there, and left
alone for a while when it does not answer: the program goes on, and what it said waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from batchml.runtime.protocol import messages
from batchml.runtime.protocol import rungs as judge
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.messages import DIVERGED, DONE, FAILED, KILLED, PAUSED, PRUNED
from batchml.runtime.protocol.rungs import Cutoffs, Decision, mark_key, rung_passed
from batchml.runtime.protocol.sweep_store import CUTOFFS, MAX, NONE, RUNGS
from batchml.runtime.storage.store import Store, StoreError
from batchml.runtime.sweep.assignment import StopWord, Work, comes_again, stop_word, stopped_code
from batchml.runtime.sweep.checkpoints import Place
from batchml.runtime.sweep.readings import Point, Readings, closest
from batchml.runtime.sweep.verdict import note_judged
from batchml.runtime.telemetry.budget import STOPPED
from batchml.runtime.telemetry.metrics import Points

# --- messages to the controller -------------------------------------------------------------------
# The messages of one attempt at a trial, on their way to the sweep's inbox.


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


# --- the command of a trial -----------------------------------------------------------------------


try:
    from typing import Protocol
except ImportError:  # pragma: no cover
    Protocol = object  # type: ignore[assignment]

_AWAY = (5.0, 60.0)  # seconds that a board which does not answer is left alone: at first, at most
_END_PAUSES = (1.0, 2.0)  # between the tries to send the end
_LINE = 1000  # bytes that are kept of each of the last lines
_BLOCKS = 64  # of the metrics file, a megabyte each, that are read at once
_BEYOND = "it trained on beyond its rung before; the step to end at is in BATCHML_STEPS"
_SHOWN = 3  # last lines in the words about a metric that never came
_BAD_REPORTS = 3  # not finite, one after the other: a training does not come back from that


class Ending(NamedTuple):
    state: str
    code: int
    why: str = ""
    has_tail: bool = False
    was_asked: bool = False  # by a signal from outside


class Program(Protocol):
    """The program that is watched: `Running` of attempt.py."""

    def stop(self, reason: str, code: int) -> None:
        """Say why, and end it: by the stop file, TERM, and KILL after the grace."""

    def ask(self) -> None:
        """Make the stop file, so that it may end by itself."""


class Watch:
    """One attempt at a trial; `board` is asked briefly, and `metrics_file` need not be there."""

    def __init__(
        self,
        work: Work,
        board: Store,
        program: Program,
        metrics_file: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        course = work.course
        self._work, self._course, self._board = work, course, board
        self._program, self._say = program, say
        self._clock, self._monotonic = clock, monotonic
        self._readings = Readings(
            [name for name, _ in course.goals],
            course.patterns,
            course.step,
            work.after,
            work.shift,
            {**course.params, **work.entry.params},
        )
        self._metrics_file, self._file = metrics_file, Points(metrics_file)
        self._tail: Deque[bytes] = deque(maxlen=messages.TAIL)
        self._step = work.after
        self._value: Optional[float] = None  # of the first goal, at `_step`
        self._best: Optional[float] = None
        self._bad: list[Point] = []  # the last reports that are not finite, until one is
        self._cutoffs = Cutoffs(0, {}, {})
        self._verdict: Optional[Ending] = None
        self._word = StopWord("", work.deadline)
        self._end_by = math.inf  # when a program that came to its target should have ended
        self._post = Post(work.sender, clock)
        now = monotonic()
        self._next_look, self._next_message = now + course.look, now + 1.0
        self._next_cutoffs = 0.0
        self._away_until, self._pause = 0.0, _AWAY[0]
        self._trouble = ""

    @property
    def place(self) -> Place:
        """How far the trial came."""
        return Place(self._step, self._readings.shift)

    # --- while it runs ------------------------------------------------------------------------

    def hear(self, lines: Sequence[bytes]) -> None:
        """What the program printed."""
        self._tail.extend(line[:_LINE] for line in lines[-messages.TAIL :])
        self._guarded(lambda: self._read_lines(lines))

    def tick(self, now: float) -> None:
        self.read_file()
        if self._verdict is None and now >= self._end_by:
            self._end_part("it came to its last step and did not end by itself")
        if self._verdict is None:
            self._look_for_stop(now)
        if now >= self._next_message and (self._post.has_news or not self._post.seq):
            self._send(now)

    def read_file(self) -> None:
        """Take what the program has added to the metrics file."""
        self._guarded(self._read_reports)

    def _guarded(self, read: Callable[[], None]) -> None:
        if self._trouble:
            return
        try:
            read()
        except Exception as error:  # the run goes on, and its end tells
            self._trouble = f"what it said could not be read: {type(error).__name__}: {error}"
            self._say(f"batchml: {self._trouble}")

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            for point in self._readings.line(line):
                self._reach(point)

    def _read_reports(self) -> None:
        for _ in range(_BLOCKS):
            read = self._file.read
            for each in self._file.new():
                for point in self._readings.reported(each):
                    self._reach(point)
            if self._file.read == read:
                return
            note_judged(self._metrics_file, self._file.read)

    def _reach(self, point: Point) -> None:
        """The trial has come to a step."""
        if self._verdict is not None:
            return  # what is done while it stops does not count
        is_last = 0 < self._work.limit <= point.step
        if not all(map(math.isfinite, point.values)):
            # A rung that it comes to so is decided by the next report.
            self._bad.append(point)
            if is_last or len(self._bad) >= _BAD_REPORTS:
                self._finish_with(self._diverged(), "the trial is stopped")
            return
        self._bad.clear()
        before, self._step, self._value = self._step, point.step, point.values[0]
        self._best = judge.best_of(self._course, self._best, self._value)
        rung = rung_passed(self._course.rungs, before, point.step)
        decision = self._judge(point.step, rung)
        self._post.add(point, decision, must=rung is not None or is_last)
        if decision is not None and not decision.goes_on:
            self._prune(decision)
        elif is_last:
            self._come_to_the_end(point.step)
        if rung is not None:
            self._send(self._monotonic())

    def _judge(self, step: int, rung: Optional[int]) -> Optional[Decision]:
        if self._best is None or self._value is None or not self._work.is_judged:
            return None
        if judge.asks(self._course, step, rung):
            self._refresh(at_once=rung is not None)
        return judge.decide(self._course, self._cutoffs, step, self._value, self._best, rung)

    def _come_to_the_end(self, step: int) -> None:
        work = self._work
        if step > work.limit and (work.is_part or work.course.method != NONE):
            self._end_part(f"it went on after {work.course.step} {work.limit}, its last one")
        elif work.is_part and self._end_by == math.inf:
            self._program.ask()  # it saves, and ends: a signal now could come before it has saved
            self._end_by = self._monotonic() + work.course.grace

    # --- its end ------------------------------------------------------------------------------

    def _diverged(self) -> Ending:
        """Its last report is not finite."""
        point = self._bad[-1]
        bad = ", ".join(
            f"{self._course.goals[place][0]} is {value}"
            for place, value in enumerate(point.values)
            if not math.isfinite(value)
        )
        return Ending(DIVERGED, 0, f"{bad} at {self._course.step} {point.step}")

    def _prune(self, decision: Decision) -> None:
        name, way = self._course.goals[0]
        side = "below" if way == MAX else "above"
        why = (
            f"{name} {decision.value:.6g} at {self._course.step} {decision.step} is {side} "
            f"{decision.cutoff:.6g} (cut-offs, version {decision.version})"
        )
        self._finish_with(Ending(PRUNED, 0, why), "others do better, the trial is stopped")

    def _end_part(self, why: str) -> None:
        self._finish_with(Ending(PAUSED if self._work.is_part else DONE, 0, why), "it is stopped")

    def _look_for_stop(self, now: float) -> None:
        if now >= max(self._next_look, self._away_until):
            self._next_look = now + self._course.look
            found = self._try(lambda: stop_word(self._board, self._work.entry.trial))
            self._word = found or self._word
        why = self._word.at(self._clock())
        if why:
            self._finish_with(
                Ending(KILLED, stopped_code(self._course), why), "the trial is stopped"
            )

    def _finish_with(self, ending: Ending, what: str) -> None:
        self._verdict = ending
        self._program.stop(f"{ending.why}: {what}.", ending.code)

    def ending(self, code: int, was_asked: bool, why: str = "") -> Ending:
        """How it ended: `code` is the program's, `was_asked` whether a signal from outside asked it
        to stop, and `why` what kept it from beginning."""
        if self._verdict is None:
            self.read_file()
        return self._ending(code, was_asked, why)

    def tell(self, ending: Ending, patient: Store, sleep: Callable[[float], None]) -> int:
        """Tell the sweep, and return the exit code. `patient` is the board, asked with patience."""
        tail = [line.decode("utf-8", "replace") for line in self._tail] if ending.has_tail else []
        again = comes_again(self._course, self._work.sender.attempt, ending.code, ending.was_asked)
        self._post.end(ending.state, ending.code, ending.why, tail, self._readings.seen, again)
        for pause in (*_END_PAUSES, None):
            try:
                self._mark_rung(ending, patient)
                self._post.deliver(patient)
                return ending.code
            except StoreError as error:
                if pause is None:
                    self._say(f"batchml: the end of this trial could not be told: {error}")
                else:
                    sleep(pause)
        return TRY_ELSEWHERE

    def _ending(self, code: int, was_asked: bool, said: str) -> Ending:
        if self._verdict is not None:
            return self._verdict
        is_complete = 0 < self._work.limit <= self._step and not self._readings.missing
        ended_well = code == 0 or (is_complete and code == STOPPED and self._end_by < math.inf)
        if (was_asked or code == STOPPED) and not (is_complete and ended_well):
            why = "a signal asked it to stop: it was cancelled, its time was over, or its host goes"
            return Ending(KILLED, code or STOPPED, why, was_asked=True)
        if self._bad:
            return self._diverged()
        if not ended_well:
            return self._failure(code, said or _words_of(code))
        if self._trouble:
            return self._failure(1, self._trouble)
        if self._had_nothing_left():
            return Ending(DONE, 0, f"it had no {self._course.step} left: {_BEYOND}")
        if self._readings.missing:
            return self._failure(1, self._never_printed())
        return Ending(PAUSED if self._work.is_part else DONE, 0)

    def _had_nothing_left(self) -> bool:
        """True of one that goes on from a rung, and ends well without a word: what it saved there
        was of its last step already. What it reported before is what it came to."""
        promotes = self._course.resume or self._course.shape == RUNGS
        return promotes and self._work.after > 0 and not self._readings.printed

    def _failure(self, code: int, why: str) -> Ending:
        shown = 0 if self._course.shape == RUNGS else code
        return Ending(FAILED, shown, why, has_tail=True)

    def _never_printed(self) -> str:
        missing = self._readings.missing
        lines = [line.decode("utf-8", "replace").strip()[:80] for line in self._tail]
        last = " | ".join(line for line in lines[-_SHOWN:] if line)
        seen = closest(missing, self._readings.printed)
        return (
            f"{', '.join(missing)} never printed; "
            + (f"last lines were: {last}; " if last else "it printed nothing; ")
            + f"metrics seen: {seen or 'none'}"
        )

    def _mark_rung(self, ending: Ending, board: Store) -> None:
        """Let the next rung's children see it: those of the chain, while they begin one by one,
        must all see the same, so one that is run again later is not shown to them."""
        course, entry, wave = self._course, self._work.entry, self._work.sender.wave
        if course.shape != RUNGS or ending.state != PAUSED or self._value is None:
            return
        if wave <= len(course.rungs) and entry.target == course.target_of(wave - 1):
            board.put(mark_key(wave - 1, course.loss(self._value), entry.trial), b"")

    # --- the board ----------------------------------------------------------------------------

    def _refresh(self, at_once: bool) -> None:
        now = self._monotonic()
        if now < self._away_until or (not at_once and now < self._next_cutoffs):
            return
        self._next_cutoffs = now + self._course.look
        data = self._try(lambda: self._board.get(CUTOFFS))
        if data is not None:
            self._cutoffs = Cutoffs.from_json(data)

    def _send(self, now: float) -> None:
        self._next_message = now + self._course.every
        if now >= self._away_until:
            self._post.close(self._readings.seen)
            self._try(lambda: self._post.deliver(self._board))

    def _try(self, call: Callable[[], Any]) -> Any:
        """What the board says, or None; it is left alone for a while when it does not answer."""
        try:
            found = call()
            self._pause = _AWAY[0]
            return found
        except StoreError as error:
            if self._pause == _AWAY[0]:
                self._say(f"batchml: the sweep's board cannot be had, the trial goes on: {error}")
            now = self._monotonic()
            self._away_until = now + self._pause
            self._next_message = min(self._next_message, self._away_until)
            self._pause = min(_AWAY[1], self._pause * 2)
            return None


def _words_of(code: int) -> str:
    if code == 137:
        return "exit code 137: it was killed, most often for memory"
    return f"exit code {code}"
