"""What a benchmark finds, as values: rows and curves; and what counts as worse. Pure.

A row is compared by its ratio to another tool or to a lower bound, measured in turn with ours: it
holds while the speed of the machine drifts. A row that is compared with nothing is compared by
its own value, which moves with whatever else the machine does, so it has to change more.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import log
from statistics import median, quantiles
from typing import Literal

from msgspec import Struct

PAIRED_NOISE = 0.10  # the least relative change that counts, of a ratio
ALONE_NOISE = 0.35  # and of a value that is compared with nothing

Verdict = Literal["worse", "better", "same", "new"]


class Row(Struct, frozen=True, kw_only=True, tag="row"):
    """One thing that was measured."""

    name: str  # MODULE/WHAT
    measured: str  # what is measured, with its sizes; rows that differ here are not compared
    unit: str  # of `ours` and `theirs`
    ours: float
    beside: str = ""  # what it is compared with; empty: with nothing
    theirs: float | None = None
    ratio: float | None = None  # ours to theirs; the median of the pairs
    spread: float | None = None  # from the first to the third quartile, for the median
    goal: float | None = None  # of the ratio where there is one, else of `ours`
    smaller: bool = True  # is better

    @property
    def module(self) -> str:
        return self.name.partition("/")[0]

    @property
    def value(self) -> float:
        """What the goal is about, and what two runs are compared by."""
        return self.ours if self.ratio is None else self.ratio

    @property
    def meets_goal(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.smaller else self.value >= self.goal


class Curve(Struct, frozen=True, kw_only=True, tag="curve"):
    """The cost of a unit at several sizes."""

    name: str
    title: str
    axis: str  # what grows
    unit: str  # of the costs
    how: str  # how it was measured
    points: list[tuple[int, float]]  # size, cost
    peers: dict[str, list[tuple[int, float]]] = {}
    whole: bool = False  # the cost of one act on all, which may grow as they do

    def growth(self) -> float:
        """How many times as much a unit costs at the largest size as at the second smallest. The
        smallest has the cost of a start in it."""
        points = sorted(self.points)
        first, last = points[min(1, len(points) - 2)], points[-1]
        each = [cost / size if self.whole else cost for size, cost in (first, last)]
        return each[1] / each[0] if each[0] else 1.0


class LeftOut(Struct, frozen=True, kw_only=True, tag="left out"):
    """Rows that were not measured, and why. A failure is an error of the benchmark itself."""

    name: str
    why: str
    failed: bool = False


Finding = Row | Curve | LeftOut


def spread_of(values: Sequence[float]) -> float | None:
    """From the first to the third quartile, for the median. None for fewer than three values."""
    if len(values) < 3 or median(values) == 0:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / median(values)


def paired(
    name: str, measured: str, unit: str, pairs: Sequence[tuple[float, float]], *, beside: str,
    goal: float | None = None, smaller: bool = True,
) -> Row:  # fmt: skip
    """A row of pairs (ours, theirs) that were measured in turn."""
    ratios = [ours / theirs for ours, theirs in pairs]
    ours, theirs = (median(side) for side in zip(*pairs, strict=True))
    return Row(
        name=name, measured=measured, unit=unit, ours=ours, beside=beside, theirs=theirs,
        ratio=median(ratios), spread=spread_of(ratios), goal=goal, smaller=smaller,
    )  # fmt: skip


def alone(
    name: str, measured: str, unit: str, values: Sequence[float], *,
    goal: float | None = None, smaller: bool = True,
) -> Row:  # fmt: skip
    """A row that is compared with nothing."""
    return Row(
        name=name, measured=measured, unit=unit, ours=median(values), spread=spread_of(values),
        goal=goal, smaller=smaller,
    )  # fmt: skip


def noise(row: Row) -> float:
    """The relative change that this row shows without a cause."""
    least = ALONE_NOISE if row.ratio is None else PAIRED_NOISE
    return max(least, row.spread if row.spread is not None else 2 * least)


def change(row: Row, before: Row) -> float:
    """How much a row got worse: the logarithm, below 0 where it got better."""
    if row.value <= 0 or before.value <= 0:  # less than the clock can tell
        return 0.0
    grown = log(row.value / before.value)
    return grown if row.smaller else -grown


def is_comparable(row: Row, before: Row) -> bool:
    return (row.measured, row.unit, row.beside) == (before.measured, before.unit, before.beside)


def verdict(row: Row, before: Row | None) -> Verdict:
    """Beside the last kept row of the same name: worse by more than the noise of the two?"""
    if before is None or not is_comparable(row, before):
        return "new"
    found, limit = change(row, before), log(1 + max(noise(row), noise(before)))
    return "worse" if found > limit else "better" if found < -limit else "same"


def worse_rows(rows: Iterable[Row], kept: Mapping[str, Row]) -> list[tuple[Row, Row]]:
    """The rows that got worse by more than their noise, each with the kept one; worst first."""
    found = [(row, kept[row.name]) for row in rows if verdict(row, kept.get(row.name)) == "worse"]
    return sorted(found, key=lambda pair: -change(*pair))


def is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Whether `ROWS=` names this row or its module; without names every row is wanted."""
    return not wanted or any(name == each or name.startswith(f"{each}/") for each in wanted)


# --- as text --------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


_Cells = tuple[str, str, str, str, str, str, str, str]


def table(rows: Sequence[Row], kept: Mapping[str, Row]) -> str:
    """All rows below each other, with the change since the last kept ones."""
    cells: list[_Cells] = [
        ("", "ours", "", "beside", "ratio", "spread", "goal", "since the last kept one")
    ]
    cells += [_cells(row, kept.get(row.name)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = (0, 2, 3, 7)
    lines = []
    for each in cells:
        words = [
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(each, widths, strict=True))
        ]
        lines.append("  ".join(words).rstrip())
    return "\n".join(lines)


def _cells(row: Row, before: Row | None) -> _Cells:
    found = verdict(row, before)
    since = (
        "new"
        if found == "new" or before is None
        else f"{row.value / before.value - 1:+.0%}"
        if before.value
        else ""
    )
    mark = {None: "", True: " met", False: " not met"}[row.meets_goal]
    sign = "" if row.goal is None else ("<=" if row.smaller else ">=") + number(row.goal) + mark
    beside = f"{number(row.theirs)} {row.beside}" if row.theirs is not None else ""
    return (
        row.name, number(row.ours), row.unit, beside,
        f"x{number(row.ratio)}" if row.ratio is not None else "",
        f"{row.spread:.0%}" if row.spread is not None else "", sign,
        since + (f" {found.upper()}" if found in ("worse", "better") else ""),
    )  # fmt: skip


def headline(rows: Sequence[Row], kept: Mapping[str, Row]) -> list[str]:
    """What is said at the top: each row that got worse, or that none did."""
    found = worse_rows(rows, kept)
    if not found:
        known = sum(verdict(row, kept.get(row.name)) != "new" for row in rows)
        return [f"No row got worse by more than its noise ({known} of {len(rows)} compared)."]
    return [
        f"WORSE: {row.name}: {row.measured}: {number(before.value)} -> {number(row.value)}"
        f"{'' if row.ratio is not None else ' ' + row.unit} "
        f"({row.value / before.value - 1:+.0%}, noise {max(noise(row), noise(before)):.0%})"
        for row, before in found
    ]
