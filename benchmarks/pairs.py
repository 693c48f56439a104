"""Run two commands in turn: the ratio of each pair holds while the speed of the machine drifts."""

import os
import resource
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.rows import Row, paired


class Sample(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, user and system, of the process and its children


Pairs = list[tuple[Sample, Sample]]  # ours, theirs


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
    pairs: int,
) -> Pairs:
    """Run both in turn, after one of each that is not counted."""
    sample(ours, environ, folder)
    sample(floor, environ, folder)
    return [(sample(ours, environ, folder), sample(floor, environ, folder)) for _ in range(pairs)]


def rows(
    name: str, measured: str, found: Pairs, *, beside: str, goal: float | None = None
) -> Iterator[Row]:
    """Their wall time, and their processor time, which other programs disturb less."""
    walls = [(ours.wall * 1000, theirs.wall * 1000) for ours, theirs in found]
    cpus = [(ours.cpu * 1000, theirs.cpu * 1000) for ours, theirs in found]
    yield paired(name, measured, "ms", walls, beside=beside, goal=goal)
    yield paired(f"{name}.cpu", f"{measured}: CPU time", "ms", cpus, beside=beside)
