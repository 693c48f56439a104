"""A Ray run, `jobs/vit-ray`: the head alone against the head with one and two CPU workers.

    python -m benchmarks.ray_gang [--python PY] [--head-cpus N --worker-cpus N] [--steps N]

The head has the first cores of this machine and the workers share those that are left, so that a
worker adds cores: on two cores one each. With `--head-cpus 4` and `--worker-cpus 16` beside a GPU
it is the case of the classic example, which claims 23 % better price per step. Trust the share of
time without data and the rows of each node; the seconds are those of a machine that does other
work, too. The supervisors are started here without AWS Batch.

The default interpreter is that of the job's environment on `local`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lenet import ROOT, interpreter

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
) -> "tuple[dict[str, Any], float]":
    """The report of one training, and the seconds that all of it took."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        place, since = Path(folder), time.monotonic()
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
            took = time.monotonic() - since
            if code != 0:
                raise RuntimeError((place / "head" / "log").read_text(errors="replace")[-2000:])
            return json.loads((place / "head" / "report.json").read_text()), took
        finally:
            for each in members:
                if each.poll() is None:
                    each.terminate()
                each.wait()


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(description="A Ray gang with 0, 1 and 2 CPU workers.")
    parser.add_argument("--python", type=Path, help="an interpreter with Ray and PyTorch")
    parser.add_argument("--head-cpus", type=int, default=1)
    parser.add_argument("--worker-cpus", type=int, default=0, help="of all workers; 0: the rest")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    python = options.python or interpreter("ray")
    cores = sorted(os.sched_getaffinity(0))
    head, rest = cores[: options.head_cpus], cores[options.head_cpus :]
    rest = rest[: options.worker_cpus or len(rest)]
    alone: dict[str, Any] = {}
    print(
        f"{'workers':>7}  {'step ms':>8}  {'waited':>6}  {'faster':>6}  {'$/1000':>7}  rows, all s"
    )
    for workers in WORKERS if rest else WORKERS[:1]:
        told, took = run(python, workers, head, rest, options.steps)
        alone = alone or told
        rows = "/".join(str(node["rows"]) for node in told["nodes"])
        print(
            f"{workers:>7}  {1000 * told['step_seconds']:>8.0f}  {told['data_wait']:>4.0f} %  "
            f"{alone['step_seconds'] / told['step_seconds']:>5.2f}x  "
            f"{told['dollars_per_1000_steps']:>7.4f}  {rows}, {took:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
