"""Which way a sweep goes onto AWS Batch. Decided once, before it starts. Pure."""

from enum import StrEnum

from msgspec import Struct

from batchml.model.sweep import MODELS, SweepSpec, count_points


class Shape(StrEnum):
    ARRAY = "array"  # all trials at once; a consumable resource holds their width
    RUNGS = "rungs"  # one array for each rung, each waiting for the one before it
    WAVES = "waves"  # a controller plans a wave whenever places are free


class Shaped(Struct, frozen=True):
    shape: Shape
    why: str  # in words, for people


def shaped(spec: SweepSpec, *, hourly: float | None, timeout: float | None) -> Shaped:
    """The shape of a sweep whose trials cost `hourly` USD and end after `timeout` seconds.

    Without a controller nobody watches the money: that needs a worst case within the limit.
    """
    if spec.early_stop.method == "halving":
        return Shaped(Shape.RUNGS, "each rung is one array; none needs this computer")
    if spec.method in MODELS:
        return Shaped(Shape.WAVES, f"{spec.method} learns from each result what to try next")
    if spec.early_stop.resume:
        return Shaped(Shape.WAVES, "trials end at rungs, and the best of them go on")
    many = countable(spec)
    if many is None:
        return Shaped(Shape.WAVES, "nothing says how many trials there will be")
    if spec.limits.cost is not None and not fits(spec, many, hourly, timeout):
        return Shaped(Shape.WAVES, "the cost is checked before each wave")
    return Shaped(Shape.ARRAY, "all trials are submitted at once; none needs this computer")


def countable(spec: SweepSpec) -> int | None:
    """How many trials there will be at most; None when only other limits end it."""
    limit = spec.limits.trials
    points = len(spec.points) if spec.method == "list" else None
    if spec.method == "grid":
        points = count_points(spec.space)
    known = [each for each in (limit, points) if each is not None]
    return min(known, default=None)


def fits(spec: SweepSpec, many: int, hourly: float | None, timeout: float | None) -> bool:
    """True when the cost limit holds even if every trial runs into its timeout."""
    if spec.limits.cost is None or hourly is None:
        return True
    return timeout is not None and many * timeout / 3600 * hourly <= spec.limits.cost
