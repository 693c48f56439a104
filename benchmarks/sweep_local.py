"""What a sweep costs on this machine: trials of a program that takes 20 ms, random search.

Compared with a bare pool of processes, which is the lower bound and keeps nothing, with Optuna
(processes that share a journal) and Ray Tune. All run the same program, as many at a time as there
are CPUs, and are timed from the command's start to its end, in turn with the pool. Ray Tune needs
more than a second a trial, so it runs a tenth.

`BATCHML_BENCH_PEERS` names a Python that has `optuna` and `ray[tune]` (this one unless set).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.rows import Finding, LeftOut, paired
from benchmarks.running import main

TRIALS, ROUNDS = 1000, 3
PEERS = os.environ.get("BATCHML_BENCH_PEERS", sys.executable)
GOAL = 1.25

_PROGRAM = """
import sys, time
time.sleep(0.02)
print("score=" + sys.argv[-1])
"""

_JOB = """
image = "python"
command = ["python", "-S", "train.py", "{params}"]
code = "."
[params]
lr = 0.1
"""

_SWEEP = """
job = "{job}"
goal = {{ max = "score" }}
method = "random"
[space]
lr = {{ log = [1e-4, 1e-1] }}
[limits]
trials = {trials}
parallel = {slots}
"""


def measure(full: bool) -> Iterator[Finding]:
    slots, trials = os.cpu_count() or 1, TRIALS if full else TRIALS // 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = _write(folder, slots, trials)
        environ = {"BATCHML_HOME": str(folder / "home")}
        measured = f"{trials:,} trials of 20 ms, {slots} at a time"

        def peer(way: str, python: str, count: int = trials) -> float:
            return _peer(python, way, slots, program, count) / count * 1000

        def compared(what: str, run: Callable[[], float], goal: float | None) -> Finding:
            pairs = [(run(), peer("pool", sys.executable)) for _ in range(ROUNDS)]
            return paired(
                f"sweep_local/{what}", f"{measured}, by {what}", "ms a trial", pairs,
                beside="a bare pool", goal=goal,
            )  # fmt: skip

        try:
            run_sweep(folder, environ, "first.toml")  # the environment is made, the server runs
            yield compared(
                "batchml", lambda: run_sweep(folder, environ, "sweep.toml") / trials * 1000, GOAL
            )
        finally:
            control.stop_server(Home(folder / "home"), SystemClock())
        few = trials // 10
        for way, package, count in (("optuna", "optuna", trials), ("ray", "ray.tune", few)):
            if _has(package):
                yield compared(way, partial(peer, way, PEERS, count), None)
            else:
                yield LeftOut(
                    name=f"sweep_local/{way}",
                    why=f"no {package} in the Python of BATCHML_BENCH_PEERS",
                )


def _write(folder: Path, slots: int, trials: int) -> str:
    """The project; the path of its program."""
    job = folder / "jobs" / "short"
    job.mkdir(parents=True)
    (job / "job.toml").write_text(_JOB)
    (job / "train.py").write_text(_PROGRAM)
    write_sweep(folder / "first.toml", "short", 2 * slots, slots)
    write_sweep(folder / "sweep.toml", "short", trials, slots)
    return str(job / "train.py")


def write_sweep(path: Path, job: str, trials: int, slots: int) -> None:
    """A random search of `lr` for the greatest `score`, `slots` trials at a time."""
    path.write_text(_SWEEP.format(job=job, trials=trials, slots=slots))


def run_sweep(
    folder: Path, environ: Mapping[str, str], file: str, limit: float | None = None
) -> float:
    """Run a sweep for `limit` seconds at most; its seconds. Raises as `_timed` does."""
    words = [str(Path(sys.executable).parent / "batchml"), "sweep", file]
    return _timed(words, str(folder), environ, limit)


def _peer(python: str, way: str, slots: int, program: str, trials: int) -> float:
    script = str(Path(__file__).parent / "sweep_peers.py")
    words = [python, "-I", script, way, str(trials), str(slots), program]
    return _timed(words, str(Path(program).parent), {})


def _timed(
    words: list[str], folder: str, environ: Mapping[str, str], limit: float | None = None
) -> float:
    """Seconds. Raises RuntimeError with the command's last words when it fails, TimeoutExpired."""
    start = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=limit,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return time.perf_counter() - start


def _has(package: str) -> bool:
    words = [PEERS, "-c", f"import {package}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main(measure)
