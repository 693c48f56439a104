"""Multi-node parallel jobs, `engine.step`: docs/behaviours.md B140-B153."""

from pathlib import Path
from typing import Any

import pytest

from batchml.local.batch.engine import next_deadline, restore, tasks_to_stop
from batchml.local.batch.events import AttemptEnded, AttemptExit, AttemptStarted
from batchml.model.run import JobStatus
from tests.support.engine_world import (
    LOST,
    World,
    consuming,
    indexes,
    needing,
    stored,
    world,
)
from tests.support.models import ec2

ALL = "0:"


def container(vcpus: int = 1, memory: int = 64, gpus: int = 0, **more: Any) -> dict[str, Any]:
    return {"image": "i", "command": ["true"], **needing(vcpus, memory, gpus), **more}


def shape(nodes: int, main: int = 0, **ranges: dict[str, Any]) -> dict[str, Any]:
    """Node properties; `ranges` are named `r0_1` for 0:1."""
    given = ranges or {"r0_": container()}
    return {
        "numNodes": nodes,
        "mainNode": main,
        "nodeRangeProperties": [
            {"targetNodes": name[1:].replace("_", ":"), "container": one}
            for name, one in given.items()
        ],
    }


def define(w: World, properties: dict[str, Any], name: str = "m", **more: Any) -> None:
    w.call(
        "RegisterJobDefinition",
        jobDefinitionName=name,
        type="multinode",
        nodeProperties=properties,
        **more,
    )


def submit(w: World, name: str = "m", **more: Any) -> str:
    made = w.call("SubmitJob", jobName="job", jobQueue="q", jobDefinition=name, **more)
    return str(made["jobId"])


def cluster(
    nodes: int = 3, main: int = 0, vcpus: int = 4, journal: Path | None = None, **more: Any
) -> tuple[World, str]:
    """A world and a job of so many nodes in it, one vCPU each."""
    w = world(vcpus, journal=journal)
    define(w, shape(nodes, main))
    return w, submit(w, **more)


def running(nodes: int = 3, **more: Any) -> tuple[World, str]:
    """A job of which all nodes run."""
    w, job = cluster(nodes, **more)
    w.start(*w.busy())
    w.start(*[node for node in w.busy() if w.jobs[node].status is JobStatus.STARTING])
    return w, job


@pytest.mark.parametrize(
    "other",
    [
        {"computeResources": ec2(99, type="SPOT")},
        {"type": "UNMANAGED", "computeResources": None, "unmanagedvCpus": 99},
    ],
)
def test_nodes_are_placed_on_demand_alone(other: dict[str, Any]) -> None:
    """B139."""
    w = world(vcpus=4)
    w.environment("other", **other)
    w.queue("others", 1, "other")
    w.queue("both", 1, "other", "ce")
    define(w, shape(2))
    alone = w.submit(queue="others")
    stuck, placed = (
        str(w.call("SubmitJob", jobName="job", jobQueue=queue, jobDefinition="m")["jobId"])
        for queue in ("others", "both")
    )
    assert w.status(alone, stuck, placed) == ["STARTING", "RUNNABLE", "STARTING"]
    assert w.jobs[stuck].status_reason.startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")


def nodes_of(job: str, count: int = 3) -> list[str]:
    return [f"{job}#{node}" for node in range(count)]


