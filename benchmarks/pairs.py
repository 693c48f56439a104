"""Run two commands in turn: the ratio of each pair holds while the speed of the machine drifts."""

import os
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, user and system, of the process and its children


class Compared(NamedTuple):
    """Medians of both, in seconds, and the median of the ratios pair by pair."""

    ours: float
    floor: float
    wall_ratio: float
    cpu_ratio: float


def sample(command: Sequence[str], environ: Mapping[str, str], folder: str) -> Sample:
    """Run a command once. Raises CalledProcessError when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        command, env={**os.environ, **environ}, cwd=folder, check=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall, cpu)


def compare(
    ours: Sequence[str],
    floor: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: str,
    pairs: int = 15,
) -> Compared:
    """Run both in turn, after one of each that is not counted."""
    sample(ours, environ, folder)
    sample(floor, environ, folder)
    taken = [(sample(ours, environ, folder), sample(floor, environ, folder)) for _ in range(pairs)]
    return Compared(
        statistics.median(a.wall for a, _ in taken),
        statistics.median(b.wall for _, b in taken),
        statistics.median(a.wall / b.wall for a, b in taken),
        statistics.median(a.cpu / b.cpu for a, b in taken),
    )


def row(name: str, beside: str, found: Compared, goal: str) -> str:
    return (
        f"{name:<28} {found.ours * 1000:7.1f} ms   beside {beside:<28} {found.floor * 1000:7.1f} ms"
        f"   wall x{found.wall_ratio:.2f}   cpu x{found.cpu_ratio:.2f}   goal {goal}"
    )
