"""Use by node on the client's side: from marks to rows, curves, and the rank that is slow."""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from batchml.aws.batch.jobs import LogMark
from batchml.context import Context
from batchml.model.outcome import restarts_in_place
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.commands.usage import cells_of, node_lines, nodes_json
from batchml.runs.groups.members import GroupWorkers
from batchml.runs.metrics.plot import html, png, time_charts, write_plot
from batchml.runs.metrics.series import Metrics, Sample, Series
from batchml.runs.metrics.usage import (
    MAX_MARK_AGE,
    MAX_NODES,
    NodeRun,
    ResourceUse,
    SlowRank,
    UsageSample,
    collect_usage,
    describe_idle_nodes,
    describe_slow_ranks,
    describe_use,
    find_nodes,
    find_slow_ranks,
    idle_seconds,
    read_idle_seconds,
    read_run_metrics,
    read_usage,
    unused_part,
    usage_charts,
    use_json,
    use_of,
)
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import (
    LogOpened,
    MetricsReported,
    OutputLine,
    RunEvent,
    StatusChanged,
)
from batchml.runtime.protocol.launch import TORCHRUN, LaunchPlan
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

NOW = 1_800_000_000_000


def node(index: int, status: str = "RUNNING", *streams: str, **more: Any) -> NodeRun:
    attempts = tuple(Attempt(log_stream=each) for each in streams or (f"s{index}",))
    run = Run(f"j#{index}", "n", "q", JobStatus(status), attempts=attempts, vcpus=2,
              memory_mib=2048, node_index=index, **more)  # fmt: skip
    return NodeRun(f"node {index}", run)


def use(index: int, ranks: Mapping[int, Mapping[str, float]]) -> UsageSample:
    return UsageSample(
        node(index), {"cpu": 1.0}, {rank: dict(told) for rank, told in ranks.items()}
    )


def test_each_mark_is_its_nodes_and_what_is_old_is_not_of_now() -> None:
    nodes = [node(0), node(1, "FAILED"), node(2, "RUNNING", "old2", "s2")]
    marks = [
        LogMark("old2", NOW - 90_000, "::batchml usage cpu=9"),
        LogMark("s1", NOW - 9 * MAX_MARK_AGE, "::batchml usage cpu=0.5 memory=10"),
        LogMark("s0", NOW - MAX_MARK_AGE - 1, "::batchml usage cpu=1"),
        LogMark("s0", NOW - MAX_MARK_AGE - 1, "::batchml ranks 0=cpu:1"),
        LogMark("s2", NOW - 1, "::batchml usage cpu=0.25"),
        LogMark("s2", NOW - 1, "::batchml ranks 2=cpu:0.25,step:7 3=cpu:0.1"),
        LogMark("s2", NOW - 1, "not a mark"),
        LogMark("elsewhere", NOW, "::batchml usage cpu=7"),
    ]
    found = collect_usage(nodes, marks, NOW)
    assert [each.usage for each in found] == [{}, {"cpu": 0.5, "memory": 10.0}, {"cpu": 0.25}]
    assert found[2].ranks == {2: {"cpu": 0.25, "step": 7.0}, 3: {"cpu": 0.1}}
    assert found[0].ranks == {}
    assert found[2].series["cpu"].values == [9.0, 0.25]
    assert usage_charts(found)["CPU, cores"].keys() == {"node 0", "node 1", "node 2"}


# --- which rank is slow ---


def waits(*shares: float) -> list[UsageSample]:
    """Two nodes, the ranks of which say that they wait such parts of the time."""
    half = len(shares) // 2
    told = [{"cpu": 1.0, "waited": share} for share in shares]
    return [use(0, dict(enumerate(told[:half]))), use(1, dict(enumerate(told[half:], half)))]


