"""First jobs of queues that cannot start, and snapshots of queues: docs/behaviours.md B175-B179."""

from pathlib import Path
from typing import Any

import pytest

from batchml.local.batch.engine import next_deadline
from batchml.local.server.protocol import ApiError
from tests.support.engine_world import World, consuming, world

FITS = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
LARGER = "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE"


def limit(reason: str = FITS, seconds: int = 600, **more: Any) -> dict[str, Any]:
    return {
        "reason": reason,
        "state": "RUNNABLE",
        "maxTimeSeconds": seconds,
        "action": "CANCEL",
        **more,
    }


def limited(*actions: dict[str, Any], vcpus: int = 4, journal: Path | None = None) -> World:
    w = world(vcpus, journal=journal)
    w.call("UpdateJobQueue", jobQueue="q", jobStateTimeLimitActions=list(actions))
    return w


# --- jobStateTimeLimitActions -----------------------------------------------------------------


def test_a_head_that_can_never_start_is_cancelled_when_its_time_is_up() -> None:
    """B175: and the next goes on."""
    w = limited(limit())
    w.tick(1)
    stuck, behind = w.submit(vcpus=5), w.submit()
    assert w.status(behind) == ["RUNNABLE"]
    assert next_deadline(w.state) == w.now + 600_000
    w.tick(599.999)
    assert w.status(stuck) == ["RUNNABLE"]
    w.tick(0.001)
    job = w.jobs[stuck]
    assert w.status(stuck, behind) == ["FAILED", "STARTING"]
    assert job.status_reason == f"Canceled by JobStateTimeLimit action due to reason: {FITS}"
    assert (job.cancelled, job.stopped_at) == (True, w.now)
    assert next_deadline(w.state) is None


def test_a_limit_counts_for_its_own_reason_alone() -> None:
    """B175."""
    w = limited(limit(LARGER, 700), limit(FITS, 600))
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 2})
    stuck = w.submit(vcpus=3)
    w.tick(600)
    assert w.status(stuck) == ["RUNNABLE"]
    w.call("UpdateComputeEnvironment", computeEnvironment="ce", computeResources={"maxvCpus": 3})
    assert w.status(stuck) == ["STARTING"]
    other = limited(limit(FITS))
    holder, waits = other.submit(vcpus=4), other.submit()
    other.tick(10_000)  # it waits for room, not for ever
    assert other.status(holder, waits) == ["STARTING", "RUNNABLE"]
    assert next_deadline(other.state) is None


def test_a_job_s_time_begins_when_it_comes_to_the_head() -> None:
    """B176."""
    w = limited(limit())
    first, second = w.submit(vcpus=5), w.submit(vcpus=6)
    w.tick(600)
    assert w.status(first, second) == ["FAILED", "RUNNABLE"]
    assert next_deadline(w.state) == w.now + 600_000
    w.tick(600)
    assert w.status(second) == ["FAILED"]


def test_a_time_limit_holds_for_children_and_multi_node_jobs() -> None:
    """B175."""
    w = limited(limit())
    array = w.array(2, containerOverrides={"vcpus": 5})
    w.tick(600)
    w.tick(600)
    assert w.status(array, f"{array}:0", f"{array}:1") == ["FAILED"] * 3
    assert w.reasons(array, f"{array}:1") == [
        "Array Child Job failed",
        f"Canceled by JobStateTimeLimit action due to reason: {FITS}",
    ]


def test_a_limit_that_is_given_later_counts_from_when_the_job_came_to_the_head() -> None:
    w = world()
    stuck = w.submit(vcpus=5)
    w.tick(700)
    w.call("UpdateJobQueue", jobQueue="q", jobStateTimeLimitActions=[limit()])
    assert w.status(stuck) == ["FAILED"]


