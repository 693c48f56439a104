"""Which way a sweep goes onto AWS Batch."""

import pytest

from batchml.model.sweep import Dimension
from batchml.sweeps.control.plan import SubmitMode, choose_mode, count_trials
from tests.support.sweep_world import spec_of

GRID = {"x": Dimension("int", 1, 4), "y": Dimension("choice", values=("a", "b", "c"))}


@pytest.mark.parametrize(
    ("method", "stopping", "more", "shape"),
    [
        ("random", "none", {}, SubmitMode.ARRAY),
        ("sobol", "asha", {}, SubmitMode.ARRAY),
        ("grid", "median", {"space": GRID, "trials": None}, SubmitMode.ARRAY),
        ("tpe", "asha", {}, SubmitMode.BATCHES),
        ("nsga2", "none", {}, SubmitMode.BATCHES),
        ("tpe", "halving", {}, SubmitMode.RUNGS),
        ("random", "asha", {"resume": True}, SubmitMode.BATCHES),
        ("random", "none", {"trials": None, "hours": 1.0}, SubmitMode.BATCHES),
    ],
)
def test_the_shape_follows_from_method_and_stopping(
    method: str, stopping: str, more: dict[str, object], shape: SubmitMode
) -> None:
    assert choose_mode(spec_of(method, stopping, **more), hourly=1.0, timeout=None).mode is shape  # type: ignore[arg-type]


def test_money_needs_a_controller_unless_the_worst_case_is_within_it() -> None:
    spec = spec_of("random", trials=10, cost=20.0)
    assert choose_mode(spec, hourly=1.0, timeout=7200.0).mode is SubmitMode.ARRAY
    assert choose_mode(spec, hourly=1.0, timeout=7201.0).mode is SubmitMode.BATCHES
    assert choose_mode(spec, hourly=1.0, timeout=None).mode is SubmitMode.BATCHES
    assert choose_mode(spec, hourly=None, timeout=None).mode is SubmitMode.ARRAY


def test_how_many_trials_there_will_be() -> None:
    assert count_trials(spec_of("grid", trials=None, space=GRID)) == 12
    assert count_trials(spec_of("grid", trials=5, space=GRID)) == 5
    assert count_trials(spec_of("tpe", trials=None)) is None
    assert count_trials(spec_of("list", trials=None, points=({"x": 1}, {"x": 2}))) == 2
