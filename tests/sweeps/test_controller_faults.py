"""The controller when trials, messages, the store or another controller fail."""

import json
from typing import Any

import pytest

from batchml.errors import ConfigError, ControllerReplaced, ServiceError, ServiceUnreachable
from batchml.model.run import JobStatus
from batchml.model.sweep import TrialState
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import CONTRACT
from batchml.sweeps.control import inbox
from batchml.sweeps.control.watch import JobObservation
from tests.support.sweep_stores import Killed, UnreachableStore
from tests.support.sweep_world import KEY, Fault, World, spec_of

FAILED, DONE = TrialState.FAILED, TrialState.DONE


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
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=5))
    assert world.run(who="second").counts[DONE] == 5


def test_a_store_that_is_away_for_a_while_is_borne_and_told_once() -> None:
    world = World(spec_of("tpe", trials=20, parallel=4))
    store = UnreachableStore(world.store)
    for number, snapshot in enumerate(world.controller(store).snapshots()):
        store.is_away = 5 <= number < 25 and not snapshot.ended
    assert snapshot.counts[DONE] == 20
    assert [words for words in world.told if "away" in words] == ["the store is away"]


def test_a_store_that_stays_away_ends_the_controller_and_the_next_goes_on() -> None:
    world = World(spec_of("tpe", trials=20, parallel=4))
    store = UnreachableStore(world.store)
    with pytest.raises(ServiceUnreachable, match="the store is away"):
        for number, _ in enumerate(world.controller(store).snapshots()):
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


def test_a_store_without_a_contract_is_no_sweep() -> None:
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


# --- Which controller has the sweep ---------------------------------------------------------------


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
