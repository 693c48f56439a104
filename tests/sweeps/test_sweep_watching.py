"""The controller's calls to AWS Batch about jobs, and the conclusions about silent trials."""

from itertools import pairwise
from typing import Any

from batchml.model.run import JobStatus
from batchml.model.sweep import TrialState
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.exit_codes import DUPLICATE
from batchml.sweeps.control import inbox
from batchml.sweeps.control.events import PlannedTrial, TrialBatch
from batchml.sweeps.control.lease import AWS_INTERVALS, LOCAL_INTERVALS
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import SweepTotals
from batchml.sweeps.control.watch import FailedChild, JobObservation, JobWatch
from tests.support.sweep_world import Fault, World, spec_of


def test_many_waves_are_looked_at_in_turn_with_one_call_at_a_time() -> None:
    spec = spec_of("tpe", trials=600, parallel=250)
    world = World(spec, intervals=AWS_INTERVALS, step_seconds=200.0)
    world.clock.time += 0.5
    looked: list[tuple[float, tuple[str, ...]]] = []
    real = world.jobs.observe

    def look(job_ids: Any) -> dict[str, JobObservation]:
        looked.append((world.clock.now(), tuple(job_ids)))
        return real(job_ids)

    world.jobs.observe = look  # type: ignore[method-assign]
    world.run()
    times = [when for when, _ in looked]
    assert min(b - a for a, b in pairwise(times)) >= AWS_INTERVALS.observe
    assert {job for _, jobs in looked for job in jobs} == set(world.jobs.by_id)


def test_an_array_ends_its_sweep_soon_after_its_last_trial_whenever_that_ends() -> None:
    for step_seconds in (0.01, 0.013, 0.017, 0.019):
        world = World(spec_of("random", trials=20, parallel=2), step_seconds=step_seconds)
        world.run()
        ended = world.state().ended
        last = max(trial.stopped_at or 0.0 for trial in world.state().trials.values())
        assert ended is not None
        assert ended.at - last <= LOCAL_INTERVALS.poll + 2 * LOCAL_INTERVALS.at_end


def test_a_job_whose_end_does_not_come_is_looked_at_ever_more_seldom() -> None:
    world = World(spec_of("random", trials=4, parallel=2))
    real, until = world.jobs.observe, world.clock.now() + 600.0

    def look(job_ids: Any) -> dict[str, JobObservation]:
        if world.clock.now() >= until:
            return real(job_ids)
        return dict.fromkeys(job_ids, JobObservation(JobStatus.RUNNING))

    world.jobs.observe = look  # type: ignore[method-assign]
    world.run()
    assert len(world.clock.naps) <= 600.0 / LOCAL_INTERVALS.poll + 10


def test_children_that_fail_unheard_are_asked_for_seldom() -> None:
    faults = {number: Fault("vanishes", 0) for number in range(0, 300, 3)}
    spec = spec_of("random", "asha", trials=300, parallel=4, failed_share=None)
    world = World(spec, intervals=AWS_INTERVALS, faults=faults, step_seconds=20.0)
    snapshot = world.run()
    assert snapshot.counts[TrialState.LOST] == 100
    assert sum(world.jobs.calls.values()) < snapshot.hours * 3600 / 10
    assert world.jobs.calls["failed_children"] <= snapshot.hours * 60 + 2


def test_a_job_that_came_second_leaves_the_word_to_the_first() -> None:
    world = World(spec_of("tpe", trials=1, parallel=1))
    world.store.create("claims/000001-000000", b"another-job")
    rounds = world.snapshots()
    for _ in range(int(LOCAL_INTERVALS.silence / LOCAL_INTERVALS.poll) + 10):
        snapshot = next(rounds)
    assert snapshot.counts[TrialState.WAITING] == 1
    (job,) = world.jobs.made.values()
    assert job.codes == [DUPLICATE] and not snapshot.ended


def test_an_array_that_came_second_leaves_the_word_to_the_first_while_that_speaks() -> None:
    world = World(spec_of("random", trials=2, parallel=2))
    for trial in range(2):
        world.store.create(f"claims/000001-{trial:06}", b"another-job")
    sender = messages.MessageSender(1, 0, 1, 0, "another-job:0", world.clock.now())
    rounds = world.snapshots()
    step, until = 0, 4 * 12 * LOCAL_INTERVALS.silence
    while (snapshot := next(rounds)) and world.clock.now() - sender.began < until:
        if world.clock.now() - sender.began > step * 20:
            step += 1
            said = messages.make_message(
                sender, step, "report", world.clock.now(), [[step, [0.5], world.clock.now()]]
            )
            world.store.put(messages.message_key(1, 0, 1, step), messages.encode_message(said))
    assert snapshot.counts[TrialState.RUNNING] == 1, "it still speaks"
    assert snapshot.counts[TrialState.LOST] == 1, "of this one nothing was heard for very long"
    assert world.jobs.calls["failed_children"] <= 3


def test_a_child_that_failed_is_not_held_against_the_trial_when_it_is_run_again() -> None:
    world = World(spec_of("random", trials=2, parallel=2))
    totals, child = SweepTotals(world.spec, SweepState()), FailedChild(1, "job:1", 1)
    watch = JobWatch(world.jobs, LOCAL_INTERVALS, SubmitMode.ARRAY)
    planned = (PlannedTrial(0, {"x": 0.5}, 1), PlannedTrial(1, {"x": 0.5}, 1))
    totals.apply(TrialBatch(1, 0.0, "2a", planned))
    watch._wait_for(totals.state.trials[1], 0.0, child)
    totals.apply(TrialBatch(2, 0.0, "2b", planned))
    assert watch.observe_silent(totals, 100.0) == []


def test_a_job_that_aws_batch_forgot_ends_its_trials_in_the_end() -> None:
    world = World(spec_of("tpe", trials=2, parallel=2, failed_share=None), slots=0)
    rounds = world.snapshots()
    next(rounds)
    world.jobs.by_id.clear()
    *_, snapshot = rounds
    assert snapshot.counts[TrialState.LOST] == 2
    assert world.state().trials[0].why == "AWS Batch no longer knows its job"


def test_an_image_without_batchml_is_told_of() -> None:
    world = World(spec_of("tpe", trials=1, parallel=1))
    world.jobs.observe = lambda ids: {ids[0]: JobObservation(JobStatus.SUCCEEDED, exit_code=0)}  # type: ignore
    world.slots = 0
    world.run()
    assert "is batchml in its image" in world.told[-1]


def test_what_waits_when_all_is_stopped_is_not_lost_but_ended() -> None:
    world = World(spec_of("random", "asha", trials=50, parallel=2, steps=100))
    rounds = world.snapshots()
    for _ in range(5):
        next(rounds)
    inbox.signal_stop(world.store, "enough")
    *_, snapshot = rounds
    assert snapshot.counts[TrialState.KILLED] == 50 and not snapshot.counts[TrialState.LOST]
    assert len(world.runs) == 2
