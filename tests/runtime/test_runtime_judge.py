"""Rungs, ranks, and whether a trial goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.runtime.protocol.sweep import (
    Cutoffs,
    PrunerDecision,
    TrialContract,
    best_of,
    decide,
    default_first_rung,
    mark_key,
    ranked,
    rung_passed,
    rung_steps,
    to_sortable_hex,
)


def course(direction: str = "max", method: str = "asha", resume: bool = False) -> TrialContract:
    return TrialContract(
        "k", (("acc", direction),), ("train",), {}, {}, method=method, rungs=(1, 3, 9), max=27,
        resume=resume,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("least", "most", "eta", "steps"),
    [
        (1, 27, 3, (1, 3, 9)),
        (1, 28, 3, (1, 3, 9, 27)),
        (2, 5, 2, (2, 4)),
        (1, 1, 3, ()),
        (5, 4, 3, ()),
        (0, 9, 3, ()),
        (4, 100, 10, (4, 40)),
        (7, 20, 1, (7,)),
    ],
)
def test_rungs_are_below_the_end(least: int, most: int, eta: int, steps: tuple[int, ...]) -> None:
    assert rung_steps(least, most, eta) == steps


def test_the_first_rung_is_a_27th_of_all() -> None:
    assert [default_first_rung(most) for most in (1, 26, 27, 28, 100)] == [1, 1, 1, 2, 4]


def test_a_trial_is_judged_once_at_the_deepest_rung_that_it_passed() -> None:
    rungs = (1, 3, 9)
    assert [rung_passed(rungs, step - 1, step) for step in range(1, 11)] == [
        0, None, 1, None, None, None, None, None, 2, None,
    ]  # fmt: skip
    assert rung_passed(rungs, 0, 4) == 1
    assert rung_passed(rungs, 4, 8) is None
    assert rung_passed(rungs, 0, 99) == 2
    assert rung_passed((), 0, 1) is None


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_ranks_sort_as_numbers_do(one: float, other: float) -> None:
    assert (to_sortable_hex(one) < to_sortable_hex(other)) == (one < other)
    assert (to_sortable_hex(one) == to_sortable_hex(other)) == (one == other)
    assert to_sortable_hex(one) <= to_sortable_hex(float("nan"))


@given(st.lists(st.tuples(st.floats(allow_nan=False), st.integers(0, 99_999)), max_size=20))
def test_the_best_of_a_rung_come_first(results: list[tuple[float, int]]) -> None:
    found = ranked(mark_key(0, loss, trial) for loss, trial in results)
    best = {trial: min(loss for loss, each in results if each == trial) for _, trial in results}
    assert found == sorted(best, key=lambda trial: (best[trial], trial))


def test_what_is_no_mark_is_passed_over() -> None:
    assert ranked(["rungs/0/", "rungs/0/x", "rungs/0/1-x", mark_key(0, 1.0, 7)]) == [7]


@pytest.mark.parametrize(
    ("direction", "value", "goes_on"),
    [
        ("max", 0.4, False), ("max", 0.5, True), ("max", 0.6, True),
        ("min", 0.4, True), ("min", 0.6, False),
    ],
)  # fmt: skip
def test_at_a_rung_one_that_is_as_good_as_the_cutoff_goes_on(
    direction: str, value: float, goes_on: bool
) -> None:
    cutoffs = Cutoffs(7, {1: (9, 0.5)}, {})
    assert decide(course(direction), cutoffs, 3, value, value, 1) == PrunerDecision(
        3, value, 0.5, 7, goes_on
    )


def test_while_few_are_known_all_go_on() -> None:
    cutoffs = Cutoffs(7, {1: (2, 0.5)}, {})
    assert decide(course(), cutoffs, 3, 0.1, 0.1, 1) == PrunerDecision(3, 0.1, None, 7, True)
    assert decide(course(), cutoffs, 1, 0.1, 0.1, 0) == PrunerDecision(1, 0.1, None, 7, True)


def test_between_rungs_nothing_is_decided() -> None:
    assert decide(course(), Cutoffs(7, {1: (9, 0.5)}, {4: (9, 0.5)}), 4, 0.1, 0.1, None) is None


@pytest.mark.parametrize(
    "one", [course(resume=True), course(method="halving"), course(method="none")]
)
def test_where_trials_end_at_rungs_they_do_not_judge_themselves(one: TrialContract) -> None:
    assert decide(one, Cutoffs(7, {1: (9, 0.5)}, {3: (9, 0.5)}), 3, 0.1, 0.1, 1) is None


def test_the_median_looks_at_the_best_so_far_and_not_too_early() -> None:
    cutoffs = Cutoffs(7, {}, {3: (9, 0.5), 4: (9, 0.5), 5: (4, 0.5)})
    judged = course(method="median")
    assert decide(judged, cutoffs, 3, 0.1, 0.1, 1) is None
    assert decide(judged, cutoffs, 4, 0.1, 0.6, None) == PrunerDecision(4, 0.6, 0.5, 7, True)
    assert decide(judged, cutoffs, 4, 0.1, 0.4, None) == PrunerDecision(4, 0.4, 0.5, 7, False)
    assert decide(judged, cutoffs, 5, 0.1, 0.4, None) is None
    assert decide(judged, cutoffs, 6, 0.1, 0.4, None) is None


def test_the_better_of_two() -> None:
    assert best_of(course("max"), 0.5, 0.6) == 0.6
    assert best_of(course("min"), 0.5, 0.6) == 0.5
    assert best_of(course("min"), None, 0.6) == 0.6
