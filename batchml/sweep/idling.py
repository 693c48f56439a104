"""The time for which a sweep stood still: what says nothing of its pace. Pure."""

from collections.abc import Iterable

from batchml.model.sweep import Trial, TrialState

_UNDER_WAY = (TrialState.WAITING, TrialState.RUNNING)


def idle(trials: Iterable[Trial], begun: float, until: float) -> float:
    """Seconds between two times in which no trial waited or ran."""
    spans = sorted((each.planned_at, _end(each, until)) for each in trials)
    found, seen = 0.0, begun
    for start, end in (*spans, (until, until)):
        found += max(0.0, min(start, until) - seen)
        seen = max(seen, end)
    return found


def _end(trial: Trial, until: float) -> float:
    if trial.state in _UNDER_WAY:
        return until
    return trial.planned_at if trial.stopped_at is None else trial.stopped_at
