"""A sweep's space (pure): what is active, how many points there are, and each of them."""

import math
from collections.abc import Iterator, Mapping
from random import Random

from batchml.model.conditions import satisfies as satisfies
from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, Space

SLACK = 1e-6  # of a step: 0.1 + 2 * 0.1 is not quite 0.3, and 0.9 - 0.8 not quite 0.1


def is_active(dimension: Dimension, params: Mapping[str, Scalar]) -> bool:
    """Whether a parameter takes part beside what its parents are set to."""
    return all(
        parent in params and is_one_of(params[parent], values)
        for parent, values in dimension.when.items()
    )


def active(space: Space, params: Mapping[str, Scalar]) -> list[str]:
    """The parameters that take part in a point, parents first; `params` may have more or fewer."""
    taken: Params = {}
    found = []
    for name, dimension in space.items():
        if is_active(dimension, taken):
            found.append(name)
            if name in params:
                taken[name] = params[name]
    return found


def is_one_of(value: Scalar, values: tuple[Scalar, ...]) -> bool:
    """1 and 1.0 are the same value, 1 and true are not."""
    return any(same(value, each) for each in values)


def same(one: Scalar, other: Scalar) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def levels(dimension: Dimension) -> int | None:
    """How many values a parameter has; None: infinitely many."""
    match dimension.kind:
        case "choice" | "constant":
            return len(dimension.values)
        case "int" | "float" if dimension.kind == "int" or dimension.step:
            span = (dimension.high - dimension.low) / (dimension.step or 1)
            return math.floor(span + SLACK) + 1
    return None


def level(dimension: Dimension, index: int) -> Scalar:
    """The value number `index` of those that `levels` counts."""
    if dimension.kind in ("choice", "constant"):
        return dimension.values[index]
    step = dimension.step or 1
    value = dimension.low + index * step
    if dimension.kind == "int":
        return round(value)
    if index == 0:
        return dimension.low
    is_end = abs(value - dimension.high) <= SLACK * step
    return dimension.high if is_end else float(f"{value:.12g}")


def as_value(dimension: Dimension, value: Scalar) -> Scalar | None:
    """`value` as the parameter has it, 1 as 1.0 where it is a number; None: it is none of its."""
    if dimension.kind in ("choice", "constant"):
        return next((each for each in dimension.values if same(each, value)), None)
    if isinstance(value, str | bool) or not is_finite(value):
        return None
    if dimension.kind == "normal":
        return None if dimension.log and value <= 0 else float(value)
    if not dimension.low <= value <= dimension.high:
        return None
    if levels(dimension) is None:
        return float(value)
    index = (value - dimension.low) / (dimension.step or 1)
    return level(dimension, round(index)) if abs(index - round(index)) < SLACK else None


def is_finite(value: float) -> bool:
    """Not so for NaN, infinity, and a whole number too great for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_discrete(space: Space) -> bool:
    """Whether there is a finite number of points."""
    return all(levels(dimension) is not None for dimension in space.values())


def count_points(space: Space) -> int | None:
    """How many points there are, `where` aside; None: infinitely many."""
    if not is_discrete(space):
        return None
    told = {parent: _told(space, parent) for each in space.values() for parent in each.when}
    return _count(list(space.items()), {}, told)


def _told(space: Space, parent: str) -> list[Scalar]:
    """The values of a parameter on which others depend; all its other values are alike."""
    found: list[Scalar] = []
    for dimension in space.values():
        for value in dimension.when.get(parent, ()):
            known = as_value(space[parent], value)
            if known is not None and not is_one_of(known, tuple(found)):
                found.append(known)
    return found


def _count(
    rest: list[tuple[str, Dimension]], params: Params, told: Mapping[str, list[Scalar]]
) -> int:
    count = 1
    for place, (name, dimension) in enumerate(rest):
        if not is_active(dimension, params):
            continue
        number = levels(dimension) or 0
        if name not in told:
            count *= number
            continue
        below = rest[place + 1 :]
        found = sum(_count(below, {**params, name: value}, told) for value in told[name])
        alike = number - len(told[name])
        return count * (found + (alike * _count(below, params, told) if alike else 0))
    return count


def every_point(space: Space) -> Iterator[Params]:
    """Each point of a discrete space, the last parameter changing fastest."""
    yield from _points(list(space.items()), {})


def _points(rest: list[tuple[str, Dimension]], params: Params) -> Iterator[Params]:
    if not rest:
        yield params
        return
    (name, dimension), below = rest[0], rest[1:]
    if not is_active(dimension, params):
        yield from _points(below, params)
        return
    for index in range(levels(dimension) or 0):
        yield from _points(below, {**params, name: level(dimension, index)})


def draw(space: Space, dice: Random) -> Params:
    """Any point, to try out conditions and to show commands; sweep/random.py draws for trials."""
    params: Params = {}
    for name, dimension in space.items():
        if is_active(dimension, params):
            params[name] = _drawn(dimension, dice)
    return params


def _drawn(dimension: Dimension, dice: Random) -> Scalar:
    count = levels(dimension)
    if dimension.kind == "normal":
        value = dice.gauss(dimension.mu, dimension.sigma)
        return math.exp(min(value, 700.0)) if dimension.log else value
    if count is not None and not (dimension.log and dimension.kind != "choice"):
        return level(dimension, dice.randrange(count))
    low, high = dimension.low, dimension.high
    if not dimension.log:
        return float(f"{dice.uniform(low, high):.6g}")
    value = math.exp(dice.uniform(math.log(low), math.log(high)))
    return round(value) if dimension.kind == "int" else float(f"{value:.6g}")


def in_order(space: Space) -> tuple[Space, list[str]]:
    """The space with parents before the parameters that depend on them, and who is in a circle."""
    done: Space = {}
    left = dict(space)
    while left:
        ready = [
            name
            for name, dimension in left.items()
            if not any(parent in left for parent in dimension.when)
        ]
        if not ready:
            return {**done, **left}, list(left)
        name = ready[0]
        done[name] = left.pop(name)
    return done, []
