"""The rules of Batch for jobs with one container, `engine.step`: docs/behaviours.md B1-B34."""

from pathlib import Path
from typing import Any

import pytest

from batchml.local.batch import persistent_heap, scheduling
from batchml.local.batch.engine import next_deadline, restore
from batchml.local.batch.events import AttemptEnded, AttemptExit, AttemptProgressed, AttemptStarted
from batchml.local.machine import MachineCapacity
from batchml.model.run import JobStatus
from tests.support.engine_world import LOST, World, in_state, indexes, order_of, stored, world

# --- the line of a queue ---------------------------------------------------------------------


def test_a_job_goes_through_its_states_in_order() -> None:
    w = world()
    a = w.submit()
    w.start(a)
    w.end(a)
    assert w.history[a] == ["RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED"]
    assert w.jobs[a].status_reason == "Essential container in task exited"


def test_a_queue_is_first_in_first_out() -> None:
    """B2."""
    w = world(vcpus=1)
    jobs = [w.submit() for _ in range(5)]
    for place, job_id in enumerate(jobs):
        assert w.active() == [job_id]
        assert w.status(*jobs[place + 1 :]) == ["RUNNABLE"] * (4 - place)
        w.end(job_id)


def test_the_head_of_a_queue_blocks_smaller_jobs_behind_it() -> None:
    """B3."""
    w = world(vcpus=4)
    first, large, small = w.submit(vcpus=2), w.submit(vcpus=4), w.submit(vcpus=1)
    assert w.status(first, large, small) == ["STARTING", "RUNNABLE", "RUNNABLE"]
    w.end(first)
    assert w.status(large, small) == ["STARTING", "RUNNABLE"]
    w.end(large)
    assert w.status(small) == ["STARTING"]


def test_a_queue_of_higher_priority_is_served_first() -> None:
    """B4."""
    w = world(vcpus=1)
    w.queue("low", 1)
    w.queue("high", 9)
    holder = w.submit()
    low, high = w.submit(queue="low"), w.submit(queue="high")
    w.end(holder)
    assert w.active() == [high]
    w.end(high)
    assert w.active() == [low]


def test_a_blocked_queue_does_not_hold_back_another() -> None:
    """B4."""
    w = world(vcpus=2)
    w.queue("low", 0)
    w.submit(vcpus=1)
    stuck = w.submit(vcpus=2)
    other = w.submit(vcpus=1, queue="low")
    assert w.status(stuck, other) == ["RUNNABLE", "STARTING"]


def test_environments_are_used_in_their_order_and_spill_over() -> None:
    """B5."""
    w = world(vcpus=8)
    w.environment("small", max_vcpus=2)
    w.environment("large", max_vcpus=3)
    order = [
        {"order": 2, "computeEnvironment": "large"},
        {"order": 1, "computeEnvironment": "small"},
    ]
    w.call("CreateJobQueue", jobQueueName="two", priority=1, computeEnvironmentOrder=order)
    jobs = [w.submit(queue="two") for _ in range(6)]
    where = [launch.attempt.environment for launch in w.launches]
    assert where == ["small", "small", "large", "large", "large"]
    assert w.status(jobs[5]) == ["RUNNABLE"]
    w.end(jobs[0])
    assert w.launches[-1].attempt.environment == "small"


def test_an_environment_s_limit_holds_over_all_its_queues() -> None:
    w = world(vcpus=8)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 3})
    w.queue("other")
    jobs = [w.submit(vcpus=2), w.submit(vcpus=2, queue="other")]
    assert w.status(*jobs) == ["STARTING", "RUNNABLE"]
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 4})
    assert w.status(*jobs) == ["STARTING", "STARTING"]


def test_an_unmanaged_environment_runs_jobs_up_to_its_vcpus() -> None:
    """B6."""
    w = world(vcpus=4)
    w.environment("own", type="UNMANAGED", computeResources=None, unmanagedvCpus=2)
    w.queue("mine", 1, "own")
    jobs = [w.submit(queue="mine") for _ in range(3)]
    assert w.status(*jobs) == ["STARTING", "STARTING", "RUNNABLE"]


