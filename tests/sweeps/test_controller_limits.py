"""The controller keeps the limits: cost, hours, failures, a target."""

import pytest
from msgspec.structs import replace

from batchml.errors import ServiceError
from batchml.model.names import KEY_LENGTH
from batchml.model.sweep import ConfirmSettings, Dimension, TrialState
from batchml.runtime.protocol.sweep import deadline_in
from batchml.sweeps.control import inbox
from batchml.sweeps.control.events import PlannedTrial
from batchml.sweeps.control.plan import params_of
from batchml.sweeps.results import confirmed_trials
from tests.support.sweep_world import DAY, KEY, Fault, World, spec_of

FAILED, DONE, KILLED = TrialState.FAILED, TrialState.DONE, TrialState.KILLED


def test_money_stops_new_trials_before_it_is_spent() -> None:
    # A trial takes 3.1 s at 3,600 USD an hour: three USD and a little.
    spec = spec_of("tpe", trials=None, parallel=2, cost=20.0)
    world = World(spec, hourly=3600.0)
    snapshot = world.run()
    assert snapshot.spent is not None and 10 < snapshot.spent <= 20
    assert snapshot.counts[DONE] == 6 and snapshot.committed == 0
    assert "20 USD" in snapshot.ended


def test_money_is_never_overrun_by_more_than_one_wave() -> None:
    spec = spec_of("tpe", trials=None, parallel=4, cost=30.0)
    world = World(spec, hourly=3600.0, step_seconds=1.0)
    growing = iter(range(10_000))
    world.curve = lambda params, step, seed: 1 / (1 + next(growing))
    for each in world.controller().snapshots():
        snapshot = each
        world.step_seconds += 0.05  # each trial takes longer than all before it
    assert snapshot.spent is not None and snapshot.spent <= 30 + 4 * (5 + 30 + 10)


def test_running_trials_are_stopped_when_the_money_is_gone() -> None:
    spec = spec_of("tpe", "asha", trials=None, parallel=2, steps=1000, cost=20.0)
    world = World(spec, hourly=3600.0)
    snapshot = world.run()
    assert snapshot.counts[KILLED] == 2 and "spent" in snapshot.ended
    assert snapshot.spent is not None and snapshot.spent < 20 + 2 * 3


def test_hours_are_over_for_trials_and_controller_alike() -> None:
    spec = spec_of("random", "asha", trials=10, parallel=2, steps=5000, hours=0.1)
    world = World(spec)
    snapshot = world.run()
    assert "its time is over: 6 minutes" in snapshot.ended
    assert snapshot.hours == pytest.approx(0.1, abs=0.03)
    assert snapshot.count(KILLED, TrialState.PRUNED, DONE) == 10
    assert deadline_in(world.store.keys("stop/")) == 1000360


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_one_failure_does_not_end_a_sweep_that_only_its_hours_end(parallel: int) -> None:
    spec = spec_of("tpe", trials=None, parallel=parallel, hours=0.02)
    snapshot = World(spec, faults={0: Fault("fails", 1)}).run()
    assert "time is over" in snapshot.ended and snapshot.counts[DONE] > 5


def test_hours_do_not_pass_while_it_is_over() -> None:
    world = World(spec_of("tpe", trials=4, parallel=2, hours=1.0))
    world.run()
    world.clock.sleep(DAY)
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=8))
    snapshot = world.run(who="second")
    assert snapshot.counts[DONE] == 8 and snapshot.hours < 0.1


def test_more_hours_reach_the_trials_that_run() -> None:
    world = World(spec_of("random", "asha", trials=2, parallel=2, steps=600, hours=0.1))
    for number, _ in enumerate(world.controller().snapshots()):
        if number == 10:
            inbox.put_request(world.store, inbox.TopUpRequest(KEY, hours=1.0))
    assert world.state().counts[DONE] == 2


def test_a_manifest_that_is_written_again_is_the_same_whatever_the_limits() -> None:
    world = World(spec_of("random", trials=4, hours=1.0))
    world.jobs.error = ServiceError("SubmitJob", "ClientException", "denied", 400)
    with pytest.raises(ServiceError):
        world.run()
    before = world.store.get("waves/000001.jsonl")
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, hours=123456.789))
    assert world.run(who="second").counts[DONE] == 4
    assert world.store.get("waves/000001.jsonl") == before


