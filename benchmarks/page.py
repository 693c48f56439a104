"""`python -m benchmarks.page`: docs/performance.md and its pictures, from the kept results. Pure
but for `main`.

The page shows the results of one kind of machine: those with the newest row.
"""

import sys
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from pathlib import Path

from benchmarks import results
from benchmarks.results import KeptRow, Results
from benchmarks.rows import Curve, number

PAGE = results.ROOT / "docs" / "performance.md"
PICTURES = results.ROOT / "docs" / "performance"

# The curves of a picture begin with one of these.
GROUPS = {
    "Finished jobs in the store": ("finished",),
    "Queued jobs": ("queued",),
    "Children of an array": ("array",),
    "Dependencies: a chain, and a fan": ("chain", "fan"),
    "Log streams and lines": ("streams", "lines"),
    "Runs in a person's history": ("history",),
    "Trials and reports of a sweep": ("suggestion", "ledger", "report", "controller"),
    "Files of a workspace archive": ("files",),
    "Nodes of a gang": ("nodes",),
    "Environments and images": ("environments", "images"),
}

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 250, 150, 44, 26, 22
_COLUMNS = 3
_STYLE = (
    "text{font:10px sans-serif;fill:#444}.t{font-weight:bold;font-size:11px}"
    ".o{fill:none;stroke:#1565c0;stroke-width:2}.p{fill:none;stroke:#ef6c00;stroke-dasharray:4 3}"
    ".g{stroke:#ddd}.d{fill:#1565c0}"
)


def groups(found: Results) -> dict[str, list[Curve]]:
    """The curves of each picture, by its title; those of no group come last."""
    curves = [kept.curve for kept in found.curves.values()]
    left = {curve.name: curve for curve in curves}
    drawn: dict[str, list[Curve]] = {}
    for title, starts in GROUPS.items():
        names = [name for name in left if name.partition("/")[2].startswith(starts)]
        if names:
            drawn[title] = [left.pop(name) for name in names]
    return drawn | ({"Others": [*left.values()]} if left else {})


def file_of(title: str) -> str:
    return "-".join(word.strip(":,'").lower() for word in title.split()[:2]) + ".svg"


