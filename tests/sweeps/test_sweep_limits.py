"""The limits of a sweep: sums over trials, and the number of trials that may begin."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import SweepLimits, Trial, TrialReport, TrialState
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import (
    Money,
    Tally,
    count_affordable,
    count_startable,
    find_exceeded_limit,
)
from tests.support.sweep_world import World, spec_of


def state_of(**counts: int) -> SweepState:
    state = SweepState()
    state.counts.update({TrialState(name): many for name, many in counts.items()})
    return state


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_sums_kept_trial_by_trial_are_those_of_all_trials(seed: int) -> None:
    dice, spec = Random(seed), spec_of("tpe", "asha", steps=27)
    tally, trials = Tally(spec), [Trial(number, {}, 0) for number in range(5)]
    for now in range(40):
        trial = dice.choice(trials)
        trial.state, trial.wave = dice.choice(list(TrialState)), dice.randrange(1, 4)
        trial.resumed_at = float(now) if dice.random() < 0.5 else None
        trial.stopped_at = now - dice.random() if trial.state.is_ended else None
        trial.seconds += dice.random()
        trial.reports.append(TrialReport(trial.step + 1, (0.5,)))
        tally.note(trial)
        known = [each for each in trials if each.step]
        assert tally.ran(now) == pytest.approx(sum(each.ran(now) for each in known))
        assert tally.steps == sum(each.step for each in known)
        assert tally.planned == len(known)
        waiting = [each for each in known if each.state in (TrialState.WAITING, TrialState.RUNNING)]
        assert sum(tally.in_flight.values()) == len(waiting)
        assert tally.busy(now) == pytest.approx(Tally(spec, trials).busy(now))
        assert tally.busy(now) == pytest.approx(
            _union([each for each in known if _has_run(each)], now)
        )


def _has_run(trial: Trial) -> bool:
    return trial.resumed_at is not None or trial.stopped_at is not None


def _union(trials: list[Trial], now: float) -> float:
    """The seconds in which any of the trials ran."""
    ends = [now if each.resumed_at is not None else each.stopped_at or 0.0 for each in trials]
    spans = [(end - each.ran(now), end) for each, end in zip(trials, ends, strict=True)]
    marks = sorted({mark for span in spans for mark in span})
    return sum(
        end - start
        for start, end in pairwise(marks)
        if any(begun <= start and end <= stop for begun, stop in spans)
    )


def test_what_one_more_trial_takes_is_what_the_longest_took() -> None:
    tally = Tally(spec_of())
    assert tally.expected(0.0, None) == 0  # nobody knows
    running = Trial(0, {}, 0, state=TrialState.RUNNING, resumed_at=0.0)
    tally.note(running)
    assert tally.expected(70.0, None) == 70.0
    tally.note(Trial(1, {}, 0, state=TrialState.PRUNED, seconds=500.0))
    tally.note(Trial(2, {}, 0, state=TrialState.DONE, seconds=100.0))
    assert tally.expected(70.0, None) == 100.0
    assert tally.expected(70.0, 90.0) == 90.0  # none runs past its timeout
    assert tally.committed(70.0, 2, None) == 30.0 + 200.0


@pytest.mark.parametrize(
    ("busy", "left", "begun"),
    [(0, None, 20), (18, None, 2), (19, None, 0), (19, 1, 1), (20, 1, 0), (0, 5, 5), (0, 0, 0)],
)
def test_places_are_filled_when_a_tenth_is_free_or_all_that_is_left_fits(
    busy: int, left: int | None, begun: int
) -> None:
    spec = spec_of("tpe", parallel=20)
    assert count_startable(state_of(RUNNING=busy), spec, left, None) == begun


def test_money_is_asked_before_anything_begins() -> None:
    assert count_affordable(None, Money(5, 5, 5)) > 1000
    assert count_affordable(100.0, None) > 1000
    assert count_affordable(100.0, Money(50, 20, 10)) == 3
    assert count_affordable(100.0, Money(80, 20, 10)) == 0
    assert count_affordable(100.0, Money(0, 0, 0)) > 1000  # the first wave teaches what one costs


def test_a_few_failures_at_the_start_are_no_share_yet() -> None:
    spec = spec_of("tpe", trials=100)
    tally = Tally(spec)
    assert find_exceeded_limit(state_of(FAILED=4, DONE=1), spec, tally, None, 0.0) is None
    assert find_exceeded_limit(state_of(FAILED=2, DONE=8), spec, tally, None, 0.0) is None
    found = find_exceeded_limit(state_of(FAILED=3, DONE=8), spec, tally, None, 0.0)
    assert found == ("failures", "3 of the 11 trials that ended failed, more than 20%")


def test_the_first_tenth_failing_ends_it() -> None:
    spec = spec_of("tpe", trials=100)
    assert find_exceeded_limit(state_of(FAILED=9), spec, Tally(spec), None, 0.0) is None
    found = find_exceeded_limit(state_of(FAILED=10), spec, Tally(spec), None, 0.0)
    assert found == ("failures", "the first 10 trials all failed")
    small = spec_of("tpe", trials=5)
    assert find_exceeded_limit(state_of(FAILED=2), small, Tally(small), None, 0.0) is None
    assert find_exceeded_limit(state_of(LOST=3), small, Tally(small), None, 0.0) is not None


def test_where_nothing_says_how_many_there_will_be_a_few_failures_are_no_share_either() -> None:
    spec = spec_of("tpe", trials=None, parallel=4, hours=1.0)
    tally = Tally(spec, [Trial(number, {}, 0) for number in range(4)])
    assert find_exceeded_limit(state_of(FAILED=1), spec, tally, None, 0.0) is None
    assert find_exceeded_limit(state_of(FAILED=1, DONE=3), spec, tally, None, 0.0) is None
    found = find_exceeded_limit(state_of(FAILED=3), spec, tally, None, 0.0)
    assert found == ("failures", "the first 3 trials all failed")


def test_the_first_failure_is_one_that_stands() -> None:
    tally = Tally(spec_of())
    first, second = (
        Trial(number, {}, 0, state=TrialState.FAILED, stopped_at=number) for number in (1, 2)
    )
    tally.note(second)
    tally.note(first)
    assert tally.first_failure is first
    first.state = TrialState.RUNNING  # it was run again
    tally.note(first)
    assert tally.first_failure is second


def test_limits_of_a_top_up_count() -> None:
    spec, state = spec_of("tpe", parallel=4), state_of()
    state.limits = SweepLimits(trials=9, parallel=2)
    assert count_startable(state, spec, None, None) == 2


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 6), st.floats(5.0, 60.0), st.integers(0, 1000),
    st.sampled_from(["tpe", "random"]), st.sampled_from(["none", "asha"]),
)  # fmt: skip
def test_no_limit_is_overrun_by_more_than_one_wave(
    parallel: int, cost: float, seed: int, method: str, stopping: str
) -> None:
    """A dollar a second; a trial takes 3 or 9 steps of up to two seconds each."""
    dice = Random(seed)
    spec = spec_of(method, stopping, trials=None, parallel=parallel, cost=cost)
    world = World(spec, hourly=3600.0, curve=lambda params, step, seed: dice.random())
    for snapshot in world.controller().snapshots():
        world.step_seconds = dice.uniform(0.5, 2.0)
        assert snapshot.in_flight <= parallel
    assert snapshot.spent is not None and snapshot.ended
    assert snapshot.spent <= cost + parallel * 20
