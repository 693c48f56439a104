"""What a sweep cannot be, even where each of its parts can (pure)."""

from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from msgspec.structs import replace

from batchml.model.run import MAX_ARRAY
from batchml.model.sweep import (
    Params,
    SweepSpec,
    count_points,
    draw,
    every_point,
    levels,
    satisfies,
)
from batchml.model.sweeplimits import MAX_TRIALS

MAX_GP = 500  # trials: an ask of a Gaussian process takes seconds beyond
MAX_SOBOL = 40  # parameters for which sweep/sobol.py has direction numbers
SAMPLES = 1000  # on which conditions are tried
ACCEPTED = SAMPLES // 100  # of them at least, or drawing points again would take for ever

_WITHOUT_VALUES = ("random", "sobol", "grid", "list", "nsga2")  # can have several goals


def bounded(spec: SweepSpec) -> tuple[SweepSpec, list[str]]:
    """The sweep with its trials bounded by the points that a grid or a list has.

    With the mistakes of that, and of conditions that almost no point satisfies.
    """
    if spec.method == "list":
        if not spec.points:
            return spec, ["points: missing. `list` tries each table of [[points]]."]
        return _up_to(len(spec.points), spec), []
    points = list(_tried(spec)) if spec.where else []
    mistakes = list(_refusals(spec, points))
    if spec.method != "grid" or mistakes:
        return spec, mistakes
    count = count_points(spec.space)
    if count is not None and spec.where and count <= MAX_TRIALS:
        count = sum(satisfies(spec.where, point) for point in points)
    if count is None:  # `method_mistakes` says which parameter is to blame
        return spec, []
    spec = _up_to(count, spec)
    if (spec.limits.trials or 0) > MAX_TRIALS:
        return spec, [f"method: the grid has {count:,} points; a sweep has up to {MAX_TRIALS:,}."]
    return spec, []


def _up_to(count: int, spec: SweepSpec) -> SweepSpec:
    trials = min(count, spec.limits.trials or count)
    return replace(spec, limits=replace(spec.limits, trials=trials))


def _tried(spec: SweepSpec) -> Iterator[Params]:
    """The points on which conditions are tried: all of a grid, else some that are drawn."""
    if spec.method != "grid":
        dice = Random(0)
        yield from (draw(spec.space, dice) for _ in range(SAMPLES))
    elif count_points(spec.space) is not None:
        yield from islice(every_point(spec.space), MAX_TRIALS)


def _refusals(spec: SweepSpec, points: Sequence[Params]) -> Iterator[str]:
    """Conditions that accept almost nothing: each by itself, or all together."""
    if not points:
        return
    is_grid = spec.method == "grid"
    least, kind = (1, "points") if is_grid else (ACCEPTED, "samples")
    words = f"of {len(points):,} {kind}"
    is_blamed = False
    for place, text in enumerate(spec.where):
        count = sum(satisfies((text,), point) for point in points)
        if count < least:
            is_blamed = True
            yield f"where[{place}]: {text!r} accepts {count} {words}."
    if not is_blamed and len(spec.where) > 1:
        count = sum(satisfies(spec.where, point) for point in points)
        if count < least:
            yield f"where: accepts {count} {words}."


def method_mistakes(spec: SweepSpec) -> Iterator[str]:
    """What the method cannot do."""
    method, space = spec.method, spec.space
    if len(spec.goals) > 1 and method not in _WITHOUT_VALUES:
        several = f"{', '.join(_WITHOUT_VALUES[:-1])} or {_WITHOUT_VALUES[-1]}"
        yield f"method: {method} has one goal; several need {several}."
    searched = {name: each for name, each in space.items() if each.kind != "constant"}
    for name, dimension in searched.items():
        if method == "grid" and levels(dimension) is None:
            yield f"space.{name}: grid needs a list or a step for {name}."
        elif dimension.kind == "normal" and method not in ("tpe", "random", "list"):
            yield f"space.{name}: {method} knows no normal; tpe and random do."
    if method == "sobol" and len(searched) > MAX_SOBOL:
        yield f"method: sobol has at most {MAX_SOBOL} parameters, the space {len(searched)}."
    if method == "gp" and not 0 < (spec.limits.trials or 0) <= MAX_GP:
        yield f"limits.trials: gp is for up to {MAX_GP} trials; say how many, or take tpe."
    if spec.early_stop.method == "halving":
        yield from _halving_mistakes(spec)


def _halving_mistakes(spec: SweepSpec) -> Iterator[str]:
    if spec.method in ("gp", "cmaes", "nsga2"):
        yield f"early_stop.method: halving begins all trials at once; {spec.method} learns nothing."
    if spec.limits.trials is None and spec.method not in ("grid", "list"):
        yield "limits.trials: halving needs to know how many trials begin."
    elif (spec.limits.trials or 0) > MAX_ARRAY:
        yield f"limits.trials: halving begins at most {MAX_ARRAY:,} trials, one array."