# --- ranges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "count", "memory"),
    [
        ({"0:": 1}, 3, [1, 1, 1]),
        ({":": 1}, 2, [1, 1]),
        ({":1": 1, "2:": 2}, 4, [1, 1, 2, 2]),
        ({"0:1": 1, "2:3": 2}, 4, [1, 1, 2, 2]),
        ({"0": 1, "1:2": 2}, 3, [1, 2, 2]),
        ({"0:10": 1, "4:5": 2}, 11, [1, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1]),
        ({"0:3": 1, "0:0": 2, "3:3": 3}, 4, [2, 1, 1, 3]),
        ({"0:0": 1}, 1, [1]),
    ],
)
def test_each_node_gets_what_the_narrowest_range_around_it_says(
    ranges: dict[str, int], count: int, memory: list[int]
) -> None:
    """B140."""
    w = world(vcpus=20)
    entries = [
        {"targetNodes": target, "container": container(memory=64 * each)}
        for target, each in ranges.items()
    ]
    define(w, {"numNodes": count, "mainNode": 0, "nodeRangeProperties": entries})
    job = submit(w)
    assert [w.jobs[node].needs.memory for node in nodes_of(job, count)] == [64 * m for m in memory]
    assert w.jobs[job].needs.memory == 64 * sum(memory)
    assert [e["targetNodes"] for e in w.jobs[job].spec.node_properties["nodeRangeProperties"]]
    shown = w.jobs[job].spec.node_properties["nodeRangeProperties"]
    assert [e["container"]["resourceRequirements"][1]["value"] for e in shown] == [
        str(64 * each) for each in ranges.values()
    ]


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (shape(3, r0_1=container()), r"not covered: [2]"),
        (shape(3, r1_2=container()), r"not covered: [0]"),
        (shape(3, r0_3=container()), "within the nodes 0:2"),
        (shape(3, r2_1=container(), r0_=container()), "within the nodes 0:2"),
        (shape(3, r12345678=container()), "must look like"),
        (shape(3, ra_b=container()), "must look like"),
        (shape(3, r=container()), "must look like"),
        (shape(3, 3), "mainNode must be below numNodes"),
        (shape(3, -1), "mainNode must be below numNodes"),
        (shape(0), "numNodes must be between 1 and 1000"),
        (shape(1001), "numNodes must be between 1 and 1000"),
        ({"numNodes": 1, "mainNode": 0, "nodeRangeProperties": []}, "number of node ranges"),
        (
            {
                **shape(9),
                "nodeRangeProperties": [{"targetNodes": "0:", "container": container()}] * 6,
            },
            "number of node ranges",
        ),
        (shape(1, r0_=needing()), "image must be provided"),
        (shape(1, r0_={"image": "i"}), "VCPU and MEMORY"),
    ],
)
def test_nodes_that_do_not_fit_together_are_refused(properties: dict[str, Any], text: str) -> None:
    """B140."""
    w = world()
    refused = w.refusal(
        "RegisterJobDefinition", jobDefinitionName="m", type="multinode", nodeProperties=properties
    )
    assert text in refused


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("multinode", {}),
        ("multinode", {"nodeProperties": shape(1), "containerProperties": container()}),
        ("container", {"nodeProperties": shape(1), "containerProperties": container()}),
    ],
)
def test_a_definition_has_the_properties_of_its_type_alone(
    kind: str, parts: dict[str, Any]
) -> None:
    w = world()
    w.refusal("RegisterJobDefinition", jobDefinitionName="m", type=kind, **parts)


def test_the_number_of_nodes_can_be_overridden_for_an_open_range() -> None:
    """B141."""
    w = world(vcpus=9)
    define(w, shape(2, 1, r0_0=container(), r1_=container(memory=128)))
    job = submit(w, nodeOverrides={"numNodes": 4})
    assert [w.jobs[node].needs.memory for node in nodes_of(job, 4)] == [64, 128, 128, 128]
    assert w.jobs[job].spec.node_properties["numNodes"] == 4
    asked = {"jobName": "n", "jobQueue": "q", "jobDefinition": "m"}
    assert "mainNode" in w.refusal("SubmitJob", **asked, nodeOverrides={"numNodes": 1})
    define(w, shape(3, 0, r0_1=container(), r2_=container()), "tail")
    asked["jobDefinition"] = "tail"
    assert "within" in w.refusal("SubmitJob", **asked, nodeOverrides={"numNodes": 2})
    define(w, shape(2, 0, r0_1=container()), "closed")
    asked["jobDefinition"] = "closed"
    assert "open end" in w.refusal("SubmitJob", **asked, nodeOverrides={"numNodes": 3})
    assert submit(w, "closed", nodeOverrides={"numNodes": 2})


