"""Whether a sweep of runs that compute with threads needs them set by hand: 24 trials of one vCPU.

The trials multiply matrices with NumPy, which starts a thread for each processor that it finds. The
same sweep runs in turn with nothing set, with one thread set by hand in `[env]`, and with a thread
for each processor of the machine. The ratios are those to the sweep by hand of the same round.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.rows import Finding, paired
from benchmarks.running import main
from benchmarks.sweep_local import run_sweep, write_sweep

ROUNDS = 5
TRIALS = 24
GOAL = 1.1
MOST = 600  # seconds of one sweep
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")

_PROGRAM = """
import sys, numpy
size = float(sys.argv[-1])
a = numpy.random.default_rng(0).standard_normal((384, 384)) / 20
for _ in range(80):
    a = numpy.tanh(a @ a)
print(f"score={size}")
"""

_JOB = """
command = ["python", "train.py", "{{params}}"]
code = "."
[params]
lr = 0.1
[resources]
vcpus = 1
memory = "512 MiB"
[env]
{env}
"""


def measure(full: bool) -> Iterator[Finding]:
    slots = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {"BATCHML_HOME": str(folder / "home")}
        for job, threads in (("by-hand", 1), ("unset", 0), ("machine", slots)):
            _write(folder, job, threads, slots)
        try:
            # The first sweep makes the environment, and the server runs from then on.
            run_sweep(folder, environ, "first.toml", MOST)
            taken: dict[str, list[float]] = {"unset": [], "by-hand": [], "machine": []}
            for _ in range(ROUNDS if full else 3):
                for job, seconds in taken.items():
                    seconds.append(run_sweep(folder, environ, f"{job}.toml", MOST))
        finally:
            control.stop_server(Home(folder / "home"), SystemClock())
    for job, label, goal in (
        ("unset", "set by batchml", GOAL), ("machine", "one for each processor", None),
    ):  # fmt: skip
        yield paired(
            f"threads/{job}", f"{TRIALS} trials with threads, {label}", "s",
            list(zip(taken[job], taken["by-hand"], strict=True)), beside="set by hand", goal=goal,
        )  # fmt: skip


def _write(folder: Path, name: str, threads: int, slots: int) -> None:
    """A job and the sweep of it, and one of a few trials for the first job."""
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    env = [f'{each}_NUM_THREADS = "{threads}"' for each in _THREADS] if threads else []
    (job / "job.toml").write_text(_JOB.format(env="\n".join(env)))
    (job / "requirements.txt").write_text("numpy\n")
    (job / "train.py").write_text(_PROGRAM)
    write_sweep(folder / f"{name}.toml", name, TRIALS, slots)
    if not (folder / "first.toml").exists():
        write_sweep(folder / "first.toml", name, slots, slots)


if __name__ == "__main__":
    main(measure)
