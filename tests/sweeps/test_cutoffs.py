"""Results at rungs: the published cut-offs, and the trials that are promoted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import EarlyStop, Goal, SweepSpec, Trial, TrialReport, TrialState
from batchml.sweeps.control.pruning import RungResults, rung_ends


def spec_of(
    direction: str = "min", method: str = "asha", most: int = 27, eta: int = 3
) -> SweepSpec:
    goal = Goal("score", direction)  # type: ignore[arg-type]
    return SweepSpec("s", "job", (goal,), {}, early_stop=EarlyStop(method, max=most, eta=eta))  # type: ignore[arg-type]


def trial_of(number: int, *values: float, state: TrialState = TrialState.RUNNING) -> Trial:
    """A trial that reported these at its steps 1, 2, ..."""
    reports = [TrialReport(step, (value,)) for step, value in enumerate(values, 1)]
    return Trial(number, {}, 0, state=state, reports=reports)


def test_rungs_are_below_the_full_training_which_is_the_last_level() -> None:
    assert rung_ends(spec_of(most=27)) == (1, 3, 9, 27)
    assert rung_ends(spec_of(most=30)) == (1, 3, 9, 27, 30)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(2, 5), st.booleans())
def test_the_best_third_goes_on_and_the_best_one_always(
    values: list[float], eta: int, maximises: bool
) -> None:
    spec = spec_of("max" if maximises else "min", eta=eta)
    rungs = RungResults(spec, [trial_of(number, value) for number, value in enumerate(values)])
    found = rungs.cutoffs(1).rungs
    if len(values) < eta:
        assert 0 not in found  # too few to judge by
        return
    count, threshold = found[0]
    kept = [each for each in values if spec.goal.loss(each) <= spec.goal.loss(threshold)]
    assert count == len(values) and len(kept) >= max(1, len(values) // eta)
    assert min(values, key=spec.goal.loss) in kept
    others = [each for each in kept if each != threshold]
    assert len(others) < max(1, len(values) // eta)  # and no more than that, ties aside


def test_what_a_trial_had_before_it_began_anew_does_not_count() -> None:
    for method in ("asha", "median"):
        spec = spec_of(method=method, most=27)
        trials = [trial_of(number, *[0.5 + number] * 9) for number in range(6)]
        rungs = RungResults(spec, trials)
        trials[0].reports = []
        rungs.note(trials[0])
        assert rungs.cutoffs(1) == RungResults(spec, trials).cutoffs(1)
        trials[0].reports = [TrialReport(1, (9.0,))]
        trials[0].state = TrialState.PAUSED
        rungs.note(trials[0])
        anew = RungResults(spec, trials)
        assert (rungs.results, rungs.best_paused()) == (anew.results, anew.best_paused())
        assert rungs.cutoffs(1) == anew.cutoffs(1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=40))
def test_trial_by_trial_comes_to_the_same_as_all_at_once(reports: list[tuple[int, float]]) -> None:
    spec = spec_of(most=9)
    rungs, trials = RungResults(spec), {number: trial_of(number) for number in range(6)}
    for number, value in reports:
        trial = trials[number]
        if trial.step < 9:
            trial.reports.append(TrialReport(trial.step + 1, (value,)))
        rungs.note(trial)
    assert rungs.results == RungResults(spec, trials.values()).results


def test_a_trial_that_passes_over_rungs_counts_at_the_deepest_once() -> None:
    trial = trial_of(0)
    trial.reports = [TrialReport(4, (0.5,)), TrialReport(8, (0.4,)), TrialReport(12, (0.3,))]
    assert RungResults(spec_of(), [trial]).results == [[], [(0.5, 0)], [(0.3, 0)]]


def test_values_that_are_no_numbers_and_confirming_trials_do_not_count() -> None:
    again = trial_of(1, 0.5)
    again.confirms = 0
    assert RungResults(spec_of(), [trial_of(0, float("nan")), again]).results == [[], [], []]


def test_one_that_begins_anew_counts_once() -> None:
    rungs, trial = RungResults(spec_of()), trial_of(0, 0.5, 0.5, 0.5)
    rungs.note(trial)
    trial.reports = [TrialReport(1, (0.9,))]
    rungs.note(trial)
    assert rungs.results[0] == [(0.9, 0)]


def test_medians_are_told_from_a_seventh_of_the_training_on_of_five_trials() -> None:
    spec = spec_of(method="median")
    trials = [trial_of(number, *(number / 10,) * 6) for number in range(5)]
    assert RungResults(spec, trials[:4]).cutoffs(1).medians == {}
    found = RungResults(spec, trials).cutoffs(2)
    assert found.medians == {4: (5, 0.2), 5: (5, 0.2), 6: (5, 0.2)} and found.rungs == {}


def test_the_medians_of_a_long_training_stay_few() -> None:
    trials = [trial_of(number, *(0.5,) * 10_000) for number in range(5)]
    assert len(RungResults(spec_of(method="median", most=10_000), trials).cutoffs(1).medians) <= 64


def test_promoted_are_those_of_the_best_third_that_wait_the_deepest_first() -> None:
    paused = [trial_of(number, number / 10, state=TrialState.PAUSED) for number in range(9)]
    rungs = RungResults(spec_of(), paused)
    assert rungs.promotable(9) == [(0, 3), (1, 3), (2, 3)]
    assert rungs.promotable(1) == [(0, 3)]
    paused[0].state = TrialState.RUNNING
    rungs.note(paused[0])
    assert rungs.promotable(9) == [(1, 3), (2, 3)]
    for trial in paused[:3]:
        trial.reports += [TrialReport(2, (0.1,)), TrialReport(3, (trial.number / 10,))]
        trial.state = TrialState.PAUSED
        rungs.note(trial)
    assert rungs.promotable(9) == [(0, 9)]
    assert rungs.best_paused() == 0


def test_nobody_is_promoted_while_there_are_too_few() -> None:
    rungs = RungResults(spec_of(), [trial_of(0, 0.1, state=TrialState.PAUSED), trial_of(1, 0.2)])
    assert rungs.promotable(9) == []
    assert rungs.best_paused() == 0
