"""The state of a sweep for people: a snapshot in each round, and a summary at the end. Pure."""

from collections.abc import Mapping

from msgspec import Struct

from batchml.model.sweep import Trial, TrialState
from batchml.sweeps.control.events import DONE
from batchml.sweeps.control.totals import (
    Money,
    SweepTotals,
    began_at,
    count_ended,
    count_in_flight,
    limits_now,
)
from batchml.sweeps.results import ConfirmedTrial, confirmed_trials, pareto_front


def status_word(*, is_ended: bool, is_paused: bool, is_stopping: bool) -> str:
    """The status of a sweep in one word, the same in all commands."""
    if is_ended or is_paused:
        return "ended" if is_ended else "paused"
    return "stopping" if is_stopping else "running"


class SweepSnapshot(Struct, frozen=True):
    """A sweep at one moment. `best` is an object of the state, which changes it later."""

    at: float  # seconds since the epoch
    counts: Mapping[TrialState, int]  # trials by state; a state without any may be missing
    planned: int  # trials so far, without confirming runs
    wanted: int | None  # the number of trials in all; None: unknown
    parallel: int  # trials at once
    best: Trial | None
    began_at: float | None  # when the first batch was planned, in seconds since the epoch
    hours: float  # since `began_at`, without the time between an end and a reopening
    hours_limit: float | None
    spent: float | None  # USD so far; None where it is free or unknown
    committed: float | None  # USD, the expected rest of running and waiting trials
    cost_limit: float | None  # USD
    eta: float | None  # seconds until the end; None: unknown
    steps: int  # training steps of all trials
    steps_saved: int  # steps that were not run, compared with the same trials in full
    notices: tuple[str, ...]  # lines, the oldest first
    stopping: str  # why no trial begins any more; empty: trials may begin
    ended: str  # why the sweep has ended; empty: it has not ended
    is_paused: bool = False  # the sweep needs a controller to continue, and has none

    @property
    def status(self) -> str:
        return status_word(
            is_ended=bool(self.ended), is_paused=self.is_paused, is_stopping=bool(self.stopping)
        )

    def __str__(self) -> str:
        """`12 of 64 trials: 8 done, 4 pruned, 3 running; best 0.98 (trial 17)`"""
        counts = ", ".join(f"{many} {state.lower()}" for state, many in self.counts.items() if many)
        of = "" if self.wanted is None else f" of {self.wanted}"
        best = ""
        if self.best is not None and self.best.values:
            values = ", ".join(f"{value:.6g}" for value in self.best.values)
            best = f"; best {values} (trial {self.best.number})"
        end = f"; {self.ended or self.stopping}" if self.ended or self.stopping else ""
        return f"{self.over}{of} trials: {counts or 'none yet'}{best}{end}"

    def count(self, *states: TrialState) -> int:
        return sum(self.counts.get(state, 0) for state in states)

    @property
    def confirming(self) -> int:
        """The number of confirming runs. They are in `counts`, and not in `planned`."""
        return max(0, sum(self.counts.values()) - self.planned)

    @property
    def in_flight(self) -> int:
        """Trials that are queued or running."""
        return self.count(TrialState.WAITING, TrialState.RUNNING)

    @property
    def over(self) -> int:
        """The number of trials that have ended; paused trials have not."""
        return sum(many for state, many in self.counts.items() if state.is_ended)


class SweepSummary(Struct, frozen=True):
    """The result of a sweep, or its state if its controller ends before the sweep.

    `by`: what ended the sweep: "done" (all trials have ended), "limit", "target", "user",
    "failures"; empty if it has not ended.
    """

    snapshot: SweepSnapshot
    by: str
    why: str  # for people
    first_failure: Trial | None = None  # the first trial that failed, if any did
    pareto: tuple[Trial, ...] = ()  # with several goals: trials that no other beats in every goal
    confirmed: tuple[ConfirmedTrial, ...] = ()  # trials with confirming runs, the best mean first


# --- Making snapshots and summaries ---------------------------------------------------------------


def make_snapshot(
    totals: SweepTotals, wanted: int | None, money: Money | None, now: float
) -> SweepSnapshot:
    """A snapshot. `wanted`: the number of trials in all, where it is known."""
    state, spec = totals.state, totals.spec
    limits, begun = limits_now(state, spec), began_at(state)
    until = state.ended.at if state.ended else now
    hours = max(0.0, until - begun - state.paused_seconds) / 3600 if begun is not None else 0.0
    return SweepSnapshot(
        now,
        dict(state.counts),
        totals.tally.planned,
        wanted,
        limits.parallel,
        totals.best.trial,
        begun,
        hours,
        limits.hours,
        money.spent if money else None,
        money.committed if money else None,
        limits.cost,
        _eta(totals, wanted, hours, until),
        totals.tally.steps,
        totals.tally.saved,
        tuple(line for notice in state.notices.values() for line in notice.words.splitlines()),
        state.stopping.why if state.stopping else "",
        state.ended.why if state.ended else "",
    )


def _eta(totals: SweepTotals, wanted: int | None, hours: float, now: float) -> float | None:
    """Seconds to the end at the rate so far, or until the hours of `limits.hours` are over.

    The rate is that of the time in which trials ran: what passed before the first one had a host,
    or while the sweep was stopped, says nothing of what is left.
    None while no trial is in flight: the sweep may be paused.
    """
    state = totals.state
    if state.ended is not None:
        return 0.0
    if not count_in_flight(state):
        return None
    over, limit = count_ended(state), limits_now(state, totals.spec).hours
    total = len(state.trials)
    if wanted is not None and state.stopping is None:
        total += max(0, wanted - totals.tally.planned)
    estimates = []
    # The first trials do not give the rate where trials end at rungs and continue later.
    has_rate = over and not totals.spec.early_stop.ends_at_rungs
    busy = totals.tally.busy(now) if has_rate else 0.0
    if busy and (wanted is not None or state.stopping is not None):
        estimates.append(busy * max(0, total - over) / over)
    if limit is not None:
        estimates.append(max(0.0, limit - hours) * 3600)
    return min(estimates, default=None)


def make_summary(totals: SweepTotals, snapshot: SweepSnapshot) -> SweepSummary:
    """The result of the sweep, or its present state."""
    state = totals.state
    by = "" if state.ended is None else state.stopping.by if state.stopping else DONE
    why = snapshot.ended or snapshot.stopping
    front = tuple(pareto_front(state, totals.spec))
    confirmed = tuple(confirmed_trials(state, totals.spec))
    return SweepSummary(snapshot, by, why, totals.tally.first_failure, front, confirmed)
