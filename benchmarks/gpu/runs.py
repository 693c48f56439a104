"""Runs of the embedded AWS Batch that use the machine's GPUs: each its own, the next in turn.

A server of its own, real commands. Two runs that request all GPUs must run one after the other; a
run without GPUs must see none. What `show` and `top` say is compared with nvidia-smi.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from statistics import mean
from typing import Any

from benchmarks.gpu.checks import CheckRun
from benchmarks.gpu.smi import number, query

HOLD_SECONDS, SMALL_SECONDS = 14.0, 2.0  # for which the first run computes
MOST_APART = 15.0  # percent of a GPU between two measurements of a load that is even
MOST_MIB = 64.0
_MARKS = 1.0  # seconds between two reports of usage

JOB = """
image = "docker.io/library/alpine:3"
command = [{python}, "hold.py", "{{seconds}}"]
[params]
seconds = 1.0
[resources]
vcpus = 1
memory = "512 MiB"
[env]
BATCHML_USAGE_EVERY = "{marks}"
[health]
checks = "{checks}"
"""
# Says which GPUs the run has; holds memory on the first and multiplies matrices there.
HOLD = """
import json, os, sys, time
names = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "BATCHML_GPUS")
found = {name: os.environ.get(name) for name in names}
try:
    import torch
    found["count"] = torch.cuda.device_count()
except ImportError:
    found["count"] = None
print("seen", json.dumps(found), flush=True)
end = time.monotonic() + float(sys.argv[1])
if found["count"]:
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while time.monotonic() < end:
    if found["count"]:
        for _ in range(50):
            b = a @ a
        torch.cuda.synchronize()
    else:
        time.sleep(0.05)
print("done", flush=True)
"""


class Commands:
    """`batchml` in a folder and with a state folder of its own."""

    def __init__(self, run: CheckRun) -> None:
        self._run = run
        self._python = run.batchml or sys.executable
        self._environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))},
            "BATCHML_HOME": str(run.folder / "home"),
        }
        job = run.folder / "jobs" / "hold"
        job.mkdir(parents=True)
        python = json.dumps(sys.executable)
        # The checks would refuse a machine whose nvidia-smi lists GPUs without devices.
        checks = "quick" if run.device == "cuda" else "off"
        text = JOB.format(python=python, marks=_MARKS, checks=checks)
        (job / "job.toml").write_text(text)
        (job / "hold.py").write_text(HOLD)

    def __call__(self, *words: str, may_fail: bool = False) -> str:
        done = subprocess.run(
            [self._python, "-m", "batchml", *words], cwd=self._run.folder, env=self._environ,
            capture_output=True, text=True, timeout=max(1.0, self._run.left()),
        )  # fmt: skip
        if done.returncode and not may_fail:
            raise RuntimeError(f"batchml {' '.join(words)}: {done.stderr.strip() or done.stdout}")
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def submit(self, name: str, gpus: int, seconds: float) -> str:
        words = ("hold", "--name", name, "--gpus", str(gpus), "-p", f"seconds={seconds:g}")
        return str(self.json("submit", "--detach", *words)["jobId"])

    def seen(self, job_id: str) -> dict[str, Any]:
        """What the run said of its GPUs. Raises RuntimeError for a run that said nothing."""
        log = self("logs", job_id)
        for line in log.splitlines():
            _, found, text = line.partition("seen {")
            if found:
                seen: dict[str, Any] = json.loads("{" + text)
                return seen
        raise RuntimeError(f"a run did not start its program: {log.strip()[-300:]}")


def measure(run: CheckRun) -> None:
    gpus = [row["uuid"] for row in query("uuid")]
    if not gpus:
        run.leave("nvidia-smi lists no GPU, so that the embedded server has none to give")
    batchml = Commands(run)
    try:
        batchml("local", "start", "--executor", "process")
        in_turn(run, batchml, gpus)
    finally:
        batchml("local", "reset", "--yes", may_fail=True)  # its jobs end, too


def in_turn(run: CheckRun, batchml: Commands, gpus: list[str]) -> None:
    seconds = SMALL_SECONDS if run.small else HOLD_SECONDS
    first = batchml.submit("first", len(gpus), seconds)
    second = batchml.submit("second", len(gpus), 1)
    none = batchml.submit("none", 0, 1)
    samples, tops = watch(run, batchml, first, second)
    batchml("wait", first, second, none, may_fail=True)
    shown = {job: batchml.json("show", job) for job in (first, second, none)}
    failed = [job for job, each in shown.items() if each["status"] != "SUCCEEDED"]
    if failed:
        run.detail("explain", [batchml("explain", each, may_fail=True) for each in failed])
        reason = batchml.json("explain", failed[0])["verdict"]
        raise RuntimeError(f"the run {shown[failed[0]]['name']} failed: {reason}")
    check_owners(run, batchml, gpus, (first, second), none)
    check_turns(run, shown[first], shown[second])
    compare_use(run, samples, tops, shown[first])


def watch(
    run: CheckRun, batchml: Commands, first: str, second: str
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Samples of nvidia-smi and of `top` while the first run works, the second waits."""
    samples: list[dict[str, float]] = []
    tops: list[dict[str, float]] = []
    while run.left() > 10:
        runs = {each["jobId"]: each for each in batchml.json("top")["runs"]}
        if first not in runs and batchml.json("show", first)["status"] in ("SUCCEEDED", "FAILED"):
            break
        if runs.get(first, {}).get("status") == "RUNNING":
            usage = runs[first].get("usage") or {}
            if "gpu" in usage:
                tops.append(usage)
            samples += [read_smi()]
            if runs.get(second, {}).get("status") == "RUNNING":
                raise RuntimeError("two runs that request every GPU ran at the same time")
        time.sleep(0.2)
    return samples, tops


