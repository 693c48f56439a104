"""Decide what a sweep does next, and which notices it gives. Pure.

Decisions follow from the ledger and from observations of jobs. The controller writes the events of
a decision to the ledger first, and then acts.
"""

from collections.abc import Iterator, Set

from msgspec import Struct

from batchml.explain.clues import match_log
from batchml.model.sweep import Trial, TrialState
from batchml.runtime.protocol.sweep import NO_COUNTER
from batchml.sweeps.control.events import DONE, LIMIT, TARGET, USER, NoticeGiven
from batchml.sweeps.control.plan import SubmitMode, choose_for_confirmation, find_unfinished_rung
from batchml.sweeps.control.state import CONFIRM, WAITING
from batchml.sweeps.control.totals import (
    Money,
    SweepTotals,
    began_at,
    count_affordable,
    count_ended,
    count_in_flight,
    count_startable,
    find_exceeded_limit,
    is_target_reached,
    limits_now,
)


class DecisionInputs(Struct, frozen=True):
    """The facts that a decision depends on, beside the ledger."""

    now: float  # seconds since the epoch
    mode: SubmitMode
    wanted: int | None  # the number of trials in all; None: unknown
    money: Money | None = None
    between_batches: float = 0.0  # seconds from one batch of trials to the next, at least
    grace: float = 0.0  # seconds from the stop signal until jobs are terminated
    stop_signal: str | None = None  # why somebody stopped the sweep
    is_exhausted: bool = False  # the sampler has no more parameters
    ended_batches: Set[int] = frozenset()  # numbers of the batches whose job has ended


class BeginTrials(Struct, frozen=True):
    """Begin new trials."""

    count: int


class PlanRungs(Struct, frozen=True):
    """With `halving`: begin `count` trials, and plan an array job for each rung."""

    count: int


class PromoteTrials(Struct, frozen=True):
    """Let trials continue to another rung: (trial, the step it runs to)."""

    trials: tuple[tuple[int, int], ...]


class ConfirmBest(Struct, frozen=True):
    """Run the best trials again with other seeds: (trial, number of runs)."""

    trials: tuple[tuple[int, int], ...]


class StopSweep(Struct, frozen=True):
    """Begin no trial from now on, and let running trials save and end."""

    by: str
    why: str


class SignalStop(Struct, frozen=True):
    """Write the stop signal to the sweep's store."""

    why: str


class ReopenSweep(Struct, frozen=True):
    """Continue a sweep that was stopping, because something is left to do."""

    why: str


class TerminateJobs(Struct, frozen=True):
    """Terminate the jobs of the batches of these numbers."""

    batches: tuple[int, ...]
    why: str


class EndSweep(Struct, frozen=True):
    """End the sweep."""

    by: str
    why: str


Action = (
    BeginTrials
    | PlanRungs
    | PromoteTrials
    | ConfirmBest
    | StopSweep
    | SignalStop
    | ReopenSweep
    | TerminateJobs
    | EndSweep
)


def decide(totals: SweepTotals, inputs: DecisionInputs) -> list[Action]:
    """The next actions, in order; none while everything runs as planned."""
    state, spec = totals.state, totals.spec
    if state.ended is not None:
        return []
    if state.stopping is not None:
        return _stop_running(totals, inputs)
    if inputs.stop_signal is not None:
        return [StopSweep(USER, inputs.stop_signal)]
    limit = find_exceeded_limit(state, spec, totals.tally, inputs.money, inputs.now)
    if limit is not None:
        return [StopSweep(*limit)]
    if is_target_reached(totals.state, spec, totals.tally):
        if is_going_on(totals, inputs) and not _has_confirming_runs(totals):
            return [StopSweep(TARGET, _describe_target(totals))]
    elif actions := _begin(totals, inputs):
        return actions
    if is_going_on(totals, inputs):
        return []
    return _confirm(totals, inputs) or [EndSweep(*_end(totals, inputs))]


def is_going_on(totals: SweepTotals, inputs: DecisionInputs) -> bool:
    """Whether a trial waits or runs, or may still begin by itself."""
    return count_in_flight(totals.state) > 0 or bool(_unfinished_jobs(totals, inputs))


def _unfinished_jobs(totals: SweepTotals, inputs: DecisionInputs) -> list[int]:
    """The numbers of the batches whose job has not ended; none with SubmitMode.BATCHES.

    Jobs count, not only trials: which trials a rung of `halving` has is known only when it runs,
    and the consumable resource of an array must exist as long as the array's job.
    """
    if inputs.mode is SubmitMode.BATCHES:
        return []
    return [number for number in totals.state.batches if number not in inputs.ended_batches]


