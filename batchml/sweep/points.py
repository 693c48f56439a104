"""Points of a space: built, told apart, drawn with numbers that a restart draws again."""

from collections.abc import Callable, Hashable
from random import Random

from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, Space, is_active

Pick = Callable[[str, Dimension], Scalar]


def built(space: Space, pick: Pick) -> Params:
    """A point: `pick` chooses each active parameter, parents first."""
    params: Params = {}
    for name, dimension in space.items():
        if is_active(dimension, params):
            params[name] = pick(name, dimension)
    return params


def key(params: Params) -> Hashable:
    """Equal for equal points. 1 and true are two values."""
    return frozenset((name, isinstance(value, bool), value) for name, value in params.items())


def generator(*words: object) -> Random:
    """The same numbers for the same words, in every process and version of Python."""
    return Random(":".join(map(str, words)))