def test_a_disabled_environment_starts_nothing_and_lets_jobs_go_on() -> None:
    w = world(vcpus=2)
    running = w.submit()
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="DISABLED")
    waiting = w.submit()
    assert w.status(running, waiting) == ["STARTING", "RUNNABLE"]
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="ENABLED")
    assert w.status(running, waiting) == ["STARTING", "STARTING"]


def test_a_disabled_queue_takes_no_jobs_and_finishes_those_it_has() -> None:
    """B7."""
    w = world(vcpus=1)
    a, b = w.submit(), w.submit()
    w.call("UpdateJobQueue", jobQueue="q", state="DISABLED")
    assert "DISABLED" in w.refusal("SubmitJob", jobName="n", jobQueue="q", jobDefinition="d")
    w.end(a)
    assert w.active() == [b]


# --- what there is to give ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each", "how_many"),
    [({"vcpus": 2}, 2), ({"memory": 1024}, 4), ({"gpus": 1}, 2), ({"memory": 2049}, 1)],
)
def test_every_resource_is_a_limit(each: dict[str, Any], how_many: int) -> None:
    w = world(vcpus=5, memory=4096, gpus=("g0", "g1"))
    jobs = [w.submit(**each) for _ in range(how_many + 1)]
    assert w.status(*jobs) == ["STARTING"] * how_many + ["RUNNABLE"]


def test_gpus_are_given_out_once_and_come_back() -> None:
    """B8."""
    gpus = ("g0", "g1", "g2", "g3")
    w = world(vcpus=9, gpus=gpus)
    jobs = [w.submit(gpus=1), w.submit(gpus=2), w.submit(gpus=1)]
    held = [gpu for launch in w.launches for gpu in launch.attempt.gpus]
    assert sorted(held) == list(gpus)
    w.end(jobs[1])
    again = w.submit(gpus=2)
    assert set(w.launches[-1].attempt.gpus) == set(w.launches[1].attempt.gpus)
    for job_id in (jobs[0], jobs[2], again):
        w.end(job_id)
    assert w.state.free == w.state.machine


@pytest.mark.parametrize(
    "end",
    [
        AttemptExit(code=0),
        AttemptExit(code=3),
        AttemptExit(start_failure="CannotPullContainerError: x"),
        LOST,
    ],
)
def test_whatever_the_end_everything_comes_back(end: AttemptExit) -> None:
    w = world(gpus=("g0",))
    a = w.submit(vcpus=3, memory=1000, gpus=1)
    assert w.state.free == MachineCapacity(1, 3096)
    w.end(a, end)
    assert w.state.free == w.state.machine
    assert w.state.used["ce"] == 0
    assert not w.state.by_task


def test_an_attempt_ends_only_once() -> None:
    w = world()
    a = w.submit()
    task = w.task(a)
    w.end(a)
    for event in (
        AttemptEnded(task, AttemptExit(code=1), 5),
        AttemptStarted(task, 5),
        AttemptProgressed(task, "x", 5),
    ):
        assert w.apply(event) == []
    assert w.status(a) == ["SUCCEEDED"]


def test_what_an_attempt_does_before_it_runs_is_shown() -> None:
    w = world()
    a = w.submit()
    w.apply(AttemptProgressed(w.task(a), "installing", w.now))
    assert w.jobs[a].status_reason == "installing"
    w.start(a)
    assert w.jobs[a].status_reason == ""
    assert w.apply(AttemptProgressed(w.task(a), "late", w.now)) == []


def test_the_head_of_a_queue_says_why_it_can_never_start() -> None:
    """B9."""
    w = world(vcpus=4)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 2})
    a, b = w.submit(vcpus=3), w.submit(vcpus=9)
    assert w.jobs[a].status_reason == scheduling.NEVER_FITS_ENVIRONMENT
    assert w.jobs[b].status_reason == ""
    w.cancel(a)
    assert w.jobs[b].status_reason == scheduling.NEVER_FITS_MACHINE


def test_a_reason_for_being_stuck_goes_when_it_ceases() -> None:
    w = world(vcpus=4)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 2})
    running, stuck = w.submit(vcpus=2), w.submit(vcpus=3)
    assert w.jobs[stuck].status_reason == scheduling.NEVER_FITS_ENVIRONMENT
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 4})
    assert (w.status(stuck), w.jobs[stuck].status_reason) == (["RUNNABLE"], "")
    w.end(running)
    assert w.status(stuck) == ["STARTING"]


