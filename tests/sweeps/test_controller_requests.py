"""The controller carries out stops, resumptions, reruns and top-ups."""

from pathlib import Path

import pytest

from batchml.model.names import KEY_LENGTH
from batchml.model.sweep import TrialState
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control import inbox
from tests.support.sweep_world import KEY, Fault, World, spec_of

FAILED, DONE, KILLED = TrialState.FAILED, TrialState.DONE, TrialState.KILLED


def test_stop_saves_what_runs_and_begins_nothing_new() -> None:
    for method in ("tpe", "random"):
        world = World(spec_of(method, "asha", trials=50, parallel=2, steps=100))
        controller = world.controller()
        for number, _ in enumerate(controller.snapshots()):
            if number == 10:
                inbox.signal_stop(world.store, "ann wants her machine")
        assert controller.summary.by == "user"
        assert controller.summary.why == "ann wants her machine"
        assert len(world.runs) == 2
        assert world.state().counts[KILLED] == len(world.state().trials)


def test_what_does_not_stop_is_ended_after_its_grace() -> None:
    world = World(spec_of("tpe", "asha", trials=5, parallel=1, steps=100_000), step_seconds=900.0)
    rounds = world.snapshots()
    for _ in range(3):
        next(rounds)
    inbox.signal_stop(world.store, "enough")
    *_, snapshot = rounds
    assert world.jobs.calls["terminate"] == 1 and snapshot.counts[KILLED] == 1
    assert snapshot.hours * 3600 < 5 + 30 + 20


def test_a_stopped_sweep_goes_on_when_it_is_asked_to() -> None:
    world = World(spec_of("tpe", trials=10, parallel=2))
    inbox.signal_stop(world.store, "not yet")
    assert world.run().planned == 0
    inbox.put_request(world.store, inbox.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    assert world.run(who="second").counts[DONE] == 10


def test_what_failed_of_a_stopped_sweep_is_run_again_and_no_more() -> None:
    world = World(spec_of("tpe", trials=10, parallel=2), faults={0: Fault("fails", 2)})
    for number, _ in enumerate(world.controller().snapshots()):
        if number == 12:
            inbox.signal_stop(world.store, "enough")
    many = len(world.state().trials)
    world.faults.clear()
    inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert snapshot.counts[FAILED] == 0 and snapshot.planned == many < 10
    assert world.state().trials[0].state is DONE


def test_many_that_run_again_beside_others_keep_the_width() -> None:
    spec = spec_of("tpe", trials=40, parallel=4, failed_share=None)
    world = World(spec, faults={number: Fault("fails", 3) for number in range(4, 20)})
    for snapshot in world.controller().snapshots():
        if world.faults and snapshot.over >= 24:
            world.faults.clear()
            inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    assert snapshot.counts[DONE] == 40 and world.most_running == 4


def test_more_trials_are_asked_of_a_controller_that_runs() -> None:
    world = World(spec_of("random", trials=4, parallel=2))
    for number, snapshot in enumerate(world.controller().snapshots()):
        if number == 3 and not snapshot.ended:
            inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=9, parallel=3))
    assert snapshot.counts[DONE] == 9 and world.most_running == 3
    params = [trial.params["x"] for trial in world.state().trials.values()]
    assert len(set(params)) == 9


def test_the_width_of_an_array_that_runs_can_be_changed_also_by_another_controller() -> None:
    for wider in (9, 2):
        world = World(spec_of("random", trials=40, parallel=4))
        rounds = world.snapshots()
        next(rounds)
        rounds.close()
        inbox.put_request(world.store, inbox.TopUpRequest(KEY, parallel=wider))
        assert world.run(who="second").counts[DONE] == 40
        assert world.jobs.quantity == wider and world.most_running == wider


@pytest.mark.parametrize("refused", [3, 1000])
def test_what_held_the_width_is_let_go_once_the_last_jobs_have_ended(refused: int) -> None:
    world, asked = World(spec_of("random", trials=4, parallel=2)), list[bool]()

    def release(*, is_patient: bool = False) -> bool:
        asked.append(is_patient)
        return len(asked) > refused

    world.jobs.remove_limit = release  # type: ignore[method-assign]
    assert world.run().ended == "all 4 trials are over"
    assert asked[:4] == [True] * 4
    assert len(asked) == 4 or (asked[-1] is False and asked.count(False) == 1)


def test_an_array_that_fits_needs_no_hold() -> None:
    world = World(spec_of("random", trials=4, parallel=4))
    world.run()
    assert "hold" not in world.jobs.calls


def test_a_store_in_a_folder_is_as_good(tmp_path: Path) -> None:
    world = World(spec_of("tpe", "asha", trials=9), FolderStore(str(tmp_path)))
    assert world.run().count(DONE, TrialState.PRUNED) == 9
    assert not world.store.keys("inbox/")


def test_a_top_up_outlives_a_stop() -> None:
    world = World(spec_of("tpe", trials=4, parallel=2))
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=8))
    for snapshot in world.snapshots():
        if snapshot.planned == 4:
            inbox.signal_stop(world.store, "enough")
    inbox.put_request(world.store, inbox.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    assert world.run(who="second").planned == 8


def test_more_trials_after_the_target_was_reached() -> None:
    world = World(spec_of("tpe", trials=20, parallel=2, target=0.9))
    assert world.run().ended == "loss reached 0.9"
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=30))
    assert world.run(who="second").count(DONE) >= 28


def test_a_sweep_that_is_over_stays_so() -> None:
    world = World(spec_of())
    world.run()
    before = world.state()
    assert len(list(world.snapshots("second"))) == 1
    assert world.state() == before and world.jobs.calls["submit"] == 1
