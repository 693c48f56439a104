"""The controller with scripted trials, jobs and time: every shape, limit and fault."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.errors import ConfigError, ControllerReplaced, ServiceError, ServiceUnreachable
from batchml.model.names import KEY_LENGTH
from batchml.model.run import JobStatus
from batchml.model.sweep import ConfirmSettings, Dimension, TrialState
from batchml.runtime.protocol import messages
from batchml.runtime.protocol.rungs import Cutoffs
from batchml.runtime.protocol.sweep_store import CONTRACT, CUTOFFS, deadline_in
from batchml.runtime.storage.folder import FolderStore
from batchml.sweeps.control import requests, store
from batchml.sweeps.control.intervals import AWS
from batchml.sweeps.control.watch import JobObservation
from batchml.sweeps.results import confirmed_trials
from tests.support.sweep_stores import Killed, UnreachableStore
from tests.support.sweep_world import DAY, KEY, Fault, World, spec_of

FAILED, DONE, KILLED = TrialState.FAILED, TrialState.DONE, TrialState.KILLED


# -- shapes ----------------------------------------------------------------------------------------


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
    world = World(spec_of("tpe", trials=30, parallel=4), intervals=AWS, step_seconds=4)
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


# -- limits ----------------------------------------------------------------------------------------


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
    for each in world.controller().rounds():
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
    requests.put_request(world.store, requests.TopUpRequest(KEY, trials=8))
    snapshot = world.run(who="second")
    assert snapshot.counts[DONE] == 8 and snapshot.hours < 0.1


def test_more_hours_reach_the_trials_that_run() -> None:
    world = World(spec_of("random", "asha", trials=2, parallel=2, steps=600, hours=0.1))
    for number, _ in enumerate(world.controller().rounds()):
        if number == 10:
            requests.put_request(world.store, requests.TopUpRequest(KEY, hours=1.0))
    assert world.state().counts[DONE] == 2


def test_a_manifest_that_is_written_again_is_the_same_whatever_the_limits() -> None:
    world = World(spec_of("random", trials=4, hours=1.0))
    world.jobs.error = ServiceError("SubmitJob", "ClientException", "denied", 400)
    with pytest.raises(ServiceError):
        world.run()
    before = world.store.get("waves/000001.jsonl")
    requests.put_request(world.store, requests.TopUpRequest(KEY, hours=123456.789))
    assert world.run(who="second").counts[DONE] == 4
    assert world.store.get("waves/000001.jsonl") == before


def test_one_that_failures_stopped_goes_on_when_it_is_asked_to() -> None:
    faults = {number: Fault("fails", 1) for number in range(4)}
    world = World(spec_of("tpe", trials=10, parallel=1), faults=faults)
    assert world.run().ended == "the first 3 trials all failed"
    requests.put_request(world.store, requests.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert (snapshot.counts[FAILED], snapshot.counts[DONE]) == (4, 6)


def test_what_runs_again_and_fails_again_stops_it_again() -> None:
    faults = {number: Fault("fails", 1) for number in range(10)}
    world = World(spec_of("tpe", trials=10, parallel=1), faults=faults)
    world.run()
    requests.put_request(world.store, requests.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    assert world.run(who="second").ended == "the first 3 trials all failed"
    assert len(world.runs) == 6


def test_a_run_that_confirms_is_run_again_in_full() -> None:
    spec = spec_of("random", "asha", trials=3, steps=9, resume=True, confirm=ConfirmSettings(1, 1))
    world = World(spec, faults={3: Fault("fails", 2)})
    world.run()
    assert world.state().trials[3].state is FAILED
    world.faults.clear()
    requests.put_request(world.store, requests.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    world.run(who="second")
    again = world.state().trials[3]
    assert (again.state, again.step) == (DONE, 9)


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
    *_, snapshot = rounds.rounds()
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


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_metric_that_is_never_printed_is_told_after_the_first_trial() -> None:
    world = World(spec_of("tpe", trials=20, parallel=2), faults={0: Fault("mute")})
    world.run()
    assert world.told == ["Trial 0: loss never printed; last lines were: done"]


@pytest.mark.parametrize("method", ["random", "tpe"])
def test_a_trial_that_never_said_how_it_ended_is_lost_after_a_while(method: str) -> None:
    faults = {1: Fault("vanishes", 0), 2: Fault("vanishes", 2)}
    world = World(spec_of(method, trials=20, parallel=4), faults=faults)
    snapshot = world.run()
    assert snapshot.counts[TrialState.LOST] == 2 and snapshot.counts[DONE] == 18
    lost = world.state().trials[2]
    assert lost.exit_code == 137 and lost.why == "Essential container exited"
    assert any("was lost" in words for words in world.told)


def test_messages_may_be_lost_doubled_and_late() -> None:
    world = World(spec_of("tpe", "asha", trials=20, parallel=4, steps=27))
    world.lose = lambda message: message["kind"] != "end" and message["trial"] % 3 == 0
    world.twice = lambda message: message["trial"] % 2 == 0
    world.delay = lambda message: 1.0 * (message["trial"] % 5)
    snapshot = world.run()
    assert snapshot.count(DONE, TrialState.PRUNED) == 20
    assert snapshot.best is not None and snapshot.best.step == 27


def test_an_end_that_comes_after_its_trial_was_given_up_counts() -> None:
    world = World(spec_of("random", trials=4))
    world.delay = lambda message: 60.0 * (message["kind"] == "end" and message["trial"] == 0)
    assert world.run().counts[TrialState.LOST] == 1
    world.clock.sleep(120)
    requests.put_request(world.store, requests.TopUpRequest(KEY, trials=5))
    assert world.run(who="second").counts[DONE] == 5


def test_a_board_that_is_away_for_a_while_is_borne_and_told_once() -> None:
    world = World(spec_of("tpe", trials=20, parallel=4))
    store = UnreachableStore(world.store)
    for number, snapshot in enumerate(world.controller(store).rounds()):
        store.is_away = 5 <= number < 25 and not snapshot.ended
    assert snapshot.counts[DONE] == 20
    assert [words for words in world.told if "away" in words] == ["the store is away"]


def test_a_board_that_stays_away_ends_the_controller_and_the_next_goes_on() -> None:
    world = World(spec_of("tpe", trials=20, parallel=4))
    store = UnreachableStore(world.store)
    with pytest.raises(ServiceUnreachable, match="the store is away"):
        for number, _ in enumerate(world.controller(store).rounds()):
            store.is_away = number > 5
    world.clock.sleep(60)
    assert world.run(who="second").counts[DONE] == 20


def test_a_submission_that_is_refused_ends_the_controller_with_the_reason() -> None:
    world = World(spec_of("tpe", trials=4, parallel=4))
    world.jobs.error = ServiceError("SubmitJob", "ClientException", "no such queue", 400)
    with pytest.raises(ServiceError, match="no such queue"):
        world.run()
    assert world.run(who="second").counts[DONE] == 4 and len(world.jobs.made) == 1


def test_a_service_that_fails_for_a_moment_is_asked_again() -> None:
    world = World(spec_of("tpe", trials=4, parallel=4))
    world.jobs.error = ServiceError("SubmitJob", "ServerException", "later", 500)
    assert world.run().counts[DONE] == 4 and len(world.jobs.made) == 1


def test_a_board_without_a_course_is_no_sweep() -> None:
    world = World(spec_of())
    world.store.delete(CONTRACT)
    with pytest.raises(ConfigError, match=r"course\.json"):
        world.run()


def test_a_service_that_is_too_busy_is_asked_again() -> None:
    world = World(spec_of("tpe", trials=4, parallel=4))
    world.jobs.error = ServiceError("SubmitJob", "TooManyRequestsException", "slow down", 429)
    assert world.run().counts[DONE] == 4


def test_nonsense_in_the_inbox_stops_nobody() -> None:
    world = World(spec_of("tpe", "asha", trials=4, parallel=1))
    said = {
        "wave": 1, "trial": 0, "attempt": 1, "seq": 9, "index": 0, "job": "", "began": 0.0,
        "at": 1.0, "kind": "report", "points": [[1, [0.5], 1.0]],
    }  # fmt: skip
    bad: tuple[dict[str, Any], ...] = (
        {"points": [[1, [], 1.0]]},
        {"points": [[2**80, [1.0], 1.0]]},
        {"seq": 2**64},
    )
    rounds = world.snapshots()
    next(rounds)
    for number, change in enumerate(bad):
        world.store.put(f"inbox/{number}.json", json.dumps({**said, **change}).encode())
    *_, snapshot = rounds
    assert snapshot.count(DONE, TrialState.PRUNED) == 4
    assert not world.store.keys("inbox/")


def test_a_trial_between_two_attempts_keeps_its_place_and_the_sweep_open() -> None:
    world = World(spec_of("tpe", trials=2, parallel=1))
    world.lose = lambda message: message["kind"] == "end" and message["trial"] == 1
    rounds = world.snapshots()
    while (1, 3) not in world.trained:
        next(rounds)
    sender = messages.MessageSender(2, 1, 1, 0, "job-2", world.clock.now())
    said = messages.make_message(sender, 5, "end", world.clock.now())
    said = messages.add_end(said, "FAILED", 1, "exit code 1", again=True)
    world.store.put(messages.message_key(2, 1, 1, 5), messages.encode_message(said))
    snapshot = next(rounds)
    assert not snapshot.ended and snapshot.in_flight == 1
    *_, snapshot = rounds  # AWS Batch says that it made no other
    assert snapshot.counts[FAILED] == 1 and world.state().trials[1].why == "exit code 1"


def test_a_rung_that_is_sent_late_is_held_to_its_width() -> None:
    world = World(spec_of("random", "halving", trials=27, parallel=4, steps=9))
    submit = world.jobs.submit
    sent: list[str] = []

    def once(*args: Any) -> str:
        if sent:
            raise Killed
        sent.append(submit(*args))
        return sent[0]

    world.jobs.submit = once  # type: ignore
    with pytest.raises(Killed):
        world.run()
    world.clock.sleep(3600)
    world.jobs.submit = submit  # type: ignore
    world.jobs.quantity, world.most_running = None, 0
    assert world.run(who="second").counts[DONE] == 3
    assert world.most_running <= 4


def test_nothing_is_said_of_waiting_while_the_container_is_being_made() -> None:
    world = World(spec_of("tpe", trials=1, parallel=1), slots=0)
    world.jobs.observe = lambda ids: {each: JobObservation(JobStatus.STARTING) for each in ids}  # type: ignore
    rounds = world.snapshots()
    for _ in range(300):
        next(rounds)
    assert world.told == []


def test_nothing_that_begins_is_told_with_where_to_ask() -> None:
    world = World(spec_of("tpe", trials=4, parallel=4), slots=0)
    rounds = world.snapshots()
    for _ in range(250):
        next(rounds)
    assert "batchml explain job-1" in world.told[-1]
    assert any("No trial has begun" in line for line in next(rounds).notices)
    world.slots = 4
    world.start_children()
    *_, snapshot = rounds
    assert snapshot.counts[DONE] == 4 and snapshot.notices == ()


# -- who has it ------------------------------------------------------------------------------------


def test_a_second_controller_refuses_and_names_the_first() -> None:
    world = World(spec_of())
    rounds = world.snapshots(who="first")
    next(rounds)
    with pytest.raises(ControllerReplaced, match="process 7 on machine-of-first, of ann"):
        world.run(who="second")
    rounds.close()  # gives it back
    assert world.run(who="second").counts[DONE] == 6


def test_one_that_slept_longer_than_its_lease_finds_another_and_ends() -> None:
    world = World(spec_of("tpe", trials=30, parallel=2))
    sleeper = world.snapshots(who="first")
    next(sleeper)
    world.clock.sleep(100)
    second = world.snapshots(who="second")
    next(second)
    with pytest.raises(ControllerReplaced):
        next(sleeper)
    *_, snapshot = second
    assert snapshot.counts[DONE] == 30
    assert len(set(world.runs)) == len(world.runs) == 30


# -- stop and go on --------------------------------------------------------------------------------


def test_stop_saves_what_runs_and_begins_nothing_new() -> None:
    for method in ("tpe", "random"):
        world = World(spec_of(method, "asha", trials=50, parallel=2, steps=100))
        controller = world.controller()
        for number, _ in enumerate(controller.rounds()):
            if number == 10:
                store.signal_stop(world.store, "ann wants her machine")
        assert controller.summary.by == "user"
        assert controller.summary.why == "ann wants her machine"
        assert len(world.runs) == 2
        assert world.state().counts[KILLED] == len(world.state().trials)


def test_what_does_not_stop_is_ended_after_its_grace() -> None:
    world = World(spec_of("tpe", "asha", trials=5, parallel=1, steps=100_000), step_seconds=900.0)
    rounds = world.snapshots()
    for _ in range(3):
        next(rounds)
    store.signal_stop(world.store, "enough")
    *_, snapshot = rounds
    assert world.jobs.calls["terminate"] == 1 and snapshot.counts[KILLED] == 1
    assert snapshot.hours * 3600 < 5 + 30 + 20


def test_a_stopped_sweep_goes_on_when_it_is_asked_to() -> None:
    world = World(spec_of("tpe", trials=10, parallel=2))
    store.signal_stop(world.store, "not yet")
    assert world.run().planned == 0
    requests.put_request(world.store, requests.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    assert world.run(who="second").counts[DONE] == 10


def test_what_failed_of_a_stopped_sweep_is_run_again_and_no_more() -> None:
    world = World(spec_of("tpe", trials=10, parallel=2), faults={0: Fault("fails", 2)})
    for number, _ in enumerate(world.controller().rounds()):
        if number == 12:
            store.signal_stop(world.store, "enough")
    many = len(world.state().trials)
    world.faults.clear()
    requests.put_request(world.store, requests.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert snapshot.counts[FAILED] == 0 and snapshot.planned == many < 10
    assert world.state().trials[0].state is DONE


def test_many_that_run_again_beside_others_keep_the_width() -> None:
    spec = spec_of("tpe", trials=40, parallel=4, failed_share=None)
    world = World(spec, faults={number: Fault("fails", 3) for number in range(4, 20)})
    for snapshot in world.controller().rounds():
        if world.faults and snapshot.over >= 24:
            world.faults.clear()
            requests.put_request(world.store, requests.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    assert snapshot.counts[DONE] == 40 and world.most_running == 4


def test_more_trials_are_asked_of_a_controller_that_runs() -> None:
    world = World(spec_of("random", trials=4, parallel=2))
    for number, snapshot in enumerate(world.controller().rounds()):
        if number == 3 and not snapshot.ended:
            requests.put_request(world.store, requests.TopUpRequest(KEY, trials=9, parallel=3))
    assert snapshot.counts[DONE] == 9 and world.most_running == 3
    params = [trial.params["x"] for trial in world.state().trials.values()]
    assert len(set(params)) == 9


def test_the_width_of_an_array_that_runs_can_be_changed_also_by_another_controller() -> None:
    for wider in (9, 2):
        world = World(spec_of("random", trials=40, parallel=4))
        rounds = world.snapshots()
        next(rounds)
        rounds.close()
        requests.put_request(world.store, requests.TopUpRequest(KEY, parallel=wider))
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


def test_a_board_in_a_folder_is_as_good(tmp_path: Path) -> None:
    world = World(spec_of("tpe", "asha", trials=9), FolderStore(str(tmp_path)))
    assert world.run().count(DONE, TrialState.PRUNED) == 9
    assert not world.store.keys("inbox/")


def test_a_top_up_outlives_a_stop() -> None:
    world = World(spec_of("tpe", trials=4, parallel=2))
    requests.put_request(world.store, requests.TopUpRequest(KEY, trials=8))
    for snapshot in world.snapshots():
        if snapshot.planned == 4:
            store.signal_stop(world.store, "enough")
    requests.put_request(world.store, requests.ResumeRequest("2" + "g" * (KEY_LENGTH - 1)))
    assert world.run(who="second").planned == 8


def test_more_trials_after_the_target_was_reached() -> None:
    world = World(spec_of("tpe", trials=20, parallel=2, target=0.9))
    assert world.run().ended == "loss reached 0.9"
    requests.put_request(world.store, requests.TopUpRequest(KEY, trials=30))
    assert world.run(who="second").count(DONE) >= 28


def test_a_sweep_that_is_over_stays_so() -> None:
    world = World(spec_of())
    world.run()
    before = world.state()
    assert len(list(world.snapshots("second"))) == 1
    assert world.state() == before and world.jobs.calls["submit"] == 1


# -- what one sees ---------------------------------------------------------------------------------


def test_pictures_say_how_far_it_is() -> None:
    spec = spec_of("tpe", "asha", trials=20, parallel=4, steps=9, hours=1.0, cost=1000.0)
    world = World(spec, hourly=360.0)
    halfway = next(p for p in world.snapshots() if p.over >= 10)
    assert halfway.wanted == 20 and 0 < halfway.in_flight <= 4
    assert halfway.eta is not None and 0 < halfway.eta < 60
    assert halfway.spent is not None and math.isclose(
        halfway.spent, halfway.hours * 1440, rel_tol=0.3
    )
    assert halfway.best is not None and not halfway.ended


@pytest.mark.parametrize("stopping", ["halving", "asha"])
def test_where_trials_end_at_rungs_nobody_knows_how_long_it_takes(stopping: str) -> None:
    spec = spec_of("random", stopping, trials=27, parallel=9, steps=9, resume=stopping == "asha")
    for snapshot in World(spec).snapshots():
        assert snapshot.eta == (0.0 if snapshot.ended else None)


def test_what_waits_at_a_rung_is_left_behind_at_the_end_until_more_is_asked() -> None:
    world = World(spec_of("random", "asha", trials=9, parallel=3, steps=9, resume=True))
    world.run()
    left = [trial for trial in world.state().trials.values() if trial.state is TrialState.PRUNED]
    assert left and all("the sweep has ended" in trial.why for trial in left)
    end = world.clock.now()
    requests.put_request(world.store, requests.TopUpRequest(KEY, trials=27))
    rounds = world.snapshots("second")
    assert next(rounds).counts[TrialState.PAUSED] == len(left)
    rounds.close()
    snapshot = world.run(who="third")
    assert snapshot.counts[TrialState.PAUSED] == 0 and snapshot.over == 27
    numbers = {trial.number for trial in left}
    later = [
        each for wave in world.state().batches.values() for each in wave.trials if wave.at > end
    ]
    assert any(each.resumes and each.number in numbers for each in later)


def test_what_waits_at_a_rung_when_its_user_stops_it_still_waits() -> None:
    world = World(spec_of("random", "asha", trials=27, parallel=3, steps=9, resume=True))
    for number, _ in enumerate(world.snapshots()):
        if number == 12:
            store.signal_stop(world.store, "enough")
    assert world.state().ended and world.state().counts[TrialState.PAUSED]


def test_a_job_that_ends_while_it_is_looked_at_breaks_no_chain() -> None:
    """The jobs are looked at first: what their trials said before their end is heard by then."""
    world = World(spec_of("random", "halving", trials=9, parallel=9, steps=9))
    world.lose = lambda message: message["kind"] != "end"
    look = world.jobs.observe

    def slow(job_ids: Sequence[str]) -> dict[str, JobObservation]:
        """Once the first rung was heard, the answer takes its time: the others end meanwhile."""
        if world.state().counts[TrialState.PAUSED] == 9:
            world.pass_time(world.clock.time + 20.0)
        return look(job_ids)

    world.jobs.observe = slow  # type: ignore[method-assign]
    snapshot = world.run()
    assert snapshot.counts[DONE] == 1 and len(world.jobs.made) == 3, "nothing was sent once more"


def test_notices_that_no_longer_hold_are_gone() -> None:
    spec = spec_of("tpe", trials=4, parallel=4, confirm=ConfirmSettings(1, 1))
    world = World(spec, faults={number: Fault("mute", 1) for number in range(4)})
    (*_, snapshot) = world.snapshots()
    assert any("never printed" in line for line in snapshot.notices)
    assert any("Trial 0 failed: loss never printed" in line for line in snapshot.notices)
    assert not any("exit code" in line for line in snapshot.notices)
    world.faults.clear()
    requests.put_request(world.store, requests.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert snapshot.notices == () and snapshot.counts[DONE] == 5
    assert world.state().notices == {}


def test_that_the_best_were_not_run_again_is_said_while_it_is_so() -> None:
    spec = spec_of("tpe", trials=9, parallel=3, confirm=ConfirmSettings(1, 1), hours=4.2 / 3600)
    world = World(spec)
    assert any("not run again" in line for line in world.run().notices)
    requests.put_request(world.store, requests.TopUpRequest(KEY, hours=5.0))
    snapshot = world.run(who="second")
    assert snapshot.notices == () and snapshot.ended == "all 9 trials and 1 confirming run are over"
    assert snapshot.planned == 9 and snapshot.over == 10


def test_when_nothing_came_of_any_trial_the_end_says_so() -> None:
    faults = {number: Fault("nan", 1) for number in range(4)}
    world = World(spec_of("tpe", trials=4, parallel=4), faults=faults)
    assert world.run().ended == "all 4 trials are over, and none has a result"


def test_the_tail_of_a_sweep_does_not_wait_for_places() -> None:
    world = World(replace(spec_of("tpe", trials=5, parallel=64)))
    assert world.run().counts[DONE] == 5 and len(world.state().batches) == 1


def test_what_happens_to_many_is_told_once() -> None:
    faults = {number: Fault("nan", 1) for number in range(4)} | {5: Fault("vanishes", 1)}
    world = World(spec_of("tpe", trials=6, parallel=1, failed_share=None), faults=faults)
    world.run()
    assert world.told == [
        "3 of the first 3 trials diverged: loss was not a finite number. "
        "The space may reach too far.",
        "Trial 5 was lost: Essential container exited",
    ]