# --- dependencies ---------------------------------------------------------------------------


def test_a_job_waits_for_all_it_depends_on() -> None:
    """B10."""
    w = world()
    a, b = w.submit(), w.submit()
    c = w.submit(after=(a, b, a))
    w.end(a)
    assert w.status(c) == ["PENDING"]
    w.end(b)
    assert w.status(c) == ["STARTING"]
    assert w.history[c] == ["PENDING", "RUNNABLE", "STARTING"]


def test_jobs_that_are_released_together_keep_the_order_of_their_submission() -> None:
    w = world(vcpus=1)
    a = w.submit()
    released = [w.submit(after=(a,)) for _ in range(4)]
    later = w.submit()
    w.end(a)
    for job_id in (*released, later):
        assert w.active() == [job_id]
        w.end(job_id)


def test_a_failed_dependency_fails_the_job_at_once() -> None:
    """B11."""
    w = world()
    a, b = w.submit(), w.submit()
    c = w.submit(after=(a, b))
    w.end(a, 1)
    assert w.status(b, c) == ["STARTING", "FAILED"]
    assert w.jobs[c].status_reason == "Dependent Job failed"
    w.end(b)
    assert w.history[c] == ["PENDING", "FAILED"]


def test_a_dependency_that_has_ended_counts_as_it_ended() -> None:
    w = world()
    good, bad = w.submit(), w.submit()
    w.end(good)
    w.end(bad, 1)
    assert w.status(w.submit(after=(good,))) == ["STARTING"]
    late = w.submit(after=(bad,))
    assert (w.status(late), w.jobs[late].status_reason) == (["FAILED"], "Dependent Job failed")
    running = w.submit()
    assert w.status(w.submit(after=(bad, running))) == ["FAILED"]


def test_a_dependency_that_does_not_exist_is_refused() -> None:
    w = world()
    text = w.refusal(
        "SubmitJob", jobName="n", jobQueue="q", jobDefinition="d", dependsOn=[{"jobId": "nope"}]
    )
    assert "nope" in text


def test_a_retried_dependency_is_waited_for_until_its_last_attempt() -> None:
    w = world()
    a = w.submit(retryStrategy={"attempts": 2})
    b = w.submit(after=(a,))
    w.end(a, 1)
    assert w.status(a, b) == ["STARTING", "PENDING"]
    w.end(a, 0)
    assert w.status(a, b) == ["SUCCEEDED", "STARTING"]


def test_a_failure_goes_down_a_chain_of_thousands() -> None:
    """B11."""
    w = world()
    first = w.submit()
    chain = [first]
    for _ in range(3000):
        chain.append(w.submit(after=(chain[-1],)))
    w.end(first, 1)
    assert set(w.status(*chain)) == {"FAILED"}
    assert not w.state.jobs
    assert not w.state.dependents


# --- stopping: the facts' table, state by state -----------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_a_runnable_job_that_is_stopped_fails_at_once(how: str) -> None:
    """B12."""
    w, a, _ = in_state("RUNNABLE")
    getattr(w, how)(a, "enough")
    job = w.jobs[a]
    assert (job.status, job.status_reason, job.attempts) == (JobStatus.FAILED, "enough", ())
    assert (job.cancelled, job.terminated) == (how == "cancel", how == "terminate")
    assert job.stopped_at == w.now


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize("code", [0, 1])
def test_a_pending_job_that_is_stopped_fails_once_its_dependencies_have_ended(
    how: str, code: int
) -> None:
    """B13."""
    w, a, other = in_state("PENDING")
    getattr(w, how)(a, "enough")
    assert w.status(a) == ["PENDING"]
    assert w.jobs[a].is_ending
    w.end(other, code)
    assert (w.status(a), w.jobs[a].status_reason) == (["FAILED"], "enough")


def test_a_pending_job_that_is_stopped_waits_for_all_its_dependencies() -> None:
    w = world()
    one, other = w.submit(), w.submit()
    a = w.submit(after=(one, other))
    w.cancel(a, "enough")
    w.end(one, 1)
    assert w.status(a) == ["PENDING"]
    w.end(other)
    assert (w.status(a), w.jobs[a].status_reason) == (["FAILED"], "enough")


