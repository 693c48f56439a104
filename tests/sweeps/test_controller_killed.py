"""A controller that is killed at any of its writes: nothing is lost, and nothing runs twice."""

from collections import Counter

import pytest

from batchml.model.sweep import ConfirmSettings, TrialState
from batchml.sweeps.control import inbox
from batchml.sweeps.control.lease import LOCAL_INTERVALS
from tests.support.sweep_stores import Killed, KillingStore, MemoryStore
from tests.support.sweep_world import Fault, World, spec_of

STORIES = {
    "array": (dict(method="random"), {}),
    "array, asha": (dict(method="sobol", stopping="asha", trials=9), {2: Fault("fails", 2)}),
    "waves": (dict(method="tpe", stopping="asha", trials=8), {3: Fault("vanishes", 1)}),
    "promoting": (dict(method="tpe", stopping="asha", trials=9, resume=True), {}),
    "halving": (dict(method="random", stopping="halving", trials=9, parallel=9), {}),
    "confirmed": (dict(method="tpe", trials=5, confirm=ConfirmSettings(2, 2)), {}),
    "stopped": (dict(method="tpe", trials=30, target=0.3), {}),
    "failing": (dict(method="random", trials=8), {n: Fault("fails", 1) for n in range(8)}),
}


def world_of(story: str) -> World:
    words, faults = STORIES[story]
    return World(spec_of(**words), MemoryStore(), faults=faults)  # type: ignore[arg-type]


def writes_of(story: str) -> int:
    """How many writes one controller makes that is not killed."""
    world = world_of(story)
    store = KillingStore(world.store, 0, before=True)
    world.run(store)
    return -store.left


def outcome(world: World) -> tuple[object, ...]:
    state = world.state()
    params = {number: trial.params for number, trial in state.trials.items()}
    ended = state.ended.why if state.ended else None
    return params, Counter(trial.state for trial in state.trials.values()), ended


@pytest.mark.full
@pytest.mark.parametrize("story", STORIES)
def test_killed_at_a_write_and_resumed_it_comes_to_the_same_end(story: str) -> None:
    whole = world_of(story)
    whole.run()
    for dies_at in range(1, writes_of(story) + 1):
        for before in (True, False):
            world = world_of(story)
            store = KillingStore(world.store, dies_at, before)
            with pytest.raises(Killed):
                world.run(store)
            world.clock.sleep(LOCAL_INTERVALS.lease + 1)  # its lease ends, while its trials go on
            world.run(who="second")
            check(world, whole, story)


def check(world: World, whole: World, story: str) -> None:
    twice = [each for each, many in Counter(world.runs).items() if many > 1]
    assert not twice, "a trial of a wave trained twice"
    waves = Counter(job.wave.number for job in world.jobs.made.values())
    assert max(waves.values()) == 1, "a wave was sent twice"
    state = world.state()
    assert set(state.jobs) == set(state.batches), "a wave was planned and never sent"
    assert world.jobs.released or "hold" not in world.jobs.calls
    trained = {number for number, _ in world.runs}
    silent = {n for n, trial in state.trials.items() if trial.state is TrialState.KILLED}
    assert trained | silent == set(state.trials)
    if story in ("array", "waves", "promoting", "halving", "array, asha"):
        assert {n: t.params for n, t in state.trials.items() if n < 5} == {
            n: t.params for n, t in whole.state().trials.items() if n < 5
        }
        assert len(state.trials) == len(whole.state().trials)
    if story in ("array", "halving"):  # where nothing depends on who was heard first
        assert outcome(world) == outcome(whole)


def test_killed_again_and_again_it_still_comes_to_an_end() -> None:
    world = world_of("waves")
    for life in range(100):
        store = KillingStore(world.store, 2 + life % 7, before=bool(life % 2))
        try:
            world.run(store, who=f"number-{life}")
            break
        except Killed:
            world.clock.sleep(LOCAL_INTERVALS.lease + 1)
    assert world.state().ended is not None
    assert max(Counter(world.runs).values()) == 1


def test_an_ask_is_done_once_wherever_its_controller_is_killed() -> None:
    asks: list[tuple[inbox.SweepRequest, int]] = [
        (inbox.RerunRequest("2rerunrerunrerunr"), 0),
        (inbox.TopUpRequest("2topuptopuptopupt", trials=7), 3),
        (inbox.ConfirmRequest("2confirmconfirmco", top=1, seeds=2), 2),
    ]
    for ask, more in asks:
        for dies_at in range(1, 30):
            world = World(spec_of(trials=4), faults={1: Fault("fails", 1)})
            world.run()
            inbox.put_request(world.store, ask)
            world.faults.clear()
            try:
                world.run(KillingStore(world.store, dies_at, before=bool(dies_at % 2)))
            except Killed:
                world.clock.sleep(LOCAL_INTERVALS.lease + 1)
                world.run(who="second")
            state = world.state()
            assert len(state.trials) == 4 + more
            assert state.counts[TrialState.FAILED] == (
                0 if isinstance(ask, inbox.RerunRequest) else 1
            )
            assert max(Counter(world.runs).values()) == 1
            assert state.ended is not None
            assert not inbox.pending_requests(world.store)
