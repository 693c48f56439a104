"""The best trials, and which parameters decide how good a trial is."""

import math
from random import Random
from statistics import median

from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import (
    Dimension,
    Goal,
    Params,
    Space,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
)
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.results import (
    LEAST,
    BestTrial,
    best_trial,
    confirmed_trials,
    importances,
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


# --- Importances of parameters --------------------------------------------------------------------


SPACE: Space = {
    "lr": Dimension("float", 1e-4, 1e-1, log=True),
    "opt": Dimension("choice", values=("a", "b", "c")),
    "layers": Dimension("int", 1, 8),
    "noise": Dimension("float", 0.0, 1.0),
    "coin": Dimension("choice", values=(True, False)),
    "same": Dimension("constant", values=(1,)),
}


def ranked(count: int, seed: int, *, greedy: bool = False) -> list[Params]:
    """The best first. lr and opt decide, layers a little; two parameters nothing."""
    random = Random(seed)
    found: list[tuple[float, Params]] = []
    for number in range(count):
        spread = 0.3 if greedy and number > count / 4 else 1.5
        params: Params = {
            "lr": 10 ** max(-4.0, min(-1.0, random.gauss(-2, spread))),
            "opt": random.choice("abc"),
            "layers": random.randint(1, 8),
            "noise": random.random(),
            "coin": random.random() < 0.5,
            "same": 1,
        }
        loss = (math.log10(float(params["lr"])) + 2.3) ** 2
        loss += 0.3 * (params["opt"] != "b") + 0.01 * int(params["layers"])
        found.append((loss + random.gauss(0, 0.02), params))
    return [params for _, params in sorted(found, key=lambda pair: pair[0])]


def test_the_parameters_that_decide_stand_first_and_others_near_zero() -> None:
    shares = [importances(SPACE, ranked(400, seed)) for seed in range(5)]
    for each in shares:
        assert set(list(each)[:2]) == {"lr", "opt"}
        assert math.isclose(sum(each.values()), 1)
        assert "same" not in each
    for name in ("noise", "coin"):
        assert median(each[name] for each in shares) < 0.02


def test_a_sampler_that_tries_one_region_more_often_does_not_make_it_important() -> None:
    found = importances(SPACE, ranked(400, 1, greedy=True))
    assert found["noise"] < 0.1 and found["coin"] < 0.1


def test_too_few_trials_say_nothing() -> None:
    assert importances(SPACE, ranked(LEAST - 1, 0)) == {}
    assert importances({"same": SPACE["same"]}, ranked(100, 0)) == {}


def test_a_parameter_that_is_seldom_active_is_judged_by_the_trials_that_have_it() -> None:
    space = {**SPACE, "momentum": Dimension("float", 0.0, 1.0, when={"opt": ("b",)})}
    random, trials = Random(0), ranked(600, 0)
    for place, params in enumerate(trials):
        if params["opt"] == "b":
            params["momentum"] = min(1.0, place / 600 + random.random() * 0.1)
    found = importances(space, trials)
    assert 0 < found["momentum"] < 1


def test_the_same_trials_give_the_same_importances() -> None:
    assert importances(SPACE, ranked(100, 3)) == importances(SPACE, ranked(100, 3))


def test_ten_thousand_trials_of_mixed_and_equal_values_are_no_trouble() -> None:
    trials: list[Params] = [{"lr": 0.1, "opt": "a", "layers": 1}] * 10_000
    assert importances(SPACE, trials) == {}
