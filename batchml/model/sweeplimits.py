"""`[early_stop]`, `[limits]` and `[confirm]` of a sweep file (pure)."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from batchml.model.sweep import PARALLEL, Confirm, EarlyStop, Limits, Stopping, is_finite
from batchml.model.tables import parse_duration

# Of a sweep. Measured with 9 reports of each of 100,000: 0.6 GiB, and 6 s to read its ledger; the
# controller that is a run of its own has 1 GiB.
MAX_TRIALS = 50_000
MAX_PARALLEL = 10_000
NEEDED = ("trials", "hours", "cost")  # a sweep has one of these limits, or it would never end
_RUNGS = 27  # a trial's first judgement comes after this part of its training

_COST = re.compile(r"\s*\$?\s*([0-9]+(?:\.[0-9]+)?)\s*(usd|\$|dollars?)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_PLAIN = re.compile(r"\s*[0-9]+(?:\.[0-9]+)?\s*")

_Steps = Annotated[int, Meta(ge=1, le=2**53)]  # as many as runtime/sweep/readings.py counts


class EarlyStopTable(Struct, frozen=True, forbid_unknown_fields=True):
    """As the file has it."""

    method: Stopping | UnsetType = UNSET
    step: str = "epoch"
    max: _Steps | UnsetType = UNSET
    min: _Steps | UnsetType = UNSET
    eta: Annotated[int, Meta(ge=2, le=10)] = 3
    resume: bool | UnsetType = UNSET


class LimitsTable(Struct, frozen=True, forbid_unknown_fields=True):
    """As the file has it."""

    trials: Annotated[int, Meta(ge=1, le=MAX_TRIALS)] | UnsetType = UNSET
    parallel: Annotated[int, Meta(ge=1, le=MAX_PARALLEL)] = PARALLEL
    hours: Any = None
    cost: Any = None
    failed: Any = None
    target: Any = None


class ConfirmTable(Struct, frozen=True, forbid_unknown_fields=True):
    """As the file has it."""

    top: Annotated[int, Meta(ge=1, le=1000)] = Confirm().top
    seeds: Annotated[int, Meta(ge=1, le=1000)] = Confirm().seeds

    def as_said(self) -> Confirm:
        return Confirm(self.top, self.seeds)


def read_early_stop(
    table: EarlyStopTable, goals: int, given: frozenset[str]
) -> tuple[EarlyStop, list[str]]:
    """On by default when `max` is known and there is one goal. `given` are the file's keys."""
    method = table.method
    if method is UNSET:
        method = "asha" if table.max is not UNSET and goals < 2 else "none"
    stop_max = 0 if table.max is UNSET else table.max
    stop_min = max(1, math.ceil(stop_max / _RUNGS)) if table.min is UNSET else table.min
    mistakes = [
        f"early_stop.{text}" for text in _stop_mistakes(method, table, stop_min, stop_max, given)
    ]
    if goals > 1 and method != "none":
        mistakes.append("early_stop.method: several goals have no early stopping.")
    # Trials of `halving` always end at rungs; `resume` asks `asha` for it.
    resume = table.resume is True and method == "asha"
    return EarlyStop(method, table.step, stop_max, stop_min, table.eta, resume), mistakes


def _stop_mistakes(
    method: Stopping, table: EarlyStopTable, low: int, high: int, given: frozenset[str]
) -> Iterator[str]:
    if not table.step.strip():
        yield 'step: is empty. The name printed beside the metric, for example "epoch".'
    if table.resume is True and method in ("median", "none") and table.method is not UNSET:
        yield f"resume: {method} has no rungs; asha has, and halving always resumes."
    if method == "none":
        if given & {"min", "eta", "resume"} and table.method is UNSET and "max" not in given:
            yield "max: missing. Without the steps of a full training nothing is stopped early."
        return
    if table.max is UNSET and "max" not in given:
        yield "max: missing. How many steps a full training has, for example max = 27."
    elif high and low >= high:
        yield f"{'min' if 'min' in given else 'max'}: min {low} is not below max {high}."


def read_limits(table: LimitsTable) -> tuple[Limits, list[str]]:
    mistakes: list[str] = []

    def read(key: str, value: float | None, expected: str) -> float | None:
        if value is None:
            found = getattr(table, key)
            mistakes.append(f"limits.{key}: found {found!r}. Expected {expected}.")
        return value

    hours = cost = target = None
    if table.hours is not None:
        hours = read("hours", _hours(table.hours), 'hours, more than 0: 12, 1.5 or "90m"')
    if table.cost is not None:
        cost = read("cost", _cost(table.cost), 'US dollars, more than 0: 50 or "50 USD"')
    if table.target is not None:
        target = read("target", _number(table.target), "a number, of the first goal's metric")
    share, count = _failed(table.failed)
    if share is None and count is None:
        read("failed", None, 'a share of the trials, "20%", or how many, 5')
    trials = None if table.trials is UNSET else table.trials
    return Limits(trials, table.parallel, hours, cost, share, count, target), mistakes


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and is_finite(value) else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < 1e12 else None


def _hours(value: Any) -> float | None:
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        seconds = parse_duration(value)
        return _positive(None if seconds is None else seconds / 3600)
    return _positive(float(value) if isinstance(value, str) else _number(value))


def _cost(value: Any) -> float | None:
    if isinstance(value, str):
        match = _COST.fullmatch(value)
        return _positive(float(match[1])) if match else None
    return _positive(_number(value))


def _failed(value: Any) -> tuple[float | None, int | None]:
    """Share and number of the trials that may fail; both None for what is neither."""
    if value is None:
        return Limits().failed_share, None
    if isinstance(value, str):
        match = _SHARE.fullmatch(value)
        share = float(match[1]) / 100 if match else 2.0
        return (share, None) if share <= 1 else (None, None)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TRIALS:
        return None, value
    return None, None