def picture(curves: Sequence[Curve]) -> str:
    """A panel for each curve, three in a row, with logarithmic axes."""
    rows = -(-len(curves) // _COLUMNS)
    columns = min(_COLUMNS, len(curves))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * _WIDTH}" '
        f'height="{rows * _HEIGHT}"><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="#fff"/>'
    ]
    for place, curve in enumerate(curves):
        row, column = divmod(place, _COLUMNS)
        x, y = column * _WIDTH, row * _HEIGHT
        parts.append(f'<g transform="translate({x},{y})">{"".join(_panel(curve))}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(curve: Curve) -> Iterator[str]:
    lines = [("o", curve.points), *(("p", points) for points in curve.peers.values())]
    sizes = [size for _, points in lines for size, _ in points]
    costs = [cost for _, points in lines for _, cost in points if cost > 0] or [1.0]
    low, high = floor(log10(min(costs))), ceil(log10(max(costs)))
    high = max(high, low + 1)
    first, last = log10(min(sizes)), max(log10(max(sizes)), log10(min(sizes)) + 1)

    def x(size: float) -> float:
        return _LEFT + (log10(size) - first) / (last - first) * (_WIDTH - _LEFT - 20)

    def y(cost: float) -> float:
        share = (log10(max(cost, 10.0**low)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    yield f'<text class="t" x="6" y="12">{escape(curve.title)}</text>'
    yield f'<text x="6" y="23">{escape(curve.unit)}</text>'
    for power in range(low, high + 1):
        at = y(10.0**power)
        yield f'<path class="g" d="M{_LEFT} {at:.0f}H{_WIDTH - 20}"/>'
        label = _short(10.0**power)
        yield f'<text x="{_LEFT - 4}" y="{at + 3:.0f}" text-anchor="end">{label}</text>'
    for size in sorted({*sizes}):
        yield (
            f'<text x="{x(size):.0f}" y="{_HEIGHT - 9}" text-anchor="middle">{_short(size)}</text>'
        )
    for kind, points in lines:
        path = " ".join(f"{x(size):.0f},{y(cost):.0f}" for size, cost in sorted(points))
        yield f'<polyline class="{kind}" points="{path}"/>'
    for size, cost in curve.points:
        yield f'<circle class="d" cx="{x(size):.0f}" cy="{y(cost):.0f}" r="2.5"/>'
    for name, points in curve.peers.items():
        size, cost = max(points)
        above = y(cost) - 4
        yield f'<text x="{x(size):.0f}" y="{above:.0f}" text-anchor="end">{escape(name)}</text>'


def _short(value: float) -> str:
    """1k, 100k, 0.01."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def page(found: Results) -> str:
    """The page as Markdown."""
    return "\n".join([*_head(found), *_curves(found), *_rows(found)]) + "\n"


def _head(found: Results) -> Iterator[str]:
    machine = found.machine
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield "# Performance"
    yield ""
    yield "`make bench` measures this page and writes it with `python -m benchmarks.page`."
    yield (
        f"Machine: {machine.processor}, {machine.cpus} processors, {machine.memory_gib} GiB, "
        f"{machine.system}; {versions}."
    )
    yield "Trust ratios before times: ours and the other tool run in turn, on a machine that may"
    yield "do other work. *Spread* is the middle half of the pairs, for their median."
    yield ""


def _curves(found: Results) -> Iterator[str]:
    drawn = groups(found)
    if not drawn:
        return
    yield "## What a unit costs as there are more"
    yield "Both axes are logarithmic: a level line is a cost that does not grow. Blue is batchml,"
    yield "orange the other tool. *Grows* compares the largest size with the second smallest."
    yield ""
    for title, curves in drawn.items():
        yield f"### {title}"
        yield f"![{title}](performance/{file_of(title)})"
        yield ""
        yield "| | smallest | largest | grows | how it was measured |"
        yield "|---|---|---|---|---|"
        for curve in curves:
            (small, before), (large, after) = min(curve.points), max(curve.points)
            yield (
                f"| {curve.title} | {number(before)} {curve.unit} ({small:,}) | {number(after)} "
                f"({large:,} {curve.axis}) | x{number(curve.growth())} | {curve.how} |"
            )
        yield ""


def _rows(found: Results) -> Iterator[str]:
    kept = [each for each in found.rows.values() if each.row.name not in found.curves]
    if not kept:
        return
    yield "## Beside other tools"
    yield ""
    yield "| measured | batchml | beside | ratio | spread | goal |"
    yield "|---|---|---|---|---|---|"
    for _, rows in groupby(kept, key=lambda each: each.row.module):
        for each in rows:
            if not each.row.name.endswith(".cpu"):
                yield _line(each)


def _line(kept: KeptRow) -> str:
    row = kept.row
    beside = f"{row.beside}: {number(row.theirs)}" if row.theirs is not None else ""
    ratio = f"x{number(row.ratio)}" if row.ratio is not None else ""
    spread = f"{row.spread:.0%}" if row.spread is not None else ""
    goal = "" if row.goal is None else ("at most " if row.smaller else "at least ")
    goal += "" if row.goal is None else number(row.goal)
    cells = (row.measured, f"{number(row.ours)} {row.unit}", beside, ratio, spread, goal)
    return f"| {' | '.join(cells)} |"


def newest(folder: Path) -> Results | None:
    """The results with the newest row, of all kinds of machines."""
    found = [results.from_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    return max(found, key=lambda each: max((row.date for row in each.rows.values()), default=""),
               default=None)  # fmt: skip


def main() -> None:
    found = newest(results.FOLDER)
    if found is None:
        sys.exit(f"{results.FOLDER} has no results: run `make bench`")
    write(found)


def write(found: Results) -> None:
    PAGE.write_text(page(found), "utf-8")
    PICTURES.mkdir(exist_ok=True)
    for path in PICTURES.glob("*.svg"):
        path.unlink()
    for title, curves in groups(found).items():
        (PICTURES / file_of(title)).write_text(picture(curves), "utf-8")


if __name__ == "__main__":
    main()
