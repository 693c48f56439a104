"""How much of its limits a sweep has used: trials, trials at once, hours, cost, failures. Pure.

Cost and hours are checked before trials begin: the cost so far, the expected rest of the running
trials, and the new trials together must be within the limit. So only trials that run already can
exceed it.
"""

from collections.abc import Iterable
from math import ceil, inf

from msgspec import Struct

from batchml.model.names import long_duration
from batchml.model.sweep import SweepLimits, SweepSpec, Trial, TrialState
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import Tally

_FREE = 10  # of the trials at once, 1 in 10 must be free before another batch begins
_BREAKER = 3  # a sweep stops when its first 3 trials all fail,
_FEW = 10  # and `failed = "20%"` is checked once 10 trials have ended;
_SHARE = 10  # in place of both: 1 in 10 of the planned trials, if that is more
_IN_FLIGHT = (TrialState.WAITING, TrialState.RUNNING)


class Money(Struct, frozen=True):
    """The cost of a sweep, in USD."""

    spent: float
    committed: float  # the expected rest of running and waiting trials
    each: float  # the expected cost of one more trial; 0: unknown yet


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
    """When the first batch was planned: the hours are counted from there."""
    first = state.batches.get(1)
    return first.at if first else None


def deadline(state: SweepState, spec: SweepSpec, now: float) -> float | None:
    """When its hours are over, in seconds since the epoch; None: never.

    A sweep that has not begun begins `now`. The time between an end and a reopening does not count.
    """
    hours = limits_now(state, spec).hours
    begun = began_at(state)
    if hours is None:
        return None
    return (now if begun is None else begun) + hours * 3600 + state.paused


def count_in_flight(state: SweepState) -> int:
    return sum(state.counts[each] for each in _IN_FLIGHT)


def count_startable(
    state: SweepState, spec: SweepSpec, left: int | None, money: Money | None
) -> int:
    """How many trials may begin now, by the trials at once, the trials left, and the cost limit.

    None begins before a tenth of the trials at once is free: a job for each would cost too many
    calls.
    """
    allowed = limits_now(state, spec)
    free = allowed.parallel - count_in_flight(state)
    if (left is not None and left <= 0) or free < _least_free(allowed.parallel, left):
        return 0
    most = free if left is None else min(free, left)
    return min(most, count_affordable(allowed.cost, money))


def count_affordable(cap: float | None, money: Money | None) -> int:
    """How many more trials the cost limit allows."""
    without_end = 10**9
    if cap is None or money is None:
        return without_end
    rest = cap - money.spent - money.committed
    if rest <= 0:
        return 0
    return without_end if money.each <= 0 else int(rest / money.each)


def _least_free(parallel: int, left: int | None) -> int:
    worth = max(1, ceil(parallel / _FREE))
    return worth if left is None else min(worth, left)


def count_failures(state: SweepState) -> int:
    return sum(many for each, many in state.counts.items() if each.is_failure)


def count_ended(state: SweepState) -> int:
    return sum(many for each, many in state.counts.items() if each.is_ended)


def find_exceeded_limit(
    state: SweepState, spec: SweepSpec, tally: Tally, money: Money | None, now: float
) -> tuple[str, str] | None:
    """(by, why) of the limit that stops the sweep; None while it may continue."""
    allowed = limits_now(state, spec)
    if (why := _failure_limit(state, allowed, tally)) is not None:
        return "failures", why
    end = deadline(state, spec, now)
    if end is not None and now >= end:
        return "limit", f"its time is over: {long_duration(3600 * (allowed.hours or 0))}"
    if allowed.cost is not None and money is not None and money.spent >= allowed.cost:
        return "limit", f"its {allowed.cost:g} USD are spent"
    return None


def is_target_reached(state: SweepState, spec: SweepSpec, tally: Tally) -> bool:
    """Whether a trial was as good as the target, at any step."""
    target = limits_now(state, spec).target
    if target is None or tally.best_loss is None:
        return False
    return tally.best_loss <= spec.goal.loss(target)


def _failure_limit(state: SweepState, allowed: SweepLimits, tally: Tally) -> str | None:
    forgiven = state.last_reopening
    bad, over = (
        max(0, count_failures(state) - forgiven.failed),
        max(0, count_ended(state) - forgiven.over),
    )
    wanted = inf if allowed.trials is None else allowed.trials
    part = ceil((allowed.trials or tally.planned) / _SHARE)
    if bad and bad == over and bad >= min(wanted, max(_BREAKER, part)):
        return f"the first {bad} trials all failed" if bad > 1 else "the only trial failed"
    if allowed.failed_count is not None:
        return f"{bad} trials failed" if bad > allowed.failed_count else None
    share = allowed.failed_share
    if share is not None and over >= min(wanted, max(_FEW, part)) and bad > share * over:
        return f"{bad} of the {over} trials that ended failed, more than {share:.0%}"
    return None


# --- Idle time ------------------------------------------------------------------------------------


def idle_seconds(trials: Iterable[Trial], begun: float, until: float) -> float:
    """Seconds between `begun` and `until` in which no trial waited or ran."""
    spans = sorted((each.planned_at, _end(each, until)) for each in trials)
    found, seen = 0.0, begun
    for start, end in (*spans, (until, until)):
        found += max(0.0, min(start, until) - seen)
        seen = max(seen, end)
    return found


def _end(trial: Trial, until: float) -> float:
    if trial.state in _IN_FLIGHT:
        return until
    return trial.planned_at if trial.stopped_at is None else trial.stopped_at
