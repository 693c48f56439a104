"""A GPU that breaks during a run, on `local`, with a driver that was built for these tests.

A file nvidia-smi on the PATH gives the machine two GPUs, and `sitecustomize` gives each attempt a
host of its own, as AWS Batch would. The command is the entry of batchml's images.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.support.cli import Cli
from tests.support.local_server import client_for, define, wait_for_job
from tests.support.nvml_fake import build

ROOT = str(Path(__file__).parents[2])
# -B: else the server starts the command by a fork, which does not read `sitecustomize`.
ENTRY = [sys.executable, "-B", "-m", "batchml.runtime.run"]
SITE = """
import os
import batchml.runtime.telemetry.gpus
batchml.runtime.telemetry.gpus.DEVICE = os.environ["DEVICE"]
is_first = os.environ.get("AWS_BATCH_JOB_ATTEMPT") == "1"
os.environ["BATCHML_HOST_ID"] = "host-a" if is_first else "host-b"
if not is_first:
    os.environ.pop("FAKE_LOST", None)
"""
TRAIN = """
import os, sys, time
from batchml.runtime import checkpoint
found = checkpoint.newest()
first = found.step if found else 0
print("from step", first, "with", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
for step in range(first + 1, 8):
    checkpoint.save(lambda path: open(path + "/x", "w").close(), step)
    if step == 5:
        open(os.environ["BREAKS"], "w").close()
        if "FAKE_LOST" in os.environ:
            raise RuntimeError("CUDA error: unspecified launch failure")
        while not checkpoint.should_stop():
            time.sleep(0.01)
        sys.exit(143)
print("trained", flush=True)
"""
RETRY = {
    "attempts": 4,
    "evaluateOnExit": [
        {"onExitCode": "75", "action": "RETRY"},
        {"onExitCode": "*", "action": "EXIT"},
    ],
}


class Machine:
    """A server on a machine with two GPUs, and a driver that `sitecustomize` makes batchml use."""

    def __init__(self, folder: Path, home: Home) -> None:
        self.driver = build(folder).parent
        (folder / "sitecustomize.py").write_text(SITE)
        self._home = home
        self._server = control.start_server(home, SystemClock())

    def run(self, **variables: str) -> tuple[dict[str, Any], list[str]]:
        """Run the training with a GPU: its job at the end, and the log of all its attempts."""
        batch, logs = (client_for(self._home, self._server, each) for each in ("batch", "logs"))
        given = {
            "PYTHONPATH": f"{self.driver}:{ROOT}", "LD_LIBRARY_PATH": str(self.driver),
            "BREAKS": str(self.driver / "breaks"), "DEVICE": "/dev/null", **variables,
        }  # fmt: skip
        container = {
            "environment": [{"name": name, "value": text} for name, text in given.items()],
            "resourceRequirements": [
                {"type": "VCPU", "value": "1"},
                {"type": "MEMORY", "value": "64"},
                {"type": "GPU", "value": "1"},
            ],
        }
        definition = define(batch, [*ENTRY, sys.executable, "-c", TRAIN], container=container)
        made = batch.submit_job(
            jobName="train", jobQueue="default", jobDefinition=definition, retryStrategy=RETRY
        )
        job = wait_for_job(batch, made["jobId"], limit=60)
        lines: list[str] = []
        for attempt in job["attempts"]:
            events = logs.get_log_events(
                logGroupName="/aws/batch/job",
                logStreamName=attempt["container"]["logStreamName"],
                startFromHead=True,
            )["events"]
            lines += [e["message"] for e in events if "::batchml" not in e["message"]]
        return job, lines


@pytest.fixture
def machine(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho GPU-aaaa\necho GPU-bbbb\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Machine(folder, home)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param(
            "FAKE_XID_79", "XID 79: it has fallen off the bus; the run saves and goes on elsewhere",
            marks=pytest.mark.journey,
        ),
        ("FAKE_LOST", "it does not answer: GPU is lost; the run goes on elsewhere"),
    ],
)  # fmt: skip
def test_a_run_whose_gpu_breaks_goes_on_from_its_checkpoint_on_another_host(
    machine: Machine, name: str, why: str
) -> None:
    """By an event, or without one, when the program has ended by CUDA's error."""
    job, lines = machine.run(**{name: str(machine.driver / "breaks")})
    assert [attempt["container"].get("exitCode") for attempt in job["attempts"]] == [75, 0], lines
    assert [line for line in lines if "from step" in line or line == "trained"] == [
        "from step 0 with GPU-aaaa", "from step 5 with GPU-aaaa", "trained",
    ]  # fmt: skip
    assert f"batchml: this host (host-a) is unfit: GPU-aaaa: {why}" in lines


@pytest.mark.parametrize(
    ("variables", "reason", "explained"),
    [
        ({"DEVICE": "/dev/none"}, "the run requested 1, and its container has no NVIDIA device",
         "toolkit"),
        ({"FAKE_CUDA_INIT": "803"}, "CUDA: cuInit: error 803: the driver's libraries", "driver"),
    ],
)  # fmt: skip
def test_the_same_fault_on_two_hosts_ends_the_run_with_its_reason(
    machine: Machine, cli: Cli, variables: dict[str, str], reason: str, explained: str
) -> None:
    job, lines = machine.run(FAKE_XID_79="", **variables)
    assert [attempt["container"].get("exitCode") for attempt in job["attempts"]] == [75, 78], lines
    first, second = lines
    assert first.startswith("batchml: this host (host-a) is unfit: ") and reason in first
    assert second.startswith("batchml: 2 hosts (host-a, host-b) were unfit for the same reason")
    shown = cli("explain", job["jobId"])
    assert shown.code == 0 and explained in shown.out
