"""A host's EFA devices, as /sys shows them, and the gate that misses some."""

import os
import threading
from pathlib import Path

import pytest

from batchml.runtime.health.checks import MONITOR, OK, REPLACE, RETRY, HostCheck
from batchml.runtime.health.efa import (
    check_efa,
    counted_since,
    efa_counters,
    efa_devices,
    instance_type,
)
from batchml.runtime.health.gate import check_host, network_delay
from batchml.runtime.health.network import KEPT, EarlierRate, MeasuredRate, digest
from batchml.runtime.health.rate_history import RateHistory, RateKind
from batchml.runtime.protocol.variables import RuntimeEnv
from tests.support.efa_fake import fake_sys


def test_amazons_devices_are_counted_and_no_others(tmp_path: Path) -> None:
    fake_sys(tmp_path, 3, "p4d.24xlarge")
    other = tmp_path / "class" / "infiniband" / "mlx5_0" / "device"
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x15b3\n")
    (other / "device").write_text("0xefa1\n")
    assert efa_devices(str(tmp_path)) == ["rdmap0", "rdmap1", "rdmap2"]
    assert efa_devices("/nonexistent") == []
    assert instance_type({"BATCHML_SYS": str(tmp_path)}) == "p4d.24xlarge"


def test_counters_are_the_sum_over_all_devices_since_before(tmp_path: Path) -> None:
    fake_sys(tmp_path, 2)
    before = efa_counters(str(tmp_path))
    assert before == {"rx_drops": 2, "retrans_pkts": 0}
    counters = tmp_path / "class/infiniband/rdmap1/ports/1/hw_counters"
    (counters / "rx_drops").write_text("8\n")
    after = efa_counters(str(tmp_path))
    assert counted_since(before, after) == {"rx_drops": 7, "retrans_pkts": 0}


def test_a_machine_without_such_a_name_has_no_type(tmp_path: Path) -> None:
    fake_sys(tmp_path, 0, "Standard PC (Q35 + ICH9, 2009)")
    assert instance_type({"BATCHML_SYS": str(tmp_path)}) == ""
    assert instance_type({"BATCHML_SYS": "/nonexistent"}) == ""


def test_devices_that_come_late_are_waited_for(tmp_path: Path) -> None:
    """As on p5en hosts."""
    fake_sys(tmp_path, 1, "p5en.48xlarge")
    paused: list[float] = []

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        fake_sys(tmp_path, 1 + len(paused))

    environ = {"BATCHML_SYS": str(tmp_path), "BATCHML_EFA": "3"}
    assert check_efa(environ, str(tmp_path), sleep) == [HostCheck("EFA", OK)]
    assert paused == [5.0, 5.0]
    check = check_efa({**environ, "BATCHML_EFA": "16"}, str(tmp_path), sleep)[0]
    assert (check.severity, len(paused)) == (REPLACE, 5)
    assert check.text.startswith("6 of 16 devices are there (only rdmap0, rdmap1, ")


def test_a_type_without_so_many_interfaces_is_named_at_once(tmp_path: Path) -> None:
    fake_sys(tmp_path, 4, "p4d.24xlarge")
    environ = {"BATCHML_SYS": str(tmp_path), "BATCHML_EFA": "32"}
    assert check_efa(environ)[0].text.endswith(": p4d.24xlarge has at most 4")


def test_a_host_without_any_device_may_have_the_fault_of_its_setup(tmp_path: Path) -> None:
    """A missing driver, or a launch template: the next host would be quarantined, too."""
    (found,) = check_efa({"BATCHML_SYS": str(tmp_path), "BATCHML_EFA": "4"})
    assert found.severity == RETRY and found.is_setup
    assert found.text == "0 of 4 devices are there (none in /sys/class/infiniband)"


@pytest.mark.parametrize("asked", ["", "0", "many", "-1"])
def test_a_run_that_was_given_no_efa_is_not_asked(asked: str) -> None:
    assert check_efa({"BATCHML_EFA": asked, "BATCHML_SYS": "/nonexistent"}) == []


