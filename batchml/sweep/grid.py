"""All points of a discrete space, in an order of the seed: whatever part runs is a fair part.

The order is a draw without replacement, by the keys of Efraimidis and Spirakis ("Weighted random
sampling with a reservoir", 2006).
"""

import math
from collections.abc import Iterable

from batchml.model.sweep import Params, Space, count_points, every_point
from batchml.sweep.points import generator
from batchml.sweep.unit import likely

LISTED = 100_000  # points, more than a sweep can have trials; a larger space is drawn from


def listed(space: Space, seed: int, *, weighted: bool) -> list[Params] | None:
    """Every point once; likely ones sooner when `weighted`. None: too many, or infinitely many."""
    count = count_points(space)
    if count is None or count > LISTED:
        return None
    return _shuffled(space, every_point(space), seed, weighted)


def _shuffled(space: Space, points: Iterable[Params], seed: int, weighted: bool) -> list[Params]:
    numbers = generator(seed, "order")
    keyed: list[tuple[float, int, Params]] = []
    for params in points:
        weight = _weight(space, params) if weighted else 1.0
        keyed.append((math.log(1 - numbers.random()) / weight, len(keyed), params))
    return [params for _, _, params in sorted(keyed, reverse=True)]


def _weight(space: Space, params: Params) -> float:
    return math.prod(likely(space[name], value) for name, value in params.items())