@pytest.mark.parametrize("status", ["STARTING", "RUNNING"])
def test_cancelling_what_has_started_does_nothing(status: str) -> None:
    """B14."""
    w, a, _ = in_state(status)
    before = w.jobs[a]
    w.cancel(a)
    assert w.jobs[a] == before
    assert w.stops == []
    w.end(a)
    assert w.status(a) == ["SUCCEEDED"]


@pytest.mark.parametrize("status", ["STARTING", "RUNNING"])
@pytest.mark.parametrize("code", [0, 1, 143])
def test_what_was_terminated_fails_and_is_never_retried(status: str, code: int) -> None:
    """B15."""
    w = world()
    a = w.submit(retryStrategy={"attempts": 5})
    if status == "RUNNING":
        w.start(a)
    w.terminate(a, "enough")
    assert w.status(a) == [status]
    assert w.stops == [w.task(a)]
    w.terminate(a, "again")
    assert w.stops == [w.task(a)]
    w.end(a, code)
    job = w.jobs[a]
    assert (job.status, job.status_reason, job.terminated) == (JobStatus.FAILED, "enough", True)
    assert len(job.attempts) == 1
    assert job.attempts[0]["statusReason"] == "Essential container in task exited"
    assert job.exit_code == code


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED"])
def test_stopping_what_has_ended_does_nothing(how: str, status: str) -> None:
    """B16."""
    w, a, _ = in_state(status)
    before = w.jobs[a]
    getattr(w, how)(a)
    assert w.jobs[a] == before
    w.call("TerminateJob", jobId="unknown", reason="r")
    w.call("CancelJob", jobId="unknown", reason="r")


def test_a_cancelled_job_leaves_its_place_to_the_next() -> None:
    w = world(vcpus=2)
    running = w.submit(vcpus=1)
    large, small = w.submit(vcpus=2), w.submit(vcpus=1)
    w.cancel(large)
    assert w.status(running, large, small) == ["STARTING", "FAILED", "STARTING"]


def test_deleting_a_queue_ends_its_jobs() -> None:
    """B17."""
    w = world(vcpus=1)
    running = w.submit()
    waiting = w.submit()
    pending = w.submit(after=(waiting,))
    w.queue("other")
    spared = w.submit(queue="other")
    assert "DISABLED" in w.refusal("DeleteJobQueue", jobQueue="q")
    w.call("UpdateJobQueue", jobQueue="q", state="DISABLED")
    w.call("DeleteJobQueue", jobQueue="q")
    assert w.status(running, waiting, pending) == ["STARTING", "FAILED", "FAILED"]
    assert w.jobs[waiting].status_reason == "JobQueue deleted"
    w.end(running, 143)
    assert w.jobs[running].status_reason == "JobQueue deleted"
    assert w.active() == [spared]


def test_a_queue_with_many_jobs_is_deleted_while_calls_are_answered() -> None:
    """B17."""
    w = world(vcpus=1)
    running = w.submit()
    array = w.array(1500)
    waiting = [w.submit() for _ in range(1200)]
    w.call("UpdateJobQueue", jobQueue="q", state="DISABLED")
    assert next_deadline(w.state) is None
    w.call("DeleteJobQueue", jobQueue="q")
    assert w.state.queues["q"].is_deleting
    assert "being modified" in w.refusal("UpdateJobQueue", jobQueue="q", state="ENABLED")
    w.call("DeleteJobQueue", jobQueue="q")  # again: it goes on
    assert next_deadline(w.state) == 0
    w.end(running, 143)
    assert w.active() == []  # the room is free, but nothing of this queue may start
    while next_deadline(w.state) is not None:
        w.tick(0.001)
    assert "q" not in w.state.queues and not w.state.jobs and not w.state.lines
    assert set(w.status(running, array, *waiting)) == {"FAILED"}
    assert w.jobs[waiting[-1]].status_reason == "JobQueue deleted"


