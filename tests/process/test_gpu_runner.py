"""The runner of `make gpu`: each check is a process, and none spoils the others."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchml.runtime.processes import state_of
from benchmarks.gpu.checks import Check
from benchmarks.gpu.report import DONE, FAILED, NOT_DONE, TIMED_OUT, Result
from benchmarks.gpu.runner import Runner, Wait, wait_for_end


def run(
    folder: Path, *names: str, wait: Wait = wait_for_end, lacks: dict[str, str] | None = None
) -> dict[str, Result]:
    runner = Runner(
        sys.executable, folder, {"machine": {}, "options": {"prices": "head=1"}}, device="cpu",
        small=True, seconds=120, wait=wait, module="tests.support.gpu_check",
    )  # fmt: skip
    said: list[str] = []
    runner.run([Check(name, name, 60) for name in names], lacks or {}, said.append)
    assert len(said) >= len(names)
    return {result.check.name: result for result in runner.results}


def test_each_check_reports_its_figures_and_the_next_one_can_read_them(tmp_path: Path) -> None:
    results = run(tmp_path, "good", "reads")
    good, reads = results["good"], results["reads"]
    assert (good.state, good.reason) == (DONE, "")
    figure = {"name": "speed", "value": 2.5, "unit": "images/s", "note": "of nothing"}
    assert list(good.figures) == [figure]
    assert list(good.findings) == ["It is slow."] and good.details == {"shape": [1, 2]}
    assert reads.figures[1]["value"] == 2.5
    assert reads.details["option"] == "head=1"
    assert reads.details["circumstances"] == ["cpu", True, True]


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("leaves", NOT_DONE, "there is one GPU, and it needs two"),
        ("breaks", FAILED, "ValueError: 3 is not 4"),
        ("dies", FAILED, "its process ended with signal SIGKILL"),
    ],
)
def test_a_check_that_does_not_end_well_says_why_and_the_rest_runs(
    tmp_path: Path, name: str, state: str, reason: str
) -> None:
    results = run(tmp_path, name, "good")
    assert (results[name].state, results[name].reason) == (state, reason)
    assert results[name].figures[0]["value"] == 2.5, "what it measured before is kept"
    assert results["good"].state == DONE


def test_a_check_that_takes_too_long_ends_with_its_processes_and_the_rest_runs(
    tmp_path: Path,
) -> None:
    def wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
        """The time of the check that hangs is over as soon as it has reported all."""
        record = tmp_path / "hangs" / "record.jsonl"
        assert isinstance(process.args, list)
        while process.poll() is None:
            if str(record) in process.args and '"child"' in record.read_text():
                raise subprocess.TimeoutExpired(process.args, seconds)
            time.sleep(0.01)

    results = run(tmp_path, "hangs", "good", wait=wait)
    assert results["hangs"].state == TIMED_OUT
    assert results["hangs"].reason == "it did not end within 60 s"
    assert results["hangs"].figures[0]["value"] == 2.5
    assert state_of(results["hangs"].details["child"]) in ("", "Z")
    assert results["good"].state == DONE


def test_a_check_whose_needs_are_not_met_starts_no_process(tmp_path: Path) -> None:
    results = run(tmp_path, "good", lacks={"torch": "it is not installed"})
    reason = "needs a Python with PyTorch: it is not installed"
    assert (results["good"].state, results["good"].reason) == (NOT_DONE, reason)
    assert not (tmp_path / "good").exists()


def test_no_check_begins_when_the_common_time_is_over(tmp_path: Path) -> None:
    times = iter([0.0, 477.0])
    runner = Runner(
        sys.executable, tmp_path, {}, device="cuda", small=False, seconds=480,
        clock=lambda: next(times),
    )  # fmt: skip
    runner.run([Check("limits", "limits", 30)], {}, lambda line: None)
    assert runner.results[0].state == NOT_DONE
    assert "was used up" in runner.results[0].reason
