"""The metrics of an array's children, `loss:3`, told together. Pure."""

from collections.abc import Mapping
from statistics import median

from msgspec import Struct

FEW = 4  # children whose values are shown one by one


class Spread(Struct, frozen=True):
    """How the last values of one metric are spread over the children that have it."""

    count: int
    least: float
    middle: float
    most: float


def by_child(metrics: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """Name -> child -> value, for metrics of children."""
    found: dict[str, dict[int, float]] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is not None:
            found.setdefault(name, {})[child] = value
    return found


def child_of(metric: str) -> tuple[str, int | None]:
    """`("loss", 3)` for `loss:3`; no child for another metric."""
    name, _, child = metric.rpartition(":")
    is_one = bool(name) and child.isascii() and child.isdecimal()
    return (name, int(child)) if is_one else (metric, None)


def spread(values: Mapping[int, float]) -> Spread:
    known = list(values.values())
    return Spread(len(known), min(known), median(known), max(known))


def metric_texts(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Each metric and its value; of many children how these are spread, at the first's place."""
    many = {name: each for name, each in by_child(metrics).items() if len(each) > FEW}
    found: dict[str, str] = {}
    for whole, value in metrics.items():
        name, child = child_of(whole)
        if child is None or name not in many:
            found[whole] = f"{value:g}"
        else:
            found.setdefault(name, _text(spread(many[name])))
    return list(found.items())


def _text(found: Spread) -> str:
    """`0.02 to 0.9, median 0.3, of 40 children`"""
    span = f"{found.least:.4g} to {found.most:.4g}, median {found.middle:.4g}"
    return f"{span}, of {found.count} children"
