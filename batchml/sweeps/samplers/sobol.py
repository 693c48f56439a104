"""Sobol points: like random points, but evenly spread. Parameters beyond the 40th are random.

Direction numbers of S. Joe and F. Y. Kuo ("Constructing Sobol sequences with better
two-dimensional projections", 2008, file new-joe-kuo-6.21201); order by Gray code (Antonov and
Saleev, 1979); a digital shift by the seed, so that no sweep begins in the corner.
"""

from functools import lru_cache

from batchml.model.sweep import Params, SweepSpec
from batchml.sweeps.samplers.points import build_point, from_unit, seeded_random

BITS = 30

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
    found = [number << (BITS - 1 - bit) for bit, number in enumerate(initial)]
    for bit in range(degree, BITS):
        number = found[bit - degree] ^ (found[bit - degree] >> degree)
        for back in range(1, degree):
            if polynomial >> (degree - back) & 1:
                number ^= found[bit - back]
        found.append(number)
    return tuple(found)
