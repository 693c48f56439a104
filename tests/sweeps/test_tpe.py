"""The Parzen estimator: its densities, its ranking, its memory, and that it learns."""

import math
from random import Random
from statistics import fmean, median
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import (
    Dimension,
    EarlyStop,
    Goal,
    Params,
    Space,
    SweepLimits,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
)
from batchml.sweeps.samplers.choose import suggest_trials
from batchml.sweeps.samplers.tpe import (
    Coordinates,
    Kernel,
    Kernels,
    Mixture,
    TrialObservations,
    find_greatest_ratio,
    locate,
    make_axes,
    results_by_depth,
)
from tests.support.sweep_story import suggest

PLANE: Space = {"x": Dimension("float", 0, 1), "y": Dimension("float", 0, 1)}
ASHA = EarlyStop("asha", max=27)


def spec_of(space: Space, **changes: Any) -> SweepSpec:
    return SweepSpec("s", "j", (Goal("loss", "min"),), space, **changes)


def trial(number: int, state: TrialState = TrialState.DONE, *reports: tuple[int, float]) -> Trial:
    return Trial(number, {}, 0, state=state, reports=[TrialReport(s, (v,)) for s, v in reports])


# Densities


def kernels(space: Space) -> Kernels:
    return Kernels(make_axes(space), Kernel(0.15, 0.3))


def test_a_density_is_one_on_average() -> None:
    """So it is a density, relative to that of a random draw: also at the ends of a range."""
    space = {**PLANE, "c": Dimension("choice", values=("a", "b", "c"))}
    points: list[Coordinates] = [(0.0, 0.5, 1.0), (0.97, 0.1, 0.0), (0.4, 0.4, 2.0)]
    mixture = Mixture(kernels(space), points)
    cells = [(n + 0.5) / 40 for n in range(40)]
    found = fmean(
        math.exp(mixture.log_density((x, y, float(c))))
        for x in cells for y in cells for c in range(3)
    )  # fmt: skip
    assert found == pytest.approx(1, abs=0.01)


def test_a_kernel_that_lacks_a_parameter_says_nothing_about_it() -> None:
    space = {
        "c": Dimension("choice", values=("a", "b")),
        "x": Dimension("float", 0, 1, when={"c": ("a",)}),
    }
    mixture = Mixture(kernels(space), [(0.0, 0.2), (1.0, None)])
    cells = [(n + 0.5) / 100 for n in range(100)]
    with_x = fmean(math.exp(mixture.log_density((0.0, x))) for x in cells)
    without = math.exp(mixture.log_density((1.0, None)))
    assert (with_x + without) / 2 == pytest.approx(1, abs=0.01)


def test_an_added_kernel_counts_as_one_that_was_there() -> None:
    one = Mixture(kernels(PLANE), [(0.2, 0.3)])
    both = Mixture(kernels(PLANE), [(0.2, 0.3), (0.6, 0.9)])
    one.log_density((0.5, 0.5))
    one.add((0.6, 0.9))
    assert one.log_density((0.5, 0.5)) == both.log_density((0.5, 0.5))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_the_best_candidate_is_found_without_all_densities(seed: int) -> None:
    dice = Random(seed)
    space = {
        "c": Dimension("choice", values=("a", "b")),
        "x": Dimension("float", 0, 1, when={"c": ("a",)}),
        "y": Dimension("float", 0, 1),
    }

    def points(count: int) -> list[Coordinates]:
        return [
            (0.0, dice.random(), dice.random())
            if dice.random() < 0.7
            else (1.0, None, dice.random())
            for _ in range(count)
        ]

    shared = kernels(space)
    good, bad = Mixture(shared, points(5)), Mixture(shared, points(150))
    asked = points(24)
    ratios = [good.log_density(each) - bad.log_density(each) for each in asked]
    assert ratios[find_greatest_ratio(good, bad, asked)] == max(ratios)


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_draws_stay_in_range_and_near(x: float, y: float, seed: int) -> None:
    mixture = Mixture(kernels(PLANE), [(x, y)], prior=0.0)
    dice = Random(seed)
    drawn = [mixture.draw(PLANE, dice) for _ in range(50)]
    assert all(0 <= float(p["x"]) <= 1 and 0 <= float(p["y"]) <= 1 for p in drawn)
    assert median(abs(float(p["x"]) - x) for p in drawn) < 0.25


