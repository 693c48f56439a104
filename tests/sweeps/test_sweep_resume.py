"""A sweep that was stopped continues where its trials were."""

import pytest

from batchml.model.names import KEY_LENGTH
from batchml.model.sweep import TrialState
from batchml.sweeps.control import inbox
from tests.support.sweep_world import Fault, World, spec_of

GO_ON = inbox.ResumeRequest("2" + "g" * (KEY_LENGTH - 1))


@pytest.mark.parametrize(
    ("method", "stopping"), [("random", "none"), ("tpe", "none"), ("tpe", "asha")]
)
def test_what_a_stop_has_ended_is_taken_up_again_and_nothing_twice(
    method: str, stopping: str
) -> None:
    world = World(spec_of(method, stopping, trials=8, parallel=2))
    for number, _ in enumerate(world.controller().snapshots()):
        if number == 6:
            inbox.signal_stop(world.store, "enough")
    before = world.state()
    assert before.counts[TrialState.KILLED]
    done = {n: trial.wave for n, trial in before.trials.items() if trial.state.name != "KILLED"}
    inbox.put_request(world.store, GO_ON)
    snapshot = world.run(who="second")
    state = world.state()
    assert snapshot.planned == 8 and not snapshot.counts[TrialState.KILLED]
    assert {n: state.trials[n].wave for n in done} == done, "what had ended is left alone"
    killed = [n for n in before.trials if n not in done]
    again = [
        planned for wave in state.batches.values() for planned in wave.trials if planned.resumes
    ]
    assert sorted(planned.number for planned in again) == killed
    assert all(state.trials[n].params == before.trials[n].params for n in killed)


def _stopped_after(world: World, rounds: int, who: str) -> None:
    for number, _ in enumerate(world.snapshots(who)):
        if number == rounds:
            inbox.signal_stop(world.store, "enough")


@pytest.mark.parametrize(("said", "asked"), [(None, 6), (8, 4)])
def test_the_trials_that_a_top_up_asked_for_stand_after_a_stop(
    said: int | None, asked: int
) -> None:
    world = World(spec_of("tpe", trials=said, parallel=2, hours=0.05))
    inbox.put_request(world.store, inbox.TopUpRequest("2" + "t" * (KEY_LENGTH - 1), trials=asked))
    _stopped_after(world, 1, "first")
    assert world.state().stopping is not None
    inbox.put_request(world.store, GO_ON)
    snapshot = world.run(who="second")
    assert (snapshot.planned, snapshot.wanted) == (asked, asked)


def test_a_rerun_of_a_stopped_sweep_and_other_hours_begin_nothing_and_a_resume_does() -> None:
    world = World(spec_of("tpe", trials=10, parallel=2), faults={0: Fault("fails", 2)})
    _stopped_after(world, 12, "first")
    many = len(world.state().trials)
    world.faults.clear()
    inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    inbox.put_request(world.store, inbox.TopUpRequest("2" + "t" * (KEY_LENGTH - 1), hours=5.0))
    assert world.run(who="second").planned == many < 10
    inbox.signal_stop(world.store, "enough")
    inbox.put_request(world.store, inbox.TopUpRequest("2" + "u" * (KEY_LENGTH - 1), trials=10))
    snapshot = world.run(who="third")
    assert (snapshot.planned, snapshot.hours_limit) == (10, 5.0)


def test_a_controller_that_dies_while_it_goes_on_does_it_once() -> None:
    world = World(spec_of("random", trials=8, parallel=2))
    for number, _ in enumerate(world.controller().snapshots()):
        if number == 4:
            inbox.signal_stop(world.store, "enough")
    inbox.put_request(world.store, GO_ON)
    rounds = world.snapshots()
    next(rounds)
    rounds.close()
    inbox.put_request(world.store, GO_ON)  # as if it had died before it was taken from the store
    assert world.run(who="third").planned == 8
    assert len([wave for wave in world.state().batches.values() if wave.key == GO_ON.key]) == 1
