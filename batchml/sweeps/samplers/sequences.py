"""Points of the methods that need no results: random, Sobol, grid and list, by index from 0.

Sobol points are spread more evenly than random points; parameters beyond the 40th are random. The
direction numbers are by S. Joe and F. Y. Kuo ("Constructing Sobol sequences with better
two-dimensional projections", 2008, file new-joe-kuo-6.21201). The order is by Gray code (Antonov
and Saleev, 1979), with a digital shift by the seed, so that no sweep begins in the corner of the
space.
"""

import math
from collections.abc import Callable, Container, Hashable, Mapping
from functools import lru_cache
from typing import Protocol

import msgspec

from batchml.model.conditions import satisfies
from batchml.model.sweep import (
    Params,
    Space,
    SweepSpec,
    count_levels,
    count_points,
    every_point,
    is_discrete,
    level,
)
from batchml.sweeps.samplers.points import (
    Scale,
    build_point,
    from_unit,
    point_key,
    seeded_random,
)

# --- Sobol ----------------------------------------------------------------------------------------


BITS = 30  # of a coordinate

# For each dimension but the first: the primitive polynomial, and the first direction numbers.
_DIRECTIONS = (
    (3, (1,)),
    (7, (1, 3)),
    (11, (1, 3, 1)),
    (13, (1, 1, 1)),
    (19, (1, 1, 3, 3)),
    (25, (1, 3, 5, 13)),
    (37, (1, 1, 5, 5, 17)),
    (41, (1, 1, 5, 5, 5)),
    (47, (1, 1, 7, 11, 19)),
    (55, (1, 1, 5, 1, 1)),
    (59, (1, 1, 1, 3, 11)),
    (61, (1, 3, 5, 5, 31)),
    (67, (1, 3, 3, 9, 7, 49)),
    (91, (1, 1, 1, 15, 21, 21)),
    (97, (1, 3, 1, 13, 27, 49)),
    (103, (1, 1, 1, 15, 7, 5)),
    (109, (1, 3, 1, 15, 13, 25)),
    (115, (1, 1, 5, 5, 19, 61)),
    (131, (1, 3, 7, 11, 23, 15, 103)),
    (137, (1, 3, 7, 13, 13, 15, 69)),
    (143, (1, 1, 3, 13, 7, 35, 63)),
    (145, (1, 3, 5, 9, 1, 25, 53)),
    (157, (1, 3, 1, 13, 9, 35, 107)),
    (167, (1, 3, 1, 5, 27, 61, 31)),
    (171, (1, 1, 5, 11, 19, 41, 61)),
    (185, (1, 3, 5, 3, 3, 13, 69)),
    (191, (1, 1, 7, 13, 1, 19, 1)),
    (193, (1, 3, 7, 5, 13, 19, 59)),
    (203, (1, 1, 3, 9, 25, 29, 41)),
    (211, (1, 3, 5, 13, 23, 1, 55)),
    (213, (1, 3, 7, 3, 13, 59, 17)),
    (229, (1, 3, 1, 3, 5, 53, 69)),
    (239, (1, 1, 5, 5, 23, 33, 13)),
    (241, (1, 1, 7, 7, 1, 61, 123)),
    (247, (1, 1, 7, 9, 13, 61, 49)),
    (253, (1, 3, 3, 5, 3, 55, 33)),
    (285, (1, 3, 1, 15, 31, 13, 49, 245)),
    (299, (1, 3, 5, 15, 31, 59, 63, 97)),
    (301, (1, 3, 1, 11, 11, 11, 77, 249)),
)
DIMENSIONS = len(_DIRECTIONS) + 1


def draw_sobol(spec: SweepSpec, index: int) -> Params:
    """Point number `index`, below 2**30."""
    count = min(len(spec.space), DIMENSIONS)
    numbers = seeded_random(spec.seed, index)
    positions = dict(zip(spec.space, shifted_point(spec.seed, index, count), strict=False))
    return build_point(
        spec.space,
        lambda name, dimension: from_unit(
            dimension, positions[name] if name in positions else numbers.random()
        ),
    )


def shifted_point(seed: int, index: int, count: int) -> list[float]:
    """Point number `index` in [0, 1)**count, shifted by the seed."""
    shift = seeded_random(seed, "sobol")
    return [(bits ^ shift.getrandbits(BITS)) / 2**BITS for bits in sobol_point(index, count)]


def sobol_point(index: int, count: int) -> list[int]:
    """Point number `index` of the sequence without a shift, in units of 2**-30."""
    gray = index ^ (index >> 1)
    point = [0] * count
    for bit in range(gray.bit_length()):
        if gray >> bit & 1:
            for position in range(count):
                point[position] ^= directions(position)[bit]
    return point


@lru_cache(DIMENSIONS)
def directions(position: int) -> tuple[int, ...]:
    """The direction numbers of a dimension, in units of 2**-30."""
    if position == 0:
        return tuple(1 << (BITS - 1 - bit) for bit in range(BITS))
    polynomial, initial = _DIRECTIONS[position - 1]
    degree = len(initial)
    numbers = [number << (BITS - 1 - bit) for bit, number in enumerate(initial)]
    for bit in range(degree, BITS):
        number = numbers[bit - degree] ^ (numbers[bit - degree] >> degree)
        for back in range(1, degree):
            if polynomial >> (degree - back) & 1:
                number ^= numbers[bit - back]
        numbers.append(number)
    return tuple(numbers)


# --- Random: each index has its own generator, so a restart repeats no point ----------------------


