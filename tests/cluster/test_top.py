"""What `top` asks for, and what it makes of it."""

from typing import Any

import pytest

from batchml.aws.batch.cluster import ClusterApi
from batchml.aws.batch.jobs import LIVE, JobApi, LiveApi
from batchml.cli.render import narrow_columns
from batchml.cli.terminal import Screen
from batchml.cluster.commands import _json, _view
from batchml.cluster.service import (
    MAX_NODES,
    USAGE_EVERY,
    ClusterPoller,
    ComputePoller,
    poll_pause,
)
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, make_snapshot
from batchml.model.run import JobStatus, Run
from batchml.runtime.protocol.launch import RAY, LaunchPlan, WorkerGroup
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession


def run(job_id: str, status: str, **more: Any) -> Run:
    return Run(**{"job_id": job_id, "name": job_id, "queue": "gpu", "status": JobStatus(status),
                  "vcpus": 4, "memory_mib": 100, "gpus": 1, **more})  # fmt: skip


def test_a_queue_counts_its_runs_and_what_those_that_run_hold() -> None:
    children = {"RUNNING": 3, "RUNNABLE": 7, "SUCCEEDED": 5}
    runs = [run("a", "RUNNING"), run("b", "RUNNABLE"), run("c", "PENDING", children=children),
            run("d", "RUNNING", nodes=2)]  # fmt: skip
    (gpu, empty) = make_snapshot(["gpu", "cpu"], runs, {}, 0).queues
    counts = {state.value: count for state, count in gpu.counts.items() if count}
    assert counts == {"RUNNING": 5, "RUNNABLE": 8}
    assert (gpu.vcpus, gpu.memory_mib, gpu.gpus) == (24, 600, 6)
    assert (empty.vcpus, set(empty.counts.values())) == (0, {0})


def test_what_runs_stands_first_and_the_newest_before_the_older() -> None:
    runs = [run("a", "RUNNABLE", created_at=9), run("b", "RUNNING", created_at=1),
            run("c", "RUNNING", created_at=2)]  # fmt: skip
    assert [row.run.job_id for row in make_snapshot(["gpu"], runs, {}, 0).runs] == ["c", "b", "a"]


def test_many_calls_make_the_pause_longer() -> None:
    assert poll_pause(6, 3.0) == 3.0
    assert poll_pause(40, 3.0) == 20.0


class Account:
    """One queue with a run in RUNNING and one in RUNNABLE."""

    def __init__(self) -> None:
        self.status = {"1": "RUNNING", "2": "RUNNABLE"}
        self.nodes: dict[str, int] = {}

    def __call__(self, operation: str, params: dict[str, Any]) -> dict[str, Any]:
        if operation == "DescribeJobQueues":
            return {"jobQueues": [{"jobQueueName": "gpu", "priority": 1}]}
        if operation == "DescribeComputeEnvironments":
            return {"computeEnvironments": []}
        if operation == "GetJobQueueSnapshot":
            return {"frontOfQueue": {"jobs": [], "lastUpdatedAt": 1}}
        if operation == "ListJobs":
            return {
                "jobSummaryList": [
                    {"jobId": each, "jobName": f"n{each}", "status": status, "createdAt": 1}
                    for each, status in self.status.items()
                    if status == params["jobStatus"]
                ]
            }
        if operation == "DescribeJobs":
            return {"jobs": [self.detail(each) for each in params["jobs"]]}
        assert operation == "FilterLogEvents"
        mark = {"timestamp": 1, "message": "::batchml usage cpu=1.5 memory=64"}
        return {"events": [{"logStreamName": name, **mark} for name in params["logStreamNames"]]}

    def detail(self, job_id: str) -> dict[str, Any]:
        whole, _, node = job_id.partition("#")
        if node:
            return {**self.detail(whole), "jobId": job_id, "nodeDetails": {"nodeIndex": int(node)},
                    "container": {"logStreamName": f"s{job_id}"}}  # fmt: skip
        if whole in self.nodes:
            count = {"numNodes": self.nodes[whole], "nodeRangeProperties": []}
            return {"jobId": whole, "jobName": "n", "jobQueue": "gpu", "startedAt": 2,
                    "status": self.status[whole], "nodeProperties": count}  # fmt: skip
        needs = [{"type": "VCPU", "value": "2"}, {"type": "MEMORY", "value": "512"}]
        return {
            "jobId": job_id, "jobName": f"n{job_id}", "jobQueue": "gpu", "createdAt": 1,
            "status": self.status[job_id], "startedAt": 2,
            "container": {"logStreamName": f"s{job_id}", "resourceRequirements": needs},
        }  # fmt: skip


def poller_of(session: ScriptedSession, clock: FakeClock) -> ClusterPoller:
    computes = ComputePoller(ClusterApi(session, "dev"), clock.now)
    return ClusterPoller(JobApi(session), LiveApi(session), clock.now, computes)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    return Account()


