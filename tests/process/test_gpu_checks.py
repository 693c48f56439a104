"""The checks of `make gpu` that concern batchml, with a driver that is built for the tests."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from benchmarks.gpu import health, runs
from benchmarks.gpu.checks import CannotRun, CheckRun
from benchmarks.gpu.report import read_record
from benchmarks.gpu.smi import number, query
from tests.support.nvml_fake import FakeDriver, build
from tests.support.smi_fake import write_smi

ROOT = str(Path(__file__).parents[2])


class Machine:
    """A machine with two GPUs, to all processes that this test starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.driver = FakeDriver(build(folder))
        (folder / "work").mkdir()
        self.record = io.StringIO()
        self.show()
        monkeypatch.chdir(folder / "work")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
        monkeypatch.setenv("PYTHONPATH", ROOT)

    def show(self, **changed: tuple[str, str]) -> None:
        """Let nvidia-smi show these values; `__` stands for a dot."""
        values = {name.replace("__", "."): value for name, value in changed.items()}
        write_smi(self.folder, sys.executable, values)

    def run(self) -> CheckRun:
        facts = {"machine": {"batchml": sys.executable}}
        return CheckRun(self.record, facts, device="cpu", small=True, seconds=100)

    def reported(self) -> dict[str, Any]:
        _, fields = read_record(self.record.getvalue().splitlines())
        return {**fields, "figures": {each["name"]: each["value"] for each in fields["figures"]}}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_health_checks_of_a_machine_are_compared_with_nvidia_smi(machine: Machine) -> None:
    machine.driver.set("errors", 3, gpu=1)
    machine.show(ecc__errors__uncorrected__volatile__total=("0", "3"))
    health.measure(machine.run(), machine.driver.open, "/dev/null")
    found = machine.reported()
    assert {"NVML's checks, time", "CUDA's start, time", "computation, time"} <= set(
        found["figures"]
    )
    accepts, same, unknown, events, clocks = found["findings"]
    assert accepts.startswith("The health checks' gate accepts this host: ")
    assert "GPU 1: 3 uncorrected ECC errors" in accepts
    assert same == (
        "batchml and nvidia-smi agree: uncorrected ECC errors, rows remapped, memory held, MiB."
    )
    assert unknown.endswith("rows that wait.")  # which this nvidia-smi does not know
    assert events.startswith("The driver reports XIDs and recovery actions; none came")
    assert "not measured" in clocks
    assert machine.driver.users == 0


def test_a_value_that_batchml_reads_otherwise_than_nvidia_smi_fails_the_check(
    machine: Machine,
) -> None:
    machine.show(memory__used=("1024", "9000"))
    with pytest.raises(RuntimeError, match=r"memory held, MiB: 1024 and 9000"):
        health.measure(machine.run(), machine.driver.open, "/dev/null")
    assert machine.driver.users == 0


def test_two_runs_share_the_gpus_in_turn_and_a_run_without_sees_none(machine: Machine) -> None:
    """With a real server and real commands."""
    runs.measure(machine.run())
    found = machine.reported()
    assert found["figures"]["GPUs that the server gives"] == 2
    assert found["figures"]["GPU passed on after"] >= 0
    assert [sentence.split()[0] for sentence in found["findings"]] == ["Each", "Two", "The"]
    assert not Home(machine.folder / "work" / "home").is_held()  # its server has ended


SMI = [{"gpu": 12.0, "gpu_memory": 500.0}, {"gpu": 97.0, "gpu_memory": 2048.0}]


def test_the_figures_of_top_are_those_of_nvidia_smi(machine: Machine) -> None:
    top = [{"cpu": 1.0, "gpu": 99.0, "gpu_memory": 2050.0}]
    runs.compare_use(machine.run(), SMI, top, {"used": {"gpus": 0.9}})
    found = machine.reported()
    assert found["figures"] == {
        "GPU busy, top": 99.0, "GPU busy, nvidia-smi": 97.0, "GPU memory, top": 2050.0,
        "GPU memory, nvidia-smi": 2048.0, "GPUs used, show": 0.9,
    }  # fmt: skip
    assert found["findings"] == ["top's figures of the GPUs are those of nvidia-smi."]
    with pytest.raises(RuntimeError, match="busy: 20 and 97 %; memory: 5000 and 2048 MiB"):
        runs.compare_use(machine.run(), SMI, [{"gpu": 20.0, "gpu_memory": 5000.0}], {})


def test_without_gpus_the_runs_are_left_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.show(uuid=("", ""))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(CannotRun, match="nvidia-smi lists no GPU"):
        runs.measure(machine.run())
    assert query("uuid") == []


def test_numbers_of_nvidia_smi_are_read() -> None:
    words = ("81559", "0x0000000000000040", "Yes", "No", "[N/A]", "12.5", "")
    assert [number(word) for word in words] == [81559.0, 64.0, 1.0, 0.0, None, 12.5, None]