def test_the_rank_that_waits_least_is_the_slow_one() -> None:
    found = find_slow_ranks(waits(40, 37, 38, 38, 39, 2, 38, 36))
    assert found == SlowRank((5,), ("node 1",), 38.0, "waited")
    assert describe_slow_ranks(found) == (
        "rank 5 on node 1 is the slow one: the others wait 38 % of a step for it"
    )
    both = find_slow_ranks(waits(40, 37, 38, 38, 39, 2, 3, 36))
    assert both is not None
    assert describe_slow_ranks(both) == (
        "ranks 5-6 on node 1 are the slow ones: the others wait 38 % of a step for them"
    )
    node_1 = find_slow_ranks(waits(40, 37, 38, 38, 1, 2, 0, 3))
    assert node_1 is not None
    assert "ranks 4-7 on node 1 are the slow ones: the others wait 38 %" in describe_slow_ranks(
        node_1
    )
    assert find_slow_ranks(waits(0, 45)) == SlowRank((0,), ("node 0",), 45.0, "waited")


@pytest.mark.parametrize(
    "shares",
    [
        (3, 4, 2, 0),  # nobody waits
        (30, 31, 29, 28),  # all do, as if for the disk
        (40, 0, 0, 0),  # three are slow, or one is fast
        (40, 0, 40, 0),  # half of them, here and there
        (0,),
        (),
    ],
)
def test_where_nobody_is_clearly_slow_nobody_is_named(shares: Sequence[float]) -> None:
    assert find_slow_ranks(waits(*shares)) is None


def test_where_only_some_say_what_they_wait_nobody_is_named() -> None:
    some = {0: {"cpu": 1.0, "waited": 40.0}, 1: {"cpu": 0.1}}
    assert find_slow_ranks([use(0, some)]) is None


def test_without_their_word_the_rank_that_computes_most_may_be_the_slow_one() -> None:
    def by_cpu(*cores: float, **more: float) -> SlowRank | None:
        return find_slow_ranks([use(0, {i: {"cpu": each, **more} for i, each in enumerate(cores)})])

    found = by_cpu(0.5, 0.98, 0.45, 0.5)
    assert found is not None
    assert (found.ranks, found.evidence) == ((1,), "cpu")
    assert "may be the slow one, by CPU time alone: the others compute 49 % less" in (
        describe_slow_ranks(found)
    )
    assert by_cpu(0.9, 0.98, 0.95, 0.9) is None
    assert by_cpu(0.01, 0.1) is None  # asleep, all of them
    assert by_cpu(0.5, 0.98, gpu_memory=100) is None  # who waits on a GPU is busy as well
    assert by_cpu(0.98) is None


# --- what is asked, and what is shown ---


