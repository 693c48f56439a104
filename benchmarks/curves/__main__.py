"""`python -m benchmarks.curves [--full]`: all curves; each is a row, too, by how much it grows."""

import gc
from collections.abc import Callable, Iterator
from math import log

from benchmarks.curves import files, gang, jobs, logs, person, sweeps
from benchmarks.rows import Curve, Finding, Row
from benchmarks.running import main

CURVES: tuple[Callable[[bool], Iterator[Curve]], ...] = (
    jobs.finished_jobs,
    jobs.queued_jobs,
    jobs.array_children,
    jobs.dependencies,
    logs.streams,
    logs.lines,
    sweeps.suggestions,
    sweeps.ledger,
    sweeps.report,
    sweeps.controller,
    files.files,
    gang.nodes,
    person.history,
    person.environments,
)


def row(curve: Curve) -> Row:
    """The cost at the largest size beside that at a small one; n log n is the goal."""
    points = sorted(curve.points)
    (small, before), (large, after) = points[min(1, len(points) - 2)], points[-1]
    return Row(
        name=curve.name, measured=f"{curve.title}, {large:,} {curve.axis}", unit=curve.unit,
        ours=after, beside=f"with {small:,}", theirs=before, ratio=curve.growth(),
        spread=1.0,  # two points, each measured once: only a doubling counts
        goal=log(large) / log(small),
    )  # fmt: skip


def measure(full: bool) -> Iterator[Finding]:
    gc.disable()  # a search for garbage would be counted where it happens to begin
    for draw in CURVES:
        for curve in draw(full):
            yield curve
            yield row(curve)
        gc.collect()


if __name__ == "__main__":
    main(measure)
