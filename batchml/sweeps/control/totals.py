"""Sums over the trials of a sweep, and how much of its limits they use. Pure.

Each event updates the sums, so no round of the controller reads all trials. The cost is checked
before trials begin: the cost so far, the expected rest of the running trials, and the new trials
together must be within the limit. So only trials that run already can exceed it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from math import ceil, inf, isfinite
from operator import itemgetter

from msgspec import Struct

from batchml.model.names import long_duration
from batchml.model.sweep import SweepLimits, SweepSpec, Trial, TrialState
from batchml.sweeps.control.events import (
    FAILURES,
    LIMIT,
    Event,
    MessageReceived,
    SweepEnded,
    SweepReopened,
    TrialBatch,
    TrialObserved,
)
from batchml.sweeps.control.pruning import RungResults
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.results import BestTrial
from batchml.sweeps.samplers.tpe import TrialObservations


class TrialShare(Struct):
    """What one trial adds to the sums, so that it can be subtracted again."""

    seconds: float = 0.0  # of containers that have ended
    step: int = 0
    saved: int = 0
    wave: int = 0  # number of the batch in which it waits or runs; 0: none
    is_point: bool = False  # a new point of the space, not a run that confirms another trial
    span: tuple[float, float] | None = None  # from its first start to its end; None: not ended


_NOTHING = TrialShare()


class BusyTime:
    """The time in which trials ran: the union of their spans, in seconds since the epoch."""

    def __init__(self, spans: Iterable[tuple[float, float]] = ()) -> None:
        self._spans: list[tuple[float, float]] = []  # in order; none touches another
        self._seconds = 0.0
        for start, end in spans:
            self.add(start, end)

    def add(self, start: float, end: float) -> None:
        first = bisect_left(self._spans, start, key=itemgetter(1))
        last = bisect_right(self._spans, end, key=itemgetter(0))
        met = self._spans[first:last]
        if met:
            start, end = min(start, met[0][0]), max(end, met[-1][1])
        self._spans[first:last] = [(start, end)]
        self._seconds += end - start - sum(stop - begun for begun, stop in met)

    def with_span(self, start: float, end: float) -> float:
        """The seconds of the union with one more span, which is not added."""
        seconds = self._seconds + end - start
        for begun, stop in reversed(self._spans):
            if stop <= start:
                break
            seconds -= max(0.0, min(stop, end) - max(begun, start))
        return seconds


class Tally:
    """Sums over all trials, kept up to date by the trials that change."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._spec = spec
        self._shares: dict[int, TrialShare] = {}
        self._running: dict[int, Trial] = {}
        self._seconds = 0.0  # of all containers that have ended
        self.planned = 0  # trials so far, without confirming runs
        self.steps = 0  # that all trials ran
        self.saved = 0  # steps that trials did not run, because they were stopped early
        self.in_flight: dict[int, int] = {}  # number of a batch -> its trials that wait or run
        self.longest = 0.0  # seconds that the longest completed trial ran
        self.has_begun = False  # whether a container of any trial has started
        self.highest = -1  # the greatest number of a trial
        self.best_loss: float | None = None  # of any trial at any step
        self._failures: dict[int, Trial] = {}  # the trials that are failed now
        self._busy: BusyTime | None = BusyTime()  # of trials that have ended; None: made when asked
        for trial in trials:
            self.note(trial)

    def note(self, trial: Trial) -> None:
        """Update the sums for a trial that has changed."""
        old, new = self._shares.get(trial.number, _NOTHING), self._share(trial)
        self._shares[trial.number] = new
        self._seconds += new.seconds - old.seconds
        self.steps += new.step - old.step
        self.saved += new.saved - old.saved
        self.planned += new.is_point - old.is_point
        self.highest = max(self.highest, trial.number)
        if old.wave != new.wave:
            self._count_in_flight(old.wave, new.wave)
        if old.span != new.span:
            self._note_span(old.span, new.span)
        _put(self._running, trial, trial.resumed_at is not None)
        _put(self._failures, trial, trial.state.is_failure)
        self.has_begun = self.has_begun or trial.started_at is not None
        if trial.state is TrialState.DONE:
            self.longest = max(self.longest, trial.seconds)
        if trial.values and isfinite(trial.values[0]):
            loss = self._spec.goal.loss(trial.values[0])
            self.best_loss = loss if self.best_loss is None else min(self.best_loss, loss)

    @property
    def first_failure(self) -> Trial | None:
        """Of the trials that are failed now, the one that ended first."""
        return min(self._failures.values(), key=_stopped, default=None)

    def ran(self, now: float) -> float:
        """Seconds that containers of all trials have run."""
        return self._seconds + sum(
            trial.ran(now) - trial.seconds for trial in self._running.values()
        )

    def busy(self, now: float) -> float:
        """Seconds in which a trial ran. A trial that ran more than once, such as before and after a
        stop of the sweep, counts as if it had run without a break until its last end."""
        if self._busy is None:
            self._busy = BusyTime(each.span for each in self._shares.values() if each.span)
        longest = max((trial.ran(now) for trial in self._running.values()), default=0.0)
        return self._busy.with_span(now - longest, now)

    def expected(self, now: float, timeout: float | None) -> float:
        """Seconds that another trial may take: as long as the longest so far; 0: unknown."""
        running = (trial.ran(now) for trial in self._running.values())
        longest = self.longest or max(running, default=0.0)
        return min(longest, timeout) if timeout is not None else longest

    def committed(self, now: float, waiting: int, timeout: float | None) -> float:
        """An estimate of the seconds that running and waiting trials will still take."""
        expected = self.expected(now, timeout)
        left = sum(max(0.0, expected - trial.ran(now)) for trial in self._running.values())
        return left + waiting * expected

    def _share(self, trial: Trial) -> TrialShare:
        full = self._spec.early_stop.max
        is_cut = trial.state in (TrialState.PRUNED, TrialState.PAUSED)
        return TrialShare(
            trial.seconds,
            trial.step,
            max(0, full - trial.step) if full and is_cut else 0,
            trial.wave if trial.state.is_in_flight else 0,
            trial.confirms is None,
            _span(trial),
        )

    def _note_span(self, old: tuple[float, float] | None, new: tuple[float, float] | None) -> None:
        if old is not None:  # rare: a trial that had ended runs again, or its end is corrected
            self._busy = None
        elif self._busy is not None and new is not None:
            self._busy.add(*new)

    def _count_in_flight(self, old: int, new: int) -> None:
        """Count a trial that was in flight in one batch, and is in another. 0: in none."""
        if old:
            self.in_flight[old] -= 1
            if not self.in_flight[old]:
                del self.in_flight[old]
        if new:
            self.in_flight[new] = self.in_flight.get(new, 0) + 1