# Results


def test_a_trial_has_a_result_at_each_rung_that_it_came_to() -> None:
    spec = spec_of(PLANE, early_stop=ASHA)
    done = trial(0, TrialState.DONE, (1, 0.9), (27, 0.5))
    runs = trial(1, TrialState.RUNNING, (1, 0.9), (9, 0.3), (20, 0.1))
    over = trial(2, TrialState.PAUSED, (2, 0.1), (4, 0.2))  # it reports every other step
    assert _depths(spec, done) == [(1, 0.9), (3, 0.5), (9, 0.5), (math.inf, 0.5)]
    assert _depths(spec, runs) == [(1, 0.9), (3, 0.3), (9, 0.3)]
    assert _depths(spec, over) == [(1, 0.1), (3, 0.2)]


def _depths(spec: SweepSpec, trial: Trial) -> list[tuple[float, float]]:
    return [(each.depth, each.loss) for each in results_by_depth(spec, (1, 3, 9), trial) or ()]


def test_failures_and_nan_are_the_worst_and_the_unknown_waits() -> None:
    spec = spec_of(PLANE)
    assert results_by_depth(spec, (), trial(0, TrialState.FAILED, (27, 0.0))) == ()
    assert results_by_depth(spec, (), trial(0, TrialState.DIVERGED)) == ()
    assert results_by_depth(spec, (), trial(0, TrialState.DONE, (3, math.nan))) == ()
    assert (
        results_by_depth(spec, (), trial(0, TrialState.RUNNING, (3, 0.5))) is None
    )  # no rungs here
    assert results_by_depth(spec, (), trial(0, TrialState.LOST)) is None


def test_more_is_better_where_the_goal_says_so() -> None:
    spec = msgspec.structs.replace(spec_of(PLANE), goals=(Goal("accuracy", "max"),))
    assert _depths(spec, trial(0, TrialState.PRUNED, (1, 0.9)))[0] == (1, -0.9)


def test_who_leads_at_a_rung_is_not_behind_all_that_have_ended() -> None:
    done = [((1, 0.5), (3, 0.5), (9, 0.5), (27, 0.1 * n)) for n in range(4)]
    leads = ((1, 0.2), (3, 0.1))
    stopped = [((1, 0.6 + 0.1 * n),) for n in range(6)]
    ledger = [_of_plane(n, TrialState.DONE, *each) for n, each in enumerate(done)]
    ledger.append(_of_plane(4, TrialState.RUNNING, *leads))
    ledger += [_of_plane(5 + n, TrialState.PRUNED, *each) for n, each in enumerate(stopped)]
    kept = TrialObservations(spec_of(PLANE, early_stop=ASHA), ledger)
    kept.read()
    assert kept.best(3) == [0, 4, 1]
    assert kept.best(6) == [0, 4, 1, 2, 3, 5]
    assert len(kept.with_results) == 11


def test_without_rungs_what_got_further_is_better() -> None:
    ledger = [
        _of_plane(0, TrialState.PRUNED, (2, 0.1)),
        _of_plane(1, TrialState.DONE, (9, 0.9)),
        _of_plane(2, TrialState.PRUNED, (4, 0.8)),
        _of_plane(3, TrialState.FAILED, (9, 0.0)),
    ]
    kept = TrialObservations(spec_of(PLANE), ledger)
    kept.read()
    assert kept.best(9) == [1, 2, 0]


def _of_plane(number: int, state: TrialState, *reports: tuple[int, float]) -> Trial:
    found = trial(number, state, *reports)
    found.params = {"x": 0.5, "y": 0.5}
    return found


# Memory

