"""All trials as CSV, and all of the sweep as JSON: for whoever draws or counts it another way."""

import csv
import json
import math
from io import StringIO
from typing import Any

import msgspec

from batchml.model.sweep import Trial
from batchml.sweep.report.subject import Subject
from batchml.sweep.standings import ranked
from batchml.sweep.state import SweepState

_OURS = (
    "trial", "rank", "state", "origin", "confirms", "wave", "job_id", "attempts", "step", "ran",
    "planned_at", "started_at", "stopped_at", "exit_code", "why", "seed",
)  # fmt: skip


def to_csv(subject: Subject, state: SweepState, now: float) -> str:
    """A row for each trial by its number: what batchml knows, `goal.NAME`, `param.NAME`.

    Times are seconds since the epoch, `ran` is in seconds. An inactive parameter is empty.
    """
    goals = [f"goal.{goal.metric}" for goal in subject.spec.goals]
    names = list(subject.spec.space)
    ranks = {trial.number: rank for rank, trial in enumerate(ranked(state, subject.spec), 1)}
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*_OURS, *goals, *(f"param.{name}" for name in names)])
    for number, trial in sorted(state.trials.items()):
        values = trial.values or (None,) * len(goals)
        params = [trial.params.get(name) for name in names]
        rows.writerow(map(_cell, [*_own(trial, ranks.get(number), now), *values, *params]))
    return text.getvalue()


def _own(trial: Trial, rank: int | None, now: float) -> list[Any]:
    return [
        trial.number, rank, trial.state.value, trial.origin, trial.confirms, trial.wave,
        trial.job_id, trial.attempt, trial.step, round(trial.ran(now), 3), trial.planned_at,
        trial.started_at, trial.stopped_at, trial.exit_code, _words(trial.why), trial.seed,
    ]  # fmt: skip


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _words(text: str) -> str:
    """One line. What a program printed must not become a formula where the file is opened."""
    plain = " ".join(text.split())
    return f"'{plain}" if plain[:1] in ("=", "+", "-", "@") else plain


def to_json(subject: Subject, state: SweepState, now: float) -> str:
    """The file as it was read, and each trial with all its reports, decisions and metrics.

    What is no number in JSON, NaN and infinity, is null.
    """
    trials = [
        {**_finite(msgspec.to_builtins(trial)), "ran": round(trial.ran(now), 3)}
        for _, trial in sorted(state.trials.items())
    ]
    document = {
        "sweepId": subject.key,
        "name": subject.name,
        "env": subject.env,
        "createdAt": subject.created_at,
        "writtenAt": now,
        "ended": state.ended.why if state.ended else None,
        "best": next((trial.number for trial in ranked(state, subject.spec)), None),
        "reports": "each: [step, [values of the goals], seconds since the epoch]",
        "decisions": "each: [step, value, cut-off or null, its version, whether it went on]",
        "spec": msgspec.to_builtins(subject.spec),
        "trials": trials,
    }
    return (
        json.dumps(document, indent=1, allow_nan=False) if len(trials) < 200 else _compact(document)
    )


def _compact(document: dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
