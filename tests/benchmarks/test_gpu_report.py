"""The rules of `make gpu`: which checks there are, what their report says."""

import importlib.util

from benchmarks.gpu.checks import CHECKS, NEEDS, PROBE_SECONDS, SECONDS, Check
from benchmarks.gpu.machine import file_name, needs_not_met
from benchmarks.gpu.report import (
    DONE,
    FAILED,
    NOT_DONE,
    TIMED_OUT,
    Result,
    failures,
    number,
    read_record,
    table,
    unmet,
)

CHECK = Check("lenet", "LeNet", 60)


def test_all_checks_together_take_eight_minutes_at_most() -> None:
    assert sum(check.seconds for check in CHECKS) + PROBE_SECONDS <= SECONDS == 480


def test_each_check_has_its_module_and_known_needs() -> None:
    for check in CHECKS:
        assert importlib.util.find_spec(f"benchmarks.gpu.{check.name}"), check.name
        assert set(check.needs) <= set(NEEDS), check.name


def test_a_record_that_was_cut_keeps_all_whole_lines() -> None:
    lines = ['{"figure": {"name": "a", "value": 1}}', '{"detail": {"x": [1]}}', '{"find']
    end, fields = read_record(lines)
    assert end is None
    assert fields["figures"] == [{"name": "a", "value": 1}] and fields["details"] == {"x": [1]}


def test_the_last_word_of_a_record_is_the_end_and_its_reason() -> None:
    lines = ['{"finding": "It is slow."}', '{"end": "not done", "reason": "no NCCL"}']
    end, fields = read_record(lines)
    assert (end, fields["reason"], fields["findings"]) == (NOT_DONE, "no NCCL", ["It is slow."])


def test_on_the_cpu_a_check_needs_no_gpu_but_a_part_for_the_cpu() -> None:
    lacks = {"gpu": "there is no driver"}
    assert unmet(CHECK, lacks, "cpu") == ""
    assert unmet(CHECK, lacks, "cuda").endswith(": there is no driver")
    assert unmet(CHECK._replace(on_cpu=False), {}, "cpu") == "has no part for a CPU"


def test_a_missing_pytorch_is_one_reason_and_not_two() -> None:
    lacks = needs_not_met({"torch": None}, "no Python with PyTorch")
    reason = "needs a Python with PyTorch: no Python with PyTorch"
    assert unmet(CHECK, lacks, "cuda") == reason


def test_needs_say_what_the_machine_lacks() -> None:
    found = {
        "torch": "2.13.0+cpu", "gpu": None, "gpu_lacks": "it is not built for CUDA",
        "nvml": "libnvidia-ml.so.1: cannot open shared object file", "batchml": "",
        "batchml_lacks": ["boto3", "typer"],
    }  # fmt: skip
    assert needs_not_met(found, "") == {
        "gpu": "it is not built for CUDA",
        "nvml": "libnvidia-ml.so.1: cannot open shared object file",
        "batchml": "no Python here has boto3, typer",
    }
    assert needs_not_met({"torch": "2", "gpu": {}, "batchml": "python"}, "").keys() == {"gpu"}
    met = {"torch": "2", "gpu": {"name": "H200"}, "nvml": "", "batchml": "python"}
    assert needs_not_met(met, "") == {}


def test_a_check_that_cannot_be_done_is_no_failure() -> None:
    states = [DONE, NOT_DONE, FAILED, TIMED_OUT]
    results = [Result(CHECK._replace(name=state), state) for state in states]
    assert failures(results) == [FAILED, TIMED_OUT]


def test_numbers_keep_three_digits() -> None:
    found = [number(value) for value in (1234567.0, 80.0, 47.123, 0.0123456, 0.0, float("nan"))]
    assert found == ["1,234,567", "80", "47.1", "0.0123", "0", "nan"]


def test_results_are_named_by_the_gpu() -> None:
    assert file_name("NVIDIA H200") == "nvidia-h200"
    assert file_name("NVIDIA A10G", small=True) == "nvidia-a10g-small"
    assert file_name(None) == "no-gpu"


def test_the_table_shows_the_machine_and_each_figure_and_finding() -> None:
    figures = [
        {"name": "epoch", "value": 0.0812, "unit": "s", "note": "CUDA graph"},
        {"name": "accuracy", "value": 98.5, "unit": "%", "note": ""},
    ]
    results = [
        Result(CHECK, DONE, seconds=12.0, figures=figures, findings=["Launches rule."]),
        Result(CHECK._replace(name="nccl"), NOT_DONE, "no NCCL"),
    ]
    machine = {
        "description": "16 CPUs", "gpu": "NVIDIA H200", "gpu_lacks": "", "driver": "580.1",
        "torch": "2.13.0", "torch_lacks": "",
    }  # fmt: skip
    report = {
        "date": "2026-11-28", "commit": "abc", "device": "cuda", "small": False,
        "machine": machine, "checks": [result.to_json() for result in results],
    }  # fmt: skip
    text = table(report)
    assert "GPU      NVIDIA H200\n" in text
    assert "lenet: LeNet (done, 12 s)\n  epoch     0.0812 s  CUDA graph\n" in text
    assert "  accuracy    98.5 %\n  => Launches rule.\n" in text
    assert "nccl: LeNet (NOT DONE, 0 s)\n  not done: no NCCL" in text
