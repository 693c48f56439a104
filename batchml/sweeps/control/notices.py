"""Notices about a running sweep, each given once. Pure.

Notices that follow from its file alone are given before it starts: `sweeps/spec/rules.py`.
"""

from collections.abc import Iterator

from batchml.model.sweep import Trial, TrialState
from batchml.sweeps.control import budgets
from batchml.sweeps.control.events import NoticeGiven
from batchml.sweeps.control.plan import choose_for_confirmation
from batchml.sweeps.control.state import CONFIRM, WAITING
from batchml.sweeps.control.totals import SweepTotals

NEVER_PRINTED = "never printed"  # in the reason of a trial without its metric
_LINES = 20  # of the output of a trial that failed
_ENOUGH = 3  # diverged trials for a notice

_Found = tuple[str, str, int | None]  # kind, text, the trial that it is about


def due(
    totals: SweepTotals, now: float, patience: float, is_starting: bool = False
) -> list[NoticeGiven]:
    """The notices that are due and were not given yet.

    `patience`: seconds in which a first trial should begin. `is_starting`: a container is being
    made, which takes long for a large image.
    """
    found = (*_of_trials(totals), *(() if is_starting else _of_waiting(totals, now, patience)))
    return [
        NoticeGiven(kind, words, now, trial)
        for kind, words, trial in found
        if kind not in totals.state.notices
    ]


def _of_trials(totals: SweepTotals) -> Iterator[_Found]:
    state, failed = totals.state, totals.tally.first_failure
    if failed is not None and NEVER_PRINTED in failed.why:
        yield "metric", f"Trial {failed.number}: {failed.why}", failed.number
    if state.counts[TrialState.LOST] and "lost" not in state.notices:
        lost = next(each for each in state.trials.values() if each.state is TrialState.LOST)
        yield "lost", f"Trial {lost.number} was lost: {lost.why}", lost.number
    bad, over = state.counts[TrialState.DIVERGED], budgets.count_ended(state)
    if bad >= _ENOUGH and bad * 2 > over:
        yield (
            "diverged",
            f"{bad} of the first {over} trials diverged: {totals.spec.goal.metric} was not a "
            "finite number. The space may reach too far.",
            None,
        )


def _of_waiting(totals: SweepTotals, now: float, patience: float) -> Iterator[_Found]:
    state, begun = totals.state, budgets.began_at(totals.state)
    nothing = not totals.tally.has_begun and state.counts[TrialState.WAITING] > 0
    if begun is not None and nothing and now - begun >= patience and state.jobs:
        job = state.jobs[min(state.jobs)]
        yield (
            WAITING,
            f"No trial has begun for {patience:.0f} seconds. Why: batchml explain {job}",
            None,
        )


def of_confirming(totals: SweepTotals, now: float) -> list[NoticeGiven]:
    """At the end of a sweep: the best were not run again, for cost or because it was stopped."""
    confirm = totals.spec.confirm
    if confirm is None or CONFIRM in totals.state.notices:
        return []
    if len(totals.state.trials) > totals.tally.planned or not choose_for_confirmation(totals, 1, 1):
        return []
    return [
        NoticeGiven(
            CONFIRM, "The best were not run again: a limit or a stop ended the sweep before.", now
        )
    ]


def last_lines(trial: Trial) -> str:
    """Why a trial failed, with the last lines of its output."""
    code, why = f"exit code {trial.exit_code}", trial.why or "the reason is unknown"
    # A trial that never printed its metric may have ended with exit code 0.
    known = trial.exit_code is None or code in why or NEVER_PRINTED in why
    head = f"Trial {trial.number} failed: {why}" + ("" if known else f" ({code})")
    tail = trial.tail[-_LINES:]
    return "\n".join(
        [f"{head}. Its last lines:" if tail else head, *(f"  {each}" for each in tail)]
    )
