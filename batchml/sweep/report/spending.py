"""Where time and money went: by how the trials ended, over time, and what was not spent."""

from collections.abc import Sequence
from typing import Any

from batchml.model.sweep import EarlyStop, Trial, TrialState
from batchml.sweep.report.numbers import even, short
from batchml.sweep.report.rungs import saved_steps

_POINTS = 240


def spending(
    trials: Sequence[Trial], stop: EarlyStop, hourly: float | None, began: float, now: float
) -> dict[str, Any]:
    """In hours of running trials, or in USD where their price is known.

    `over`: `[seconds, amount]`, counted when a trial ends. `saved` is an estimate: the steps that
    were not run, at what a step took on average.
    """
    rate = hourly if hourly else 1.0
    parts: dict[str, float] = {}
    ends: list[tuple[float, float]] = []
    ran = 0.0
    for trial in trials:
        seconds = trial.ran(now)
        if seconds <= 0:
            continue
        ran += seconds
        parts[trial.state.value] = parts.get(trial.state.value, 0.0) + seconds / 3600 * rate
        ends.append((trial.stopped_at or now, seconds / 3600 * rate))
    steps = sum(trial.step for trial in trials)
    saved, _ = saved_steps(trials, stop)
    return {
        "unit": "USD" if hourly else "hours",
        "parts": {
            state.value: short(parts[state.value], 5) for state in TrialState if state in parts
        },
        "total": short(sum(parts.values()), 5),
        "over": _over(ends, began),
        "saved": short(saved * ran / steps / 3600 * rate, 4) if steps else 0,
    }


def _over(ends: list[tuple[float, float]], began: float) -> list[list[float | None]]:
    total, found = 0.0, []
    for at, amount in sorted(ends):
        total += amount
        found.append([short(max(0.0, at - began), 5), short(total, 5)])
    return even([[0, 0], *found], _POINTS) if found else []
