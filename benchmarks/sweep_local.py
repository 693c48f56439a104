"""What a sweep costs on this machine: 1,000 trials of a program that takes 20 ms, random search.

Compared with a bare pool of processes, which is the lower bound and keeps nothing, with Optuna
(processes that share a journal) and Ray Tune. All run the same program, as many at a time as there
are CPUs, and are timed from the command's start to its end. The pool runs before and after each,
and the ratio is to the mean of the two. Ray Tune needs more than a second a trial, so it runs a
tenth.

`BATCHML_BENCH_TRIALS` is the number of trials (1,000 unless set). `BATCHML_BENCH_PEERS` names a
Python that has `optuna` and `ray[tune]`; without it their rows are left out.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home

TRIALS = int(os.environ.get("BATCHML_BENCH_TRIALS", "1000"))
PEERS = os.environ.get("BATCHML_BENCH_PEERS", "")
GOAL = 2

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


def main() -> None:
    slots = os.cpu_count() or 1
    print(f"{TRIALS} trials of 20 ms, {slots} at a time; load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = _write(folder, slots)
        environ = {"BATCHML_HOME": str(folder / "home")}

        def again() -> float:
            return _peer(sys.executable, "pool", slots, program)

        try:
            run_sweep(folder, environ, "first.toml")  # the environment is made, the server runs
            floor = again()
            for row in _rows(folder, environ, slots, program):
                floor = _tell(row, floor, again)
        finally:
            control.stop_server(Home(folder / "home"), SystemClock())


class Row(NamedTuple):
    label: str
    trials: int
    run: Callable[[], float]  # seconds
    goal: str = ""


def _rows(folder: Path, environ: Mapping[str, str], slots: int, program: str) -> list[Row]:
    def peer(label: str, way: str, trials: int) -> Row:
        return Row(label, trials, lambda: _peer(PEERS, way, slots, program, trials))

    rows = [
        Row("batchml sweep", TRIALS, lambda: run_sweep(folder, environ, "sweep.toml"), f"x{GOAL}")
    ]
    for row, package in (
        (peer("Optuna", "optuna", TRIALS), "optuna"),
        (peer("Ray Tune", "ray", max(1, TRIALS // 10)), "ray.tune"),
    ):
        if _has(package):
            rows.append(row)
        else:
            print(f"{row.label:<14} left out: BATCHML_BENCH_PEERS names no Python that has it")
    return rows


def _tell(row: Row, before: float, again: Callable[[], float]) -> float:
    """Run a row and print it; how long the floor took after it."""
    took, after = row.run() / row.trials, again()
    floor = (before + after) / 2 / TRIALS
    print(
        f"{row.label:<14} {row.trials:6} trials   {took * 1000:7.1f} ms a trial   "
        f"a bare pool {floor * 1000:6.1f} ms   x{took / floor:.2f}"
        + (f"   goal {row.goal}" if row.goal else ""),
        flush=True,
    )
    return after


def _write(folder: Path, slots: int) -> str:
    """The project; the path of its program."""
    job = folder / "jobs" / "short"
    job.mkdir(parents=True)
    (job / "job.toml").write_text(_JOB)
    (job / "train.py").write_text(_PROGRAM)
    write_sweep(folder / "first.toml", "short", 2 * slots, slots)
    write_sweep(folder / "sweep.toml", "short", TRIALS, slots)
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


def _peer(python: str, way: str, slots: int, program: str, trials: int = TRIALS) -> float:
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
    if not PEERS:
        return False
    words = [PEERS, "-c", f"import {package}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
