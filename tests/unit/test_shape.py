"""Which way a sweep goes onto AWS Batch."""

import pytest

from batchml.model.sweep import Dimension
from batchml.sweep.shape import Shape, countable, shaped
from tests.sweep_world import spec_of

GRID = {"x": Dimension("int", 1, 4), "y": Dimension("choice", values=("a", "b", "c"))}


@pytest.mark.parametrize(
    ("method", "stopping", "more", "shape"),
    [
        ("random", "none", {}, Shape.ARRAY),
        ("sobol", "asha", {}, Shape.ARRAY),
        ("grid", "median", {"space": GRID, "trials": None}, Shape.ARRAY),
        ("tpe", "asha", {}, Shape.WAVES),
        ("nsga2", "none", {}, Shape.WAVES),
        ("tpe", "halving", {}, Shape.RUNGS),
        ("random", "asha", {"resume": True}, Shape.WAVES),
        ("random", "none", {"trials": None, "hours": 1.0}, Shape.WAVES),
    ],
)
def test_the_shape_follows_from_method_and_stopping(
    method: str, stopping: str, more: dict[str, object], shape: Shape
) -> None:
    assert shaped(spec_of(method, stopping, **more), hourly=1.0, timeout=None).shape is shape  # type: ignore[arg-type]


def test_money_needs_a_controller_unless_the_worst_case_is_within_it() -> None:
    spec = spec_of("random", trials=10, cost=20.0)
    assert shaped(spec, hourly=1.0, timeout=7200.0).shape is Shape.ARRAY
    assert shaped(spec, hourly=1.0, timeout=7201.0).shape is Shape.WAVES
    assert shaped(spec, hourly=1.0, timeout=None).shape is Shape.WAVES
    assert shaped(spec, hourly=None, timeout=None).shape is Shape.ARRAY


def test_how_many_trials_there_will_be() -> None:
    assert countable(spec_of("grid", trials=None, space=GRID)) == 12
    assert countable(spec_of("grid", trials=5, space=GRID)) == 5
    assert countable(spec_of("tpe", trials=None)) is None
    assert countable(spec_of("list", trials=None, points=({"x": 1}, {"x": 2}))) == 2
