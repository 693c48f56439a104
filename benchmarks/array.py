"""What a job that does nothing costs: an array of them, from submission to the last child's end.

Compared with GNU parallel, task-spooler and a bare loop around posix_spawn, all with two jobs at a
time. Of these only the embedded AWS Batch keeps its jobs and their results through kill -9 and a
power cut, and gives each child limits, a log and a folder of its own.

`BATCHML_BENCH_CHILDREN` is the number of children (10,000 unless set).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home

CHILDREN = int(os.environ.get("BATCHML_BENCH_CHILDREN", "10000"))
SLOTS = 2
GOAL = 1.7  # ms of wall time for a child
_LIMIT = 600.0  # seconds for one run
_LARGEST_ARRAY = 10_000

_SPAWN = f"""
import os
left, running = {{count}}, 0
while left or running:
    while left and running < {SLOTS}:
        os.posix_spawn("/bin/true", ["true"], os.environ)
        left, running = left - 1, running + 1
    os.wait()
    running -= 1
"""


class Taken(NamedTuple):
    """Of one child, in ms: wall time, and the CPU time of the whole machine."""

    wall: float
    cpu: float


def main() -> None:
    rows: list[tuple[str, Taken]] = []
    for name, run in (
        ("posix_spawn loop", _spawn_loop),
        ("embedded AWS Batch, one array", _array),
        (f"task-spooler (tsp -S {SLOTS})", _task_spooler),
        (f"GNU parallel -j{SLOTS}", _gnu_parallel),
    ):
        taken = run(CHILDREN)
        if taken is None:
            print(f"{name:<32} not installed", flush=True)
            continue
        rows.append((name, taken))
        floor = rows[0][1]
        print(
            f"{name:<32} {taken.wall:7.2f} ms a child  cpu {taken.cpu:6.2f} ms   "
            f"wall x{taken.wall / floor.wall:.2f} of the loop"
            + (f"   goal {GOAL} ms" if name.startswith("embedded") else ""),
            flush=True,
        )


def _measure(count: int, run: Callable[[], object]) -> Taken:
    cpu, start = _machine_cpu(), time.perf_counter()
    run()
    wall = time.perf_counter() - start
    return Taken(wall / count * 1000, (_machine_cpu() - cpu) / count * 1000)


def _machine_cpu() -> float:
    """Seconds that all processes of this machine have had: children leave no other trace."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system = map(int, file.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _command(
    words: list[str], stdin: bytes = b"", environ: Mapping[str, str] | None = None
) -> None:
    env = {**os.environ, **(environ or {})}
    subprocess.run(words, input=stdin, check=True, stdout=subprocess.DEVNULL, env=env)


def _spawn_loop(count: int) -> Taken:
    words = [sys.executable, "-I", "-S", "-c", _SPAWN.format(count=count)]
    return _measure(count, lambda: _command(words))


def _gnu_parallel(count: int) -> Taken | None:
    if shutil.which("parallel") is None:
        return None
    lines = b"true\n" * count
    return _measure(count, lambda: _command(["parallel", f"-j{SLOTS}"], lines))


def _task_spooler(count: int) -> Taken | None:
    """Submitted by its own command, one process a job, which is how it is used."""
    program = shutil.which("tsp")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        environ = {"TS_SOCKET": f"{folder}/socket", "TMPDIR": folder, "TS_MAXFINISHED": "10"}
        _command([program, "-S", str(SLOTS)], environ=environ)
        script = f"i=0; while [ $i -lt {count} ]; do {program} -n true; i=$((i+1)); done; tsp -w"

        def run() -> None:
            _command(["sh", "-c", script], environ=environ)

        try:
            return _measure(count, run)
        finally:
            _command([program, "-K"], environ=environ)


def _array(count: int) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        clock = SystemClock()
        endpoint = control.ensure_server(home, clock)
        try:
            batch = _client(home, endpoint.url)
            definition = _define(batch)
            _run(batch, definition, min(count, 50))  # the runners are there, as in daily use
            sizes = [_LARGEST_ARRAY] * (count // _LARGEST_ARRAY) + [count % _LARGEST_ARRAY]

            def run() -> None:
                for size in filter(None, sizes):
                    _run(batch, definition, max(size, 2))

            return _measure(count, run)
        finally:
            control.stop_server(home, clock)


def _client(home: Home, url: str) -> Any:
    from batchml.aws.session import Access, Session

    keys = home.keys()
    access = Access(
        "us-east-1",
        endpoint=url,
        access_key_id=keys.access_key_id,
        secret_access_key=keys.secret_access_key,
    )
    return Session(access).client("batch")


def _define(batch: Any) -> str:
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
    batch.register_job_definition(
        jobDefinitionName="nothing",
        type="container",
        containerProperties={"image": "any", "command": ["true"], "resourceRequirements": needs},
    )
    return "nothing"


def _run(batch: Any, definition: str, count: int) -> None:
    """One array, to its end. Raises RuntimeError unless every child succeeded."""
    made: Mapping[str, Any] = batch.submit_job(
        jobName="nothing",
        jobQueue="default",
        jobDefinition=definition,
        arrayProperties={"size": count},
    )
    end = time.monotonic() + _LIMIT
    while time.monotonic() < end:
        (job,) = batch.describe_jobs(jobs=[made["jobId"]])["jobs"]
        if job["status"] in ("SUCCEEDED", "FAILED"):
            if job["status"] == "FAILED":
                raise RuntimeError(f"the array failed: {job.get('statusReason')}")
            return
        time.sleep(0.05)
    raise RuntimeError(f"the array did not end within {_LIMIT} s")


if __name__ == "__main__":
    main()