def _put(trials: dict[int, Trial], trial: Trial, is_member: bool) -> None:
    if is_member:
        trials[trial.number] = trial
    else:
        trials.pop(trial.number, None)


def _span(trial: Trial) -> tuple[float, float] | None:
    if trial.stopped_at is None or trial.resumed_at is not None:
        return None
    return trial.stopped_at - trial.seconds, trial.stopped_at


def _stopped(trial: Trial) -> tuple[float, int]:
    return (trial.stopped_at if trial.stopped_at is not None else inf, trial.number)


class SweepTotals:
    """A sweep's state with its sums, rung results and best trial. `apply` updates all of them."""

    def __init__(self, spec: SweepSpec, state: SweepState) -> None:
        self.spec = spec
        self.state = state
        self.tally = Tally(spec, state.trials.values())
        self.rungs = RungResults(spec, state.trials.values())
        self.best = BestTrial(spec, state.trials.values())
        self.observed: TrialObservations | None = None  # of the sampler
        if spec.method == "tpe":
            self.observed = TrialObservations(spec, state.trials.values())

    def apply(self, event: Event) -> None:
        """Apply an event to the state, and its changes to the rest."""
        self.state.apply(event)
        for number in self._changed(event):
            trial = self.state.trials.get(number)
            if trial is None:
                continue
            self.tally.note(trial)
            self.rungs.note(trial)
            if self.observed is not None:
                self.observed.note(trial)
            if not self.best.note(trial):
                self.best.restart(self.state.trials.values())

    def _changed(self, event: Event) -> Iterable[int]:
        if isinstance(event, SweepEnded | SweepReopened):  # they change all paused trials
            return self.state.trials
        return trials_of_event(event, self.state)


def trials_of_event(event: Event, state: SweepState) -> tuple[int, ...]:
    """The numbers of the trials that an event changes."""
    match event:
        case MessageReceived():
            return (state.sender_of(event.message),)
        case TrialObserved():
            return (event.trial,)
        case TrialBatch():
            return tuple(planned.number for planned in event.trials)
    return ()


# --- Limits ---------------------------------------------------------------------------------------


_FREE_DIVISOR = 10  # another batch begins when 1/10 of `limits.parallel` is free
# Failures stop a sweep if its first 3 trials all fail, or if their share is above the limit
# (`failed = "20%"`) once 10 trials have ended. 1/10 of the planned trials replaces both numbers if
# it is more.
_FIRST_FAILURES, _SHARE_AFTER, _PLANNED_DIVISOR = 3, 10, 10


class Money(Struct, frozen=True):
    """The cost of a sweep, in USD."""

    spent: float  # so far
    committed: float  # the expected rest of running and waiting trials
    each: float  # the expected cost of one more trial; 0: still unknown


