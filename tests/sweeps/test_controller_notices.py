"""The snapshots and notices of the controller."""

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from batchml.model.names import KEY_LENGTH
from batchml.model.sweep import ConfirmSettings, TrialState
from batchml.sweeps.control import inbox
from batchml.sweeps.control.watch import JobObservation
from tests.support.sweep_world import KEY, Fault, World, spec_of

DONE = TrialState.DONE


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
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, trials=27))
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
            inbox.signal_stop(world.store, "enough")
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
    said = [line for line in snapshot.notices if "never printed" in line]
    assert said == ["Trial 0: loss never printed; last lines were: done"]  # once
    assert not any("exit code" in line for line in snapshot.notices)
    world.faults.clear()
    inbox.put_request(world.store, inbox.RerunRequest("2" + "r" * (KEY_LENGTH - 1)))
    snapshot = world.run(who="second")
    assert snapshot.notices == () and snapshot.counts[DONE] == 5
    assert world.state().notices == {}


@pytest.mark.parametrize(
    ("counters", "said"),
    [
        (("iter", ""), 'count iter, so early_stop.max = 9 does, too. Write step = "iter" below'),
        (("", "iter"), "count iter, not epoch: each of them counts as one epoch. For iter write"),
        (("", "none"), "have no epoch: each of them counts as one epoch."),
    ],
)
def test_lines_that_do_not_count_the_step_are_named_once_in_the_first_trial(
    counters: tuple[str, str], said: str
) -> None:
    world = World(spec_of("tpe", "asha", trials=4, parallel=1))
    world.counters = counters
    first = next(each for each in world.snapshots() if each.notices)
    assert [line for line in first.notices if f"The lines with loss {said}" in line]
    assert first.over == 0
    assert len(world.run(who="second").notices) == 1
    plain = World(spec_of("tpe", trials=4, parallel=1))
    plain.counters = counters
    assert plain.run().notices == ()


def test_a_flag_that_the_program_does_not_know_is_named_once() -> None:
    tail = ("usage: train.py", "train.py: error: unrecognized arguments: --batch_size 8")
    faults = {number: Fault("fails", 1, tail=tail) for number in (1, 2)}
    spec = spec_of("random", trials=9, parallel=3, steps=9)
    notices = [line for line in World(spec, faults=faults).run().notices if "kebab" in line]
    assert len(notices) == 1
    assert "The program has no flag --batch_size. If it writes flags with hyphens" in notices[0]


def test_that_the_best_were_not_run_again_is_said_while_it_is_so() -> None:
    spec = spec_of("tpe", trials=9, parallel=3, confirm=ConfirmSettings(1, 1), hours=4.2 / 3600)
    world = World(spec)
    assert any("not run again" in line for line in world.run().notices)
    inbox.put_request(world.store, inbox.TopUpRequest(KEY, hours=5.0))
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
        "The search space may be too wide.",
        "Trial 5 was lost: Essential container exited",
    ]