def test_a_server_that_is_killed_while_it_deletes_a_queue_goes_on_with_it(tmp_path: Path) -> None:
    w = world(vcpus=1, journal=tmp_path / "journal.db")
    running, *waiting = [w.submit() for _ in range(2300)]
    late = w.submit(dependsOn=[{"jobId": waiting[-1]}])
    w.start(running)
    w.call("UpdateJobQueue", jobQueue="q", state="DISABLED")
    w.call("DeleteJobQueue", jobQueue="q")
    left = len(w.state.jobs)
    assert 1000 < left < 2300
    while "q" in w.state.queues:
        assert w.busy() == [running] and next_deadline(w.state) == 0
        w.restart()  # a server that starts goes on at once
        assert len(w.state.jobs) < left or "q" not in w.state.queues
        left = len(w.state.jobs)
    w.restart()
    assert set(w.state.jobs) == {running} and not w.state.lines
    w.end(running, 143)
    assert set(w.status(running, *waiting, late)) == {"FAILED"}


def test_a_queue_made_again_does_not_run_the_jobs_of_the_old_one() -> None:
    w = world(vcpus=1)
    w.submit()
    old = w.submit()
    w.call("UpdateJobQueue", jobQueue="q", state="DISABLED")
    w.call("DeleteJobQueue", jobQueue="q")
    w.queue()
    new = w.submit()
    w.end(w.launches[0].job.id, 143)
    assert (w.status(old), w.active()) == (["FAILED"], [new])


# --- retries --------------------------------------------------------------------------------


def test_a_retried_job_goes_to_the_front_of_its_queue() -> None:
    """B20."""
    w = world(vcpus=1)
    a = w.submit(retryStrategy={"attempts": 3})
    b = w.submit()
    w.start(a)
    w.end(a, 1)
    assert w.active() == [a]
    assert w.history[a] == ["RUNNABLE", "STARTING", "RUNNING", "RUNNABLE", "STARTING"]
    w.end(a, 0)
    assert w.active() == [b]


def retried_and_released() -> tuple[World, str, str]:
    """A retried job, and one submitted before it that was released while it ran; both wait."""
    w = world(vcpus=2)
    first = w.submit()
    released = w.submit(vcpus=2, after=(first,))
    retried = w.submit(retryStrategy={"attempts": 2})
    w.end(first)
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="DISABLED")
    w.end(retried, 1)
    assert w.status(released, retried) == ["RUNNABLE", "RUNNABLE"]
    return w, retried, released


def test_a_retried_job_goes_before_one_that_was_submitted_earlier() -> None:
    """B20."""
    w, retried, released = retried_and_released()
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="ENABLED")
    assert w.status(retried, released) == ["STARTING", "RUNNABLE"]


def test_a_restarted_server_keeps_a_retried_job_in_front() -> None:
    w, retried, released = retried_and_released()
    back = restore(stored(w.state))
    assert order_of(back, "q") == order_of(w.state, "q") == [retried, released]


def test_each_attempt_leaves_a_record() -> None:
    """B21."""
    w = world()
    a = w.submit(retryStrategy={"attempts": 3})
    tasks = []
    for code in (5, 6, 7):
        tasks.append(w.task(a))
        w.now += 1000
        w.start(a)
        w.now += 1000
        w.end(a, code)
    job = w.jobs[a]
    assert (w.status(a), job.exit_code) == (["FAILED"], 7)
    containers = [attempt["container"] for attempt in job.attempts]
    assert [container["exitCode"] for container in containers] == [5, 6, 7]
    assert [c["taskArn"].rpartition("/")[2] for c in containers] == tasks
    assert len({c["logStreamName"] for c in containers}) == 3
    assert [attempt["stoppedAt"] - attempt["startedAt"] for attempt in job.attempts] == [1000] * 3
    assert job.started_at == job.attempts[-1]["startedAt"]
    assert job.stopped_at == job.attempts[-1]["stoppedAt"]


def test_a_lost_runner_is_a_lost_host_to_the_rules() -> None:
    """B22."""
    rules = [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ]
    w = world()
    a = w.submit(retryStrategy={"attempts": 9, "evaluateOnExit": rules})
    w.start(a)
    w.end(a, LOST)
    assert w.status(a) == ["STARTING"]
    (attempt,) = w.jobs[a].attempts
    assert attempt["statusReason"].startswith("Host EC2 (instance this-machine) terminated")
    assert "exitCode" not in attempt["container"]
    w.end(a, 1)
    assert w.status(a) == ["FAILED"]
    assert len(w.jobs[a].attempts) == 2


