"""Sobol points: those of Joe and Kuo, and evenly spread."""

import math
import zlib

import pytest

from batchml.model.sweep import Dimension, Goal, Params, SweepSpec
from batchml.sweeps.samplers import sequences
from batchml.sweeps.samplers.choose import suggest_trials

# In units of 1/16: points 0 to 7 of the first five dimensions, as SciPy's qmc.Sobol has them too.
FIRST = [
    (0, 0, 0, 0, 0),
    (8, 8, 8, 8, 8),
    (12, 4, 4, 4, 12),
    (4, 12, 12, 12, 4),
    (6, 6, 10, 14, 6),
    (14, 14, 2, 6, 14),
    (10, 2, 14, 10, 10),
    (2, 10, 6, 2, 2),
]
# Of 64 points of all 40 dimensions, number by number; compared with SciPy's once, bit by bit.
ALL = 1745831215


def test_the_first_points_are_those_of_the_paper() -> None:
    found = [
        tuple(bits >> (sequences.BITS - 4) for bits in sequences.sobol_point(n, 5))
        for n in range(8)
    ]
    assert found == FIRST


def test_no_direction_number_is_mistyped() -> None:
    points = [sequences.sobol_point(n, sequences.DIMENSIONS) for n in range(64)]
    assert zlib.crc32(str(points).encode()) == ALL


@pytest.mark.parametrize("place", range(sequences.DIMENSIONS))
def test_each_dimension_has_one_point_in_every_interval(place: int) -> None:
    """The first 2**k points of a dimension fill 2**k intervals: what makes it a Sobol sequence."""
    for power in (3, 6, 9):
        found = {
            sequences.sobol_point(n, place + 1)[place] >> (sequences.BITS - power)
            for n in range(2**power)
        }
        assert len(found) == 2**power


def test_a_shift_keeps_the_intervals_filled_and_differs_by_seed() -> None:
    points = [sequences.shifted_point(3, n, 2) for n in range(64)]
    assert {int(point[1] * 64) for point in points} == set(range(64))
    assert sequences.shifted_point(3, 5, 2) != sequences.shifted_point(4, 5, 2)


def test_a_sweep_of_sobol_points_is_spread_over_a_logarithmic_range() -> None:
    spec = SweepSpec(
        "s", "j", (Goal("loss", "min"),), {"lr": Dimension("float", 1e-4, 1.0, log=True)}, "sobol"
    )
    found = [_number(params, "lr") for params, _ in suggest_trials(spec, [], range(64))]
    assert sorted(int(16 * (math.log10(lr) + 4)) for lr in found) == list(range(64))


def test_more_parameters_than_there_are_directions_for() -> None:
    space = {f"x{n}": Dimension("float", 0, 1) for n in range(sequences.DIMENSIONS + 3)}
    spec = SweepSpec("s", "j", (Goal("loss", "min"),), space, "sobol")
    one, other = suggest_trials(spec, [], range(2))
    assert one.params.keys() == space.keys()
    assert one.params["x42"] != other.params["x42"]


def _number(params: Params, name: str) -> float:
    value = params[name]
    assert isinstance(value, float)
    return value