def test_overrides_are_for_the_nodes_that_they_name() -> None:
    """B141."""
    w = world(vcpus=9)
    define(w, shape(3, 0, r0_=container(environment=[{"name": "A", "value": "1"}])))
    overrides = [
        {
            "targetNodes": "1:",
            "containerOverrides": {
                "command": ["other", "Ref::what"],
                "environment": [{"name": "B", "value": "2"}],
                **needing(2, 128),
            },
        },
        {"targetNodes": "2", "containerOverrides": {"environment": [{"name": "A", "value": "3"}]}},
    ]
    job = submit(
        w, nodeOverrides={"nodePropertyOverrides": overrides}, parameters={"what": "thing"}
    )
    found = [w.jobs[node].container for node in nodes_of(job)]
    assert [one["command"] for one in found] == [["true"], ["other", "thing"], ["other", "thing"]]
    assert [{e["name"]: e["value"] for e in one["environment"]} for one in found] == [
        {"A": "1"}, {"A": "1", "B": "2"}, {"A": "3", "B": "2"},
    ]  # fmt: skip
    assert w.jobs[job].needs.vcpus == 5
    asked = {"jobName": "n", "jobQueue": "q", "jobDefinition": "m"}
    outside = {"nodePropertyOverrides": [{"targetNodes": "3:3"}]}
    assert "within" in w.refusal("SubmitJob", **asked, nodeOverrides=outside)


@pytest.mark.parametrize("part", ["containerOverrides", "arrayProperties"])
def test_what_is_for_jobs_with_one_container_is_refused(part: str) -> None:
    """B141."""
    w = world()
    define(w, shape(2))
    given = {"containerOverrides": needing(), "arrayProperties": {"size": 2}}[part]
    asked = {"jobName": "n", "jobQueue": "q", "jobDefinition": "m"}
    assert "multi-node" in w.refusal("SubmitJob", **asked, **{part: given})
    asked["jobDefinition"] = "d"
    assert "multi-node" in w.refusal("SubmitJob", **asked, nodeOverrides={"numNodes": 2})


# --- placing ----------------------------------------------------------------------------------


def test_all_nodes_are_placed_at_once_or_none() -> None:
    """B142."""
    w = world(vcpus=4)
    first = w.submit(vcpus=2)
    define(w, shape(3))
    job = submit(w)
    behind = w.submit()
    assert w.status(job, *nodes_of(job), behind) == ["RUNNABLE", *["PENDING"] * 3, "RUNNABLE"]
    w.end(first)
    assert w.status(job, behind) == ["STARTING", "STARTING"]
    assert w.state.free.vcpus == 0
    assert w.state.used["ce"] == 4


@pytest.mark.parametrize(
    ("each", "fits"),
    [
        ({"vcpus": 3}, True), ({"vcpus": 4}, False), ({"memory": 1000}, True),
        ({"memory": 1001}, False), ({"gpus": 2}, True), ({"gpus": 3}, False),
    ],
)  # fmt: skip
def test_what_all_nodes_need_together_must_fit(each: dict[str, int], fits: bool) -> None:
    """B142."""
    w = world(vcpus=6, memory=2000, gpus=("a", "b", "c", "d"))
    define(w, shape(2, r0_=container(**each)))
    job = submit(w)
    assert w.status(job) == ["STARTING" if fits else "RUNNABLE"]
    assert bool(w.reasons(job)[0]) != fits


def test_each_gpu_belongs_to_one_node() -> None:
    """B8, B142."""
    w = world(vcpus=9, gpus=("a", "b", "c", "d", "e"))
    define(w, shape(3, 1, r0_0=container(gpus=2), r1_1=container(), r2_2=container(gpus=2)))
    job = submit(w)
    w.start(f"{job}#1")
    held = {n.job.id: n.attempt.gpus for n in w.launches}
    assert held == {f"{job}#1": (), f"{job}#0": ("a", "b"), f"{job}#2": ("c", "d")}
    assert w.state.free.gpus == ("e",)
    for node in (f"{job}#0", f"{job}#2", f"{job}#1"):
        assert w.state.free.gpus == ("e",)
        w.end(node)
    assert w.state.free == w.state.machine