def test_a_restarted_server_gives_a_head_its_time_again(tmp_path: Path) -> None:
    """B176."""
    w = limited(limit(), journal=tmp_path / "journal.db")
    stuck = w.submit(vcpus=5)
    w.tick(500)
    w.restart()
    assert next_deadline(w.state) == w.now + 600_000
    w.tick(600)
    assert w.status(stuck) == ["FAILED"]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (limit(seconds=599), "between 600 and 86400"),
        (limit(seconds=86_401), "between 600 and 86400"),
        (limit("because"), "reason must be one of"),
        (limit(action="TERMINATE"), "must be CANCEL"),
    ],
)
def test_a_limit_that_aws_does_not_know_is_refused(action: dict[str, Any], text: str) -> None:
    """B177."""
    w = world()
    assert text in w.refusal("UpdateJobQueue", jobQueue="q", jobStateTimeLimitActions=[action])
    order = [{"order": 1, "computeEnvironment": "ce"}]
    assert text in w.refusal(
        "CreateJobQueue", jobQueueName="n", priority=1, computeEnvironmentOrder=order,
        jobStateTimeLimitActions=[action],
    )  # fmt: skip


@pytest.mark.parametrize("priority", [-1, 1001])
def test_a_queue_s_priority_is_0_to_1000(priority: int) -> None:
    """B177."""
    w = world()
    order = [{"order": 1, "computeEnvironment": "ce"}]
    asked = {"computeEnvironmentOrder": order, "jobQueueName": "n"}
    assert "priority must" in w.refusal("CreateJobQueue", **asked, priority=priority)
    assert "priority must" in w.refusal("UpdateJobQueue", jobQueue="q", priority=priority)


# --- GetJobQueueSnapshot ----------------------------------------------------------------------


def front(w: World, queue: str = "q") -> list[tuple[str, int]]:
    found = w.read("GetJobQueueSnapshot", jobQueue=queue)["frontOfQueue"]["jobs"]
    return [(job["jobArn"].rpartition("/")[2], job["earliestTimeAtPosition"]) for job in found]


def test_a_snapshot_shows_who_is_next_and_what_is_used(tmp_path: Path) -> None:
    """B178."""
    w = world(3, journal=tmp_path / "journal.db")
    began = w.now
    w.submit(vcpus=3)
    w.tick(5)
    large = w.submit(vcpus=2)
    array = w.array(2)
    gone = w.submit()
    w.cancel(gone)
    w.submit(after=(large,))
    before = w.state
    assert front(w) == [(job, began + 5000) for job in (large, f"{array}:0", f"{array}:1")]
    assert w.state is before
    shown = w.read("GetJobQueueSnapshot", jobQueue="q")
    assert shown["frontOfQueue"]["lastUpdatedAt"] == w.now
    assert shown["queueUtilization"] == {
        "totalCapacityUsage": [{"capacityUnit": "VCPU", "quantity": 3.0}],
        "lastUpdatedAt": w.now,
    }
    with pytest.raises(ApiError, match="not found"):
        w.read("GetJobQueueSnapshot", jobQueue="none")


def test_a_snapshot_has_the_first_hundred_jobs_and_none_that_wait_for_a_resource(
    tmp_path: Path,
) -> None:
    """B178."""
    w = world(1, journal=tmp_path / "journal.db")
    w.call("CreateConsumableResource", consumableResourceName="seat", totalQuantity=0)
    w.submit(consumableResourcePropertiesOverride=consuming(seat=1))
    holder = w.submit()
    array = w.array(150)
    assert [job_id for job_id, _ in front(w)] == [f"{array}:{n}" for n in range(100)]
    w.end(holder)
    assert front(w)[0][0] == f"{array}:1"


def test_a_snapshot_of_a_fair_share_queue_goes_by_shares(tmp_path: Path) -> None:
    """B179."""
    w = world(4, journal=tmp_path / "journal.db")
    w.call("CreateSchedulingPolicy", name="p", fairsharePolicy={})
    w.queue("fair", schedulingPolicyArn="p")
    for share, vcpus in (("a", 3), ("b", 1)):
        w.submit(vcpus, queue="fair", shareIdentifier=share)
    jobs = [w.submit(queue="fair", shareIdentifier=share) for share in "aabc"]
    assert [job_id for job_id, _ in front(w, "fair")] == [jobs[3], jobs[2], jobs[0], jobs[1]]
    usage = w.read("GetJobQueueSnapshot", jobQueue="fair")["queueUtilization"]
    assert usage["totalCapacityUsage"] == [{"capacityUnit": "VCPU", "quantity": 4.0}]
    fair = usage["fairshareUtilization"]
    assert fair["activeShareCount"] == 2
    assert [
        (share["shareIdentifier"], share["capacityUsage"][0]["quantity"])
        for share in fair["topCapacityUtilization"]
    ] == [("a", 3.0), ("b", 1.0)]