def estimate_money(
    tally: Tally, state: SweepState, hourly: float | None, timeout: float | None, now: float
) -> Money | None:
    """The cost of the sweep; None where it is free or unknown."""
    if hourly is None:
        return None
    rate, waiting = hourly / 3600, state.counts[TrialState.WAITING]
    return Money(
        tally.ran(now) * rate,
        tally.committed(now, waiting, timeout) * rate,
        tally.expected(now, timeout) * rate,
    )


def limits_now(state: SweepState, spec: SweepSpec) -> SweepLimits:
    """The present limits: those of the last top-up, or of the file."""
    return state.limits or spec.limits


def began_at(state: SweepState) -> float | None:
    """When the first batch was planned: `limits.hours` counts from this time."""
    first = state.batches.get(1)
    return first.at if first else None


def find_deadline(state: SweepState, spec: SweepSpec, now: float) -> float | None:
    """When the hours of `limits.hours` are over, in seconds since the epoch; None: never.

    A sweep that has not begun begins `now`. The time between an end and a reopening does not count.
    """
    hours = limits_now(state, spec).hours
    begun = began_at(state)
    if hours is None:
        return None
    return (now if begun is None else begun) + hours * 3600 + state.paused_seconds


def count_in_flight(state: SweepState) -> int:
    return sum(count for each, count in state.counts.items() if each.is_in_flight)


def count_startable(
    state: SweepState, spec: SweepSpec, left: int | None, money: Money | None
) -> int:
    """The number of trials that may begin now.

    `left`: the trials that are still to begin; None: unknown. The number is 0 until a tenth of
    `limits.parallel` is free: a job for each trial would take too many calls.
    """
    allowed = limits_now(state, spec)
    free = allowed.parallel - count_in_flight(state)
    most = free if left is None else min(free, left)
    least_free = max(1, ceil(allowed.parallel / _FREE_DIVISOR))
    if most <= 0 or free < (least_free if left is None else min(least_free, left)):
        return 0
    return min(most, count_affordable(allowed.cost, money))


def count_affordable(cap: float | None, money: Money | None) -> int:
    """The number of trials that the rest of the cost limit `cap` allows."""
    unlimited = 10**9
    if cap is None or money is None:
        return unlimited
    rest = cap - money.spent - money.committed
    if rest <= 0:
        return 0
    return unlimited if money.each <= 0 else int(rest / money.each)


def count_failures(state: SweepState) -> int:
    return sum(count for each, count in state.counts.items() if each.is_failure)


def count_ended(state: SweepState) -> int:
    return sum(count for each, count in state.counts.items() if each.is_ended)


def find_exceeded_limit(
    state: SweepState, spec: SweepSpec, tally: Tally, money: Money | None, now: float
) -> tuple[str, str] | None:
    """The cause that stops the sweep, FAILURES or LIMIT, and why; None while it may continue."""
    allowed = limits_now(state, spec)
    if (why := _exceeded_failures(state, allowed, tally)) is not None:
        return FAILURES, why
    end = find_deadline(state, spec, now)
    if end is not None and now >= end:
        return LIMIT, f"its time is over: {long_duration(3600 * (allowed.hours or 0))}"
    if allowed.cost is not None and money is not None and money.spent >= allowed.cost:
        return LIMIT, f"its {allowed.cost:g} USD are spent"
    return None


def is_target_reached(state: SweepState, spec: SweepSpec, tally: Tally) -> bool:
    """Whether a trial was as good as the target, at any step."""
    target = limits_now(state, spec).target
    if target is None or tally.best_loss is None:
        return False
    return tally.best_loss <= spec.goal.loss(target)


def _exceeded_failures(state: SweepState, allowed: SweepLimits, tally: Tally) -> str | None:
    """Why the failures since the last reopening stop the sweep; None if they do not."""
    before = state.last_reopening
    failed = max(0, count_failures(state) - before.failed)
    over = max(0, count_ended(state) - before.over)
    wanted = inf if allowed.trials is None else allowed.trials
    part = ceil((allowed.trials or tally.planned) / _PLANNED_DIVISOR)
    if failed and failed == over and failed >= min(wanted, max(_FIRST_FAILURES, part)):
        return f"the first {failed} trials all failed" if failed > 1 else "the only trial failed"
    if allowed.failed_count is not None:
        return f"{failed} trials failed" if failed > allowed.failed_count else None
    share, enough = allowed.failed_share, min(wanted, max(_SHARE_AFTER, part))
    if share is not None and over >= enough and failed > share * over:
        return f"{failed} of the {over} trials that ended failed, more than {share:.0%}"
    return None
