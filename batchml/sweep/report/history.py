"""How the sweep went: each trial's result as it came, and the best one until then."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from batchml.model.sweep import Goal, Trial, TrialState
from batchml.sweep.report.numbers import even, short

_MOST = 400  # steps of the incumbent's line


class Came(NamedTuple):
    """A trial's result in the order of the sweep."""

    trial: Trial
    order: int  # how many had ended with it
    seconds: float  # since the sweep began
    steps: int  # of training, of all trials that had ended


def in_order(trials: Sequence[Trial], began: float) -> list[Came]:
    """Those that have ended, as they did."""
    ended = [trial for trial in trials if trial.state.is_ended]
    ended.sort(key=lambda trial: (trial.stopped_at or 0.0, trial.number))
    found, steps = [], 0
    for order, trial in enumerate(ended, 1):
        steps += trial.step
        at = trial.stopped_at or (trial.reports[-1].at if trial.reports else began)
        found.append(Came(trial, order, max(0.0, at - began), steps))
    return found


def incumbents(came: Sequence[Came], goal: Goal) -> list[list[Any]]:
    """`[order, seconds, steps, value, trial]` each time that a trained trial beat all before it.

    Only trials that came to their own end count: one that was stopped at an early step may have
    been better there than any will be in the end, or worse. While none has, all count.
    """
    done = [each for each in came if each.trial.state is TrialState.DONE]
    best: float | None = None
    found: list[list[Any]] = []
    for each in done or came:
        value = each.trial.values[0] if each.trial.values else None
        if value is None or short(value) is None:
            continue
        if best is None or goal.loss(value) < goal.loss(best):
            best = value
            place = [each.order, short(each.seconds, 5), each.steps, short(value)]
            found.append([*place, each.trial.number])
    return even(found, _MOST)
