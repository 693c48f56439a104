"""Suggestions of every method: inside the space, the same after a restart, none twice."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.errors import ConfigError
from batchml.model.sweep import (
    Dimension,
    EarlyStop,
    Goal,
    Method,
    Params,
    Space,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
    as_value,
    count_points,
    is_active,
)
from batchml.sweeps.control.events import PlannedTrial, TrialBatch
from batchml.sweeps.control.plan import SubmitMode, plan_new
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import SweepTotals
from batchml.sweeps.samplers import sequences
from batchml.sweeps.samplers.choose import suggest_trials
from batchml.sweeps.samplers.optuna import missing_packages
from batchml.sweeps.samplers.points import point_key
from tests.support.sweep_story import suggest

FREE: Space = {
    "lr": Dimension("float", 1e-5, 0.1, log=True),
    "width": Dimension("int", 1, 300, log=True),
    "layers": Dimension("int", 2, 10, step=2),
    "dropout": Dimension("float", 0, 0.5, step=0.1),
    "noise": Dimension("normal", mu=3, sigma=0.5, log=True),
    "optimizer": Dimension("choice", values=("sgd", "adam")),
    "nesterov": Dimension("choice", values=(True, False, 1), when={"optimizer": ("sgd",)}),
    "momentum": Dimension("float", 0.8, 0.99, when={"nesterov": (True,)}),
    "epochs": Dimension("constant", values=(27,)),
}
DISCRETE: Space = {
    "batch": Dimension("choice", values=(32, 64, 128)),
    "optimizer": Dimension("choice", values=("sgd", "adam")),
    "momentum": Dimension("float", 0.8, 0.9, step=0.05, when={"optimizer": ("sgd",)}),
    "layers": Dimension("int", 1, 2),
}  # 3 * (3 + 1) * 2 points
ALWAYS: tuple[Method, ...] = ("tpe", "random", "sobol")


def spec_of(space: Space, method: Method = "tpe", **changes: Any) -> SweepSpec:
    return SweepSpec("s", "j", (Goal("loss", "min"),), space, method, **changes)


def ended(found: Sequence[Params], losses: Sequence[float]) -> list[Trial]:
    return [
        Trial(number, params, 0, state=TrialState.DONE, reports=[TrialReport(1, (loss,))])
        for number, (params, loss) in enumerate(zip(found, losses, strict=True))
    ]


def params_of(spec: SweepSpec, count: int, trials: Sequence[Trial] = ()) -> list[Params]:
    return [params for params, _ in suggest_trials(spec, trials, range(len(trials), count))]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ALWAYS), st.integers(0, 60))
def test_every_suggestion_lies_in_the_space(seed: int, method: Method, before: int) -> None:
    spec = spec_of(FREE, method, seed=seed)
    found = params_of(msgspec.structs.replace(spec, method="random"), before)
    trials = ended(found, [float(n * seed % 97) for n in range(before)])
    for params in params_of(spec, before + 3, trials):
        active = [name for name in FREE if is_active(FREE[name], params)]
        assert list(params) == active
        for name, value in params.items():
            # Equal, and of one type: a whole number never arrives as 64.0.
            known = as_value(FREE[name], value)
            assert known == value and type(known) is type(value), name


@pytest.mark.parametrize("method", [*ALWAYS, "grid"])
def test_a_discrete_space_is_used_up_without_a_repetition(method: Method) -> None:
    spec = spec_of(DISCRETE, method, early_stop=EarlyStop())
    found = params_of(spec, 100)
    assert (
        len({point_key(params) for params in found}) == len(found) == count_points(DISCRETE) == 24
    )
    assert suggest(spec, ended(found, [1.0] * 24), 24) is None


def test_tpe_repeats_nothing_in_waves_whatever_has_ended() -> None:
    spec = spec_of(DISCRETE)
    trials: list[Trial] = []
    for wave in range(6):
        found = params_of(spec, 4 * wave + 4, trials)
        for params in found:
            trials.append(Trial(len(trials), params, 0))
        for trial in trials[: 4 * wave]:
            trial.state = TrialState.DONE
            trial.reports = [TrialReport(1, (float(trial.number % 5),))]
    assert len({point_key(trial.params) for trial in trials}) == 24


@pytest.mark.parametrize("method", ["random", "sobol", "grid"])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_needs_no_results_depends_on_the_number_alone(method: Method, seed: int) -> None:
    spec = spec_of(DISCRETE if method == "grid" else FREE, method, seed=seed)
    together = suggest_trials(spec, [], range(12))
    apart = [suggest(spec, [], number) for number in reversed(range(12))]
    assert together == apart[::-1]
    other = suggest_trials(msgspec.structs.replace(spec, seed=seed + 7), [], range(12))
    assert [s.params for s in other] != [s.params for s in together]


def test_likely_points_of_a_discrete_space_come_first() -> None:
    """Without repetitions, and still log-uniform: half of the first points are below 32."""
    spec = spec_of({"width": Dimension("int", 1, 1024, log=True)}, "random")
    found = params_of(spec, 100)
    small = sum(1 for params in found if int(params["width"]) < 32)
    assert 20 <= small <= 31  # all that there are, or nearly: none comes twice


def test_a_grid_that_is_cut_short_is_a_fair_part() -> None:
    space: Space = {
        "a": Dimension("choice", values=tuple(range(10))),
        "b": Dimension("choice", values=tuple(range(10))),
    }
    found = params_of(spec_of(space, "grid"), 30)
    assert len({params["a"] for params in found}) >= 8


@pytest.mark.parametrize("method", ["tpe", "random", "sobol", "grid"])
def test_a_space_too_large_to_be_listed_repeats_nothing(method: Method) -> None:
    space: Space = {name: Dimension("int", 0, 99) for name in "abc"}
    found = params_of(spec_of(space, method), 200)
    assert len({point_key(params) for params in found}) == 200


@pytest.mark.parametrize("method", ALWAYS)
def test_where_is_kept(method: Method) -> None:
    space: Space = {"a": Dimension("float", 0, 1), "b": Dimension("float", 0, 1)}
    spec = spec_of(space, method, where=("a + b < 0.5",))
    found = params_of(spec, 30)
    trials = ended(found, [float(params["a"]) for params in found])
    found += params_of(spec, 40, trials)
    assert len(found) == 40
    assert all(float(params["a"]) + float(params["b"]) < 0.5 for params in found)


@pytest.mark.parametrize("method", ALWAYS)
def test_a_where_that_allows_nothing_ends_it(method: Method) -> None:
    spec = spec_of({"a": Dimension("float", 0, 1)}, method, where=("a > 2",))
    assert suggest(spec, [], 0) is None
    assert suggest_trials(spec, [], range(3)) == []


def test_the_files_own_points_come_first_and_are_not_repeated() -> None:
    own: Params = {"batch": 64, "optimizer": "adam", "layers": 1}
    for method in (*ALWAYS, "grid"):
        found = suggest_trials(spec_of(DISCRETE, method, points=(own,)), [], range(100))
        assert found[0] == (own, "list")
        assert len(found) == 24 and [s.params for s in found].count(own) == 1


def test_a_list_is_its_points_and_then_nothing() -> None:
    points: tuple[Params, ...] = ({"a": 1}, {"a": 2}, {"a": 1})
    found = suggest_trials(spec_of({}, "list", points=points), [], range(9))
    assert found == [({"a": 1}, "list"), ({"a": 2}, "list"), ({"a": 1}, "list")]


def test_trials_that_confirm_others_use_up_no_point() -> None:
    spec = spec_of(DISCRETE, "grid")
    points = params_of(spec, 10)
    planned = [PlannedTrial(n, params, n, "grid") for n, params in enumerate(points)]
    planned += [PlannedTrial(10 + n, points[0], n, "confirm", confirms=0) for n in range(3)]
    state = SweepState()
    state.apply(TrialBatch(1, 0.0, "first", tuple(planned)))
    (batch,) = plan_new(SweepTotals(spec, state), SubmitMode.ARRAY, 99, 1.0, lambda: "next")
    assert [each.number for each in batch.trials] == list(range(13, 27))
    assert [each.params for each in batch.trials] == params_of(spec, 24)[10:]


def test_halving_asks_for_no_results() -> None:
    spec = spec_of(FREE, "tpe", early_stop=EarlyStop("halving", max=9))
    assert {s.origin for s in suggest_trials(spec, [], range(50))} == {"random"}


def test_a_space_of_constants_has_one_point() -> None:
    space: Space = {"epochs": Dimension("constant", values=(3,))}
    for method in (*ALWAYS, "grid"):
        assert suggest_trials(spec_of(space, method), [], range(3))[1:] == []


@pytest.mark.skipif(not missing_packages("gp"), reason="all that gp needs is installed here")
def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'batchml\[optuna\]'"):
        suggest(spec_of(FREE, "gp"), [], 0)


@pytest.mark.parametrize("method", ["gp", "cmaes", "nsga2"])
def test_methods_of_the_extra(method: Method) -> None:
    lacking = missing_packages(method)
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}: pip install 'batchml[optuna]'")
    spec = spec_of(FREE, method)
    trials = ended(
        found := params_of(msgspec.structs.replace(spec, method="random"), 40),
        [float(n % 7) for n in range(40)],
    )
    trials[3].state = TrialState.FAILED
    trials.append(Trial(40, found[0], 0, state=TrialState.RUNNING))
    one = params_of(spec, 44, trials)
    assert one == params_of(spec, 44, trials)  # seeded by the number: a restart asks the same
    assert len({point_key(params) for params in one}) == 3
    assert len(params_of(spec_of(DISCRETE, method), 30)) == 24


# --- Sobol points: those of Joe and Kuo, and evenly spread ----------------------------------------

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
