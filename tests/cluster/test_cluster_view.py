"""Hosts and compute environments, as people who look at a cluster see them."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.batch.jobs import LIVE
from batchml.cli.terminal import Screen
from batchml.cluster.commands import TopView, _json, _live, _view
from batchml.cluster.rows import (
    ClusterState,
    compute_rows,
    host_rows,
    sum_hosts,
    vcpus_now,
    with_prices,
)
from batchml.cluster.snapshot import (
    ClusterSnapshot,
    QueueRow,
    RunRow,
    make_snapshot,
    narrow_to_project,
)
from batchml.cluster.tables import (
    held_and_asked,
    host_or_reason,
    missing_line,
    names_text,
    queue_table,
    total_line,
)
from batchml.local.machine import ProcessorMeter
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostResources, HostState
from batchml.model.run import JobStatus, Run
from tests.support.fakes import FakeClock

GPU = ComputeState("batchml-dev-gpu", max_vcpus=256, desired_vcpus=96, is_spot=True, cluster="c1",
                   instance_types=("g5",))  # fmt: skip
CPU = ComputeState("batchml-dev-cpu", max_vcpus=64, cluster="c2", instance_types=("m7i",))
QUEUES = {
    "gpu": QueueState("gpu", environments=(GPU.name,), priority=10),
    "cpu": QueueState("cpu", environments=(CPU.name,), is_enabled=False),
}


def host(name: str, used: float = 0, gpus: int = 0, **more: Any) -> ClusterHost:
    resources = HostResources(48, 190_000, 4, used, int(used) * 1000, gpus)
    return ClusterHost(**{"id": f"ci-{name}", "cluster": "c1", "instance": name,
                          "type": "g5.12xlarge", "zone": "us-east-1a", "tasks": int(used > 0),
                          "since": 1_000, "resources": resources, **more})  # fmt: skip


def run(job_id: str, status: str = "RUNNING", on: str = "", **more: Any) -> Run:
    return Run(**{"job_id": job_id, "name": job_id, "queue": "gpu", "status": JobStatus(status),
                  "vcpus": 24, "memory_mib": 1000, "gpus": 2, "host": on, **more})  # fmt: skip


HOSTS = (host("i-1", 48, 4), host("i-2", 24, 2), host("i-3"))
CLUSTER = ClusterState(QUEUES, {each.name: each for each in (GPU, CPU)}, HOSTS)


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (host("i"), HostState.IDLE),
        (host("i", 8), HostState.MIXED),
        (host("i", 48), HostState.ALLOCATED),
        (host("i", 8, 4), HostState.ALLOCATED),  # no GPU is left
        (host("i", tasks=1), HostState.MIXED),  # a task that asks for nothing
        (host("i", 8, status="DRAINING"), HostState.DRAINING),
        (host("i", status="REGISTERING"), HostState.STARTING),
        (host("i", 8, is_connected=False), HostState.DOWN),
        (host("i", status="REGISTRATION_FAILED"), HostState.DOWN),
    ],
)
def test_a_host_s_state_is_one_that_users_of_slurm_know(
    given: ClusterHost, state: HostState
) -> None:
    assert given.state is state


def test_a_host_s_row_has_what_its_runs_use_and_the_free_ones_stand_last() -> None:
    runs = [run("a", on="ci-i-1"), run("b", on="ci-i-1"), run("c", on="i-2"), run("d", on="gone")]
    usage = {"a": {"cpu": 10.0, "gpu": 100.0}, "b": {"cpu": 14.0, "gpu": 50.0}}
    rows = host_rows(CLUSTER, runs, usage)
    assert [(row.host.name, [each.name for each in row.runs]) for row in rows] == [
        ("i-1", ["a", "b"]), ("i-2", ["c"]), ("i-3", [])
    ]  # fmt: skip
    assert rows[0].usage == {"cpu": 24.0, "gpu": 3.0}  # 2 GPUs in full, 2 by half
    assert rows[0].spot and rows[0].computes == (GPU.name,)
    whole = sum_hosts(rows)
    assert (whole.resources.used_vcpus, whole.resources.vcpus, whole.resources.used_gpus) == (
        72,
        144,
        6,
    )
    assert (whole.cpu, whole.gpu, whole.price) == (24 / 144, 3 / 12, None)


def test_the_price_of_all_is_told_only_where_that_of_each_is_known() -> None:
    rows = host_rows(CLUSTER, [], {})
    priced = with_prices(rows, {"spot:g5.12xlarge": Decimal("2.50")})
    assert sum_hosts(priced).price == Decimal("7.50")
    assert sum_hosts((*priced, rows[0])).price is None
    assert sum_hosts(()).price is None


def test_environments_that_share_a_machine_share_its_room_and_it_counts_once() -> None:
    one = ComputeState("one", max_vcpus=8, cluster="local")
    two = ComputeState("two", max_vcpus=4, cluster="local")
    here = ClusterState({}, {"one": one, "two": two}, (host("this-machine", 2, cluster="local"),))
    assert [row.resources.vcpus for row in compute_rows(here)] == [48, 48]
    (row,) = host_rows(here, [], {})
    assert row.computes == ("one", "two")
    assert sum_hosts([row]).resources.vcpus == 48


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (None, "in use: CPU 17%, GPU 25%"),
        (0.2, "in use: CPU 17%, GPU 25%"),
        (0.95, "in use: CPU 17% by runs, 95% in all, GPU 25%"),
    ],
)
def test_the_use_by_other_programs_of_this_machine_is_shown_beside_ours(
    machine: float | None, says: str
) -> None:
    usage = {"a": {"cpu": 24.0, "gpu": 150.0}}
    rows = host_rows(CLUSTER, [run("a", on="ci-i-1")], usage)
    shown = ClusterSnapshot(0, hosts=rows, is_local=True, machine_cpu=machine)
    assert says in total_line(shown)
    idle = ClusterSnapshot(0, hosts=host_rows(CLUSTER, [], {}), is_local=True, machine_cpu=machine)
    assert ("in use: CPU 95% in all" in total_line(idle)) == (machine == 0.95)


def test_the_processors_of_a_machine_are_measured_between_two_readings() -> None:
    first = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 10 0 10 100 0 0 0 0 5 0\ncpu1 0 0 0 100 20 0 0 0 0 0\n"
    later = first.replace("cpu0 10 0 10 100", "cpu0 80 0 20 120").replace("100 20 0", "150 70 0")
    texts = iter([first, first, later, "", ""])
    meter = ProcessorMeter(lambda: next(texts), [0, 1])
    assert meter.measure() is None  # no time has passed
    assert meter.measure() == 80 / 200
    assert ProcessorMeter(lambda: "", [0]).measure() is None  # not Linux


def test_now_is_at_most_the_maximum_and_names_are_never_cut_at_a_comma() -> None:
    one = ComputeState("one", max_vcpus=1, cluster="local")
    resources = HostResources(vcpus=2)
    assert vcpus_now(one, resources, is_local=True) == 1
    assert vcpus_now(GPU, resources) == 96  # AWS Batch's own word
    assert names_text(("one", "this-machine")) == "one, this-machine"
    assert (
        names_text(("one", "this-machine", "rehearsal-of-spot")) == "one, this-machine and 1 more"
    )
    assert names_text(("one", "this-machine", "x", "y")) == "one, this-machine, x, y"
    assert names_text(("x" * 40, "y")) == f"{'x' * 21} and 1 more"
    assert names_text(()) == ""


def snapshot(*runs: Run, cluster: ClusterState = CLUSTER, **more: Any) -> ClusterSnapshot:
    usage = {"a": {"cpu": 10.0, "gpu": 90.0}}
    return make_snapshot(["gpu", "cpu"], runs, usage, 3_601_000, cluster=cluster, **more)


BUSY = snapshot(
    run("a", on="ci-i-1"), run("b", on="ci-i-2"),
    run("first-one", "RUNNABLE", created_at=1), run("d", "RUNNABLE", created_at=2),
)  # fmt: skip


def test_top_says_where_runs_are_and_why_others_wait() -> None:
    rows = [(row.run.name, host_or_reason(row)) for row in BUSY.runs]
    assert rows == [("a", "i-1"), ("b", "i-2"), ("first-one", "(#1 next to start)"), ("d", "(#2)")]
    (gpu, _) = BUSY.queues
    assert (gpu.running, gpu.waiting, gpu.head, gpu.reason) == (2, 2, "first-one", "next to start")
    assert held_and_asked(gpu.vcpus, gpu.asked_vcpus, gpu.is_exact) == "48+48"
    shown = _view(BUSY, "dev", Screen(), 20)
    assert "3 hosts: 1 allocated, 1 mixed, 1 idle   vCPUs 72/144   GPUs 6/12" in shown
    assert "in use: CPU 7%, GPU 15%" in shown
    assert "DISABLED" in shown


def test_what_is_asked_for_is_at_least_so_much_until_all_are_known() -> None:
    found = snapshot(run("a", "RUNNABLE"), run("b", "RUNNABLE", vcpus=0, memory_mib=0, gpus=0))
    (gpu, _) = found.queues
    assert held_and_asked(gpu.vcpus, gpu.asked_vcpus, gpu.is_exact) == "0+>24"
    assert held_and_asked(0, 0, True) == ""


@pytest.mark.parametrize("shown", [TopView(), TopView(hosts=True)])
@pytest.mark.parametrize("width", [40, 80, 132])
def test_a_screen_is_no_wider_than_the_window(shown: TopView, width: int) -> None:
    named = replace(BUSY.runs[0].run, name="a-very-long-name-of-a-run-that-nobody-would-type")
    rows = (replace(BUSY.runs[0], run=named), *BUSY.runs[1:])
    lines = _view(replace(BUSY, runs=rows), "dev", Screen(width), 9, view=shown).splitlines()
    tables = [line for line in lines[2:] if line]
    assert max(map(len, tables)) <= width
    if width >= 80:
        assert ("i-1" if shown.hosts else "(#1 next to") in "\n".join(tables)


def test_hosts_have_a_screen_of_their_own() -> None:
    coming = ClusterHost("i-9", compute=GPU.name, instance="i-9", type="g5.12xlarge",
                         status="REGISTERING", since=3_000_000)  # fmt: skip
    grown = replace(CLUSTER, hosts=(*HOSTS, coming), computes={GPU.name: replace(
        GPU, desired_vcpus=192)})  # fmt: skip
    found = snapshot(run("a", on="ci-i-1"), cluster=grown)
    lines = _view(found, "dev", Screen(), 9, view=TopView(hosts=True)).splitlines()
    (row,) = [line.split("  ") for line in lines if line.startswith(GPU.name)]
    assert [each for each in row if each] == [
        GPU.name, "0/192/256", "ENABLED", "spot", "1 allocated, 1 mixed, 1 idle, 1 starting",
        "72/144", "6/12", "48 vCPUs are starting",
    ]  # fmt: skip
    table = "\n".join(lines)
    assert "i-9" in table and "starting" in table and "g5.12xlarge spot" in table
    assert "1:00:00" in table  # since when it has been there
    assert _view(found, "dev", Screen(), 1, view=TopView(hosts=True)).endswith("and 3 more")


def test_where_hosts_may_not_be_seen_the_rest_is_and_it_is_said() -> None:
    denied = replace(CLUSTER, hosts=None, missing=("ecs:ListContainerInstances is not allowed",))
    found = snapshot(run("a", on="ci-i-1"), cluster=denied)
    for shown in (TopView(), TopView(hosts=True)):
        text = _view(found, "dev", Screen(), 9, view=shown)
        assert text.endswith("Not shown: ecs:ListContainerInstances is not allowed.")
        assert "hosts:" not in text
    assert host_or_reason(found.runs[0]) == "ci-i-1"  # as the run itself tells it
    rude = replace(found, missing=("no\nanswer\x1b[2J",))
    assert missing_line(rude) == "Not shown: no answer\N{REPLACEMENT CHARACTER}[2J."
    told = _json(found, "dev")
    assert (told["hosts"], told["total"]) == (None, None)
    empty = _view(snapshot(cluster=replace(CLUSTER, hosts=())), "dev", Screen(), 9,
                  view=TopView(hosts=True))  # fmt: skip
    assert "No hosts: AWS Batch starts hosts for waiting runs" in empty


def test_programs_are_told_the_same() -> None:
    told = _json(BUSY, "dev")
    assert told["queues"][0]["asked"] == {"vcpus": 48, "memory": 2000, "gpus": 4, "whole": True}
    assert told["queues"][0]["head"] == {"jobId": "first-one", "reason": "next to start"}
    assert [(each["position"], each["hosts"]) for each in told["runs"]] == [
        (None, ["i-1"]), (None, ["i-2"]), (1, []), (2, [])
    ]  # fmt: skip
    assert told["total"]["hosts"] == {"allocated": 1, "mixed": 1, "idle": 1}
    assert [each["runs"] for each in told["hosts"]] == [["a"], ["b"], []]
    assert {each["computeEnvironmentName"] for each in told["computeEnvironments"]} == {
        GPU.name, CPU.name
    }  # fmt: skip


def test_an_array_whose_turn_it_is_stands_among_those_that_wait() -> None:
    array = run("sweep", "PENDING", children={"RUNNABLE": 5}, created_at=1)
    found = snapshot(run("late", "RUNNABLE", created_at=9), run("dep", "PENDING"), array)
    assert [(row.run.name, row.position) for row in found.runs] == [
        ("sweep", 1), ("late", 6), ("dep", None)
    ]  # fmt: skip
    assert found.queues[0].asked_vcpus == 24 * 7


def test_queues_are_listed_by_priority() -> None:
    rows = queue_table(BUSY.queues, lambda name: name.removeprefix("batchml-dev-"))
    assert rows[1:] == [
        ["gpu", "10", "ENABLED", "2", "2", "48+48", "4+4", "gpu", "first come", "next to start"],
        ["cpu", "0", "DISABLED", "0", "0", "", "", "cpu", "first come", ""],
    ]
    bare = QueueRow("gpu", {}, state=QUEUES["gpu"])  # runs may not be listed
    assert queue_table([bare], str)[1][3:5] == ["", ""]


# --- keys -------------------------------------------------------------------------------------


def test_keys_turn_to_hosts_and_back_and_go_through_the_orders() -> None:
    shown = TopView()
    orders = [shown.sort]
    for _ in range(4):
        shown = shown.after("s")
        orders.append(shown.sort)
    assert orders == ["state", "age", "cpu", "gpu", "state"]
    assert shown.after("h").hosts and not shown.after("h").after("h").hosts
    assert shown.after("h").after("s").sort == "state"  # hosts have one order
    assert shown.after("x") == shown


@pytest.mark.parametrize(
    ("sort", "order"), [("age", ["old", "a"]), ("cpu", ["a", "old"]), ("gpu", ["a", "old"])]
)
def test_runs_are_sorted_as_was_asked(sort: str, order: list[str]) -> None:
    found = snapshot(run("old", created_at=1), run("a", created_at=5))
    text = _view(found, "dev", Screen(), 9, view=TopView(sort=sort))
    assert sorted(order, key=lambda name: text.index(f"\n{name} ")) == order


def test_a_key_shows_at_once_what_is_known_and_only_hosts_are_priced() -> None:
    clock, asked = FakeClock(), list[str]()
    keys: Iterator[str] = iter(["s", "x", "", "h", "h", "h", "", "q"])

    def look() -> ClusterSnapshot:
        asked.append("look")
        return replace(BUSY, calls=2)

    def priced(found: ClusterSnapshot) -> ClusterSnapshot:
        asked.append("price")
        return found

    def rest(seconds: float) -> str:
        key = next(keys)
        clock.time += seconds if not key else 0.1
        return key

    _live(look, priced, TopView(), "dev", 3.0, rest, clock.now)
    assert asked == ["look", "look", "price", "price", "look", "price"]
    assert clock.time == 1_000_000.0 + 3 + 3 + 0.1


def test_the_states_of_a_queue_add_up() -> None:
    row = QueueRow("q", {state: 1 for state in LIVE})
    assert (row.running, row.waiting) == (2, 3)
    assert host_or_reason(RunRow(run("a"), hosts=("i-1", "i-2", "i-3"))) == "i-1 and 2 more"


def test_two_queues_never_have_one_name() -> None:
    queues = [QueueRow(name, {}, state=QueueState(name)) for name in ("gpu", "batchml-dev-gpu")]
    rows = queue_table(queues, lambda name: name.removeprefix("batchml-dev-"))
    assert sorted(row[0] for row in rows[1:]) == ["batchml-dev-gpu", "gpu"]


def test_top_shows_the_runs_of_a_project_with_their_positions_among_all() -> None:
    tags = [{"batchml:project": project} for project in ("theirs", "ours")]
    waiting = [run(f"w{at}", "RUNNABLE", created_at=at, tags=tags[at - 1]) for at in (1, 2)]
    undescribed = [run(f"u{at}", "RUNNABLE", created_at=at) for at in (3, 4)]
    shown = make_snapshot(["gpu"], [*waiting, *undescribed], {}, 5)
    narrowed = narrow_to_project(shown, "ours", {"u4": "ours", "u3": "theirs"})
    assert [(row.run.job_id, row.position) for row in narrowed.runs] == [("w2", 2), ("u4", 4)]
    assert narrowed.others == 2 and narrowed.queues[0].counts[JobStatus.RUNNABLE] == 4