def test_a_device_node_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    if not os.getuid():
        pytest.skip("root may open every file")
    fake_sys(tmp_path, 1)
    node = tmp_path / "infiniband" / "uverbs1"
    node.parent.mkdir()
    node.touch(0)
    environ = {"BATCHML_SYS": str(tmp_path), "BATCHML_EFA": "1"}
    assert check_efa(environ, str(tmp_path))[0].severity == MONITOR


def test_the_gate_leaves_a_host_with_too_few_devices_for_good(tmp_path: Path) -> None:
    for host, count in (("i-1", 3), ("i-2", 4)):
        fake_sys(tmp_path / host, count)
    environ = {
        "AWS_BATCH_JOB_ID": "j", "BATCHML_STORE": str(tmp_path / "store"),
        "TMPDIR": str(tmp_path), "BATCHML_EFA": "4", "BATCHML_SYS": str(tmp_path / "{host}"),
        "BATCHML_FAULT_FILE": str(tmp_path / "fault-{host}"),
    }  # fmt: skip
    said: list[str] = []

    def start(host: str, attempt: str) -> str | None:
        given = {**environ, "BATCHML_HOST_ID": host, "AWS_BATCH_JOB_ATTEMPT": attempt}
        return check_host(RuntimeEnv.read(given), given, said.append)

    assert start("i-1", "1") == (
        "this host (i-1) is unfit: EFA: 3 of 4 devices are there (only rdmap0, rdmap1, rdmap2 in "
        "/sys/class/infiniband); another one is tried (1 of 3)"
    )
    fake_sys(tmp_path / "i-1", 4)
    again = start("i-1", "2")
    assert again is not None and "found unfit before: EFA: 3 of 4" in again
    (tmp_path / "fault-i-2").write_text("slow: 0.5")
    assert start("i-2", "3") is None  # a slow network is no fault of the host itself
    assert network_delay({**environ, "BATCHML_HOST_ID": "i-2"}) == 0.5
    assert network_delay({**environ, "BATCHML_HOST_ID": "i-1"}) == 0
    assert said == []


# --- earlier rates --------------------------------------------------------------------------------


KIND = RateKind("p5.48xlarge", 2, 16, "nccl")
RATE = MeasuredRate("NCCL 2.29.7 with Libfabric 1.21.1", 1 << 30, 437.25)


def history(workspace: Path, kind: RateKind = KIND) -> RateHistory:
    environ = {"BATCHML_WORKSPACE": str(workspace), "BATCHML_STORE": str(workspace / "store")}
    found = RateHistory.open(RuntimeEnv.read(environ), environ, kind)
    assert found is not None
    return found


def test_rates_are_kept_for_later_runs_of_the_same_kind(tmp_path: Path) -> None:
    history(tmp_path).add(RATE, "run", 1e9)
    assert history(tmp_path).read() == [EarlierRate(digest(RATE.software), 1 << 30, 437.2)]
    assert history(tmp_path, KIND._replace(nodes=4)).read() == []
    assert RateHistory.open(RuntimeEnv.read({}), {}, KIND) is None


def test_only_the_newest_rates_stay(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        history(tmp_path).add(RATE._replace(rate=float(number)), "run", 1e9 + number)
    assert [each.rate for each in history(tmp_path).read()] == [*map(float, range(5, KEPT + 5))]


def test_runs_that_write_at_once_lose_no_rate(tmp_path: Path) -> None:
    def write(number: int) -> None:
        history(tmp_path).add(RATE._replace(rate=float(number)), "run", 1e9)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.rate for each in history(tmp_path).read()) == [*map(float, range(16))]


def test_a_file_of_another_program_is_no_rate(tmp_path: Path) -> None:
    found = history(tmp_path)
    (tmp_path / ".batchml" / KIND.prefix / "notes.txt").write_text("x")
    assert found.read() == []
