"""A sweep as a journal of Optuna's, which its dashboard and its plots read.

A journal is one JSON object a line: what was done to a storage, in order. Format: Optuna 5,
optuna/storages/journal/_storage.py (operations and their fields), optuna/distributions.py (how a
distribution is written), optuna/trial/_state.py.
"""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, SweepSpec, Trial, TrialState
from batchml.sweep.state import SweepState

# JournalOperation
_CREATE_STUDY, _STUDY_USER_ATTR, _CREATE_TRIAL = 0, 2, 4
# StudyDirection
_DIRECTIONS = {"min": 1, "max": 2}
# TrialState. One that pauses or waits has no state of Optuna's own that fits better.
_RUNNING, _COMPLETE, _PRUNED, _FAIL, _WAITING = 0, 1, 2, 3, 4
_STATES = {
    TrialState.DONE: _COMPLETE, TrialState.PRUNED: _PRUNED, TrialState.PAUSED: _RUNNING,
    TrialState.RUNNING: _RUNNING, TrialState.WAITING: _WAITING,
}  # fmt: skip

_WORKER = "batchml"


def write_journal(path: Path, name: str, spec: SweepSpec, state: SweepState, now: float) -> int:
    """Write the journal anew; how many trials are in it. Raises OSError.

    Optuna would append to a file that is there, and have every trial twice; so does nobody here.
    """
    from batchml.runtime.storage.files import write_atomically

    trials = sorted(state.trials.values(), key=lambda trial: trial.number)
    lines = (json.dumps(each, separators=(",", ":")) for each in journal(name, spec, trials, now))
    write_atomically(str(path), "".join(f"{line}\n" for line in lines).encode(), 0o644)
    return len(trials)


def journal(
    name: str, spec: SweepSpec, trials: Sequence[Trial], now: float
) -> Iterator[dict[str, Any]]:
    """The operations that make a study of a sweep's trials, in their order."""
    directions = [_DIRECTIONS[goal.direction] for goal in spec.goals]
    yield _operation(_CREATE_STUDY, study_name=name, directions=directions)
    about = {"metrics": [goal.metric for goal in spec.goals], "method": spec.method}
    for key, value in about.items():
        yield _operation(_STUDY_USER_ATTR, study_id=0, user_attr={key: value})
    known = distributions(spec, [trial.params for trial in trials])
    for trial in trials:
        yield _operation(_CREATE_TRIAL, study_id=0, **_trial(trial, spec, known, now))


def _operation(code: int, **fields: Any) -> dict[str, Any]:
    return {"op_code": code, "worker_id": _WORKER, **fields}


def _trial(
    trial: Trial, spec: SweepSpec, known: dict[str, dict[str, Any]], now: float
) -> dict[str, Any]:
    state, values = _state(trial, spec)
    began = trial.started_at if trial.started_at is not None else trial.planned_at
    ended = trial.stopped_at if trial.state.is_ended else None
    own = {name: known[name] for name in trial.params if name in known}
    found: dict[str, Any] = {
        "datetime_start": _time(began) if state != _WAITING else None,
        "state": state,
        "distributions": {name: json.dumps(each) for name, each in own.items()},
        "params": {name: _inner(trial.params[name], each) for name, each in own.items()},
        "user_attrs": _attributes(trial),
        "system_attrs": {},
        "intermediate_values": {
            str(report.step): report.values[0] for report in trial.reports if report.values
        } if len(spec.goals) == 1 else {},
    }  # fmt: skip
    if state in (_COMPLETE, _PRUNED, _FAIL):
        found["datetime_complete"] = _time(ended if ended is not None else now)
    several = len(spec.goals) > 1
    found["value"] = values[0] if values and not several else None
    found["values"] = values if several else None
    return found


def _state(trial: Trial, spec: SweepSpec) -> tuple[int, list[float] | None]:
    """Optuna's state and values: complete needs a finite value of each goal, several goals no
    values of what was pruned."""
    state = _STATES.get(trial.state, _FAIL)
    values = list(trial.values or ())
    usable = len(values) == len(spec.goals) and all(map(math.isfinite, values))
    if state == _COMPLETE and not usable:
        return _FAIL, None
    if state == _PRUNED and len(spec.goals) > 1:
        return _FAIL, None
    return state, values if usable and state in (_COMPLETE, _PRUNED) else None


def _attributes(trial: Trial) -> dict[str, Any]:
    """What Optuna has no field for. NaN and infinity are left out: JSON has none."""
    found: dict[str, Any] = {
        "trial": trial.number, "state": trial.state.value, "seed": trial.seed,
        "origin": trial.origin, "job_id": trial.job_id, "why": trial.why,
        "exit_code": trial.exit_code, "confirms": trial.confirms,
    }  # fmt: skip
    found |= {f"metric:{name}": value for name, value in trial.metrics.items()
              if math.isfinite(value)}  # fmt: skip
    return {name: value for name, value in found.items() if value not in (None, "")}


def distributions(spec: SweepSpec, tried: Sequence[Params]) -> dict[str, dict[str, Any]]:
    """What each parameter may be, wide enough for everything that was tried.

    Optuna refuses a value outside. Constants are left out, unless they differ.
    """
    found = {}
    for name, dimension in spec.space.items():
        values = [params[name] for params in tried if name in params]
        if values and (dimension.kind != "constant" or len(_different(values)) > 1):
            found[name] = _distribution(dimension, values)
    return found


def _distribution(dimension: Dimension, values: Sequence[Scalar]) -> dict[str, Any]:
    numbers = [each for each in values if isinstance(each, int | float)
               and not isinstance(each, bool)]  # fmt: skip
    if dimension.kind in ("choice", "constant") or len(numbers) < len(values):
        return _named("CategoricalDistribution", choices=_different([*dimension.values, *values]))
    ends = [] if dimension.kind == "normal" else [dimension.low, dimension.high]
    low, high = min([*numbers, *ends]), max([*numbers, *ends])
    log = dimension.log and low > 0
    if dimension.kind == "int" and all(float(each).is_integer() for each in numbers):
        return _named("IntDistribution", log=log, step=1, low=int(low), high=int(high))
    return _named("FloatDistribution", step=None, low=float(low), high=float(high), log=log)


def _named(name: str, **attributes: Any) -> dict[str, Any]:
    return {"name": name, "attributes": attributes}


def _different(values: Sequence[Scalar]) -> list[Scalar]:
    """Each once. `True` and `1` are two, which Python takes for one."""
    return list({(type(value), value): value for value in values}.values())


def _inner(value: Scalar, distribution: dict[str, Any]) -> float:
    """A parameter as Optuna stores it: a number, or the place of a choice."""
    choices = distribution["attributes"].get("choices")
    if choices is None:
        return float(value)
    return next(
        place for place, each in enumerate(choices) if (type(each), each) == (type(value), value)
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
