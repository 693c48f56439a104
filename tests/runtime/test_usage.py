"""What a node tells of itself, from what the kernel has counted. docs/seeing.md"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from batchml.runtime.protocol.log_marks import MARK, ranks_mark, read_ranks, usage_mark
from batchml.runtime.protocol.log_marks import parse_mark as parse
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.telemetry.heartbeat import EVERY as WRITES
from batchml.runtime.telemetry.heartbeat import ProgressFile, RankProgress, waited_share
from batchml.runtime.telemetry.usage import (
    FIRST,
    Counters,
    RankMeter,
    UsageReporter,
    counters,
    cpu_of,
    cpu_seconds,
    find_mount,
    interfaces,
    is_entry,
    memory_mib,
    own_cgroup,
    ranks_of,
    rates,
    traffic_of,
)

# Two looks at a burner that computes 46 % of the time, on a host of the wrong speed: 30.04 s apart
# by the clock, of which it used 13.82 s by its own getrusage. utime is 1318 -> 2690 ticks.
FIRST_STAT = (
    "4242 (python3 (burn) x) R 4200 4242 4242 0 -1 4194304 3310 0 0 0 1318 12 31 4 20 0 1 0 "
    "8642342 21061632 2411 18446744073709551615 1 1 0 0 0 0 0 16781312 2 0 0 0 17 1 0 0 0 0 0"
)
LATER_STAT = FIRST_STAT.replace("1318 12 31 4", "2690 20 33 4")
TICKS = os.sysconf("SC_CLK_TCK")

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo: 8070163822 3719321    0    0    0     0          0         0 8070163822 3719321    0    0
  eth0: 5339310818  154621    0    0    0     0          0         0 10382190   94627    0    0
  eth1:     100       1    0    0    0     0          0         0      50       1    0    0
"""


def test_a_burner_at_46_percent_is_reported_at_46_percent() -> None:
    """(C3) The share is of the time that passed by the clock, whatever it was busy with."""
    before = Counters(100.0, cpu_of(FIRST_STAT) * TICKS / 100)
    now = Counters(130.04, cpu_of(LATER_STAT) * TICKS / 100)
    assert rates(before, now)["cpu"] == pytest.approx(0.46, abs=0.005)


def test_counters_that_begin_anew_give_no_nonsense() -> None:
    before = Counters(0.0, 10.0, (1_000, 500))
    assert rates(before, Counters(10.0, 4.0, (100, 600))) == {
        "cpu": 0.0, "net_in": 10.0, "net_out": 10.0,
    }  # fmt: skip
    assert rates(before, Counters(10.0, 20.0)) == {"cpu": 1.0}
    assert cpu_of("") == cpu_of("12 (gone") == 0.0


def test_a_node_counts_the_bytes_of_its_own_interfaces() -> None:
    assert counters(DEV)["eth0"] == (5339310818, 10382190)
    assert traffic_of(DEV, ("eth0", "eth1")) == (5339310918, 10382240)
    assert traffic_of(DEV, ("gone",)) is None
    assert traffic_of(DEV, None) is None


@pytest.mark.parametrize(
    ("environ", "is_entry", "device", "found"),
    [
        ({"BATCHML_NODE_ADDRESS": "10.9.0.2"}, False, "eth0", ("eth0",)),
        ({"BATCHML_NODE_ADDRESS": "127.1.2.3"}, False, "lo", None),
        ({"BATCHML_NODE_ADDRESS": "10.9.0.2"}, False, "", None),
        ({"AWS_BATCH_JOB_NODE_INDEX": "1"}, False, "", ("eth0", "eth1")),
        ({}, True, "", ("eth0", "eth1")),
        ({}, False, "", None),  # a process among others of the machine
    ],
)
def test_what_cannot_be_told_from_others_is_left_out(
    environ: Mapping[str, str], is_entry: bool, device: str, found: tuple[str, ...] | None
) -> None:
    assert interfaces(environ, is_entry, DEV, lambda address: device) == found


def test_a_container_in_the_network_of_its_host_tells_nothing() -> None:
    host = DEV + "docker0: 1 1 0 0 0 0 0 0 1 1 0 0\n"
    assert interfaces({}, True, host, str) is None


# --- control groups -------------------------------------------------------------------------------


def proc_of(folder: Path, cgroup: str, mountinfo: str = "") -> str:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    (folder / "proc" / "self" / "mountinfo").write_text(mountinfo)
    return str(folder / "proc")