_STATES = st.sampled_from(list(TrialState))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 11), _STATES, st.floats(0, 1)), max_size=40),
)
def test_what_is_kept_up_is_what_would_be_built_anew(
    changes: list[tuple[int, TrialState, float]],
) -> None:
    spec = spec_of(PLANE, early_stop=ASHA)
    trials: list[Trial] = []
    kept = TrialObservations(spec)
    for index, state, value in changes:
        if index >= len(trials):
            trials.append(Trial(len(trials), {"x": value, "y": value}, 0))
        else:
            trials[index].state = state
            trials[index].reports.append(TrialReport(trials[index].step + 1, (value,)))
        kept.note(trials[min(index, len(trials) - 1)])
        if state is TrialState.RUNNING:  # otherwise several changes are read together
            kept.read()
    kept.read()
    anew = TrialObservations(spec, trials)
    anew.read()
    assert kept.best(12) == anew.best(12)
    assert (kept.with_results, kept.waiting) == (anew.with_results, anew.waiting)


def test_a_restart_asks_for_the_same() -> None:
    """From a ledger that was read anew, in a process that knows nothing."""
    spec = spec_of(PLANE, seed=5)
    trials = _trained(spec, 60)
    again = msgspec.json.decode(msgspec.json.encode(trials), type=list[Trial])
    found = suggest_trials(spec, trials, range(60, 70))
    assert {each.origin for each in found} == {"tpe"}
    assert suggest_trials(spec, again, range(60, 70)) == found


# Learning


def _loss(params: Params) -> float:
    return (float(params["x"]) - 0.3) ** 2 + (float(params["y"]) - 0.8) ** 2


def _trained(spec: SweepSpec, count: int, at_once: int = 4) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < count:
        numbers = range(len(trials), len(trials) + at_once)
        for params, origin in suggest_trials(spec, trials, numbers):
            new = Trial(len(trials), params, 0, origin, state=TrialState.DONE)
            new.reports.append(TrialReport(1, (_loss(params),)))
            trials.append(new)
    return trials


@pytest.mark.parametrize("parallel", [2, 16])
def test_it_comes_closer_than_chance(parallel: int) -> None:
    limits = SweepLimits(parallel=parallel)
    better = 0
    for seed in range(5):
        ours = _trained(spec_of(PLANE, seed=seed, limits=limits), 64)
        chance = _trained(spec_of(PLANE, seed=seed, method="random"), 64)
        better += median(map(_of, ours[32:])) < 0.5 * median(map(_of, chance[32:]))
    assert better >= 4


def _of(trial: Trial) -> float:
    return _loss(trial.params)


def test_what_runs_keeps_others_away() -> None:
    """The constant liar: with the same results, the next goes elsewhere than all that runs."""
    spec = spec_of(PLANE)
    trials = _trained(spec, 40)
    first = suggest(spec, trials, 40)
    assert first is not None
    crowd = [Trial(40 + n, first.params, 0, state=TrialState.RUNNING) for n in range(20)]
    after = suggest(spec, [*trials, *crowd], 60)
    alone = suggest(spec, trials, 60)
    assert after is not None and alone is not None
    assert _apart(after.params, first.params) > 0.2
    assert _apart(alone.params, first.params) < _apart(after.params, first.params)


def _apart(one: Params, other: Params) -> float:
    return math.dist([float(one["x"]), float(one["y"])], [float(other["x"]), float(other["y"])])


def test_a_point_outside_the_space_does_not_disturb_it() -> None:
    space = {**PLANE, "c": Dimension("choice", values=("a", "b"))}
    spec = spec_of(space)
    assert locate(make_axes(space), {"x": 0.5, "y": 0.5, "c": "gone"}) is None
    trials = [
        Trial(n, {"x": 0.5, "y": n / 40, "c": "gone" if n % 2 else "a"}, 0,
              state=TrialState.DONE, reports=[TrialReport(1, (float(n),))])
        for n in range(40)
    ]  # fmt: skip
    found = suggest(spec, trials, 40)
    assert found is not None and found.params["c"] in ("a", "b")