def test_one_that_failures_stopped_goes_on_when_it_is_asked_to() -> None:
    faults = {number: Fault("fails", 1) for number in range(4)}
    world = World(spec_of("tpe", trials=10, parallel=1), faults=faults)
    assert world.run().ended == "the first 3 trials all failed"
    inbox.put_request(world.store, inbox.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert (snapshot.counts[FAILED], snapshot.counts[DONE]) == (4, 6)


def test_what_runs_again_and_fails_again_stops_it_again() -> None:
    faults = {number: Fault("fails", 1) for number in range(10)}
    world = World(spec_of("tpe", trials=10, parallel=1), faults=faults)
    world.run()
    inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    assert world.run(who="second").ended == "the first 3 trials all failed"
    assert len(world.runs) == 6


def test_a_run_that_confirms_is_run_again_in_full() -> None:
    spec = spec_of("random", "asha", trials=3, steps=9, resume=True, confirm=ConfirmSettings(1, 1))
    world = World(spec, faults={3: Fault("fails", 2)})
    world.run()
    assert world.state().trials[3].state is FAILED
    world.faults.clear()
    inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    world.run(who="second")
    again = world.state().trials[3]
    assert (again.state, again.step) == (DONE, 9)


def test_a_run_that_confirms_has_its_own_seed_as_the_job_s_parameter() -> None:
    job = {"seed": 0, "data-seed": 1, "split_seed": "{seed}", "lr": 0.1}
    trial = PlannedTrial(3, {"x": 0.5}, 77, "confirm", 0)
    assert params_of(trial, job) == {"x": 0.5, "seed": 77, "data-seed": 77}
    assert params_of(replace(trial, params={"seed": 5}), job) == {"seed": 5, "data-seed": 77}
    assert params_of(replace(trial, confirms=None), job) == {"x": 0.5}


def test_a_target_ends_it() -> None:
    world = World(spec_of("tpe", trials=1000, parallel=4, target=0.26))
    snapshot = world.run()
    assert snapshot.ended == "loss reached 0.26" and len(world.state().trials) < 1000


def test_the_best_are_run_again_in_full_with_other_seeds_also_after_a_target() -> None:
    for target in (None, 0.3):
        spec = spec_of(
            "tpe", "asha", trials=12, parallel=3, confirm=ConfirmSettings(2, 3), target=target
        )
        world = World(
            spec, curve=lambda params, step, seed: float(params["x"]) + 1 / step + seed % 7 / 1e3
        )
        world.run()
        state = world.state()
        again = [trial for trial in state.trials.values() if trial.confirms is not None]
        assert len(again) == 6 and all(trial.step == 9 for trial in again)
        assert len({trial.seed for trial in again}) == 6
        found = confirmed_trials(state, world.spec)
        assert len(found) == 2 and found[0].mean < found[1].mean and len(found[0].values) == 4


def test_when_the_first_trials_all_fail_it_stops_and_shows_the_first_ones_last_lines() -> None:
    faults = {number: Fault("fails", 1, "exit code 2") for number in range(100)}
    world = World(spec_of("tpe", trials=100, parallel=4), faults=faults)
    rounds = world.controller()
    *_, snapshot = rounds.snapshots()
    assert 10 <= snapshot.over <= 16 and "trials all failed" in snapshot.ended
    assert rounds.summary.by == "failures" and rounds.summary.first_failure is not None
    assert any("ValueError: no such optimizer" in words for words in world.told)


def test_more_failures_than_allowed_end_it_and_diverged_ones_are_none() -> None:
    def faulty(kind: str) -> World:
        faults = {number: Fault(kind, 2) for number in range(0, 60, 2)}
        return World(spec_of("tpe", trials=60, parallel=2), faults=faults)

    assert "failed, more than 20%" in faulty("fails").run().ended
    snapshot = faulty("nan").run()
    assert snapshot.ended == "all 60 trials are over"
    assert snapshot.counts[TrialState.DIVERGED] == 30


def test_a_number_of_failures_may_be_said_instead_of_a_share() -> None:
    faults = {number: Fault("fails", 2) for number in range(3)}
    spec = spec_of("tpe", trials=9, parallel=1, failed_share=None, failed_count=2)
    assert World(spec, faults={1: faults[1], 2: faults[2]}).run().counts[FAILED] == 2
    faults[4] = faults.pop(0)
    assert World(spec, faults=faults).run().ended == "3 trials failed"


def test_a_space_that_is_tried_out_ends_it() -> None:
    space = {"x": Dimension("choice", values=(0, 1, 2))}
    world = World(spec_of("grid", trials=100, space=space))
    assert world.run().counts[DONE] == 3
