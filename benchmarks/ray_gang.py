"""A Ray run, `jobs/vit-ray`: the head alone against the head with one and two CPU workers.

The head has the first core of this machine and the workers share those that are left, so that a
worker adds cores: on two cores one each. Trust the share of time without data; the seconds are
those of a machine that does other work, too. The supervisors are started here without AWS Batch.

The interpreter is that of the job's environment on `local`.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lenet import ROOT, interpreter
from benchmarks.rows import Finding, LeftOut, paired
from benchmarks.running import main

JOB = ROOT / "jobs" / "vit-ray"
WORKERS = (0, 1, 2)
PRICES = "head=1.408,worker=0.816"  # dollars an hour: a g5.xlarge and a c5.4xlarge
LIMIT = 900.0  # seconds for one run


def start(
    python: Path, place: Path, name: str, cpus: Sequence[int], plan: Mapping[str, Any],
    command: Sequence[str], more: Mapping[str, str],
) -> "subprocess.Popen[bytes]":  # fmt: skip
    """The supervisor of one node, on these cores."""
    folder = place / name
    folder.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "BATCHML_OWN_PYTHONPATH": str(ROOT),
        "BATCHML_LAUNCH": json.dumps({"kind": "ray", "start_within": 120.0, **plan}),
        "BATCHML_GANG_TOKEN": "0" * 32,
        "BATCHML_GANG_KEY": "bench",
        "BATCHML_WORKSPACE": str(place),
        "BATCHML_ENDPOINT_URL": "http://127.0.0.1:9",  # nobody: there is no queue to clear
        "BATCHML_TASK": f"{place}/{name}",
        "BATCHML_VCPUS": str(len(cpus)),
        "BATCHML_OUTPUT_DIR": str(folder),
        "BATCHML_CHECKPOINT_DIR": str(folder),
        **more,
    }
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cpus)), str(python), "-m",
             "batchml.runtime.nodes.ray.main", "--", *command],
            env=environ, cwd=JOB, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def run(
    python: Path, workers: int, head: Sequence[int], rest: Sequence[int], steps: int
) -> dict[str, Any]:
    """The report of one training."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        place = Path(folder)
        group = {"name": "cpu", "size": workers, "least": workers, "job_name": "w", "queue": "q"}
        program = [str(python), "train.py", "--steps", str(steps), "--prices", PRICES]
        plan = {"groups": [group] if workers else []}
        members = [start(python, place, "head", head, plan, program, {"BATCHML_KEY": "h"})]
        for number in range(workers):
            own = {"BATCHML_KEY": "w", "AWS_BATCH_JOB_ARRAY_INDEX": str(number)}
            share = rest[number::workers] or rest
            members.append(
                start(python, place, f"worker-{number}", share, {"role": "worker"}, [], own)
            )
        try:
            code = members[0].wait(LIMIT)
            if code != 0:
                raise RuntimeError((place / "head" / "log").read_text(errors="replace")[-2000:])
            report: dict[str, Any] = json.loads((place / "head" / "report.json").read_text())
            return report
        finally:
            for each in members:
                if each.poll() is None:
                    each.terminate()
                each.wait()


def measure(full: bool) -> Iterator[Finding]:
    python, steps = interpreter("ray"), 60 if full else 40
    cores = sorted(os.sched_getaffinity(0))
    head, rest = cores[:1], cores[1:]
    if not rest:
        yield LeftOut(name="ray_gang", why="workers need a second core")
        return
    told = {workers: run(python, workers, head, rest, steps) for workers in WORKERS}
    for workers in WORKERS[1:]:
        measured = f"a step of vit-ray with {workers} workers, {steps} steps"
        pair = (1000 * told[workers]["step_seconds"], 1000 * told[0]["step_seconds"])
        yield paired(
            f"ray_gang/step_{workers}", measured, "ms", [pair], beside="the head alone", goal=1
        )
        waits = (told[workers]["data_wait"], told[0]["data_wait"])
        yield paired(
            f"ray_gang/wait_{workers}", f"{measured}: its time without data", "%", [waits],
            beside="the head alone", goal=1,
        )  # fmt: skip


if __name__ == "__main__":
    main(measure)