def draw_random(spec: SweepSpec, index: int, attempt: int = 0) -> Params:
    """Point number `index`. `attempt`: from 1, draws that replace points that `where` refuses."""
    numbers = seeded_random(spec.seed, index, attempt)
    return build_point(spec.space, lambda name, dimension: from_unit(dimension, numbers.random()))


# --- Grid: all points of a discrete space, in an order that depends on the seed -------------------
# So any part of the grid that runs is a fair sample. The order is a draw without replacement by
# the keys of Efraimidis and Spirakis ("Weighted random sampling with a reservoir", 2006).


LISTED = 100_000  # points: more than a sweep has trials; points of a larger space are drawn


def list_points(space: Space, seed: int, *, weighted: bool) -> list[Params] | None:
    """Every point once; if `weighted`, likely ones come earlier. None: too many points."""
    count = count_points(space)
    if count is None or count > LISTED:
        return None
    numbers = seeded_random(seed, "order")
    scales = {name: Scale(dimension) for name, dimension in space.items()}
    keyed: list[tuple[float, int, Params]] = []
    for params in every_point(space):
        weight = _weight(scales, params) if weighted else 1.0
        keyed.append((math.log(1 - numbers.random()) / weight, len(keyed), params))
    return [params for _, _, params in sorted(keyed, reverse=True)]


def _weight(scales: Mapping[str, Scale], params: Params) -> float:
    return math.prod(scales[name].probability(value) for name, value in params.items())


# --- Sequences ------------------------------------------------------------------------------------


TRIES = 1000  # draws in a row that `where` refuses or that are repetitions, before giving up
_KEPT = 8  # sequences

DrawPoint = Callable[[SweepSpec, int], Params]  # draws the point of an index


class PointSequence(Protocol):
    """The points of a method, in their order."""

    def at(self, index: int) -> Params | None:
        """Point number `index`; None if there are fewer points."""
        ...


class ListedPoints:
    """Points from a list."""

    def __init__(self, points: list[Params]) -> None:
        self._points = points

    def at(self, index: int) -> Params | None:
        return self._points[index] if index < len(self._points) else None


class RandomPoints:
    """Random points of an infinite space."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec

    def at(self, index: int) -> Params | None:
        drawn = (draw_random(self._spec, index, attempt) for attempt in range(TRIES))
        return next((params for params in drawn if is_allowed(self._spec, params)), None)


class FilteredPoints:
    """Drawn points in their order, without points that `where` refuses.

    In a discrete space also without repetitions, and without the points of the sweep file.
    """

    def __init__(self, spec: SweepSpec, draw: DrawPoint) -> None:
        self._spec = spec
        self._draw = draw
        self._accepted: list[Params] = []
        self._next = 0  # the index of the next draw
        self._known: set[Hashable] | None = None  # None: in an infinite space no point repeats
        if is_discrete(spec.space):
            self._known = {point_key(params) for params in spec.points}

    def at(self, index: int) -> Params | None:
        last = self._next + TRIES
        while len(self._accepted) <= index and self._next < last:
            params = self._draw(self._spec, self._next)
            self._next += 1
            if self._is_new(params):
                self._accepted.append(params)
                last = self._next + TRIES
        return self._accepted[index] if index < len(self._accepted) else None

    def _is_new(self, params: Params) -> bool:
        if not is_allowed(self._spec, params):
            return False
        if self._known is None:
            return True
        before = len(self._known)
        self._known.add(point_key(params))
        return len(self._known) > before


def is_allowed(spec: SweepSpec, params: Params) -> bool:
    """Whether `where` allows a point."""
    return not spec.where or satisfies(spec.where, params)


def find_unused(spec: SweepSpec, tried: Container[Hashable], index: int) -> Params | None:
    """Random point number `index`, or the next that was not tried; None: no point is left.

    `tried`: the keys of points.
    """
    points = find_sequence(spec, "random")
    for positions in (range(index, index + LISTED), range(index)):
        for position in positions:
            params = points.at(position)
            if params is None:
                break
            if point_key(params) not in tried:
                return params
    return None


def find_sequence(spec: SweepSpec, kind: str) -> PointSequence:
    """The sequence of `kind` for a sweep's space and seed.

    The last few sequences are kept in memory, because it may take long to make one.
    """
    key = msgspec.json.encode((kind, spec.space, spec.seed, spec.where, spec.points))
    if key not in _kept_sequences:
        while len(_kept_sequences) >= _KEPT:
            del _kept_sequences[next(iter(_kept_sequences))]
        _kept_sequences[key] = _make_sequence(spec, kind)
    return _kept_sequences[key]


_kept_sequences: dict[bytes, PointSequence] = {}


def _make_sequence(spec: SweepSpec, kind: str) -> PointSequence:
    if kind == "sobol":
        return FilteredPoints(spec, draw_sobol)
    if not is_discrete(spec.space):
        return RandomPoints(spec)
    points = list_points(spec.space, spec.seed, weighted=kind != "grid")
    if points is None:
        return FilteredPoints(spec, _draw_from_grid if kind == "grid" else draw_random)
    from_file = {point_key(params) for params in spec.points}
    return ListedPoints(
        [p for p in points if is_allowed(spec, p) and point_key(p) not in from_file]
    )


def _draw_from_grid(spec: SweepSpec, index: int) -> Params:
    """Draw a point of a grid that is too large to be listed."""
    numbers = seeded_random(spec.seed, index)
    return build_point(
        spec.space,
        lambda _, dimension: level(dimension, numbers.randrange(count_levels(dimension) or 1)),
    )
