"""Every submit mode: which one a sweep has, and how the controller runs it."""

from itertools import pairwise

import pytest

from batchml.model.sweep import Dimension, TrialState
from batchml.runtime.protocol.sweep import CUTOFFS, Cutoffs
from batchml.sweeps.control.lease import AWS_INTERVALS
from batchml.sweeps.control.plan import SubmitMode, choose_mode, count_trials
from tests.support.sweep_world import Fault, World, spec_of

DONE = TrialState.DONE


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


def test_a_grid_is_one_job_and_its_width_is_held() -> None:
    space = {"x": Dimension("choice", values=tuple(range(40)))}
    world = World(spec_of("grid", trials=None, parallel=7, space=space))
    snapshot = world.run()
    assert snapshot.counts[DONE] == 40 and world.jobs.calls["submit"] == 1
    assert world.most_running == 7
    assert world.jobs.released
    assert snapshot.ended == "all 40 trials are over"


def test_trials_of_an_array_go_on_without_a_controller_and_are_heard_later() -> None:
    world = World(spec_of(trials=12, parallel=2))
    rounds = world.snapshots()
    next(rounds)
    rounds.close()  # the laptop is closed
    world.clock.sleep(3600)
    assert len(world.runs) == 12
    assert world.run(who="second").counts[DONE] == 12


def test_waves_keep_the_places_filled_and_never_more() -> None:
    world = World(spec_of("tpe", trials=40, parallel=8))
    snapshot = world.run()
    assert snapshot.counts[DONE] == 40
    assert world.most_running == 8 and "hold" not in world.jobs.calls


def test_in_aws_waves_are_some_seconds_apart() -> None:
    world = World(spec_of("tpe", trials=30, parallel=4), intervals=AWS_INTERVALS, step_seconds=4)
    world.run()
    sent = sorted(wave.at for wave in world.state().batches.values())
    assert min(b - a for a, b in pairwise(sent)) >= 15


def test_a_wave_waits_until_a_tenth_of_the_places_is_free() -> None:
    world = World(spec_of("tpe", trials=300, parallel=40))
    world.run()
    sizes = [len(wave.trials) for wave in world.state().batches.values()]
    assert min(sizes[:-1]) >= 4


def test_asha_stops_what_does_badly_and_the_best_is_trained_in_full() -> None:
    world = World(spec_of("random", "asha", trials=27, parallel=3, steps=9))
    snapshot = world.run()
    assert snapshot.counts[TrialState.PRUNED] >= 14
    assert snapshot.best is not None and snapshot.best.step == 9
    assert snapshot.steps + snapshot.steps_saved == 27 * 9
    assert Cutoffs.from_json(world.store.get(CUTOFFS)).rungs[0][0] == 27


def test_promoted_trials_go_on_from_their_checkpoints_and_repeat_no_step() -> None:
    world = World(spec_of("random", "asha", trials=27, parallel=3, steps=9, resume=True))
    world.run()
    assert len(world.trained) == len(set(world.trained))
    state = world.state()
    assert 3 <= state.counts[DONE] <= 9
    assert state.counts[TrialState.PRUNED] == 27 - state.counts[DONE], "none waits when it is over"


def test_too_few_trials_to_promote_still_give_one_that_is_trained_in_full() -> None:
    world = World(spec_of("random", "asha", trials=2, parallel=2, steps=27, resume=True))
    snapshot = world.run()
    assert snapshot.counts[DONE] == 1 and snapshot.best is not None and snapshot.best.step == 27


def test_halving_is_one_array_for_each_rung_all_sent_at_once() -> None:
    world = World(spec_of("random", "halving", trials=27, parallel=9, steps=9))
    rounds = world.snapshots()
    next(rounds)
    assert world.jobs.calls["submit"] == 3
    assert [job.size for job in world.jobs.made.values()] == [27, 9, 3]
    rounds.close()
    world.clock.sleep(3600)  # nobody is there
    snapshot = world.run(who="second")
    assert snapshot.counts[DONE] == 3 and snapshot.counts[TrialState.PRUNED] == 24
    assert snapshot.over == snapshot.wanted == 27
    assert len(world.trained) == len(set(world.trained)) == 27 + 9 * 2 + 3 * 6


def test_a_chain_that_broke_is_taken_up_where_it_broke() -> None:
    faults = {4: Fault("vanishes", 1)}
    world = World(spec_of("random", "halving", trials=9, parallel=9, steps=9), faults=faults)
    snapshot = world.run()
    second, third = list(world.jobs.made.values())[1:3]
    assert second.reasons[0] == third.reasons[0] == "Dependent Job failed"
    assert snapshot.counts[DONE] == 1 and snapshot.counts[TrialState.LOST] == 1
    assert len(world.trained) == len(set(world.trained))
