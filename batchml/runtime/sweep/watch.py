"""Watch a trial while its command runs: read its values, decide whether it continues, and report.

All this happens in the loop that copies the output, so calls to the sweep store have short time
limits. After an error the store is not called for a while: the program continues, and messages
wait.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Protocol, Tuple

from batchml.runtime.protocol import sweep as protocol
from batchml.runtime.protocol.exit_codes import STOPPED, TRY_ELSEWHERE
from batchml.runtime.protocol.sweep import (
    CUTOFFS,
    DIVERGED,
    DONE,
    FAILED,
    KILLED,
    MAX,
    NONE,
    PAUSED,
    PRUNED,
    RUNGS,
    SIGNALLED,
    Cutoffs,
    PrunerDecision,
    mark_key,
    rung_passed,
)
from batchml.runtime.storage.store import Store, StoreError
from batchml.runtime.sweep.assignment import (
    StopRequest,
    TrialAssignment,
    TrialProgress,
    exit_code_when_stopped,
    may_be_retried,
    read_stop_request,
)
from batchml.runtime.sweep.pending_decision import note_decided
from batchml.runtime.sweep.readings import Point, Readings, list_likely_names
from batchml.runtime.telemetry.metrics import MetricsFile

# --- Messages to the controller -------------------------------------------------------------------


# The first DENSE steps are all sent; later ones are thinned out more and more. Of a million steps
# 2,400 points are sent.
DENSE = 256

_TimedPoint = Tuple[int, Tuple[float, ...], float]  # step, values, seconds since the epoch


class MessageOutbox:
    """The messages of one attempt at a trial. It collects steps and makes messages of them.

    A message that was sent once does not change, because it may have arrived even after an error:
    later steps are part of the next message.
    """

    def __init__(self, sender: protocol.MessageSender, clock: Callable[[], float]) -> None:
        self.seq = 0  # the number of the next message
        self._sender, self._clock = sender, clock
        self._points: List[_TimedPoint] = []
        self._decisions: List[PrunerDecision] = []
        self._waiting: List[Tuple[str, bytes]] = []
        self._last_kept = 0  # the last step that was not thinned out
        self._skipped: Optional[_TimedPoint] = None  # the last step, if it was thinned out

    @property
    def has_news(self) -> bool:
        return bool(self._points or self._decisions or self._waiting)

    def add(self, point: Point, decision: Optional[PrunerDecision], must_send: bool) -> None:
        """Add a step and the decision on it. `must_send`: the step is not thinned out."""
        timed = (point.step, point.values, round(self._clock(), 3))
        if (
            must_send
            or decision is not None
            or (point.step - self._last_kept) * DENSE >= self._last_kept
        ):
            self._points.append(timed)
            self._last_kept, self._skipped = point.step, None
        else:
            self._skipped = timed
        if decision is not None:
            self._decisions.append(decision)

    def close(self, metrics: Dict[str, float], counters: Tuple[str, str]) -> None:
        """Make a message of the collected steps, unless a message waits to be sent."""
        if not self._waiting:
            kind = protocol.REPORT if self.has_news else protocol.START
            self._seal(protocol.make_message(*self._next(kind), metrics, counters))

    def end(
        self,
        state: str,
        code: int,
        why: str,
        tail: Sequence[str],
        metrics: Dict[str, float],
        counters: Tuple[str, str],
        may_be_retried: bool = False,
    ) -> None:
        """Make the last message, with the last step."""
        if self._skipped is not None:
            self._points.append(self._skipped)
        message = protocol.make_message(*self._next(protocol.END), metrics, counters)
        self._seal(protocol.add_end(message, state, code, why, tail, may_be_retried))

    def deliver(self, store: Store) -> None:
        """Send the waiting messages in order. After a StoreError the rest keeps waiting."""
        while self._waiting:
            store.put(*self._waiting[0])
            del self._waiting[0]

    def _next(
        self, kind: str
    ) -> Tuple[protocol.MessageSender, int, str, float, List[_TimedPoint], List[PrunerDecision]]:
        return self._sender, self.seq, kind, self._clock(), self._points, self._decisions

    def _seal(self, message: Dict[str, object]) -> None:
        key = protocol.message_key(
            self._sender.wave, self._sender.trial, self._sender.attempt, self.seq
        )
        self._waiting.append((key, protocol.encode_message(message)))
        self._points, self._decisions = [], []
        self.seq += 1


# --- The running command --------------------------------------------------------------------------


_PAUSES = (5.0, 60.0)  # seconds without calls after an error of the store: at first and at most
_END_PAUSES = (1.0, 2.0)  # seconds between attempts to send the end
_MAX_LINE = 1000  # bytes of each of the last lines
_MAX_BLOCKS = 64  # blocks of the metrics file that are read at once, of a megabyte each
_BEYOND = "it trained beyond its rung before; BATCHML_STEPS is the step at which it must end"
_MAX_LINES = 3  # last lines in the message about a missing metric
_REPORTS_AFTER_LIMIT = 2  # reports after its last step that end a trial
_MAX_BAD_REPORTS = 3  # in a row with values that are not finite, from which no training recovers


class TrialEnding(NamedTuple):
    """How a trial ended, as the controller is told."""

    state: str
    code: int
    why: str = ""
    has_tail: bool = False  # the message contains the last lines of output
    was_signalled: bool = False  # a signal from outside requested a stop


class WatchedProgram(Protocol):
    """The program of the trial, which `RunningAttempt` implements."""

    def stop(self, reason: str, code: int) -> None:
        """Print the reason, and end the program: stop file, SIGTERM, SIGKILL after the grace."""

    def request_stop(self) -> None:
        """Make the stop file, so that the program can end by itself."""


class TrialWatch:
    """Watches one attempt at a trial.

    `store` is the sweep store with short time limits. `metrics_file` need not exist.
    """

    def __init__(
        self,
        assignment: TrialAssignment,
        store: Store,
        program: WatchedProgram,
        metrics_file: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        contract = assignment.contract
        self._assignment, self._contract, self._store = assignment, contract, store
        self._program, self._say = program, say
        self._clock, self._monotonic = clock, monotonic
        self._readings = Readings(
            [name for name, _ in contract.goals],
            contract.patterns,
            contract.step,
            assignment.after,
            assignment.shift,
            {**contract.params, **assignment.entry.params},
            contract.max,
            not contract.is_step_given,
        )
        self._metrics_file, self._file = metrics_file, MetricsFile(metrics_file)
        self._tail: Deque[bytes] = deque(maxlen=protocol.TAIL)
        self._step = assignment.after
        self._value: Optional[float] = None  # of the first goal, at `_step`
        self._best: Optional[float] = None
        self._bad: List[Point] = []  # the last points, if they have values that are not finite
        self._cutoffs = Cutoffs(0, {}, {})
        self._decided_ending: Optional[TrialEnding] = None
        self._stop = StopRequest("", assignment.deadline)
        self._reports_after = 0  # after the last step
        self._end_by = math.inf  # when a program at its last step should have ended
        self._outbox = MessageOutbox(assignment.sender, clock)
        now = monotonic()
        self._next_poll, self._next_message = now + contract.look, now + 1.0
        self._next_cutoffs = 0.0
        self._paused_until, self._pause = 0.0, _PAUSES[0]
        self._trouble = ""  # why the output could not be read

    @property
    def progress(self) -> TrialProgress:
        return TrialProgress(self._step, self._readings.shift)

    # --- While it runs ------------------------------------------------------------------------

    def read_output(self, lines: Sequence[bytes]) -> None:
        """Take lines that the program has printed."""
        self._tail.extend(line[:_MAX_LINE] for line in lines[-protocol.TAIL :])
        self._try_reading(lambda: self._read_lines(lines))

    def tick(self, now: float) -> None:
        self.read_reports()
        if self._decided_ending is None and now >= self._end_by:
            self._finish_batch("it reached its last step and did not end by itself")
        if self._decided_ending is None:
            self._poll_stop_request(now)
        if now >= self._next_message and (self._outbox.has_news or not self._outbox.seq):
            self._send(now)

    def read_reports(self) -> None:
        """Read what the program has added to the metrics file."""
        self._try_reading(self._read_metrics_file)

    def _try_reading(self, read: Callable[[], None]) -> None:
        if self._trouble:
            return
        try:
            read()
        except Exception as error:  # the program continues, and the trial fails at its end
            self._trouble = f"its output could not be read: {type(error).__name__}: {error}"
            self._say(f"batchml: {self._trouble}")

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            for point in self._readings.read_line(line):
                self._reach(point)

    def _read_metrics_file(self) -> None:
        for _ in range(_MAX_BLOCKS):
            read = self._file.bytes_read
            for each in self._file.new():
                for point in self._readings.read_report(each):
                    self._reach(point)
            if self._file.bytes_read == read:
                return
            note_decided(self._metrics_file, self._file.bytes_read)

    def _reach(self, point: Point) -> None:
        """Record that the trial has reached a step, and decide whether it continues."""
        if self._decided_ending is not None:
            return  # steps of a program that is being stopped do not count
        if self._ends_at_limit and self._step >= self._assignment.limit:
            # It has its result, and may be saving its model: only if it trains on it is ended.
            self._reports_after += 1
            if self._reports_after >= _REPORTS_AFTER_LIMIT:
                self._finish_after_limit()
            return
        is_last = 0 < self._assignment.limit <= point.step
        if not all(map(math.isfinite, point.values)):
            # If this step is a rung, the next report decides instead.
            self._bad.append(point)
            if is_last or len(self._bad) >= _MAX_BAD_REPORTS:
                self._finish_with(self._diverged(), "the trial is stopped")
            return
        self._bad.clear()
        before, self._step, self._value = self._step, point.step, point.values[0]
        self._best = protocol.best_of(self._contract, self._best, self._value)
        rung = rung_passed(self._contract.rungs, before, point.step)
        decision = self._decide(point.step, rung)
        self._outbox.add(point, decision, must_send=rung is not None or is_last)
        if decision is not None and not decision.goes_on:
            self._prune(decision)
        elif is_last:
            self._reach_last_step(point.step)
        if rung is not None:
            self._send(self._monotonic())

    def _decide(self, step: int, rung: Optional[int]) -> Optional[PrunerDecision]:
        if self._best is None or self._value is None or not self._assignment.may_be_pruned:
            return None
        if protocol.needs_cutoffs(self._contract, step, rung):
            self._refresh_cutoffs(at_once=rung is not None)
        return protocol.decide(self._contract, self._cutoffs, step, self._value, self._best, rung)

    @property
    def _ends_at_limit(self) -> bool:
        """Whether no step after the limit counts, in this batch or in a later one."""
        assignment = self._assignment
        stops = assignment.contract.method != NONE
        return stops and assignment.limit > 0 and not assignment.may_continue

    def _reach_last_step(self, step: int) -> None:
        assignment = self._assignment
        if step > assignment.limit and assignment.may_continue:
            self._finish_after_limit()
        elif assignment.may_continue and self._end_by == math.inf:
            # Without a signal, which could come before the program has saved.
            self._program.request_stop()
            self._end_by = self._monotonic() + assignment.contract.grace

    def _finish_after_limit(self) -> None:
        step = self._readings.counter or self._contract.step
        limit = self._assignment.limit
        last = limit - (self._readings.shift or 0)  # as the program prints it
        which = "the last of this part" if self._assignment.may_continue else "its early_stop.max"
        of = f", the last of {limit} ({which})" if last != limit else f", {which}"
        self._finish_batch(f"it continued after {step} {last}{of}")

    # --- Its end ------------------------------------------------------------------------------

    def _diverged(self) -> TrialEnding:
        """The ending of a trial whose values are not finite."""
        point = self._bad[-1]
        bad = ", ".join(
            f"{self._contract.goals[index][0]} is {value}"
            for index, value in enumerate(point.values)
            if not math.isfinite(value)
        )
        return TrialEnding(DIVERGED, 0, f"{bad} at {self._contract.step} {point.step}")

    def _prune(self, decision: PrunerDecision) -> None:
        name, direction = self._contract.goals[0]
        side = "below" if direction == MAX else "above"
        why = (
            f"{name} {decision.value:.6g} at {self._contract.step} {decision.step} is {side} "
            f"the cut-off {decision.cutoff:.6g}"
        )
        ending = TrialEnding(PRUNED, 0, why)
        self._finish_with(ending, "others do better, the trial is stopped")

    def _finish_batch(self, why: str) -> None:
        self._finish_with(self._complete(why), "it is stopped")

    def _complete(self, why: str = "") -> TrialEnding:
        """The ending of a trial that has reached the last step of this batch."""
        return TrialEnding(PAUSED if self._assignment.may_continue else DONE, 0, why)

    def _poll_stop_request(self, now: float) -> None:
        if now >= max(self._next_poll, self._paused_until):
            self._next_poll = now + self._contract.look
            found = self._try_store(
                lambda: read_stop_request(self._store, self._assignment.entry.trial)
            )
            self._stop = found or self._stop
        why = self._stop.reason_at(self._clock())
        if why:
            self._finish_with(
                TrialEnding(KILLED, exit_code_when_stopped(self._contract), why),
                "the trial is stopped",
            )

    def _finish_with(self, ending: TrialEnding, outcome: str) -> None:
        """End the program, because the trial ends this way. `outcome`: for the log."""
        self._decided_ending = ending
        self._program.stop(f"{ending.why}: {outcome}.", ending.code)

    def ending(self, code: int, was_signalled: bool, why: str = "") -> TrialEnding:
        """Return how the trial ended.

        `code`: the exit code of the program. `was_signalled`: a signal from outside requested a
        stop. `why`: the reason why the program did not start.
        """
        if self._decided_ending is None:
            self.read_reports()
        return self._find_ending(code, was_signalled, why)

    def send_end(self, ending: TrialEnding, patient: Store, sleep: Callable[[float], None]) -> int:
        """Report the end, and return the exit code. `patient`: the store with long time limits."""
        tail = [line.decode("utf-8", "replace") for line in self._tail] if ending.has_tail else []
        again = may_be_retried(
            self._contract, self._assignment.sender.attempt, ending.code, ending.was_signalled
        )
        self._outbox.end(*ending[:3], tail, self._readings.seen, self._readings.counters, again)
        for pause in (*_END_PAUSES, None):
            try:
                self._mark_rung(ending, patient)
                self._outbox.deliver(patient)
                return ending.code
            except StoreError as error:
                if pause is None:
                    self._say(f"batchml: the end of this trial could not be reported: {error}")
                else:
                    sleep(pause)
        return TRY_ELSEWHERE

    def _find_ending(self, code: int, was_signalled: bool, not_started: str) -> TrialEnding:
        if self._decided_ending is not None:
            return self._decided_ending
        is_complete = 0 < self._assignment.limit <= self._step and not self._readings.missing
        ended_well = code == 0 or (is_complete and code == STOPPED and self._end_by < math.inf)
        if (was_signalled or code == STOPPED) and not (is_complete and ended_well):
            return TrialEnding(KILLED, code or STOPPED, SIGNALLED, was_signalled=True)
        if self._bad:
            return self._diverged()
        if not ended_well:
            return self._failure(code, not_started or _describe_code(code))
        if self._trouble:
            return self._failure(1, self._trouble)
        if self._was_already_complete():
            return TrialEnding(DONE, 0, f"it had no {self._contract.step} left: {_BEYOND}")
        if self._readings.missing:
            return self._failure(1, self._never_printed())
        return self._complete()

    def _was_already_complete(self) -> bool:
        """Whether the trial continued from a rung and ended well without a report.

        Then the checkpoint was of its last step already, and its earlier reports are the result.
        """
        promotes = self._contract.resume or self._contract.shape == RUNGS
        return promotes and self._assignment.after > 0 and not self._readings.printed

    def _failure(self, code: int, why: str) -> TrialEnding:
        # With code 0 for jobs of rungs: a failed job would fail the jobs that depend on it.
        shown = 0 if self._contract.shape == RUNGS else code
        return TrialEnding(FAILED, shown, why, has_tail=True)

    def _never_printed(self) -> str:
        missing = self._readings.missing
        lines = [line.decode("utf-8", "replace").strip()[:80] for line in self._tail]
        last = " | ".join(line for line in lines[-_MAX_LINES:] if line)
        seen = list_likely_names(missing, self._readings.printed)
        return (
            f"{', '.join(missing)} never printed; "
            + (f"last lines were: {last}; " if last else "it printed nothing; ")
            + f"metrics seen: {seen or 'none'}"
        )

    def _mark_rung(self, ending: TrialEnding, store: Store) -> None:
        """Write the mark by which the next rung finds this trial.

        Only trials of the first batch of each rung are marked, because all children of a rung must
        find the same marks, although they start one by one.
        """
        contract, entry, wave = self._contract, self._assignment.entry, self._assignment.sender.wave
        if contract.shape != RUNGS or ending.state != PAUSED or self._value is None:
            return
        if wave <= len(contract.rungs) and entry.target == contract.target_of(wave - 1):
            store.put(mark_key(wave - 1, contract.loss(self._value), entry.trial), b"")

    # --- The sweep store ----------------------------------------------------------------------

    def _refresh_cutoffs(self, at_once: bool) -> None:
        now = self._monotonic()
        if now < self._paused_until or (not at_once and now < self._next_cutoffs):
            return
        self._next_cutoffs = now + self._contract.look
        data = self._try_store(lambda: self._store.get(CUTOFFS))
        if data is not None:
            self._cutoffs = Cutoffs.from_json(data)

    def _send(self, now: float) -> None:
        self._next_message = now + self._contract.every
        if now >= self._paused_until:
            self._outbox.close(self._readings.seen, self._readings.counters)
            self._try_store(lambda: self._outbox.deliver(self._store))

    def _try_store(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call to the store; after an error None, and pause all calls."""
        try:
            result = call()
            self._pause = _PAUSES[0]
            return result
        except StoreError as error:
            if self._pause == _PAUSES[0]:
                self._say(
                    f"batchml: the sweep store cannot be reached, the trial continues: {error}"
                )
            now = self._monotonic()
            self._paused_until = now + self._pause
            self._next_message = min(self._next_message, self._paused_until)
            self._pause = min(_PAUSES[1], self._pause * 2)
            return None


def _describe_code(code: int) -> str:
    if code == 137:
        return "exit code 137: it was killed, most often because memory ran out"
    return f"exit code {code}"
