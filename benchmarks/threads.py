"""Whether a sweep of runs that compute with threads needs them set by hand: 24 trials of one vCPU.

The trials multiply matrices with NumPy, which starts a thread for each processor that it finds. The
same sweep runs in turn with nothing set, with one thread set by hand in `[env]`, and with a thread
for each processor of the machine. The ratios are those to the sweep by hand of the same round.

`BATCHML_BENCH_PAIRS` is the number of rounds (5 unless set).
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home

ROUNDS = int(os.environ.get("BATCHML_BENCH_PAIRS", "5"))
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
    print(f"{TRIALS} trials, {slots} at a time; load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = {"BATCHML_HOME": str(folder / "home")}
        for job, threads in (("by-hand", 1), ("unset", 0), ("machine", slots)):
            _write(folder, job, threads, slots)
        try:
            _sweep(folder, environ, "first")  # the environment is made, the server runs
            taken: dict[str, list[float]] = {"unset": [], "by-hand": [], "machine": []}
            for _ in range(ROUNDS):
                for job, seconds in taken.items():
                    seconds.append(_sweep(folder, environ, job))
        finally:
            control.stop_server(Home(folder / "home"), SystemClock())
    hand = taken["by-hand"]
    for job, label, goal in (
        ("unset", "set by batchml", f"   goal x{GOAL}"),
        ("by-hand", "set by hand", ""),
        ("machine", "one for each processor", ""),
    ):
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(taken[job], hand, strict=True)
        )
        took = statistics.median(taken[job])
        print(f"threads {label:<23} {took:6.1f} s   x{ratio:.2f}{goal}", flush=True)


def _write(folder: Path, name: str, threads: int, slots: int) -> None:
    """A job and the sweep of it, and one of a few trials for the first job."""
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    env = [f'{each}_NUM_THREADS = "{threads}"' for each in _THREADS] if threads else []
    (job / "job.toml").write_text(_JOB.format(env="\n".join(env)))
    (job / "requirements.txt").write_text("numpy\n")
    (job / "train.py").write_text(_PROGRAM)
    (folder / f"{name}.toml").write_text(_SWEEP.format(job=name, trials=TRIALS, slots=slots))
    first = folder / "first.toml"
    if not first.exists():
        first.write_text(_SWEEP.format(job=name, trials=slots, slots=slots))


def _sweep(folder: Path, environ: Mapping[str, str], name: str) -> float:
    """Run a sweep; its seconds. Raises RuntimeError with the command's last words if it fails."""
    words = [str(Path(sys.executable).parent / "batchml"), "sweep", f"{name}.toml"]
    start = time.perf_counter()
    done = subprocess.run(
        words, cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=MOST,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
