"""Neuron chips, in folders that look like /dev and /sys: what is found, and what it means."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from batchml.runtime.health.checks import NOT_CHECKED, OK, REPLACE, RETRY, HostCheck, worst
from batchml.runtime.health.host_records import HostRecords
from batchml.runtime.health.neuron_watch import NeuronWatcher
from batchml.runtime.health.neurons import (
    check_neurons,
    core_count,
    kernel_errors,
    read_kernel_log,
    run_chips,
)
from batchml.runtime.nodes.supervisor.settings import count_processes
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore
from batchml.runtime.storage.store import Store
from tests.support.neuron_fake import TREES, FakeChips

BOTH = pytest.mark.parametrize("driver", list(TREES))


def checked(chips: FakeChips, asked: int, log: str = "/no/such/log") -> list[HostCheck]:
    found = check_neurons(chips.environ(asked), str(chips.dev), log)
    return [each for each in found if each.severity != OK]


@BOTH
def test_chips_that_are_well_have_nothing_to_say(tmp_path: Path, driver: str) -> None:
    chips = FakeChips(tmp_path, 16, driver)
    found = check_neurons(chips.environ(16), str(chips.dev), "/no/such/log")
    assert {each.name for each in found} == {f"neuron{number}" for number in range(16)}
    assert worst(found) == OK


@BOTH
@pytest.mark.parametrize(
    ("counter", "severity", "words"),
    [
        ("mem_ecc_uncorrected", REPLACE, "neuron10: 3 uncorrectable errors of its memory"),
        ("sram_ecc_uncorrected", REPLACE, "neuron10: 3 uncorrectable errors of its SRAM"),
        ("mem_ecc_repairable_uncorrected", RETRY, "that a restart of the driver repairs"),
    ],
)
def test_counted_errors_refuse_the_host_in_the_old_tree_of_the_driver_and_in_the_new(
    tmp_path: Path, driver: str, counter: str, severity: int, words: str
) -> None:
    chips = FakeChips(tmp_path, 16, driver)
    chips.count(10, counter, 3)
    (found,) = checked(chips, 16)
    assert found.severity == severity and words in found.describe()
    assert checked(chips, 8) == [], "a chip of another run does not matter"


def test_a_run_without_chips_asks_nothing(tmp_path: Path) -> None:
    chips = FakeChips(tmp_path, 16)
    chips.count(0, "sram_ecc_uncorrected", 3)
    assert check_neurons(chips.environ(), str(chips.dev)) == []


def test_missing_chips_are_counted_and_none_may_be_the_fault_of_the_setup(tmp_path: Path) -> None:
    (found,) = checked(FakeChips(tmp_path / "few", 12), 16)
    assert found.severity == REPLACE and not found.is_setup
    assert "12 of the run's 16 are in" in found.text
    (found,) = checked(FakeChips(tmp_path / "none", 0), 16)
    assert found.severity == RETRY and found.is_setup  # so the host is not quarantined


def test_a_driver_without_counters_is_said_once(tmp_path: Path) -> None:
    chips = FakeChips(tmp_path, 4)
    environ = {**chips.environ(4), "BATCHML_SYS": str(tmp_path / "nothing")}
    (found,) = check_neurons(environ, str(chips.dev), "/no/such/log")
    assert (found.severity, found.text) == (NOT_CHECKED, "the driver does not count errors")


@pytest.mark.skipif(os.getuid() == 0, reason="root may open every node")
def test_a_node_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    chips = FakeChips(tmp_path, 2)
    (chips.dev / "neuron1").chmod(0)
    (found,) = checked(chips, 2)
    assert found.is_setup and "may not open" in found.text


LINES = [
    "6,1,2,-;NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=h nd-id=3 nc-id=0 "
    "serial-num=19 action=TERMINATE_INSTANCE",
    "6,1,2,-;NEURON_HW_ERR=DMA_ERROR instance-id=i-0 hostname=h nd-id=12 nc-id=0",
    "6,1,2,-;NEURON_HW_ERR=DMA_ERROR instance-id=i-0 hostname=h nd-id=12 nc-id=1",
    "6,1,2,-;neuron: loaded",
]


def test_the_kernels_lines_count_for_the_chips_of_the_run(tmp_path: Path) -> None:
    found = kernel_errors(LINES, range(16))
    assert [(each.name, each.severity) for each in found] == [
        ("neuron3", REPLACE), ("neuron12", RETRY),
    ]  # fmt: skip
    assert kernel_errors(LINES, [0, 1]) == []
    log = tmp_path / "kmsg"
    log.write_text("\n".join(LINES))
    assert [each.name for each in checked(FakeChips(tmp_path, 16), 16, str(log))] == [
        "neuron3", "neuron12",
    ]  # fmt: skip
    assert read_kernel_log(str(tmp_path)) == [], "a log that cannot be read has no lines"


@pytest.mark.parametrize(
    ("name", "cores", "each", "ranks"),
    [("Trainium1", 2, 2, 32), ("Trainium2", 8, 4, 64), ("Inferentia", 4, 4, 64)],
)
def test_there_is_a_rank_for_each_core_that_a_program_sees(
    tmp_path: Path, name: str, cores: int, each: int, ranks: int
) -> None:
    chips = FakeChips(tmp_path, 16, name=name, cores=cores)
    assert core_count(str(chips.sys), 0) == each and core_count("/no/such", 0) == 1
    devices = os.listdir(chips.dev)
    assert count_processes(0, chips.environ(16), devices) == ranks
    assert count_processes(3, chips.environ(16), devices) == 3
    assert count_processes(0, chips.environ(), devices) == 1, "the run has none of them"
    assert run_chips(chips.environ(4), str(chips.dev)) == [0, 1, 2, 3]


# --- While the run goes on ------------------------------------------------------------------------


class Attempt:
    """What a plug-in is given."""

    last_output, notice = 0.0, ""

    def __init__(self, folder: Path, chips: FakeChips) -> None:
        self.environ: Mapping[str, str] = {
            **chips.environ(4), "AWS_BATCH_JOB_ID": "j", "BATCHML_STORE": str(folder / "store"),
        }  # fmt: skip
        self.env = RuntimeEnv.read(self.environ)
        self.store: Store | None = FolderStore(self.env.store)
        self.code: int | None = None
        self.lines: list[str] = []
        self.stopped: list[tuple[str, int]] = []

    def pids(self) -> list[int]:
        return []

    def last_lines(self) -> list[str]:
        return self.lines

    def mark(self, text: str) -> None:
        raise AssertionError(text)

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def stop(self, reason: str, code: int, within: float = 0.0) -> None:
        self.stopped.append((reason, code))


def test_a_chip_that_breaks_sends_the_run_elsewhere_once(tmp_path: Path) -> None:
    chips = FakeChips(tmp_path / "host", 4)
    chips.count(2, "mem_ecc_uncorrected", 7)  # before the run: the checks have reported it
    attempt = Attempt(tmp_path, chips)
    watch = NeuronWatcher(attempt, str(chips.dev))
    watch.tick(0.0)
    chips.count(2, "mem_ecc_uncorrected", 8)
    watch.tick(29.0)
    assert attempt.stopped == [], "the counters are read every half minute"
    watch.tick(31.0)
    watch.tick(99.0)
    watch.finish()
    ((reason, code),) = attempt.stopped
    assert code == 75 and "neuron2: 1 uncorrectable errors of its memory" in reason
    assert "saves and goes on elsewhere" in reason
    records = HostRecords.open(attempt.env, attempt.environ)
    assert records.find("i-1") is not None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("(FATAL-RT-UNDEFINED-STATE) Uncorrectable HBM memory error is detected.", "HBM memory"),
        ("[MLA 0][NC 0] DMA TX engine 0 is in an abort state", "abort state"),
        ("ValueError: shapes differ", ""),
    ],
)
def test_a_program_that_died_of_a_broken_chip_goes_on_elsewhere(
    tmp_path: Path, line: str, words: str
) -> None:
    chips = FakeChips(tmp_path / "host", 4)
    attempt = Attempt(tmp_path, chips)
    watch = NeuronWatcher(attempt, str(chips.dev))
    attempt.code, attempt.lines = 1, ["epoch 3", line]
    watch.finish()
    assert [code for _, code in attempt.stopped] == ([75] if words else [])
    assert all(words in reason for reason, _ in attempt.stopped)