class Aws:
    """A run of two nodes, and a gang of a head with workers."""

    def __init__(self) -> None:
        self.denied = False

    def __call__(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation == "DescribeJobs":
            return {"jobs": [self.job(job_id) for job_id in params["jobs"]]}
        assert operation == "FilterLogEvents"
        if self.denied:
            return "AccessDeniedException"
        events = []
        for i, stream in enumerate(params["logStreamNames"]):
            for back, cpu in ((60, 1.0), (30, 0.5)):
                text = f"usage cpu={cpu} memory={100 + i} net_in=2500000 net_out=10"
                at = NOW - back * 1000
                events.append({"logStreamName": stream, "timestamp": at,
                               "message": f"::batchml {text}"})  # fmt: skip
            ranks = f"::batchml ranks {i}=cpu:0.5,waited:{40 if i else 1}"
            events.append({"logStreamName": stream, "timestamp": NOW - 30_000, "message": ranks})
        return {"events": events}

    def job(self, job_id: str) -> dict[str, Any]:
        needs = [{"type": "VCPU", "value": "2"}, {"type": "MEMORY", "value": "2048"}]
        container = {"logStreamName": f"s/{job_id}", "resourceRequirements": needs}
        return {"jobId": job_id, "jobName": "n", "jobQueue": "q", "status": "RUNNING",
                "startedAt": NOW - 100_000, "container": container,
                "nodeDetails": {"nodeIndex": int(job_id[-1])}}  # fmt: skip


class Here:
    """Of a Place what is asked of it."""

    def __init__(self, session: ScriptedSession) -> None:
        self.session = session
        self.clock = FakeClock(NOW / 1000)

    def connect(self) -> ScriptedSession:
        return self.session

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        from batchml.aws.batch.jobs import JobApi

        return JobApi(self.session).describe(job_ids)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    return Here(ScriptedSession(Aws()))


def whole(**more: Any) -> Run:
    return Run("j", "n", "q", JobStatus.RUNNING, started_at=NOW - 100_000, **more)


def test_two_calls_show_what_the_nodes_of_a_run_use(here: Here) -> None:
    place = cast(Context, here)
    nodes = find_nodes(place, FoundRun(whole(nodes=2), None), [])
    uses = read_usage(place, nodes)
    assert [operation for operation, _ in here.session.calls] == [
        "DescribeJobs", "FilterLogEvents",
    ]  # fmt: skip
    asked = here.session.calls[1][1]
    assert asked["logStreamNames"] == ["s/j#0", "s/j#1"]
    assert asked["filterPattern"] == '?"::batchml usage" ?"::batchml ranks" ?"::batchml idle"'
    assert list(node_lines(uses, 0)) == [
        "NODE    STATUS   CPU     MEMORY      IN        OUT     OVER TIME",
        "node 0  RUNNING  0.50/2  100M/2048M  2.5 MB/s  10 B/s  \u2588\u2581",
        "node 1  RUNNING  0.50/2  101M/2048M  2.5 MB/s  10 B/s  \u2588\u2581",
        "slow rank  rank 0 on node 0 is the slow one: the others wait 40 % of a step for it",
    ]
    assert max(map(len, list(node_lines(uses, 40))[:3])) <= 40
    told = nodes_json(uses)
    assert [each["name"] for each in told["nodes"]] == ["node 0", "node 1"]
    assert told["nodes"][1]["ranks"] == {"1": {"cpu": 0.5, "waited": 40.0}}
    assert told["slowRank"] == {
        "ranks": [0], "nodes": ["node 0"], "othersPercent": 40.0, "evidence": "waited",
    }  # fmt: skip


def test_of_a_gang_the_head_and_each_worker_is_a_node(here: Here) -> None:
    place = cast(Context, here)
    head = whole(attempts=(Attempt(log_stream="h"),))
    workers = Run("w", "n", "q", JobStatus.RUNNING, array_size=3)
    one = Run("o", "n", "q", JobStatus.RUNNING, attempts=(Attempt(log_stream="o"),))
    parts = [
        GroupWorkers("workers", 3, "w", FoundRun(workers, None)),
        GroupWorkers("one", 1, "o", FoundRun(one, None)),
        GroupWorkers("gone", 1),
    ]
    nodes = find_nodes(place, FoundRun(head, None), parts)
    assert [each.name for each in nodes] == ["head", "one", "workers 0", "workers 1", "workers 2"]
    assert here.session.asked("DescribeJobs") == [{"jobs": ["w:0", "w:1", "w:2"]}]
    many = Run("w", "n", "q", JobStatus.RUNNING, array_size=10_000)
    nodes = find_nodes(
        place, FoundRun(head, None), [GroupWorkers("workers", 1, "w", FoundRun(many, None))]
    )
    assert len(nodes) == MAX_NODES + 1


def test_one_node_of_a_run_is_shown_by_itself(here: Here) -> None:
    one = node(3).run
    assert find_nodes(cast(Context, here), FoundRun(one, None), []) == [NodeRun("node 3", one)]
    assert here.session.calls == []


def test_a_run_that_has_no_nodes_or_has_not_begun_costs_no_call(here: Here) -> None:
    place = cast(Context, here)
    waiting = Run("j", "n", "q", JobStatus.RUNNABLE, nodes=4)
    plain = whole(attempts=(Attempt(log_stream="s"),))
    for run in (waiting, plain, None):
        nodes = find_nodes(place, FoundRun(run, None), [])
        assert nodes == []
        assert read_usage(place, nodes) == []
    assert here.session.calls == []
    assert nodes_json([]) == {}


def test_who_may_not_read_logs_sees_how_the_nodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    aws = Aws()
    aws.denied = True
    place = cast(Context, Here(ScriptedSession(aws)))
    uses = read_usage(place, find_nodes(place, FoundRun(whole(nodes=2), None), []))
    lines = list(node_lines(uses, 0))
    assert lines[1] == "node 0  RUNNING  2    2048M"
    assert nodes_json(uses)["nodes"][0]["usage"] is None


def test_of_a_run_that_is_over_its_end_is_read_and_for_a_plot_all_of_it(here: Here) -> None:
    place = cast(Context, here)
    first = Attempt(NOW - 9_000_000, NOW - 8_000_000, log_stream="a")
    last = Attempt(NOW - 7_000_000, NOW - 1_000_000, log_stream="b")
    over = node(0, "SUCCEEDED")
    ended = NodeRun("node 0", Run("j#0", "n", "q", JobStatus.SUCCEEDED, attempts=(first, last)))
    read_usage(place, [ended])
    read_usage(place, [ended, over], whole=True)
    short, long = here.session.asked("FilterLogEvents")
    assert (short["logStreamNames"], short["startTime"]) == (["b"], NOW - 1_600_000)
    assert (long["logStreamNames"], long["startTime"]) == (["a", "b", "s0"], 0)


def test_cells_say_what_was_used_of_what_was_given() -> None:
    run = node(0).run
    quota = {"cpu": 0.46, "cores": 0.5, "net_in": 1.25e9, "net_out": 999.0}
    assert cells_of(run, quota) == ["0.46/0.5", "2048M", "", "", "1.25 GB/s", "999 B/s"]
    assert cells_of(run, {"cpu": 1.5, "cores": 8.0})[0] == "1.5/2"
    assert cells_of(run, {"net_in": 12_345.0})[4] == "12.3 kB/s"


# --- use beside request ---


def sampled(*marks: str, status: str = "RUNNING", **more: Any) -> UsageSample:
    owner = node(0, status, **more)
    lines = [LogMark("s0", NOW - 10_000 * i, f"::batchml usage {m}") for i, m in enumerate(marks)]
    return collect_usage([owner], reversed(lines), NOW)[0]


def used(*marks: str, **more: Any) -> ResourceUse | None:
    return use_of(sampled(*marks, **more))


def test_a_running_container_has_the_mean_of_the_last_minutes() -> None:
    found = used("cpu=1.5 memory=900", "cpu=0.5 memory=1000")
    assert found is not None
    assert describe_use(found) == "1.0 of 2 vCPU, 1000 of 2048 MiB"
    assert use_json(found) == {"vcpus": 1.0, "memory": 1000.0, "gpus": None}
    assert found.unused == 0.5


def test_a_container_that_has_ended_has_the_mean_that_its_last_mark_says() -> None:
    last = "cpu=0 memory=1 seconds=60 mean_cpu=0.5 mean_gpu=25 most_memory=1500"
    found = used(last, "cpu=2 memory=1000 gpu=100", status="SUCCEEDED", gpus=2)
    assert found is not None and found.seconds == 60
    assert describe_use(found) == "0.50 of 2 vCPU, 0.50 of 2 GPU, 1500 of 2048 MiB"
    assert found.unused == 0.75, "its GPUs count, and not its vCPUs"


def test_the_row_of_a_node_that_has_ended_has_its_most_memory() -> None:
    last = "cpu=0 memory=23 seconds=60 mean_cpu=0.5 most_memory=599"
    assert "  599M/2048M" in list(node_lines([sampled(last, status="SUCCEEDED")], 0))[1]


def test_before_a_container_has_reported_its_use_is_unknown() -> None:
    assert used() is None
    assert use_json(None) is None


def test_containers_count_for_the_unused_part_by_their_time() -> None:
    one = ResourceUse(2, 2.0, 100, 0, 0, None, seconds=300)
    other = ResourceUse(2, 0.0, 100, 0, 0, None, seconds=100)
    assert unused_part([one, other]) == 0.25
    assert unused_part([structs.replace(one, cpu=2.4)]) == 0, "idle processors of the host"
    assert unused_part([]) is unused_part([structs.replace(one, gpus=1)]) is None
    busy = structs.replace(one, gpus=1, gpu=1.0)
    assert unused_part([busy]) == 0
    assert unused_part([busy, other]) is None, "their hosts have different prices"


def test_gpus_in_use_stand_beside_those_requested() -> None:
    run = structs.replace(node(0).run, gpus=8)
    assert cells_of(run, {"gpu": 97.0})[2] == "7.8/8"
    assert cells_of(structs.replace(run, gpus=1), {"gpu": 71.0})[2] == "0.71/1"
    assert cells_of(run, {})[2] == "8"


# --- drawn ---


def curve(*values: float, start: float = 100.0) -> Series:
    return Series("cpu", tuple(Sample(v, start + 30 * i, None) for i, v in enumerate(values)))


def test_each_node_has_a_curve_in_one_picture_over_the_same_time(tmp_path: Path) -> None:
    many = {f"node {i}": curve(0.5, 1.0, start=100.0 + i) for i in range(20)}
    drawn = time_charts({"CPU, cores": many, "memory, MiB": {"<node>": curve(7.0)}})
    page = html({"loss": curve(3, 2, 1)}, "run", drawn)
    figures = page.split("<figure>")[1:]
    assert len(figures) == 3
    assert "and 4 more" in figures[1]
    trees = [ET.fromstring(each[each.index("<svg") : each.index("</svg>") + 6]) for each in figures]
    lines = [[line.get("points") for line in tree.iter("polyline")] for tree in trees]
    assert [len(each) for each in lines] == [1, 16, 1]
    assert "&lt;node&gt;" in page
    assert len(set(map(str, lines[1]))) == 16  # each begins when its node did
    write_plot(tmp_path / "a.html", {}, "no metrics", drawn)
    assert "CPU, cores" in (tmp_path / "a.html").read_text()


def test_curves_of_nodes_are_drawn_as_png_too() -> None:
    pytest.importorskip("matplotlib")
    drawn = time_charts({"CPU, cores": {"node 0": curve(1, 2), "node 1": curve(2, 1)}})
    assert png({}, "run", drawn).startswith(b"\x89PNG")


# --- metrics of ranks that train together ---


def gang(**more: Any) -> Run:
    return whole(nodes=2, environment={"BATCHML_LAUNCH": LaunchPlan(TORCHRUN).to_json()}, **more)


def test_what_rank_0_reports_is_the_runs() -> None:
    points = ({"step": 1, "loss": 0.5},)
    metrics = Metrics({"acc": r"acc=(\S+)"})
    list(metrics.watch([
        StatusChanged(gang()), LogOpened("s0", 1, "0"), LogOpened("s1", 1, "1"),
        MetricsReported("s0", points, "0"), OutputLine(1, "acc=0.5", "1"),
    ]))  # fmt: skip
    assert set(metrics.series) == {"loss", "acc:1"}
    plain = Metrics()
    list(plain.watch([StatusChanged(whole(nodes=2)), MetricsReported("s0", points, "0")]))
    assert set(plain.series) == {"loss:0"}
    assert not restarts_in_place(whole(environment={"BATCHML_LAUNCH": "{"}))


def test_the_metrics_of_a_gang_are_read_from_its_main_node() -> None:
    opened: list[str] = []

    class Logs:
        clock = FakeClock()
        check = None

        def open_log(self, run: Run, stream: str) -> "Logs":
            opened.append(stream)
            return self

        def read(self) -> list[Any]:
            return []

    nodes = [node(1), node(0)]
    read_run_metrics(cast(Context, Logs()), gang(), nodes, None)
    assert opened == ["s0"]
    read_run_metrics(cast(Context, Logs()), whole(nodes=2), nodes, None)
    assert opened == ["s0"]


def test_patterns_of_ranks_that_train_together_have_plain_names() -> None:
    run = Run("j", "n", "q", JobStatus.RUNNING, nodes=2,
              environment={"BATCHML_LAUNCH": LaunchPlan(TORCHRUN).to_json()})  # fmt: skip
    for environment, name in ((run.environment, "loss"), ({}, "loss:0")):
        metrics = Metrics({"loss": "loss ([0-9.]+)"})
        begun = StatusChanged(structs.replace(run, environment=environment))
        told: list[RunEvent] = [begun, LogOpened("s", 1, "0"), OutputLine(0, "loss 0.5", "0")]
        assert list(metrics.watch(told)) == told
        assert metrics.values == {name: 0.5}


# --- idle runs ------------------------------------------------------------------------------------

WAITS = "rank 1 waits to connect to 10.0.0.1:29500, where nobody listens"


def marks(*texts: str, stream: str = "s0", at: int = NOW) -> list[LogMark]:
    return [LogMark(stream, at, f"::batchml {text}") for text in texts]


def test_a_run_is_idle_when_all_its_nodes_are_and_says_what_they_wait_for() -> None:
    idle = marks(f"idle {WAITS}", "usage cpu=0.02 net_in=120 net_out=90 idle=840", stream="s1")
    busy = marks("usage cpu=1.9")
    nodes = [node(0), node(1)]
    uses = collect_usage(nodes, [*idle, *busy], NOW)
    assert [use.idle for use in uses] == [0, 840] and idle_seconds(uses) == 0
    uses = collect_usage(nodes, [*idle, *marks("usage cpu=0.01 idle=900")], NOW)
    assert idle_seconds(uses) == 840
    assert describe_idle_nodes(uses) == [
        "node 0: 0.01 cores", f"node 1: 0.02 cores, network 120 B/s; {WAITS}"
    ]  # fmt: skip
    lines = list(node_lines(uses, 120))
    assert "RUNNING, idle 15 min" in lines[1] and "RUNNING, idle 14 min" in lines[2]
    assert lines[-1].endswith(WAITS)
    assert nodes_json(uses)["nodes"][1]["waits"] == WAITS


def test_a_node_that_works_again_waits_for_nothing() -> None:
    again = [*marks(f"idle {WAITS}", "usage cpu=0.02 idle=840"), *marks("usage cpu=1")]
    (use,) = collect_usage([node(0)], again, NOW)
    assert (use.idle, use.waits) == (0, "")
    (old,) = collect_usage([node(0)], again[:2], NOW + MAX_MARK_AGE + 1)
    assert (old.idle, old.waits) == (0, "")  # it may be over


def test_a_list_of_runs_asks_once_for_those_that_may_be_idle(here: Here) -> None:
    log = [
        {"logStreamName": name, "timestamp": NOW, "eventId": name,
         "message": f"::batchml usage cpu=0 idle={seconds}"}
        for name, seconds in (("s1", 300), ("s2", 400))
    ]  # fmt: skip
    here.session = ScriptedSession(lambda *_: {"events": log})

    def run(number: int, started: int, status: str = "RUNNING") -> Run:
        tried = (Attempt(log_stream=f"s{number}", started_at=started),)
        return Run(f"j{number}", "n", "q", JobStatus(status), started_at=started, attempts=tried)

    early, place = run(3, NOW - 60_000), cast(Context, here)
    assert read_idle_seconds(place, [early, run(4, 1, "SUCCEEDED")], NOW) == {}
    assert here.session.calls == []
    runs = [run(1, NOW - 600_000), early, run(2, NOW - 500_000)]
    assert read_idle_seconds(place, runs, NOW) == {"j1": 300, "j2": 400}
    (asked,) = here.session.asked("FilterLogEvents")
    assert asked["logStreamNames"] == ["s1", "s2"]
