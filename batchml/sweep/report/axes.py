"""The parameters as axes: what is drawn along them, and where a trial lies on each."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, Space
from batchml.sweep.report.numbers import short

_MOST_NAMES = 40  # choices that have a place of their own; others share the last one
_LONGEST = 60  # characters of a choice


def axes(space: Space, tried: Sequence[Params]) -> list[dict[str, Any]]:
    """One axis for each parameter that was tried with more than one value."""
    found = []
    for name, dimension in space.items():
        values = [params[name] for params in tried if name in params]
        if len(set(map(repr, values))) > 1:
            found.append({"name": name, **_axis(dimension, values)})
    return found


def places(axis: dict[str, Any], trials: Iterable[Params]) -> list[float | None]:
    """Where each lies: a number, or the number of a choice; None where it has no such parameter."""
    name = axis["name"]
    if "names" not in axis:
        return [short(float(each[name]), 5) if name in each else None for each in trials]
    known = {text: place for place, text in enumerate(axis["names"])}
    return [
        known.get(label(each[name]), len(known) - 1) if name in each else None for each in trials
    ]


def label(value: Scalar) -> str:
    """A choice as text, cut where it is long."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "\u2026"


def _axis(dimension: Dimension, values: Sequence[Scalar]) -> dict[str, Any]:
    numbers = [value for value in values if _is_number(value)]
    if dimension.kind in ("choice", "constant") or len(numbers) < len(values):
        names = list(dict.fromkeys(map(label, (*dimension.values, *values))))
        others = [*names[: _MOST_NAMES - 1], "others"]
        return {"names": names if len(names) <= _MOST_NAMES else others}
    low, high = float(min(numbers)), float(max(numbers))
    if dimension.kind != "normal":  # its ends are the ones that were seen
        low, high = min(low, dimension.low), max(high, dimension.high)
    log = dimension.log and low > 0
    return {"low": short(low), "high": short(high), "log": log, "int": dimension.kind == "int"}


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