def test_the_group_of_a_container_is_counted_whole_v2(tmp_path: Path) -> None:
    proc = proc_of(tmp_path, "0::/\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.current").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {100 << 20}\n")
    found = own_cgroup(1, proc, str(tmp_path))
    assert found is not None
    assert (found.cpu_seconds(), found.cores(), found.memory_bytes()) == (1.5, 0.5, 200 << 20)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert found.cores() is None
    assert own_cgroup(77, proc, str(tmp_path)) is None  # one process of several


def test_the_group_of_a_container_is_counted_whole_v1(tmp_path: Path) -> None:
    mounts = "".join(
        f"4{i} 30 0:{i} /docker/ab {tmp_path}/{name} ro - cgroup cgroup rw,{name}\n"
        for i, name in enumerate(("cpu,cpuacct", "memory"))
    )
    cgroup = "9:cpu,cpuacct:/docker/ab\n8:memory:/docker/ab\n1:name=systemd:/docker/ab\n"
    proc = proc_of(tmp_path, cgroup, mounts)
    for name, text in {
        "cpu,cpuacct/cpuacct.usage": "2500000000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.usage_in_bytes": f"{64 << 20}\n",
        "memory/memory.stat": f"cache 5\ntotal_inactive_file {4 << 20}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = own_cgroup(1, proc, str(tmp_path))
    assert found is not None
    assert (found.cpu_seconds(), found.cores(), found.memory_bytes()) == (2.5, 1.5, 60 << 20)
    (tmp_path / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("-1\n")
    assert found.cores() is None
    # The whole machine's tree is mounted: nothing there is of this container.
    elsewhere = proc_of(tmp_path / "host", cgroup, mounts.replace("/docker/ab", "/"))
    assert own_cgroup(1, elsewhere, str(tmp_path)) is None
    assert find_mount("garbage\n\n", "cpu", "/") is None


def test_the_entry_of_a_container_is_its_first_process_or_its_inits_child(tmp_path: Path) -> None:
    for pid, stat in ((7, "7 (python) S 1 7"), (8, "8 (a) b) S 7 8"), (1, "1 (tini) S 0 1")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat)
    (tmp_path / "1" / "comm").write_text("tini\n")
    assert [is_entry(pid, str(tmp_path)) for pid in (1, 7, 8, 9)] == [True, True, False, False]
    (tmp_path / "1" / "comm").write_text("systemd\n")
    assert not is_entry(7, str(tmp_path))


# --- marks ----------------------------------------------------------------------------------------

FIGURES = st.dictionaries(
    st.sampled_from(["cpu", "memory", "gpu", "gpu_memory", "step", "waited"]),
    st.floats(allow_nan=True) | st.integers(-5, 10**12),
)


@examples(max_examples=50)
@example({0: {"cpu": -0.0}})
@given(st.dictionaries(st.integers(0, 99_999), FIGURES, min_size=1, max_size=80))
def test_ranks_are_read_back_and_never_fill_a_log(ranks: dict[int, dict[str, float]]) -> None:
    mark = ranks_mark(ranks)
    assert len(mark) < 64 * 200
    kept = sorted(ranks)[:64]
    plain = {r: {n: v for n, v in ranks[r].items() if 0 <= v < 1e15} for r in kept}
    if not all(plain.values()):
        return  # a rank of which nothing is known is never written
    kind, words = parse(mark) or ("", {})
    assert kind == "ranks"
    found = read_ranks(words)
    assert found.keys() == plain.keys()
    for rank, told in plain.items():
        assert found[rank] == pytest.approx(told, abs=0.0051)


def test_64_ranks_take_little_of_a_log() -> None:
    one = {"cpu": 0.97, "memory": 81234.0, "gpu": 97.0, "gpu_memory": 71234.0, "step": 123456.0,
           "waited": 12.34}  # fmt: skip
    assert len(ranks_mark(dict.fromkeys(range(64), one))) < 5_500


def test_use_is_told_in_few_characters() -> None:
    mark = usage_mark({"cpu": 1.934, "memory": 812.0, "gpu": 45.0, "net_in": 1_234_567.0})
    assert mark == "::batchml usage cpu=1.93 memory=812 gpu=45 net_in=1234567"
    words = {"cpu": "1.93", "memory": "812", "gpu": "45", "net_in": "1234567"}
    assert parse(mark) == ("usage", words)


# --- the companion --------------------------------------------------------------------------------


class Attempt:
    """What a companion is given, and what it wrote."""

    last_output, notice, store = 0.0, "", None

    def __init__(self, *pids: int) -> None:
        self.env = RuntimeEnv.read({})
        self.environ: Mapping[str, str] = {}
        self.marks: list[str] = []
        self._pids = list(pids)

    def pids(self) -> list[int]:
        return self._pids

    def mark(self, text: str) -> None:
        self.marks.append(MARK + text)


def told_at(attempt: Attempt, seconds: int) -> list[int]:
    usage = UsageReporter(cast(Any, attempt), lambda: float(seconds))
    told: list[int] = []
    for second in range(seconds):
        usage.tick(float(second))
        told += [second] * (sum("usage" in mark for mark in attempt.marks) - len(told))
    usage.finish()
    return told


@pytest.mark.parametrize(
    ("every", "told"), [("2", [2, 4, 6]), ("0", [5]), ("often", [5]), ("nan", [5])]
)
def test_who_wants_to_see_more_asks_for_it(every: str, told: list[int]) -> None:
    attempt = Attempt()
    attempt.environ = {"BATCHML_USAGE_EVERY": every}
    assert told_at(attempt, 8) == told


def test_use_is_told_early_then_every_10_seconds_and_after_two_minutes_every_30() -> None:
    attempt = Attempt(os.getpid())
    assert FIRST == 5.0
    assert told_at(attempt, 220) == [5, *range(15, 126, 10), 155, 185, 215]
    _, words = parse(attempt.marks[0]) or ("", {})
    assert set(words) >= {"cpu", "memory"}
    assert 1 < float(words["memory"]) < 100_000


@pytest.mark.parametrize("seconds", [5, 60])
def test_at_the_end_the_use_of_the_whole_attempt_is_told(seconds: int) -> None:
    attempt = Attempt(os.getpid())
    told_at(attempt, seconds)
    _, words = parse(attempt.marks[-1]) or ("", {})
    assert float(words["seconds"]) == seconds
    assert float(words["mean_cpu"]) > 0
    has_samples = seconds > FIRST
    assert ("memory" in words) == ("most_memory" in words) == has_samples
    assert not has_samples or float(words["most_memory"]) >= float(words["memory"])


@pytest.mark.parametrize(("seconds", "share"), [(0, 100.0), (3, 80.0), (36, 25.0)])
def test_the_time_before_the_start_is_told_also_of_a_short_attempt(
    seconds: int, share: float
) -> None:
    attempt = Attempt()
    attempt.environ = {"BATCHML_DATA_SECONDS": "12.00"}
    told_at(attempt, seconds)
    _, words = parse(attempt.marks[-1]) or ("", {})
    assert words["staging"] == "12" and float(words["data_wait"]) >= share
    assert ("seconds" in words) == (seconds >= FIRST)


def test_a_short_attempt_tells_nothing() -> None:
    attempt = Attempt()
    UsageReporter(cast(Any, attempt), lambda: 100.0).finish()
    usage = UsageReporter(cast(Any, attempt), lambda: 4.9)
    usage.tick(0.0)
    usage.finish()
    assert attempt.marks == []


def test_a_busy_child_is_counted_also_once_it_has_ended() -> None:
    before = cpu_seconds([])
    subprocess.run([sys.executable, "-c", "for _ in range(3_000_000): pass"], check=True)
    assert cpu_seconds([]) - before > 0.01


def test_processes_that_have_ended_hold_nothing() -> None:
    assert memory_mib([2**22 + 1]) == 0


# --- ranks ----------------------------------------------------------------------------------------


class Proc:
    """Files of processes, by path."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        return self.files.get(path, "")

    def add(self, pid: int, environ: str, ticks: int = 0) -> None:
        self.files[f"/proc/{pid}/environ"] = environ.replace(" ", "\0")
        self.files[f"/proc/{pid}/stat"] = f"{pid} (x) R {'0 ' * 10}{ticks} 0 0 0 20"


def test_a_rank_is_its_process_and_all_that_it_started() -> None:
    proc = Proc()
    proc.add(10, "A=1 RANK=4 BATCHML_PROGRESS=/p/4")
    proc.add(11, "A=1 RANK=5")
    proc.add(12, "RANK=4 BATCHML_PROGRESS=/p/4 LOCAL_RANK=9")
    proc.add(13, "XRANK=7")
    proc.add(14, "RANK=x")
    proc.add(15, "RANK=5")
    proc.files["/proc/15/comm"] = "batchml-spare\n"  # of its next start
    found = ranks_of([9, 10, 11, 12, 13, 14, 15], proc)
    assert [(each.number, each.pids, each.progress) for each in found] == [
        (4, [10, 12], "/p/4"), (5, [11], ""),
    ]  # fmt: skip


def test_of_each_rank_what_it_used_since_the_last_look_also_when_it_was_started_again() -> None:
    proc = Proc()
    meter = RankMeter(proc)
    proc.add(10, "RANK=0", 5 * TICKS)
    assert meter.measure([10], 10.0, [])[0]["cpu"] == 0.5
    proc.add(10, "RANK=0", 14 * TICKS)
    assert meter.measure([10], 10.0, [])[0]["cpu"] == pytest.approx(0.9)
    proc.add(20, "RANK=0", 3 * TICKS)  # the next generation
    assert meter.measure([20], 10.0, [])[0]["cpu"] == pytest.approx(0.3)


def test_what_a_rank_says_of_itself_is_passed_on_as_long_as_it_says_it() -> None:
    proc = Proc()
    meter = RankMeter(proc)
    proc.add(10, "RANK=0 BATCHML_PROGRESS=/p/0")
    proc.files["/p/0"] = "12 4.0 110.0 100.0   \n"
    assert meter.measure([10], 5.0, [])[0] == {"cpu": 0, "memory": 0, "step": 12.0, "waited": 40.0}
    proc.files["/p/0"] = "13 4.5 115.0 100.0   \n"
    assert meter.measure([10], 5.0, [])[0]["waited"] == pytest.approx(10.0)
    assert meter.measure([10], 5.0, [])[0]["waited"] == pytest.approx(10.0)  # a long step
    proc.files["/p/0"] = "no word of ours"
    assert "step" not in meter.measure([10], 5.0, [])[0]


# --- the pulse ------------------------------------------------------------------------------------


def test_a_program_that_reports_still_gets_the_function(tmp_path: Path) -> None:
    """A submodule of the function's name would take its place."""
    program = (
        "from batchml.runtime import report; report(1, loss=1)\n"
        "from batchml.runtime import progress; progress(2, waited=0.1); progress('3')"
    )
    path = tmp_path / "progress"
    environ = {**os.environ, "BATCHML_METRICS": str(tmp_path / "m"), "BATCHML_PROGRESS": str(path)}
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)
    assert told_in(path).step == 1  # the others came too soon to be written
    environ.pop("BATCHML_PROGRESS")
    subprocess.run([sys.executable, "-c", program], env=environ, check=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told_in(path: Path) -> RankProgress:
    found = RankProgress.read(path.read_text())
    assert found is not None
    return found


def test_a_pulse_is_one_short_line_that_is_written_over_and_not_too_often(tmp_path: Path) -> None:
    path, clock = tmp_path / "p", Clock()
    pulse = ProgressFile(str(path), clock)
    pulse.update(1e9, 5.0)  # what was waited before the first call is before the beginning
    assert told_in(path) == RankProgress(1e9, 0.0, 100.0, 100.0)
    size = path.stat().st_size
    clock.now += WRITES / 2
    pulse.update(2, 0.05)
    assert told_in(path).step == 1e9
    clock.now += WRITES
    pulse.update(None, 0.05)
    assert told_in(path) == pytest.approx(RankProgress(2, 0.1, 100.3, 100.0))
    assert path.stat().st_size == size
    ProgressFile(str(tmp_path / "no" / "folder"), clock).update(1, 1.0)  # costs nobody the training


def test_the_share_that_was_waited_is_of_the_time_between_two_looks() -> None:
    first = RankProgress(1, 2.0, 110.0, 100.0)
    assert waited_share(None, first) == pytest.approx(0.2)
    assert waited_share(first, RankProgress(2, 7.0, 120.0, 100.0)) == pytest.approx(0.5)
    assert waited_share(first, RankProgress(2, 3.0, 130.0, 120.0)) == pytest.approx(
        0.3
    )  # another process
    assert waited_share(first, first) is None
    assert waited_share(first, RankProgress(2, None, 120.0, 100.0)) is None
    assert waited_share(first, RankProgress(2, 99.0, 120.0, 100.0)) == 1.0


@examples(max_examples=50)
@given(st.none() | st.floats(-1e300, 1e300), st.none() | st.floats(0, 1e9))
def test_any_step_is_written_in_the_width_of_the_line(
    step: float | None, waited: float | None
) -> None:
    line = RankProgress(step, waited, 1e7, 1e7).to_text()
    assert len(line) <= 95
    found = RankProgress.read(line + " " * 9 + "\n")
    assert found is not None
    assert found.step == (None if step is None else pytest.approx(step))