def _stop_running(totals: SweepTotals, inputs: DecisionInputs) -> list[Action]:
    """Signal running trials to end; after the grace period terminate them, and waiting trials."""
    state, stopping = totals.state, totals.state.stopping
    assert stopping is not None
    if not is_going_on(totals, inputs):
        is_stopped_by_user = inputs.stop_signal not in (None, stopping.why)  # meanwhile
        if stopping.by == TARGET and not is_stopped_by_user and _confirm(totals, inputs):
            return [ReopenSweep("the best are run again")]
        return [EndSweep(stopping.by, stopping.why)]
    actions: list[Action] = [] if inputs.stop_signal is not None else [SignalStop(stopping.why)]
    if inputs.now - stopping.at >= inputs.grace or not state.counts[TrialState.RUNNING]:
        batches = sorted({*totals.tally.in_flight, *_unfinished_jobs(totals, inputs)})
        actions.append(TerminateJobs(tuple(batches), stopping.why))
    return actions


def _begin(totals: SweepTotals, inputs: DecisionInputs) -> list[Action]:
    left = _trials_left(totals, inputs)
    match inputs.mode:
        case SubmitMode.ARRAY:
            cost = limits_now(totals.state, totals.spec).cost
            count = min(left or 0, count_affordable(cost, inputs.money))
            return [BeginTrials(count)] if count > 0 else []
        case SubmitMode.RUNGS:
            return _begin_rungs(totals, inputs, left)
        case SubmitMode.BATCHES:
            return _begin_batch(totals, inputs, left)


def _trials_left(totals: SweepTotals, inputs: DecisionInputs) -> int | None:
    """The number of new trials that are still to begin; None: unknown."""
    if inputs.is_exhausted:
        return 0
    return None if inputs.wanted is None else max(0, inputs.wanted - totals.tally.planned)


def _begin_rungs(totals: SweepTotals, inputs: DecisionInputs, left: int | None) -> list[Action]:
    if not totals.state.batches:
        count = totals.spec.limits.parallel if left is None else left
        return [PlanRungs(count)] if count else []
    if is_going_on(totals, inputs):
        return []
    # Jobs whose dependency failed have left rungs without all their trials.
    rest = find_unfinished_rung(totals.state, totals.spec)
    return [PromoteTrials(tuple(rest))] if rest else []


def _begin_batch(totals: SweepTotals, inputs: DecisionInputs, left: int | None) -> list[Action]:
    state, spec = totals.state, totals.spec
    busy = count_in_flight(state)
    newest = next(reversed(state.batches.values()), None)
    if busy and newest is not None and inputs.now - newest.at < inputs.between_batches:
        return []
    chosen: list[tuple[int, int]] = []
    if spec.early_stop.resume:
        chosen = totals.rungs.promotable(limits_now(state, spec).parallel)
    startable = None if left is None else left + len(chosen)
    if startable == 0 and not busy:
        chosen = _last_promotion(totals)
        startable = len(chosen)
    count = count_startable(state, spec, startable, inputs.money)
    chosen = chosen[:count]
    actions: list[Action] = [PromoteTrials(tuple(chosen))] if chosen else []
    count -= len(chosen)
    if left is not None:
        count = min(count, left)
    return [*actions, BeginTrials(count)] if count > 0 else actions


def _last_promotion(totals: SweepTotals) -> list[tuple[int, int]]:
    """Train the best paused trial in full, if too few trials are left to fill the last rungs."""
    if not totals.spec.early_stop.resume or totals.state.counts[TrialState.DONE]:
        return []
    number = totals.rungs.best_paused()
    return [] if number is None else [(number, totals.spec.early_stop.max)]


def _has_confirming_runs(totals: SweepTotals) -> bool:
    """Whether the best trials are being run again, or were."""
    return len(totals.state.trials) > totals.tally.planned


def _confirm(totals: SweepTotals, inputs: DecisionInputs) -> list[Action]:
    """Run the best trials again, once, if the sweep file has `[confirm]` and the cost limit allows
    all of these runs."""
    confirm = totals.spec.confirm
    if confirm is None or _has_confirming_runs(totals):
        return []
    chosen = choose_for_confirmation(totals, confirm.top, confirm.seeds)
    cost = limits_now(totals.state, totals.spec).cost
    count = sum(seeds for _, seeds in chosen)
    if not chosen or count > count_affordable(cost, inputs.money):
        return []
    return [ConfirmBest(tuple(chosen))]


def _describe_target(totals: SweepTotals) -> str:
    target = limits_now(totals.state, totals.spec).target
    return f"{totals.spec.goal.metric} reached {target:g}"


def _end(totals: SweepTotals, inputs: DecisionInputs) -> tuple[str, str]:
    """The cause of the end, and why, for people."""
    state = totals.state
    planned, allowed = totals.tally.planned, limits_now(state, totals.spec)
    if is_target_reached(state, totals.spec, totals.tally):
        return TARGET, _describe_target(totals)
    left = _trials_left(totals, inputs)
    if left != 0 and count_affordable(allowed.cost, inputs.money) < 1:
        return LIMIT, f"the rest of its {allowed.cost:g} USD is less than a trial costs"
    if inputs.is_exhausted and (inputs.wanted is None or planned < inputs.wanted):
        return DONE, f"every point was tried: {planned}"
    return DONE, _describe_end(totals)