def test_the_main_node_starts_first_and_the_others_once_it_runs() -> None:
    """B143: they learn where it is."""
    w, job = cluster(3, main=1)
    assert w.active() == [f"{job}#1"]
    assert w.status(job, *nodes_of(job)) == ["STARTING", "PENDING", "STARTING", "PENDING"]
    assert w.launches[0].attempt.main_address == ""
    w.tick(5)
    w.apply(AttemptStarted(w.task(f"{job}#1"), w.now, "127.0.0.9"))
    assert w.status(job, *nodes_of(job)) == ["RUNNING", "STARTING", "RUNNING", "STARTING"]
    assert w.jobs[job].started_at == w.now
    assert [n.job.id for n in w.launches] == [f"{job}#1", f"{job}#0", f"{job}#2"]
    assert [n.attempt.main_address for n in w.launches[1:]] == ["127.0.0.9"] * 2
    w.start(f"{job}#2")
    assert w.status(job, *nodes_of(job)) == ["RUNNING", "STARTING", "RUNNING", "RUNNING"]
    assert len(w.launches) == 3


# --- ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        AttemptExit(code=0),
        AttemptExit(code=3),
        LOST,
        AttemptExit(start_failure="CannotPullContainerError: x"),
    ],
)
def test_the_end_of_another_node_changes_nothing_for_the_job(end: AttemptExit) -> None:
    """B144."""
    w, job = running()
    w.end(f"{job}#1", end)
    assert w.status(job, f"{job}#0", f"{job}#2") == ["RUNNING"] * 3
    assert w.stops == []
    assert w.state.free.vcpus == 1  # its place is kept
    w.end(f"{job}#0")
    assert w.stops == [w.task(f"{job}#2")]
    w.end(f"{job}#2", 143)
    assert w.status(job) == ["SUCCEEDED"]
    ended = "SUCCEEDED" if end.code == 0 else "FAILED"
    assert w.status(*nodes_of(job)) == ["SUCCEEDED", ended, "SUCCEEDED"]


@pytest.mark.parametrize(("code", "status"), [(0, "SUCCEEDED"), (7, "FAILED")])
def test_the_end_of_the_main_node_stops_the_others_and_decides(code: int, status: str) -> None:
    """B145."""
    w, job = running()
    w.now += 1000
    w.end(f"{job}#0", code)
    assert sorted(w.stops) == sorted([w.task(f"{job}#1"), w.task(f"{job}#2")])
    assert w.status(job) == ["RUNNING"]
    over = w.now
    w.now += 1000
    w.end(f"{job}#1", 143)
    assert w.status(job) == ["RUNNING"]
    assert w.state.free.vcpus == 1
    w.end(f"{job}#2", 137)
    assert w.status(job, *nodes_of(job)) == [status] * 4
    assert (w.jobs[job].exit_code, w.jobs[job].stopped_at) == (code, over)
    assert w.reasons(job) == ["Essential container in task exited"]
    assert w.state.free == w.state.machine
    assert not w.state.jobs
    assert not w.state.by_task


def test_a_job_whose_main_node_cannot_start_fails_and_starts_no_other() -> None:
    """B145."""
    w, job = cluster()
    w.end(f"{job}#0", AttemptExit(start_failure="CannotPullContainerError: x"))
    assert len(w.launches) == 1
    assert w.status(job, *nodes_of(job)) == ["FAILED"] * 4
    assert w.reasons(job, f"{job}#0") == ["Task failed to start"] * 2
    assert w.jobs[job].reason.startswith("CannotPull")
    assert w.jobs[job].exit_code is None
    assert w.state.free == w.state.machine


def test_a_main_node_that_ends_before_its_start_was_reported() -> None:
    w, job = cluster()
    w.end(f"{job}#0", AttemptExit(code=0, started_at=5, stopped_at=9))
    assert len(w.launches) == 1
    assert w.status(job, *nodes_of(job)) == ["SUCCEEDED"] * 4
    assert (w.jobs[job].started_at, w.jobs[job].stopped_at) == (5, 9)


def test_a_retry_runs_all_nodes_again() -> None:
    """B146."""
    w, job = running(retryStrategy={"attempts": 2})
    w.end(f"{job}#1", 1)
    w.end(f"{job}#0", 1)
    assert w.status(job) == ["RUNNING"]
    w.end(f"{job}#2", 143)
    assert w.status(job, *nodes_of(job)) == ["STARTING", "STARTING", "PENDING", "PENDING"]
    w.start(f"{job}#0")
    again = w.launches[3:]
    assert [n.job.id for n in again] == nodes_of(job)
    assert [n.attempt.number for n in again] == [2, 2, 2]
    assert len({n.attempt.task_id for n in w.launches}) == 6
    for node in nodes_of(job):
        w.end(node)
    assert w.status(job, *nodes_of(job)) == ["SUCCEEDED"] * 4
    assert [len(w.jobs[one].attempts) for one in (job, *nodes_of(job))] == [2] * 4
    assert [a["container"]["exitCode"] for a in w.jobs[job].attempts] == [1, 0]


