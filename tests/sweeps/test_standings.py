"""Which trial is best."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import Goal, SweepSpec, Trial, TrialReport, TrialState
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.results import (
    BestTrial,
    best_trial,
    confirmed_trials,
    pareto_front,
    rank_trials,
)

ONE = SweepSpec("s", "job", (Goal("accuracy", "max"),), {})
TWO = SweepSpec("s", "job", (Goal("accuracy", "max"), Goal("ms", "min")), {})
DONE = TrialState.DONE


def state_of(*trials: Trial) -> SweepState:
    state = SweepState()
    state.trials.update({trial.number: trial for trial in trials})
    return state


def trial_of(number: int, state: TrialState, step: int, *values: float) -> Trial:
    return Trial(number, {}, 0, state=state, reports=[TrialReport(step, values)] if values else [])


def test_those_trained_in_full_stand_first_then_the_deepest_then_the_value() -> None:
    state = state_of(
        trial_of(0, TrialState.PRUNED, 9, 0.99),
        trial_of(1, DONE, 27, 0.8),
        trial_of(2, DONE, 27, 0.9),
        trial_of(3, TrialState.RUNNING, 3, 0.999),
        trial_of(4, TrialState.KILLED, 9, 0.7),
    )
    assert [trial.number for trial in rank_trials(state, ONE)] == [2, 1, 0, 4, 3]
    found = best_trial(state, ONE)
    assert found is not None and found.number == 2


def test_what_failed_diverged_or_said_nothing_takes_no_part() -> None:
    again = trial_of(4, DONE, 27, 0.99)
    again.confirms = 0
    state = state_of(
        trial_of(0, TrialState.FAILED, 9, 0.99),
        trial_of(1, TrialState.DIVERGED, 9, 0.99),
        trial_of(2, TrialState.RUNNING, 0),
        trial_of(3, DONE, 9, float("nan")),
        again,
    )
    assert (
        rank_trials(state, ONE) == []
        and best_trial(state, ONE) is None
        and pareto_front(state, TWO) == []
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_leader_is_the_best_at_every_moment(seed: int) -> None:
    dice = Random(seed)
    state, leader = state_of(), BestTrial(ONE)
    for _ in range(40):
        number = dice.randrange(6)
        trial = state.trials.setdefault(number, trial_of(number, TrialState.RUNNING, 0))
        if dice.random() < 0.7:
            trial.reports.append(TrialReport(trial.step + 1, (dice.random(),)))
        else:
            trial.state = dice.choice(list(TrialState))
        if not leader.note(trial):
            leader.restart(state.trials.values())
        assert leader.trial is best_trial(state, ONE)


def test_the_front_has_those_that_none_beats_in_everything() -> None:
    points = {0: (0.9, 30.0), 1: (0.8, 10.0), 2: (0.7, 20.0), 3: (0.9, 40.0), 4: (0.8, 10.0)}
    state = state_of(*(trial_of(n, DONE, 1, *values) for n, values in points.items()))
    assert [trial.number for trial in pareto_front(state, TWO)] == [0, 1]


def test_confirmed_are_ordered_by_their_mean_with_its_deviation() -> None:
    def again(number: int, original: int, value: float, state: TrialState = DONE) -> Trial:
        trial = trial_of(number, state, 9, value)
        trial.confirms = original
        return trial

    state = state_of(
        trial_of(0, DONE, 9, 0.9), trial_of(1, DONE, 9, 0.85),
        again(2, 0, 0.7), again(3, 0, 0.8), again(4, 1, 0.86), again(5, 1, 0.1, TrialState.FAILED),
    )  # fmt: skip
    first, second = confirmed_trials(state, ONE)
    assert (first.trial.number, first.values) == (1, (0.85, 0.86))
    assert second.trial.number == 0 and round(second.mean, 6) == 0.8
    assert round(second.deviation, 6) == 0.1
