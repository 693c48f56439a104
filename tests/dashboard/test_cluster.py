"""The page of the cluster: what its tables say, and which bars its strips of time have."""

from decimal import Decimal
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.cluster.rows import ClusterState, with_prices
from batchml.cluster.snapshot import ClusterSnapshot, QueueRow, RunRow, make_snapshot
from batchml.dashboard.app import PageQuery
from batchml.dashboard.cluster import (
    PARTS,
    ClusterPages,
    cluster_page,
    cluster_panel,
    meter,
    read_window,
)
from batchml.dashboard.html import join
from batchml.dashboard.hub import Hub, is_different
from batchml.dashboard.strips import (
    HOUR,
    MINUTE,
    MOST_LANES,
    NOT_KNOWN,
    HostSpan,
    gather_short,
    host_spans,
    pack,
    strip,
    ticks,
)
from batchml.errors import AccessError, BatchmlError, NotFound, ServiceUnreachable, UsageError
from batchml.model.explanation import ComputeState, QueueState
from batchml.model.hosts import ClusterHost, HostResources
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.search import FoundRun
from tests.support.fakes import FakeClock

NOW = 1_790_000_000_000
NASTY = "</script><img src=x onerror=alert(1)>\x00\u202e\x1b[31m\r\n"
GPU = ComputeState("gpu-hosts", max_vcpus=256, desired_vcpus=48, is_spot=True, cluster="c1",
                   instance_types=("g5",))  # fmt: skip
QUEUES = {"gpu": QueueState("gpu", environments=(GPU.name,), priority=10)}


def host(name: str, used: float = 0, gpus: int = 0) -> ClusterHost:
    resources = HostResources(48, 190_000, 4, used, int(used) * 1000, gpus)
    return ClusterHost(id=f"ci-{name}", cluster="c1", instance=name, type="g5.12xlarge",
                       zone="us-east-1a", tasks=int(used > 0), since=NOW - HOUR,
                       resources=resources)  # fmt: skip


def run(job_id: str, status: str = "RUNNING", **more: Any) -> Run:
    return Run(**{"job_id": job_id, "name": job_id, "queue": "gpu", "status": JobStatus(status),
                  "vcpus": 48, "memory_mib": 1000, "gpus": 4, "created_at": NOW - HOUR,
                  **more})  # fmt: skip


def on(where: str, start: int, stop: int | None = None, **more: Any) -> dict[str, Any]:
    """The times of an only attempt, in minutes before now."""
    begun, ended = NOW - start * MINUTE, None if stop is None else NOW - stop * MINUTE
    attempt = Attempt(begun, ended, host=where)
    return {"started_at": begun, "stopped_at": ended, "host": where, "attempts": (attempt,), **more}


TRAINS = run("trains", **on("i-1", 20))
WAITS, NEXT = run("waits", "RUNNABLE", created_at=NOW - MINUTE), run("next", "RUNNABLE")


def snapshot(*runs: Run, **more: Any) -> ClusterSnapshot:
    state = ClusterState(QUEUES, {GPU.name: GPU}, (host("i-1", 48, 4), host("i-2")), **more)
    return make_snapshot(QUEUES, runs, {"trains": {"cpu": 12.0, "gpu": 50.0}}, NOW, {}, state)


def words(markup: object) -> str:
    """The texts of a page, with one space between them."""
    import re

    return " ".join(re.sub(r"<[^>]*>", " ", str(markup)).split())


def panels(shown: ClusterSnapshot, now: int = NOW, trouble: str = "") -> str:
    """The texts of all parts of the page."""
    return words(join(cluster_panel(part, shown, [], now, "1h", trouble) for part in PARTS))


def test_a_waiting_run_has_its_position_and_the_reason() -> None:
    text = panels(snapshot(TRAINS, WAITS, NEXT))
    assert "next 1 next to start gpu 48 vCPU, 1000M, 4 GPU 1 h" in text
    assert "waits 2 1 before it gpu 48 vCPU, 1000M, 4 GPU 1 min" in text
    assert "trains ▶ RUNNING gpu i-1 20 min 12.0 of 48 - of 1000M 2.0 of 4 -" in text


def test_queues_computes_and_hosts_have_their_numbers() -> None:
    shown = snapshot(TRAINS, WAITS, NEXT)
    priced = with_prices(shown.hosts or (), {"spot:g5.12xlarge": Decimal("2.50")})
    text = panels(ClusterSnapshot(NOW, shown.queues, shown.runs, 0, shown.computes, priced))
    assert "gpu 2 1 next to start 48+96 4+8 gpu-hosts first come 10 enabled" in text
    assert "gpu-hosts 48 of 256 0 spot g5 1 allocated, 1 idle 48 of 96 4 of 8 enabled -" in text
    assert "i-1 allocated gpu-hosts 48 of 48 4 of 4 47G of 186G 25% 50% 1 1 h $2.50" in text
    assert "Hosts cost $5.00 an hour" in text