def test_attempts_are_numbered_by_the_job_though_a_node_missed_one() -> None:
    """B146."""
    w, job = cluster(retryStrategy={"attempts": 2})
    w.end(f"{job}#0", 1)
    w.start(f"{job}#0")
    assert [(n.job.node, n.attempt.number) for n in w.launches] == [(0, 1), (0, 2), (1, 2), (2, 2)]
    for node in nodes_of(job):
        w.end(node)
    assert [len(w.jobs[node].attempts) for node in nodes_of(job)] == [2, 1, 1]


def test_a_retried_job_goes_to_the_front_with_all_its_nodes() -> None:
    """B20, B146."""
    w = world(vcpus=3)
    define(w, shape(3))
    job = submit(w, retryStrategy={"attempts": 2})
    behind = w.submit()
    w.end(f"{job}#0", 1)
    assert w.status(job, behind) == ["STARTING", "RUNNABLE"]


def test_the_rules_of_a_retry_see_the_main_node() -> None:
    """B146."""
    rules = [{"onExitCode": "3", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]
    w, job = running(2, retryStrategy={"attempts": 5, "evaluateOnExit": rules})
    w.end(f"{job}#1", 9)
    w.end(f"{job}#0", 3)
    assert w.status(job) == ["STARTING"]
    w.start(f"{job}#0")
    w.end(f"{job}#1", 3)
    w.end(f"{job}#0", 9)
    assert w.status(job) == ["FAILED"]


def test_the_timeout_is_that_of_the_whole_job() -> None:
    """B147."""
    w, job = cluster(timeout={"attemptDurationSeconds": 60}, retryStrategy={"attempts": 3})
    w.tick(100)
    assert next_deadline(w.state) is None
    w.start(f"{job}#0")
    w.tick(30)
    w.start(f"{job}#1")
    assert next_deadline(w.state) == w.now + 30_000
    w.restart()
    w.tick(30)
    assert sorted(w.stops) == sorted(w.task(node) for node in nodes_of(job))
    for node in nodes_of(job):
        w.end(node, 143)
    assert w.reasons(job) == ["Job attempt duration exceeded timeout"]
    assert w.status(job, *nodes_of(job)) == ["FAILED"] * 4


# --- stopping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_a_job_that_has_no_place_yet_ends_at_once_with_its_nodes(how: str) -> None:
    """B148."""
    w = world(vcpus=3)
    define(w, shape(3))
    w.submit()
    job = submit(w)
    assert w.status(job) == ["RUNNABLE"]
    getattr(w, how)(job, "enough")
    assert w.reasons(job, *nodes_of(job)) == ["enough"] * 4
    assert len(w.state.jobs) == 1


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_a_job_that_waits_for_others_ends_after_them(how: str) -> None:
    """B13, B148."""
    w = world()
    define(w, shape(2))
    other = w.submit()
    job = submit(w, dependsOn=[{"jobId": other}])
    getattr(w, how)(job, "enough")
    assert w.status(job, *nodes_of(job, 2)) == ["PENDING"] * 3
    w.end(other)
    assert w.reasons(job, *nodes_of(job, 2)) == ["enough"] * 3
    assert not w.state.jobs


def test_cancelling_a_job_that_has_started_does_nothing() -> None:
    """B14, B148."""
    w, job = running()
    w.cancel(job)
    w.cancel(f"{job}#0")
    w.cancel(f"{job}#1")
    assert w.stops == []
    assert not any(one.is_ending for one in w.state.jobs.values())


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("target", ["", "#0", "#2"])
def test_terminating_a_job_or_any_of_its_nodes_stops_them_all(target: str, started: bool) -> None:
    """B148, B149."""
    w, job = running(retryStrategy={"attempts": 3}) if started else cluster()
    w.terminate(f"{job}{target}", "enough")
    w.terminate(job, "again")
    assert sorted(w.stops) == sorted(w.task(node) for node in w.busy())
    for node in w.busy():
        w.end(node, 0)
    assert w.reasons(job) == ["enough"]
    assert w.status(job, *nodes_of(job)) == ["FAILED"] * 4
    assert w.state.free == w.state.machine


def test_a_job_terminated_while_its_main_node_starts_starts_no_other() -> None:
    """B148."""
    w, job = cluster()
    w.terminate(job)
    w.start(f"{job}#0")
    assert len(w.launches) == 1
    w.end(f"{job}#0", 143)
    assert w.status(job, *nodes_of(job)) == ["FAILED"] * 4


def test_deleting_a_queue_ends_its_multi_node_jobs() -> None:
    """B17, B148."""
    w = world(vcpus=4)
    define(w, shape(3))
    going, waiting = submit(w), submit(w)
    w.start(f"{going}#0")
    w.drop_queue()
    assert w.status(waiting, *nodes_of(waiting)) == ["FAILED"] * 4
    assert w.status(going) == ["RUNNING"]
    assert len(w.stops) == 3
    for node in nodes_of(going):
        w.end(node, 143)
    assert set(w.reasons(going, waiting, *nodes_of(waiting))) == {"JobQueue deleted"}
    assert w.state.free == w.state.machine


def test_deleting_a_queue_while_only_the_main_node_has_started() -> None:
    """B148."""
    w, job = cluster()
    w.drop_queue()
    assert w.stops == [w.task(f"{job}#0")]
    w.start(f"{job}#0")
    w.end(f"{job}#0", 143)
    assert w.status(job, *nodes_of(job)) == ["FAILED"] * 4
    assert not w.state.jobs


# --- dependencies -----------------------------------------------------------------------------


def test_what_depends_on_a_multi_node_job_waits_for_its_end() -> None:
    """B150."""
    w, job = running(2, vcpus=9)
    after, after_node = w.submit(after=(job,)), w.submit(after=(f"{job}#1",))
    w.end(f"{job}#1", 0)
    w.restart()
    assert w.status(after, after_node) == ["PENDING"] * 2
    w.end(f"{job}#0", 0)
    assert w.status(after, after_node) == ["STARTING"] * 2
    assert w.status(w.submit(after=(f"{job}#1", job))) == ["STARTING"]


def test_a_failed_multi_node_job_fails_what_depends_on_it() -> None:
    """B150."""
    w, job = running(2, vcpus=9)
    after, after_node = w.submit(after=(job,)), w.submit(after=(f"{job}#0",))
    w.end(f"{job}#0", 4)
    w.end(f"{job}#1", 143)
    assert w.reasons(after, after_node) == ["Dependent Job failed"] * 2
    define(w, shape(2))
    late = submit(w, dependsOn=[{"jobId": job}])
    assert w.reasons(late, *nodes_of(late, 2)) == ["Dependent Job failed"] * 3
    assert not w.state.jobs


def test_an_array_that_depends_on_a_job_and_its_node_ends_once() -> None:
    """B150."""
    w, job = running(2, vcpus=9)
    array = w.array(2, {"jobId": f"{job}#0"}, {"jobId": job})
    w.end(f"{job}#0", 4)
    w.end(f"{job}#1", 143)
    assert w.reasons(array, f"{array}:1") == ["Dependent Job failed"] * 2
    assert set(w.ends.values()) == {1}


# --- restarts ---------------------------------------------------------------------------------


def test_a_server_killed_at_any_point_goes_on_with_all_nodes(tmp_path: Path) -> None:
    """B151."""
    w, job = cluster(journal=tmp_path / "journal.db", retryStrategy={"attempts": 2})

    def again() -> None:
        before = indexes(w.state)
        jobs = dict(w.state.jobs)
        w.restart()
        assert indexes(w.state) == before
        assert dict(w.state.jobs) == jobs

    for attempt in (1, 2):
        again()
        assert tasks_to_stop(w.state) == []
        w.start(f"{job}#0")
        again()
        w.start(f"{job}#1")
        w.end(f"{job}#1", 5)
        again()
        assert tasks_to_stop(w.state) == []
        w.end(f"{job}#0", 1)
        again()
        assert tasks_to_stop(w.state) == [w.task(f"{job}#2")]
        w.end(f"{job}#2", 143)
        assert w.status(job) == [["STARTING"], ["FAILED"]][attempt - 1]
    again()
    assert not w.state.jobs
    assert w.state.free == w.state.machine
    assert w.described(f"{job}#2")["nodeDetails"] == {"nodeIndex": 2, "isMainNode": False}


def test_a_restarted_server_stops_all_nodes_of_a_job_that_was_terminated() -> None:
    """B33, B151."""
    w, job = running()
    w.terminate(job)
    back = restore(stored(w.state), w.now)
    assert sorted(tasks_to_stop(back)) == sorted(w.task(node) for node in nodes_of(job))


def test_what_a_node_s_task_tells_twice_counts_once() -> None:
    w, job = running()
    task = w.task(f"{job}#1")
    w.apply(AttemptStarted(task, w.now + 9, "x"))
    assert w.jobs[f"{job}#1"].started_at == w.now
    w.end(f"{job}#1", 3)
    assert w.apply(AttemptEnded(task, AttemptExit(code=0), w.now)) == []
    w.end(f"{job}#0")
    w.end(f"{job}#2", 143)
    assert w.apply(AttemptEnded(task, AttemptExit(code=0), w.now)) == []
    assert w.state.free == w.state.machine


# --- the rest ---------------------------------------------------------------------------------


def test_consumables_of_job_and_nodes_add_up() -> None:
    """B152."""
    w = world(vcpus=9)
    w.call("CreateConsumableResource", consumableResourceName="seat", totalQuantity=7)
    properties = shape(3)
    properties["nodeRangeProperties"][0]["consumableResourceProperties"] = consuming(seat=2)
    define(w, properties, consumableResourceProperties=consuming(seat=1))
    first, second = submit(w), submit(w)
    assert w.state.in_use["seat"] == 7
    assert w.status(first, second) == ["STARTING", "RUNNABLE"]
    w.end(f"{first}#0")
    assert w.state.in_use["seat"] == 7
    assert w.status(first, second) == ["SUCCEEDED", "STARTING"]


def test_a_node_that_ecs_would_not_take_fails_the_job_before_any_starts() -> None:
    """B181."""
    w = world(vcpus=9)
    define(w, shape(3, 0, r0_0=container(), r1_2=container(command=["x" * 9000])))
    job = submit(w)
    assert w.launches == []
    text = "Container Overrides length must be at most 8192"
    assert w.reasons(job, *nodes_of(job)) == [text] * 4
    assert not w.state.jobs


def test_a_multi_node_job_is_shown_as_one_and_by_its_nodes(tmp_path: Path) -> None:
    """B153."""
    w, job = running(journal=tmp_path / "journal.db")
    assert w.listed(jobQueue="q") == [job]
    nodes = w.read("ListJobs", multiNodeJobId=job)["jobSummaryList"]
    assert [node["nodeProperties"] for node in nodes] == [
        {"nodeIndex": 2, "isMainNode": False, "numNodes": 3},
        {"nodeIndex": 1, "isMainNode": False, "numNodes": 3},
        {"nodeIndex": 0, "isMainNode": True, "numNodes": 3},
    ]
    w.end(f"{job}#1", 4)
    assert w.listed(multiNodeJobId=job, jobStatus="FAILED") == [f"{job}#1"]
    w.end(f"{job}#0")
    w.end(f"{job}#2", 143)
    w.restart()
    whole, main, failed = (w.described(one) for one in (job, f"{job}#0", f"{job}#1"))
    assert whole["nodeProperties"]["numNodes"] == 3
    assert "container" not in whole
    assert (whole["status"], whole["attempts"]) == ("SUCCEEDED", main["attempts"])
    assert main["nodeDetails"] == {"nodeIndex": 0, "isMainNode": True}
    assert main["container"]["logStreamName"] != failed["container"]["logStreamName"]
    assert main["container"]["networkInterfaces"] == [{"privateIpv4Address": "127.0.0.4"}]
    assert (failed["status"], failed["container"]["exitCode"]) == ("FAILED", 4)
    assert "nodeProperties" not in failed
    assert w.listed(multiNodeJobId=job, jobStatus="SUCCEEDED") == [f"{job}#2", f"{job}#0"]
