"""Learning curves: a choice of trials, each thinned, that looks like all of them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from batchml.model.sweep import Trial, TrialState
from batchml.sweep.report.numbers import even, short

_BEST = 24  # of the best that are drawn whatever else is
_MOST = 240
_POINTS = 64  # of one curve


def curves(ranked: Sequence[Trial], trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """`{"n": trial, "s": state, "p": [step, value, step, value, ...]}`; the best stand last.

    Drawn in this order the best lie on top. Of the others each state has its share, and at least a
    few, so that rare ends are seen.
    """
    best = [trial for trial in ranked[:_BEST] if trial.reports]
    chosen = {trial.number for trial in best}
    by_state: dict[TrialState, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.reports and trial.number not in chosen:
            by_state[trial.state].append(trial)
    count = sum(map(len, by_state.values())) or 1
    others: list[Trial] = []
    for alike in by_state.values():
        others += even(alike, max(12, _MOST * len(alike) // count))
    return [_curve(trial) for trial in (*others, *reversed(best))]


def _curve(trial: Trial) -> dict[str, Any]:
    points: list[float | None] = []
    for report in even(trial.reports, _POINTS):
        points += (report.step, short(report.values[0], 5) if report.values else None)
    return {"n": trial.number, "s": trial.state.value, "p": points}