def test_hosts_that_aws_does_not_tell_are_not_shown_as_none() -> None:
    state = ClusterState(QUEUES, None, None, missing=("ecs:ListContainerInstances is denied",))
    shown = make_snapshot(QUEUES, [TRAINS], {}, NOW, {}, state)
    text = panels(shown)
    assert "Not shown: ecs:ListContainerInstances is denied." in text
    assert "AWS does not say which hosts there are." in text and "Hosts -" in text


def test_old_values_stay_with_their_age() -> None:
    shown = snapshot(TRAINS)
    assert "old" not in panels(shown, NOW + 5_000)
    late = panels(shown, NOW + 3 * MINUTE)
    assert "these values are 3 min old" in late and "trains" in late
    text = panels(shown, NOW + 4_000, "no network")
    assert "The environment does not answer: these values are 4 s old." in text


def test_a_page_without_a_snapshot_asks_for_it() -> None:
    page = str(cluster_page(None, [], NOW, "dev", window="6h", env_option=" --env dev"))
    assert 'data-panel="/cluster/strips?span=6h"' in page and "<noscript>" in page
    assert "batchml top --hosts --env dev" in page


def test_strips_of_a_long_time_do_not_delay_the_page() -> None:
    shown = snapshot(TRAINS)
    for window, is_patient, is_there in (
        ("7d", False, False), ("7d", True, True), ("1h", False, True)
    ):  # fmt: skip
        page = str(cluster_page(shown, [], NOW, "dev", window=window, is_patient=is_patient))
        assert ('class="strip"' in page) == is_there, window


def test_an_unknown_time_span_is_refused() -> None:
    assert (read_window(""), read_window("7d")) == ("1h", "7d")
    with pytest.raises(UsageError, match="span=2y: choose one of 15m, 1h"):
        read_window("2y")
    with pytest.raises(NotFound):
        cluster_panel("nothing", snapshot(), [], NOW)


def test_texts_of_others_stay_texts() -> None:
    bad = run(NASTY, name=NASTY, queue=NASTY, status_reason=NASTY, **on(NASTY, 5))
    row = RunRow(bad, reason=NASTY, hosts=(NASTY,))
    waits = RunRow(run("w", "RUNNABLE", name=NASTY), reason=NASTY)
    queue = QueueRow(NASTY, {}, state=QueueState(NASTY, status="INVALID", status_reason=NASTY,
                                                 environments=(NASTY,)), reason=NASTY)  # fmt: skip
    shown = ClusterSnapshot(NOW, (queue,), (row, waits), missing=(NASTY,), hosts=())
    page = str(cluster_page(shown, [FoundRun(bad, None)], NOW, NASTY, trouble=NASTY))
    for sign in ("<img", "\x00", "\u202e", "\x1b"):
        assert sign not in page
    assert "&lt;img src=x" in page


def test_a_long_queue_is_cut_and_counted() -> None:
    many = [run(f"r{number}", "RUNNABLE") for number in range(500)]
    panel = str(cluster_panel("queues", snapshot(*many), [], NOW))
    assert "The first 100 of 500 waiting runs" in panel and panel.count('href="/run/') == 101


def test_only_what_happens_is_a_change() -> None:
    one = snapshot(TRAINS, WAITS)
    assert not is_different(one, make_snapshot(
        QUEUES, [TRAINS, WAITS], {"trains": {"cpu": 12.0, "gpu": 50.0}}, NOW + 9, {},
        ClusterState(QUEUES, {GPU.name: GPU}, (host("i-1", 48, 4), host("i-2"))),
    ))  # fmt: skip
    assert is_different(one, snapshot(TRAINS))


class Environment:
    """A client of an environment that denies, until it does not."""

    env, env_option = "dev", " --env dev"
    error: BatchmlError | None = AccessError("batch:ListJobs is not allowed.")

    history_size = 0

    def cluster(self, **_: Any) -> ClusterSnapshot:
        if self.error:
            raise self.error
        return snapshot(TRAINS)

    def runs(self, **_: Any) -> list[Any]:
        return []

    def resource_label(self, name: str) -> str:
        return name.upper()


def test_an_environment_that_denies_is_said_and_its_last_values_stay() -> None:
    client = Environment()
    hub = Hub(client, lambda: 0.0, pace=1.0)  # type: ignore[arg-type]
    pages = ClusterPages(client, hub, FakeClock(NOW / 1000))  # type: ignore[arg-type]
    part = PageQuery("/cluster/queues", ("queues",))
    assert "Asking for queues" in words(pages.part(part))
    hub.poll()
    with pytest.raises(ServiceUnreachable, match="batch:ListJobs is not allowed"):
        pages.part(part)
    assert "batch:ListJobs is not allowed." in words(pages.page(PageQuery("/cluster")))
    client.error = None
    hub.poll()
    assert "GPU 0 1" in words(pages.part(part)), "queues have the names of the commands"
    client.error = ServiceUnreachable("AWS does not answer.")
    hub.poll()
    text = words(pages.page(PageQuery("/cluster")))
    assert (
        "AWS does not answer." in text and "these values are 0 s old" in text and "trains" in text
    )


