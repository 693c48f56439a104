"""Places in a queue, and in a few words why a run waits."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.cluster.rows import ClusterState
from batchml.cluster.snapshot import (
    count_runnable,
    describe_coming_move,
    positions,
    short_reason,
    shorten_reason,
)
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.fallback import FALLBACK_TAG
from batchml.model.hosts import ClusterHost, HostResources
from batchml.model.run import Attempt, JobStatus, Run


def run(job_id: str, status: str = "RUNNABLE", **more: Any) -> Run:
    return Run(**{"job_id": job_id, "name": job_id, "queue": "gpu", "status": JobStatus(status),
                  "vcpus": 4, "memory_mib": 100, "gpus": 1, "created_at": 1, **more})  # fmt: skip


def array(job_id: str, runnable: int, **more: Any) -> Run:
    return run(job_id, "PENDING", children={"RUNNABLE": runnable, "RUNNING": 2}, **more)


def host(used: float = 0, gpus_used: int = 0, **more: Any) -> ClusterHost:
    resources = HostResources(8, 1000, 2, used_vcpus=used, used_gpus=gpus_used)
    return ClusterHost(**{"id": "h1", "cluster": "c", "resources": resources, **more})


def compute(**more: Any) -> ComputeState:
    return ComputeState(**{"name": "ce", "max_vcpus": 16, "instance_types": ("g5",),
                           "cluster": "c", **more})  # fmt: skip


def cluster(*hosts: ClusterHost, ce: ComputeState | None = None, **queue: Any) -> ClusterState:
    state = QueueState(**{"name": "gpu", "environments": ("ce",), **queue})
    return ClusterState({"gpu": state}, {"ce": ce or compute()}, hosts)


# --- places -----------------------------------------------------------------------------------


def test_places_are_those_that_aws_batch_says_and_then_by_age() -> None:
    old, again, young = run("old", created_at=1), run("again", created_at=5), run("y", created_at=9)
    assert positions([young, again, old], ["again", "old"]) == {"again": 1, "old": 2, "y": 3}
    assert positions([young, again, old], None) == {"old": 1, "again": 2, "y": 3}


def test_an_array_takes_a_place_for_each_of_its_children_that_wait() -> None:
    front = ["a:3", "a:4", "b", "a:5", "c"]
    runs = [array("a", 3), run("b"), run("c"), run("d", created_at=8), array("e", 9, created_at=9)]
    assert positions(runs, front) == {"a": 1, "b": 3, "c": 5, "d": 6, "e": 7}
    assert positions([array("a", 3), run("b", created_at=2)], ()) == {"a": 1, "b": 4}


def test_who_has_started_since_the_order_was_asked_for_counts_no_more() -> None:
    runs = [run("a", "STARTING"), run("b"), run("p", "PENDING"), run("s", "SUBMITTED")]
    assert positions(runs, ["gone", "a", "b"]) == {"b": 1}


def test_whatever_is_told_places_are_distinct_and_within_what_waits() -> None:
    chance = random.Random(8)
    for _ in range(200):
        runs = [
            array(name, chance.randint(0, 4)) if chance.random() < 0.5
            else run(name, chance.choice(["RUNNABLE", "RUNNING", "PENDING"]))
            for name in "abcdef"
        ]  # fmt: skip
        told = [f"{name}:{n}" for name in "abcxyz" for n in range(3)] + list("cdez")
        front = chance.sample(told, chance.randint(0, len(told)))
        found = positions(runs, front)
        assert {*found} == {each.job_id for each in runs if count_runnable(each)}
        assert len({*found.values()}) == len(found)
        assert all(place >= 1 for place in found.values())
        assert not found or min(found.values()) == 1


def test_where_shares_decide_age_gives_no_place() -> None:
    runs = [run("a"), run("b", created_at=2)]
    assert positions(runs, ["b"], is_fair=True) == {"b": 1}
    assert positions(runs, None, is_fair=True) == {}
    fair = cluster(policy="fair")
    assert short_reason(runs[0], None, fair) == "waits for its share's turn"


# --- reasons ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiting", "place", "reason"),
    [
        (run("a", "RUNNING"), None, ""),
        (run("a", "SUCCEEDED"), None, ""),
        (run("a", "SUBMITTED"), None, "just submitted"),
        (run("a", "PENDING"), None, "waits for other runs"),
        (run("a", "PENDING", depends_on=("6b0e12ab",)), None, "after 6b0e12ab"),
        (run("a", "PENDING", depends_on=("6b0e", "x", "y")), None, "after 6b0e and 2 more"),
        (run("a", "PENDING", children={"RUNNING": 2}), None, ""),
        (run("a"), 4, "3 before it"),
        (run("a", status_reason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot"), 1,
         "no capacity"),
    ],
)  # fmt: skip
def test_what_a_run_itself_tells(waiting: Run, place: int | None, reason: str) -> None:
    assert short_reason(waiting, place, cluster(host())) == reason


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (cluster(host(), is_enabled=False), "queue is DISABLED"),
        (cluster(host(), status="INVALID"), "queue is INVALID"),
        (cluster(host(), environments=()), "queue has no compute"),
        (cluster(host(), ce=compute(is_enabled=False)), "compute is DISABLED"),
        (cluster(host(), ce=compute(status="INVALID")), "compute is INVALID"),
        (cluster(ce=compute(max_vcpus=2)), "needs 4 vCPUs, compute has 2 at most"),
        (cluster(host()), "next to start"),
        (cluster(host(8), ce=compute(desired_vcpus=16)), "hosts are starting"),
        (cluster(host(8), ClusterHost("h2", compute="ce", status="REGISTERING")),
         "hosts are starting"),
        (cluster(host(8, status="DRAINING"), ce=compute(max_vcpus=8)),
         "compute is full: 8 of 8 vCPUs"),
        (cluster(host(8)), "waits for a host"),
        (cluster(), "waits for a host"),
        (ClusterState(), ""),
        (ClusterState({"gpu": QueueState("gpu", environments=("ce",))}, None, None), ""),
        (ClusterState({"gpu": QueueState("gpu", environments=("ce",))}, {"ce": compute()}), ""),
    ],
)  # fmt: skip
def test_why_the_head_of_a_queue_waits(where: ClusterState, reason: str) -> None:
    assert short_reason(run("a"), 1, where) == reason


@pytest.mark.parametrize(
    ("used", "asked", "reason"),
    [
        (host(6), {}, "needs 4 vCPUs, 2 free"),
        (host(0, 2), {}, "needs 1 GPU, 0 free"),
        (host(0), {"gpus": 3}, "needs 3 GPUs, 2 free"),
        (host(0), {"memory_mib": 2000}, "needs 2000 MiB, 1000 free"),
        (host(0), {"nodes": 2}, "needs 2 times 4 vCPUs at once"),
    ],
)
def test_on_this_machine_it_is_said_what_is_short(
    used: ClusterHost, asked: dict[str, Any], reason: str
) -> None:
    ce = compute(instance_types=("optimal",))
    here = ClusterState({"gpu": QueueState("gpu", environments=("ce",))}, {"ce": ce}, (used,),
                   is_local=True)  # fmt: skip
    assert short_reason(run("a", **asked), 1, here) == reason


@pytest.mark.parametrize(("held", "reason"), [(1, "compute is full: 1 of 1 vCPUs"),
                                              (0, "next to start")])  # fmt: skip
def test_the_compute_environment_s_own_maximum_counts_where_the_machine_has_room(
    held: int, reason: str
) -> None:
    here = cluster(host(held), ce=compute(max_vcpus=1))
    here = replace(here, is_local=True, held={"gpu": held, "elsewhere": 5})
    assert short_reason(run("a", vcpus=1), 1, here) == reason


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "moves to big in 17 s"),
        ({"created_at": 1}, "moves to big"),  # whoever moves it is about to
        ({"attempts": (Attempt(stopped_at=90_000),)}, "moves to big in 30 s"),
        ({"depends_on": ("x",)}, ""),
        ({"queue": "big"}, ""),  # it has moved
        ({"status": JobStatus.RUNNING}, ""),
        ({"tags": {}}, ""),
    ],
)
def test_a_run_that_may_move_says_when(more: dict[str, Any], words: str) -> None:
    waiting = run("a", tags={FALLBACK_TAG: "big:30"}, created_at=77_000)
    assert describe_coming_move(replace(waiting, **more), 90_000) == words


def test_words_of_aws_that_nobody_knew_are_still_told() -> None:
    assert (
        shorten_reason("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - too large")
        == "too large for any host"
    )
    assert shorten_reason("ACTION_REQUIRED:NEW_CAUSE - x") == "new cause"
    assert shorten_reason("Something else, in words") == "Something else, in words"