def _describe_end(totals: SweepTotals) -> str:
    """Why a sweep has ended that ran all its trials. Confirming runs are counted apart."""
    planned = totals.tally.planned
    confirming = len(totals.state.trials) - planned
    subject = f"all {planned} trials" if planned != 1 else "its only trial"
    if confirming:
        subject += f" and {confirming} confirming {'run' if confirming == 1 else 'runs'}"
    verb = "is" if planned == 1 and not confirming else "are"
    none = ", and none has a result" if planned and totals.best.trial is None else ""
    return f"{subject} {verb} over{none}"


# --- Notices about a running sweep ----------------------------------------------------------------


NEVER_PRINTED = "never printed"  # in the reason of a trial that did not print its metric
_LINES = 20  # of the output of a failed trial, in a notice
_DIVERGED = 3  # diverged trials, after which a notice is given

_Notice = tuple[str, str, int | None]  # kind, text, number of the trial that the notice is about


def due_notices(
    totals: SweepTotals, now: float, patience: float, is_starting: bool = False
) -> list[NoticeGiven]:
    """The notices that are due and were not given yet.

    `patience`: seconds in which a first trial should begin. `is_starting`: a container is STARTING,
    which takes long for a large image.
    """
    waiting = [] if is_starting else _wait_notices(totals, now, patience)
    return [
        NoticeGiven(kind, words, now, trial)
        for kind, words, trial in (*_failure_notices(totals), *_counter_notices(totals), *waiting)
        if kind not in totals.state.notices
    ]


def _failure_notices(totals: SweepTotals) -> Iterator[_Notice]:
    state, failed = totals.state, totals.tally.first_failure
    clue = match_log(failed.tail) if failed is not None and failed.tail else None
    if failed is not None and clue is not None and clue.cause == "unknown-flag":
        words = f"Trial {failed.number}: {clue.verdict} {clue.fix} A new sweep reads it."
        yield "flags", words, failed.number
    if failed is not None and NEVER_PRINTED in failed.why:
        yield "metric", f"Trial {failed.number}: {failed.why}", failed.number
    if state.counts[TrialState.LOST] and "lost" not in state.notices:
        lost = next(each for each in state.trials.values() if each.state is TrialState.LOST)
        yield "lost", f"Trial {lost.number} was lost: {lost.why}", lost.number
    diverged, over = state.counts[TrialState.DIVERGED], count_ended(state)
    if diverged >= _DIVERGED and diverged * 2 > over:
        yield (
            "diverged",
            f"{diverged} of the first {over} trials diverged: {totals.spec.goal.metric} was not a "
            "finite number. The search space may be too wide.",
            None,
        )


def _counter_notices(totals: SweepTotals) -> Iterator[_Notice]:
    """A notice if the program's lines do not count the step of the sweep file."""
    best, stop = totals.best.trial, totals.spec.early_stop
    if best is None or stop.method == "none" or not (best.counter or best.other):
        return
    lines = f"The lines with {totals.spec.goal.metric}"
    if best.counter:
        words = (
            f"{lines} count {best.counter}, so early_stop.max = {stop.max} does, too. "
            f'Write step = "{best.counter}" below [early_stop].'
        )
    elif best.other == NO_COUNTER:
        words = f"{lines} have no {stop.step}: each of them counts as one {stop.step}."
    else:
        words = (
            f"{lines} count {best.other}, not {stop.step}: each of them counts as one {stop.step}. "
            f'For {best.other} write step = "{best.other}" below [early_stop], and max as the last '
            f"{best.other}."
        )
    yield "counter", words, None


def _wait_notices(totals: SweepTotals, now: float, patience: float) -> Iterator[_Notice]:
    state, begun = totals.state, began_at(totals.state)
    none_has_begun = not totals.tally.has_begun and state.counts[TrialState.WAITING] > 0
    if begun is not None and none_has_begun and now - begun >= patience and state.jobs:
        job = state.jobs[min(state.jobs)]
        yield (
            WAITING,
            f"No trial has begun for {patience:.0f} seconds. Why: batchml explain {job}",
            None,
        )


def confirmation_notices(totals: SweepTotals, now: float) -> list[NoticeGiven]:
    """The notice at a sweep's end that its best trials were not run again, though the file has
    `[confirm]`: for cost, or because the sweep was stopped."""
    if totals.spec.confirm is None or CONFIRM in totals.state.notices:
        return []
    if _has_confirming_runs(totals) or not choose_for_confirmation(totals, 1, 1):
        return []
    words = "The best trials were not run again: a limit or a stop ended the sweep before that."
    return [NoticeGiven(CONFIRM, words, now)]


def describe_failure(trial: Trial) -> str:
    """Why a trial failed, with the last lines of its output."""
    code, why = f"exit code {trial.exit_code}", trial.why or "the reason is unknown"
    is_code_known = trial.exit_code is None or code in why
    head = f"Trial {trial.number} failed: {why}" + ("" if is_code_known else f" ({code})")
    tail = trial.tail[-_LINES:]
    return "\n".join(
        [f"{head}. Its last lines:" if tail else head, *(f"  {each}" for each in tail)]
    )
