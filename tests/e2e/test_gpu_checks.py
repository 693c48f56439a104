"""`make gpu` on a machine without a GPU: it says what it could not do, and its CPU part is real."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.checks import CHECKS

ROOT = Path(__file__).parents[2]


def gpu(python: str, out: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--python", python, "--out", out, *arguments],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.journey
def test_without_pytorch_each_check_says_what_is_missing(tmp_path: Path) -> None:
    code, printed = gpu("/nonexistent/python", tmp_path)
    assert code == 0, printed
    report = json.loads((tmp_path / "no-gpu.json").read_text())
    assert [check["name"] for check in report["checks"]] == [check.name for check in CHECKS]
    for check in report["checks"]:
        assert (
            check["state"] == "not done" and "/nonexistent/python is no program" in check["reason"]
        )
    assert report["machine"]["gpu"] is None and report["commit"]
    assert (tmp_path / "no-gpu.txt").read_text().rstrip() in printed


def test_a_mistake_in_an_option_is_said_before_anything_runs(tmp_path: Path) -> None:
    code, printed = gpu("", tmp_path, "--checks", "limits,lenett")
    assert code == 2 and "--checks: unknown: lenett; known: limits" in printed
    code, printed = gpu("", tmp_path, "--seconds", "0")
    assert code == 2 and "--seconds is a number greater than 0" in printed
    code, printed = gpu("", tmp_path, "--prices", "head=cheap")
    assert code == 2 and "--prices: " in printed
    code, printed = gpu("", tmp_path, "--show", str(tmp_path))
    assert code == 2 and "is no report of these checks" in printed


def figures(out: Path, check: str) -> dict[str, Any]:
    (report,) = json.loads((out / "no-gpu-small.json").read_text())["checks"]
    assert (report["name"], report["state"]) == (check, "done"), report
    return {figure["name"]: figure["value"] for figure in report["figures"]}


# What each check measures on a CPU; a figure that only a GPU has is left out.
ON_CPU = {
    "limits": {"eager launch", "copy on the device", "bf16 product"},
    "lenet": {
        "eager, fp32, channels_last, 16, as the job",
        "best epoch",
        "kernels a step, the job",
    },
    "vit": {"images on the device", "0 workers", "2 workers", "2 workers: 1000 steps"},
    "llama": {"tiny, FSDP2", "tiny, FSDP2, recomputation, compiled"},
    "nccl": {"first collective", "all-gather of 1 MiB"},
    "checkpoint": {"torch.save, stall", "shards, stall", "pinned copy, stall", "written beside"},
}


@pytest.mark.slow
@pytest.mark.parametrize("check", ON_CPU)
def test_a_check_runs_on_the_cpu(pytorch: Path, tmp_path: Path, check: str) -> None:
    code, printed = gpu(str(pytorch), tmp_path, "--device", "cpu", "--checks", check)
    assert code == 0, printed
    found = figures(tmp_path, check)
    assert set(found) >= ON_CPU[check]
    assert all(found[name] > 0 for name in ON_CPU[check])


@pytest.mark.slow
def test_lenet_learns_the_same_by_replays_of_a_graph_as_step_by_step(pytorch: Path) -> None:
    done = subprocess.run(
        [pytorch, "-m", "tests.support.gpu_lenet"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 106, "the last batch is smaller"
    assert found["equal"], "each image comes once, in the order of the epoch"
    assert found["right"][0] == found["right"][1] > 0
    assert found["accuracy"][0] == found["accuracy"][1] > 0.5
    assert found["kernels"] > 50 and found["loss"] < 2.3
