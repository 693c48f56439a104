"""What a sweep has used and may use still: trials, places, hours, money, failures. Pure.

Money and hours are asked about before anything is begun: spent, plus what runs will cost still,
plus what is new, must be within the limit. So at most what runs already goes over it.
"""

from collections.abc import Iterable
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.model.names import spelled
from batchml.model.sweep import Limits, SweepSpec, Trial, TrialState

if TYPE_CHECKING:
    from batchml.sweep.state import SweepState

_FREE = 10  # one of so many places must be free before a wave is worth its while
_BREAKER = 3  # trials that all fail before any other ended stop a sweep,
_FEW = 10  # and of fewer than this a share says nothing;
_SHARE = 10  # or one of so many that are wanted, where that is more
_IN_FLIGHT = (TrialState.WAITING, TrialState.RUNNING)


class Share(Struct):
    """What one trial adds to the sums, so that it can be taken away again."""

    seconds: float = 0.0  # of containers that have ended
    step: int = 0
    saved: int = 0
    wave: int = 0  # in which it is in flight; 0: in none
    is_point: bool = False  # a trial of its own, not one that confirms another


_NOTHING = Share()


class Tally:
    """Sums over all trials, kept up to date by those that changed."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._spec = spec
        self._shares: dict[int, Share] = {}
        self._running: dict[int, Trial] = {}
        self._seconds = 0.0
        self.planned = 0
        self.steps = 0
        self.saved = 0
        self.in_flight: dict[int, int] = {}  # wave -> how many of its trials wait or run
        self.longest = 0.0  # seconds that the longest trial ran that came to its own end
        self.has_begun = False  # a container of any trial
        self.highest = -1  # the greatest number of a trial
        self.best_loss: float | None = None  # at any step
        self._failures: dict[int, Trial] = {}
        for trial in trials:
            self.note(trial)

    def note(self, trial: Trial) -> None:
        """A trial has changed."""
        old, new = self._shares.get(trial.number, _NOTHING), self._share(trial)
        self._shares[trial.number] = new
        self._seconds += new.seconds - old.seconds
        self.steps += new.step - old.step
        self.saved += new.saved - old.saved
        self.planned += new.is_point - old.is_point
        self.highest = max(self.highest, trial.number)
        if old.wave != new.wave:
            self._move(old.wave, new.wave)
        if trial.resumed_at is not None:
            self._running[trial.number] = trial
        else:
            self._running.pop(trial.number, None)
        self._remember(trial)

    @property
    def first_failure(self) -> Trial | None:
        """Of the trials that stand as failed now, the one that was the first to end."""
        return min(self._failures.values(), key=_stopped, default=None)

    def ran(self, now: float) -> float:
        """Seconds that containers of all trials have run."""
        return self._seconds + sum(
            trial.ran(now) - trial.seconds for trial in self._running.values()
        )

    def expected(self, now: float, timeout: float | None) -> float:
        """Seconds that one more trial may take: as long as the longest so far."""
        running = (trial.ran(now) for trial in self._running.values())
        longest = self.longest or max(running, default=0.0)
        return min(longest, timeout) if timeout is not None else longest

    def committed(self, now: float, waiting: int, timeout: float | None) -> float:
        """Seconds that what runs and waits will take still, as far as can be told."""
        each = self.expected(now, timeout)
        left = sum(max(0.0, each - trial.ran(now)) for trial in self._running.values())
        return left + waiting * each

    def _share(self, trial: Trial) -> Share:
        full = self._spec.early_stop.max
        is_cut = trial.state in (TrialState.PRUNED, TrialState.PAUSED)
        return Share(
            trial.seconds,
            trial.step,
            max(0, full - trial.step) if full and is_cut else 0,
            trial.wave if trial.state in _IN_FLIGHT else 0,
            trial.confirms is None,
        )

    def _move(self, old: int, new: int) -> None:
        if old:
            self.in_flight[old] -= 1
            if not self.in_flight[old]:
                del self.in_flight[old]
        if new:
            self.in_flight[new] = self.in_flight.get(new, 0) + 1

    def _remember(self, trial: Trial) -> None:
        self.has_begun = self.has_begun or trial.started_at is not None
        if trial.state is TrialState.DONE:
            self.longest = max(self.longest, trial.seconds)
        if trial.state.is_failure:
            self._failures[trial.number] = trial
        else:
            self._failures.pop(trial.number, None)
        if trial.values and isfinite(trial.values[0]):
            loss = self._spec.goal.loss(trial.values[0])
            self.best_loss = loss if self.best_loss is None else min(self.best_loss, loss)


def _stopped(trial: Trial) -> tuple[float, int]:
    return (trial.stopped_at if trial.stopped_at is not None else inf, trial.number)


class Money(Struct, frozen=True):
    """USD."""

    spent: float
    committed: float  # that trials under way are expected to cost still
    each: float  # that one more is expected to cost; 0: nothing is known yet


def money(
    tally: Tally, state: "SweepState", hourly: float | None, timeout: float | None, now: float
) -> Money | None:
    """What the sweep costs; None where nobody pays."""
    if hourly is None:
        return None
    rate, waiting = hourly / 3600, state.counts[TrialState.WAITING]
    return Money(
        tally.ran(now) * rate,
        tally.committed(now, waiting, timeout) * rate,
        tally.expected(now, timeout) * rate,
    )


def limits(state: "SweepState", spec: SweepSpec) -> Limits:
    """The limits as they are now: the file's, or those of the last top-up."""
    return state.limits or spec.limits