def test_a_round_is_one_call_a_state_and_what_is_known_is_not_asked_again(account: Account) -> None:
    session, clock = ScriptedSession(account), FakeClock()
    poller = poller_of(session, clock)
    first = poller.poll()
    assert first.calls == len(session.calls) == 2 + 5 + 1 + 1 + 1  # the last two: order, usage
    assert first.runs[0].usage == {"cpu": 1.5, "memory": 64.0}
    assert first.queues[0].vcpus == 2
    clock.time += 1
    assert poller.poll().calls == 5
    clock.time += USAGE_EVERY
    assert poller.poll().calls == 2 + 5 + 1 + 1  # queues, order and usage again
    account.status = {"1": "RUNNING", "2": "RUNNING"}
    clock.time += 1
    again = poller.poll()
    assert again.calls == 6  # details of the second
    assert again.queues[0].vcpus == 4
    account.status = {}
    assert poller.poll().runs == ()


def test_who_has_no_more_time_reads_no_further_streams(account: Account) -> None:
    live, streams = LiveApi(ScriptedSession(account)), [f"s{number}" for number in range(250)]
    assert len(list(live.filter_lines("group", streams, 0, "x", lambda: False))) == 100
    assert live.calls == 1


def test_nodes_of_a_run_have_rows_of_their_own_and_are_asked_about_once(account: Account) -> None:
    account.status, account.nodes = {"1": "RUNNING", "7": "RUNNING"}, {"7": 20}
    session, clock = ScriptedSession(account), FakeClock()
    poller = poller_of(session, clock)
    first = poller.poll()
    assert first.calls == len(session.calls) == 2 + 5 + 1 + 1 + 1  # the last two: nodes, usage
    (row,) = (row for row in first.runs if row.run.nodes)
    assert len(row.nodes) == MAX_NODES
    assert {node.usage["cpu"] for node in row.nodes} == {1.5}
    clock.time += USAGE_EVERY
    assert poller.poll().calls == 2 + 5 + 1

    shown = _view(first, "dev", Screen(), 20)
    assert shown.count("  node ") == 8
    assert "  and 12 more nodes" in shown
    assert "node" not in _view(first, "dev", Screen(), 5).partition("NAME")[2]
    told = {each["jobId"]: len(each.get("nodes", ())) for each in _json(first, "dev")["runs"]}
    assert told == {"1": 0, "7": MAX_NODES}
    account.status = {"1": "RUNNING"}
    assert len(poller.poll().runs) == 1


@pytest.mark.parametrize(
    ("idle", "says"),
    [((840.0, 900.0), "RUNNING, idle 14 min"), ((840.0, 0.0), "RUNNING "), ((), "RUNNING ")],
)
def test_a_run_is_shown_as_idle_when_all_its_nodes_are(idle: tuple[float, ...], says: str) -> None:
    nodes = [run(f"7#{i}", "RUNNING", node_index=i) for i in range(len(idle))]
    usage = {f"7#{i}": {"idle": each} for i, each in enumerate(idle) if each}
    found = make_snapshot(["gpu"], [run("7", "RUNNING", nodes=2)], usage, 1, {"7": nodes})
    (line,) = (each for each in _view(found, "dev", Screen(), 9).splitlines() if each[:1] == "7")
    assert says in line and ("idle" in line) == ("idle" in says)


def test_a_narrow_window_loses_columns_and_empty_ones_are_not_shown() -> None:
    rows = [["ID", "NAME", "QUEUE", "STATUS", "GPU"], ["6b0e", "train", "default", "RUNNING", ""]]
    assert narrow_columns(rows, 0, ())[0] == ["ID", "NAME", "QUEUE", "STATUS"]
    assert narrow_columns(rows, 15, ("QUEUE", "ID"))[0] == ["NAME", "STATUS"]
    assert narrow_columns(rows, 5, ("QUEUE",))[0] == ["ID", "NAME", "STATUS"]


def test_trouble_on_the_way_is_said_above_what_was_there_last() -> None:
    found = ClusterSnapshot(1_000, (QueueRow("gpu", dict.fromkeys(LIVE, 0)),))
    plain = _view(found, "dev", Screen(60), 5).splitlines()
    lines = _view(found, "dev", Screen(60), 5, "no\ncontact\x1b[2J").splitlines()
    assert lines == [plain[0], "no contact\N{REPLACEMENT CHARACTER}[2J", *plain[1:]]


def test_workers_of_a_gang_stand_behind_their_head() -> None:
    plan = LaunchPlan(RAY, groups=(WorkerGroup("cpu", 2, 2, "vit-cpu-k", "q"),))
    head = run("head", "RUNNING", key="K", created_at=1,
               environment={"BATCHML_LAUNCH": plan.to_json()})  # fmt: skip
    waiting = run("cpu", "RUNNABLE", job_name="vit-cpu-k")
    going = run("gpu", "RUNNING", tags={"batchml:gang": "K"}, created_at=9)
    other = run("other", "RUNNING", created_at=5)
    found = make_snapshot(["gpu"], [waiting, going, other, head], {}, 0)
    assert [(row.run.job_id, row.head) for row in found.runs] == [
        ("other", ""), ("head", ""), ("gpu", "head"), ("cpu", "head")
    ]  # fmt: skip
    assert "  cpu" in _view(found, "local", Screen(), 20)
    assert [each.get("head") for each in _json(found, "local")["runs"]] == [
        None, None, "head", "head"
    ]  # fmt: skip