# --- strips ---------------------------------------------------------------------------------------


def spans(*ended: Run, live: tuple[Run, ...] = (), local: bool = False) -> dict[str, list[Any]]:
    found = host_spans(snapshot(*live, is_local=local), [FoundRun(each, None) for each in ended],
                       NOW - HOUR, NOW)  # fmt: skip
    return {
        name: [(each.name, (NOW - each.start) // MINUTE, (NOW - each.stop) // MINUTE, each.state)
               for each in bars]
        for name, bars in found.items()
    }  # fmt: skip


def test_each_attempt_is_a_bar_on_its_host() -> None:
    first = Attempt(NOW - 50 * MINUTE, NOW - 40 * MINUTE, host="ci-i-2")
    second = Attempt(NOW - 30 * MINUTE, NOW - 10 * MINUTE, host="i-9")
    retried = run("retried", "SUCCEEDED", attempts=(first, second), stopped_at=NOW - 10 * MINUTE)
    assert spans(retried, live=(TRAINS,)) == {
        "i-1": [("trains", 20, 0, "running")],
        "i-2": [("retried", 50, 40, "failed")],
        "i-9": [("retried", 30, 10, "succeeded")],  # a host that has ended
    }


def test_runs_before_the_window_and_waiting_runs_have_no_bar() -> None:
    old = run("old", "FAILED", **on("i-1", 90, 70))
    reaches_in = run("reaches-in", "FAILED", **on("i-1", 90, 50))
    assert spans(old, reaches_in, live=(WAITS,)) == {
        "i-1": [("reaches-in", 90, 50, "failed")],
        "i-2": [],
    }


def test_the_snapshot_is_believed_before_the_list_of_runs() -> None:
    before = run("trains", "STARTING")
    assert spans(before, live=(TRAINS,))["i-1"] == [("trains", 20, 0, "running")]


def test_an_array_has_no_host_that_is_known_unless_there_is_one_only() -> None:
    array = run("array", "SUCCEEDED", array_size=4, started_at=NOW - 9 * MINUTE,
                stopped_at=NOW - 3 * MINUTE)  # fmt: skip
    assert spans(array)[NOT_KNOWN] == [("array", 9, 3, "succeeded")]
    here = ClusterState({}, {}, (ClusterHost("this-machine", cluster="local"),), is_local=True)
    found = host_spans(make_snapshot((), (), {}, NOW, {}, here), [FoundRun(array, None)],
                       NOW - HOUR, NOW)  # fmt: skip
    assert [each.name for each in found["this-machine"]] == ["array"]


def span(start: int, stop: int, name: str = "a") -> HostSpan:
    return HostSpan(start, stop, name, name, "succeeded")


def test_bars_that_overlap_are_in_rows_of_their_own() -> None:
    lanes, left = pack([span(0, 10), span(5, 15), span(10, 20), span(16, 30)])
    assert [[(each.start, each.stop) for each in lane] for lane in lanes] == [
        [(0, 10), (10, 20)],
        [(5, 15), (16, 30)],
    ]
    assert left == 0
    assert pack([span(0, 10)] * (MOST_LANES + 3))[1] == 3


def test_many_short_runs_share_bars_and_none_is_lost() -> None:
    short = [span(at, at + 10) for at in range(0, HOUR, 1000)]
    long = span(100, HOUR - 100, "long")
    gathered = gather_short(sorted([*short, long], key=lambda each: each.start), 0, HOUR)
    assert sum(each.count for each in gathered) == len(short) + 1
    assert len(gathered) <= 101 and long in gathered
    assert gather_short([long], 0, HOUR) == [long]
    mixed = [replace(each, state="failed") if each.start % 3000 else each for each in short]
    states = {each.state for each in gather_short(mixed, 0, HOUR)}
    assert states == {"failed", "succeeded"}
    crowded = [span(at, at + 60_000) for at in range(0, HOUR, 1000)]
    assert len(gather_short(crowded, 0, HOUR)) <= 101
    drawn, left = strip(gathered, "1h", HOUR)
    assert "36 runs" in str(drawn) and left == 0


def test_bars_are_links_by_percent_of_the_window_without_style_attributes() -> None:
    drawn = str(strip([span(NOW - 30 * MINUTE, NOW - 15 * MINUTE)], "1h", NOW)[0])
    assert 'x="50.000%" y="3" width="25.000%"' in drawn
    assert 'href="/run/a" tabindex="-1"' in drawn and "style=" not in drawn


@pytest.mark.parametrize("window", ["15m", "1h", "6h", "24h", "7d"])
def test_an_axis_has_a_few_times(window: str) -> None:
    assert 5 <= len(ticks(window, NOW)) <= 8


def test_a_meter_stays_within_its_width() -> None:
    assert 'width="100.0%"' in str(meter(9, 4)) and 'width="50.0%"' in str(meter(2, 4))
    assert meter(0, 0) is None