def began_at(state: "SweepState") -> float | None:
    """When the first wave was planned: hours are counted from there."""
    first = state.waves.get(1)
    return first.at if first else None


def deadline(state: "SweepState", spec: SweepSpec, now: float) -> float | None:
    """When its hours are over, in seconds since the epoch; None: never. `now`: it begins now.

    The time between its end and its going on again does not count.
    """
    hours = limits(state, spec).hours
    begun = began_at(state)
    if hours is None:
        return None
    return (now if begun is None else begun) + hours * 3600 + state.paused


def in_flight(state: "SweepState") -> int:
    return sum(state.counts[each] for each in _IN_FLIGHT)


def room(state: "SweepState", spec: SweepSpec, left: int | None, purse: Money | None) -> int:
    """How many trials may begin now: free places, trials that are left, and the money for them.

    None begins before a tenth of the places is free: a job each would cost more calls than it won.
    """
    allowed = limits(state, spec)
    free = allowed.parallel - in_flight(state)
    if (left is not None and left <= 0) or free < _worth(allowed.parallel, left):
        return 0
    most = free if left is None else min(free, left)
    return min(most, affordable(allowed.cost, purse))


def affordable(cap: float | None, purse: Money | None) -> int:
    """How many more trials the cost limit allows."""
    without_end = 10**9
    if cap is None or purse is None:
        return without_end
    rest = cap - purse.spent - purse.committed
    if rest <= 0:
        return 0
    return without_end if purse.each <= 0 else int(rest / purse.each)


def _worth(parallel: int, left: int | None) -> int:
    worth = max(1, ceil(parallel / _FREE))
    return worth if left is None else min(worth, left)


def failures(state: "SweepState") -> int:
    return sum(many for each, many in state.counts.items() if each.is_failure)


def ended(state: "SweepState") -> int:
    return sum(many for each, many in state.counts.items() if each.is_ended)


def exceeded(
    state: "SweepState", spec: SweepSpec, tally: Tally, purse: Money | None, now: float
) -> tuple[str, str] | None:
    """(by, why) of the limit at which all has to stop; None while the sweep may go on."""
    allowed = limits(state, spec)
    if (why := _failing(state, allowed, tally)) is not None:
        return "failures", why
    end = deadline(state, spec, now)
    if end is not None and now >= end:
        return "limit", f"its time is over: {spelled(3600 * (allowed.hours or 0))}"
    if allowed.cost is not None and purse is not None and purse.spent >= allowed.cost:
        return "limit", f"its {allowed.cost:g} USD are spent"
    return None


def is_reached(state: "SweepState", spec: SweepSpec, tally: Tally) -> bool:
    """True when a trial was as good as the target, at any step."""
    target = limits(state, spec).target
    if target is None or tally.best_loss is None:
        return False
    return tally.best_loss <= spec.goal.loss(target)


def _failing(state: "SweepState", allowed: Limits, tally: Tally) -> str | None:
    known = state.forgiven
    bad, over = max(0, failures(state) - known.failed), max(0, ended(state) - known.over)
    wanted = inf if allowed.trials is None else allowed.trials  # as many as the limits allow
    part = ceil((allowed.trials or tally.planned) / _SHARE)
    if bad and bad == over and bad >= min(wanted, max(_BREAKER, part)):
        return f"the first {bad} trials all failed" if bad > 1 else "the only trial failed"
    if allowed.failed_count is not None:
        return f"{bad} trials failed" if bad > allowed.failed_count else None
    share = allowed.failed_share
    if share is not None and over >= min(wanted, max(_FEW, part)) and bad > share * over:
        return f"{bad} of the {over} trials that ended failed, more than {share:.0%}"
    return None