def test_an_attempt_that_could_not_start_has_no_exit_code() -> None:
    """B23."""
    w = world()
    a = w.submit()
    w.end(a, AttemptExit(start_failure="CannotPullContainerError: " + "x" * 999))
    job = w.jobs[a]
    assert (job.status_reason, job.exit_code) == ("Task failed to start", None)
    assert job.reason.startswith("CannotPullContainerError: ")
    assert len(job.reason) == 255
    assert job.started_at is None
    assert "startedAt" not in job.attempts[0]


def test_running_out_of_memory_is_named() -> None:
    w = world()
    a = w.submit()
    w.end(a, AttemptExit(code=137, oom=True))
    assert w.jobs[a].reason == "OutOfMemoryError: Container killed due to memory usage"
    assert w.jobs[a].status_reason == "Essential container in task exited"


def test_a_retried_job_can_be_cancelled_while_it_waits() -> None:
    w = world(vcpus=2)
    a = w.submit(vcpus=2, retryStrategy={"attempts": 2})
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="DISABLED")
    w.end(a, 1)
    w.cancel(a, "enough")
    job = w.jobs[a]
    assert (job.status, job.status_reason, len(job.attempts)) == (JobStatus.FAILED, "enough", 1)


def test_an_exit_record_gives_the_start_that_was_not_reported() -> None:
    w = world()
    a = w.submit()
    w.end(a, AttemptExit(code=0, started_at=5, stopped_at=9))
    assert (w.jobs[a].started_at, w.jobs[a].stopped_at) == (5, 9)


# --- timeouts -------------------------------------------------------------------------------


def test_an_attempt_that_takes_too_long_is_stopped_and_not_retried() -> None:
    """B30."""
    w = world()
    a = w.submit(timeout={"attemptDurationSeconds": 60}, retryStrategy={"attempts": 3})
    w.tick(1000)
    w.start(a)
    w.tick(59.999)
    assert w.stops == []
    w.tick(0.001)
    w.tick(1)
    assert w.stops == [w.task(a)]
    w.end(a, 143)
    job = w.jobs[a]
    assert (w.status(a), job.status_reason) == (["FAILED"], "Job attempt duration exceeded timeout")
    assert len(job.attempts) == 1
    assert not job.terminated


def test_a_retry_starts_the_time_again() -> None:
    """B31."""
    w = world()
    a = w.submit(timeout={"attemptDurationSeconds": 60}, retryStrategy={"attempts": 2})
    w.start(a)
    w.tick(50)
    w.end(a, 1)
    w.tick(5)
    w.start(a)
    w.tick(59)
    assert w.stops == []
    w.tick(2)
    assert w.stops == [w.task(a)]


def test_the_next_deadline_is_the_earliest() -> None:
    w = world()
    assert next_deadline(w.state) is None
    for seconds in (300, 100, 200):
        w.start(w.submit(timeout={"attemptDurationSeconds": seconds}))
    assert next_deadline(w.state) == w.now + 100_000


# --- restore ----------------------------------------------------------------------------------


def test_a_restarted_server_has_the_same_indexes() -> None:
    """B33."""
    w = world(vcpus=3, gpus=("g0", "g1", "g2"))
    retried = w.submit(gpus=1, retryStrategy={"attempts": 2})
    holder = w.submit(gpus=1)
    middle = w.submit(gpus=1, timeout={"attemptDurationSeconds": 60})
    w.start(middle)
    waiting = [w.submit() for _ in range(3)]
    w.submit(after=(holder, waiting[1]))
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", state="DISABLED")
    w.end(retried, 1)
    w.end(holder)
    back = restore(stored(w.state))
    assert indexes(back) == indexes(w.state)
    assert order_of(back, "q") == [retried, *waiting]
    assert back.free.gpus == ("g0", "g1")
    assert next_deadline(back) == next_deadline(w.state) == w.now + 60_000


def test_the_deadlines_of_jobs_that_have_ended_are_forgotten() -> None:
    w = world()
    lasting = w.submit(timeout={"attemptDurationSeconds": 3600})
    w.start(lasting)
    for _ in range(500):
        job = w.submit(timeout={"attemptDurationSeconds": 86_400})
        w.start(job)
        w.end(job)
    assert persistent_heap.size(w.state.deadlines) < 100
    w.tick(3600)
    assert w.stops == [w.task(lasting)]
