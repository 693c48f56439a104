"""What a job that does nothing costs: an array of them, from submission to the last child's end.

Compared with GNU parallel, task-spooler and a bare loop around posix_spawn, all with two jobs at a
time. Of these only the embedded AWS Batch keeps its jobs and their results through kill -9 and a
power cut, and gives each child limits, a log and a folder of its own.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.rows import Finding, LeftOut, paired
from benchmarks.running import main

CHILDREN, ROUNDS = 300, 3
SLOTS = 2
_LIMIT = 600.0  # seconds for one run

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


Way = Callable[[int], float]  # number of children -> ms of each


def measure(full: bool) -> Iterator[Finding]:
    count = 10_000 if full else CHILDREN
    with _Embedded() as embedded:
        ways: dict[str, Way] = {
            "loop": _spawn_loop, "plain": embedded.plain, "runtime": embedded.with_runtime,
        }  # fmt: skip
        for name, program, way in (
            ("tsp", "tsp", _task_spooler), ("parallel", "parallel", _gnu_parallel),
        ):  # fmt: skip
            if shutil.which(program):
                ways[name] = way
            else:
                yield LeftOut(name=f"array/{name}", why=f"{program} is not installed")
        rounds = [{name: way(count) for name, way in ways.items()} for _ in range(ROUNDS)]
    for name, ours, theirs, beside, goal in (
        ("plain", "plain", "loop", "a posix_spawn loop", None),
        ("plain_tsp", "plain", "tsp", f"task-spooler -S {SLOTS}", 1.0),
        ("runtime", "runtime", "loop", "a posix_spawn loop", None),
        ("runtime_parallel", "runtime", "parallel", f"GNU parallel -j{SLOTS}", 1.0),
    ):
        if theirs in ways:
            by = "boto3, without the runtime" if ours == "plain" else "batchml submit --wait"
            yield paired(
                f"array/{name}", f"an array of {count:,} times true, by {by}", "ms a child",
                [(each[ours], each[theirs]) for each in rounds], beside=beside, goal=goal,
            )  # fmt: skip


def _timed(count: int, run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / count * 1000


def _command(
    words: list[str],
    stdin: bytes = b"",
    environ: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> None:
    """Raises CalledProcessError."""
    subprocess.run(
        words, input=stdin, check=True, env={**os.environ, **(environ or {})}, cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _spawn_loop(count: int) -> float:
    words = [sys.executable, "-I", "-S", "-c", _SPAWN.format(count=count)]
    return _timed(count, lambda: _command(words))


def _gnu_parallel(count: int) -> float:
    lines = b"true\n" * count
    return _timed(count, lambda: _command(["parallel", f"-j{SLOTS}"], lines))


def _task_spooler(count: int) -> float:
    """Submitted by its own command, one process a job, which is how it is used."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {"TS_SOCKET": f"{folder}/socket", "TMPDIR": folder, "TS_MAXFINISHED": "10"}
        _command(["tsp", "-S", str(SLOTS)], environ=environ)
        script = f"i=0; while [ $i -lt {count} ]; do tsp -n true; i=$((i+1)); done; tsp -w"
        try:
            return _timed(count, lambda: _command(["sh", "-c", script], environ=environ))
        finally:
            _command(["tsp", "-K"], environ=environ)


class _Embedded:
    """The server, with runners that are ready, as in daily use."""

    def __enter__(self) -> "_Embedded":
        self._folder = tempfile.TemporaryDirectory()
        self._home = Home(Path(self._folder.name) / "home")
        endpoint = control.ensure_server(self._home, SystemClock())
        self._batch = _client(self._home, endpoint.url)
        self._definition = _define(self._batch)
        self.plain(50)
        self.with_runtime(2 * SLOTS)
        return self

    def __exit__(self, *_: object) -> None:
        control.stop_server(self._home, SystemClock())
        self._folder.cleanup()

    def plain(self, count: int) -> float:
        return _timed(count, lambda: _run(self._batch, self._definition, count))

    def with_runtime(self, count: int) -> float:
        batchml = str(Path(sys.executable).parent / "batchml")
        words = [batchml, "submit", "--wait", "--array", str(count), "--", "true"]
        environ = {"BATCHML_HOME": str(self._home.root)}
        return _timed(count, lambda: _command(words, environ=environ, folder=self._folder.name))


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
    main(measure)
