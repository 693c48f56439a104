"""Points that depend on no results: random, Sobol, grid and list, by their index from 0."""

from collections.abc import Container, Hashable
from typing import Protocol

import msgspec

from batchml.model.sweep import Params, SweepSpec, is_discrete, level, levels
from batchml.model.sweep import satisfies as allows
from batchml.sweep import random, sobol
from batchml.sweep.grid import LISTED, listed
from batchml.sweep.points import built, generator, key

TRIES = 1000  # points drawn in a row that `where` refuses, or that are known, before it ends
_KEPT = 8  # sequences


class Sequence(Protocol):
    def at(self, index: int) -> Params | None:
        """Point number `index`; None: there are fewer."""
        ...


class Listed:
    """Points that are all known."""

    def __init__(self, points: list[Params]) -> None:
        self._points = points

    def at(self, index: int) -> Params | None:
        return self._points[index] if index < len(self._points) else None


class Free:
    """Random points of a space that has room for any number of them."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec

    def at(self, index: int) -> Params | None:
        drawn = (random.draw(self._spec, index, again) for again in range(TRIES))
        return next((params for params in drawn if satisfies(self._spec, params)), None)


class Walked:
    """Points found one after the other: what `where` refuses and what was there is left out."""

    def __init__(self, spec: SweepSpec, draw: "Draw") -> None:
        self._spec = spec
        self._draw = draw
        self._found: list[Params] = []
        self._next = 0
        self._known: set[Hashable] | None = None
        if is_discrete(spec.space):
            self._known = {key(params) for params in spec.points}

    def at(self, index: int) -> Params | None:
        last = self._next + TRIES
        while len(self._found) <= index and self._next < last:
            params = self._draw(self._spec, self._next)
            self._next += 1
            if self._is_new(params):
                self._found.append(params)
                last = self._next + TRIES
        return self._found[index] if index < len(self._found) else None

    def _is_new(self, params: Params) -> bool:
        if not satisfies(self._spec, params):
            return False
        if self._known is None:
            return True
        before = len(self._known)
        self._known.add(key(params))
        return len(self._known) > before


class Draw(Protocol):
    def __call__(self, spec: SweepSpec, index: int, /) -> Params: ...


def satisfies(spec: SweepSpec, params: Params) -> bool:
    """Whether `where` allows it."""
    return not spec.where or allows(spec.where, params)


def unused(spec: SweepSpec, known: Container[Hashable], index: int) -> Params | None:
    """Random point number `index`, or the next that is none of `known`; None: none is left."""
    points = sequence(spec, "random")
    for places in (range(index, index + LISTED), range(index)):
        for place in places:
            params = points.at(place)
            if params is None:
                break
            if key(params) not in known:
                return params
    return None


def sequence(spec: SweepSpec, kind: str) -> Sequence:
    """That of `kind` for this space and seed. The last few are kept: making one may take long."""
    sort = msgspec.json.encode((kind, spec.space, spec.seed, spec.where, spec.points))
    if sort not in _sequences:
        while len(_sequences) >= _KEPT:
            del _sequences[next(iter(_sequences))]
        _sequences[sort] = _made(spec, kind)
    return _sequences[sort]


_sequences: dict[bytes, Sequence] = {}


def _made(spec: SweepSpec, kind: str) -> Sequence:
    if kind == "list":
        return Listed(list(spec.points))
    if kind == "sobol":
        return Walked(spec, sobol.draw)
    if not is_discrete(spec.space):
        return Free(spec)
    points = listed(spec.space, spec.seed, weighted=kind != "grid")
    if points is None:
        return Walked(spec, _of_grid if kind == "grid" else random.draw)
    begun = {key(params) for params in spec.points}
    return Listed([p for p in points if satisfies(spec, p) and key(p) not in begun])


def _of_grid(spec: SweepSpec, index: int) -> Params:
    """Any point of a grid that is too large to be listed."""
    numbers = generator(spec.seed, index)
    return built(
        spec.space,
        lambda _, dimension: level(dimension, numbers.randrange(levels(dimension) or 1)),
    )