def read_smi() -> dict[str, float]:
    """The use of all GPUs as the runtime reports it: the mean in percent, the sum in MiB."""
    rows = query("utilization.gpu", "memory.used")
    busy = [each for row in rows if (each := number(row["utilization.gpu"])) is not None]
    held = [each for row in rows if (each := number(row["memory.used"])) is not None]
    return {"gpu": mean(busy) if busy else 0.0, "gpu_memory": sum(held)}


def check_owners(
    run: CheckRun, batchml: Commands, gpus: list[str], owners: tuple[str, ...], none: str
) -> None:
    """Each run sees the GPUs that it requested, by the names that nvidia-smi has."""
    for job in owners:
        seen = batchml.seen(job)
        run.detail(f"seen by {job}", seen)
        for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            if sorted((seen[name] or "").split(",")) != sorted(gpus):
                raise RuntimeError(f"a run with {len(gpus)} GPUs got {name}={seen[name]!r}")
        if run.device == "cuda" and seen["count"] != len(gpus):
            raise RuntimeError(f"PyTorch saw {seen['count']} of a run's {len(gpus)} GPUs")
    seen = batchml.seen(none)
    run.detail("seen by a run without GPUs", seen)
    if seen["NVIDIA_VISIBLE_DEVICES"] != "void" or seen["count"]:
        raise RuntimeError(f"a run without GPUs saw some: {seen}")
    run.figure("GPUs that the server gives", len(gpus), "", "as nvidia-smi lists them")
    run.finding("Each run saw the GPUs that it requested; a run that requested none saw none.")


def check_turns(run: CheckRun, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    ended, started = seconds_of_day(first["stoppedAt"]), seconds_of_day(second["startedAt"])
    if started < ended:
        raise RuntimeError("two runs that request every GPU overlapped")
    run.figure("GPU passed on after", started - ended, "s", "from the end of one run to the next")
    run.finding("Two runs that request every GPU ran one after the other.")


def seconds_of_day(text: str) -> float:
    """`2026-11-23T20:29:02.716Z` as seconds since the epoch."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def compare_use(
    run: CheckRun,
    samples: list[dict[str, float]],
    tops: list[dict[str, float]],
    shown: Mapping[str, Any],
) -> None:
    """Compare the figures of `top` and `show` with nvidia-smi's. Raises RuntimeError."""
    run.detail("nvidia-smi", samples)
    run.detail("top", tops)
    if not samples or not tops:
        run.finding("The GPUs' use was not compared: the run reported none while it worked.")
        return
    # The first figures are those of the program's start.
    theirs = {name: max(each[name] for each in samples) for name in ("gpu", "gpu_memory")}
    ours = {name: max(each.get(name, 0.0) for each in tops) for name in ("gpu", "gpu_memory")}
    run.figure("GPU busy, top", ours["gpu"], "%", "the most during the run")
    run.figure("GPU busy, nvidia-smi", theirs["gpu"], "%")
    run.figure("GPU memory, top", ours["gpu_memory"], "MiB")
    run.figure("GPU memory, nvidia-smi", theirs["gpu_memory"], "MiB")
    used = (shown.get("used") or {}).get("gpus")
    if used is not None:
        run.figure("GPUs used, show", used, "GPUs", "the mean of the whole run")
    apart = [
        f"{words}: {ours[name]:.0f} and {theirs[name]:.0f} {unit}"
        for name, words, unit, most in (
            ("gpu", "busy", "%", MOST_APART),
            ("gpu_memory", "memory", "MiB", MOST_MIB * max(1, len(query("uuid")))),
        )
        if abs(ours[name] - theirs[name]) > most
    ]
    if apart:
        raise RuntimeError(f"top and nvidia-smi differ: {'; '.join(apart)}")
    run.finding("top's figures of the GPUs are those of nvidia-smi.")
