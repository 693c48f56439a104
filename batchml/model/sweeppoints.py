"""`[[points]]` of a sweep file: sets of parameters that the user wants tried (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchml.errors import did_you_mean
from batchml.model.job import Scalar
from batchml.model.spacefile import Wrong, as_scalar, shown
from batchml.model.sweep import Params, Space, active, as_value, is_one_of, satisfies


def with_listed(table: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`[space]` for the method `list`: what only the points name has the values that they give."""
    seen: dict[str, list[Scalar]] = {}
    for point in points:
        for name, value in point.items():
            is_listed = name not in table and not did_you_mean(name, table)
            if not is_listed or not isinstance(value, str | int | float):
                continue
            values = seen.setdefault(name, [])
            if not is_one_of(value, tuple(values)):
                values.append(value)
    listed = {name: values if len(values) > 1 else values[0] for name, values in seen.items()}
    return {**table, **listed}


def read_points(
    points: Sequence[Mapping[str, Any]], space: Space, where: Sequence[str]
) -> tuple[tuple[Params, ...], list[str]]:
    """The points as trials run them, constants filled in, and every mistake of theirs."""
    found: list[Params] = []
    mistakes: list[str] = []
    for place, point in enumerate(points):
        params, wrong = _point(point, space)
        if not wrong and not satisfies(where, params):
            wrong = [": does not satisfy `where`."]
        if not wrong and params in found:
            wrong = [f": is the same as points[{found.index(params)}]."]
        mistakes += [f"points[{place}]{text}" for text in wrong]
        found.append(params)
    return tuple(found), mistakes


def _point(point: Mapping[str, Any], space: Space) -> tuple[Params, list[str]]:
    mistakes = []
    given: Params = {}
    for name, value in point.items():
        if name not in space:
            mistakes.append(f".{name}: there is no such parameter.{did_you_mean(name, space)}")
            continue
        try:
            scalar = as_scalar(value)
        except Wrong as error:
            mistakes.append(f".{name}{error}")
            continue
        known = as_value(space[name], scalar)
        if known is None:
            mistakes.append(f".{name}: {shown(value)} is not in the space.")
        else:
            given[name] = known
    for name, dimension in space.items():
        if dimension.kind == "constant":
            given.setdefault(name, dimension.values[0])
    if mistakes:
        return given, mistakes
    names = active(space, given)
    mistakes += [f".{name}: missing." for name in names if name not in given]
    idle = [name for name in point if name not in names]
    mistakes += [f".{name}: is not active beside the others (when)." for name in idle]
    return {name: given[name] for name in names if name in given}, mistakes
