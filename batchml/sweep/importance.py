"""Which parameters decide how good a trial is: an estimate that costs milliseconds.

After PED-ANOVA (Watanabe, Bansal, Hutter: "PED-ANOVA: Efficiently Quantifying Hyperparameter
Importance in Arbitrary Subspaces", IJCAI 2023): a parameter matters as far as its values among the
best tenth are spread otherwise than among all trials. The distance of the two is the Pearson
divergence of their densities. All trials stand for the space, so a sampler that tried some regions
more often does not make them look important.

With few trials two random samples differ as well. So what a random tenth would show on average is
taken away: a parameter that decides nothing comes out near 0.
"""

import math
from collections.abc import Iterable, Sequence
from random import Random

from batchml.model.sweep import Dimension, Params, Space

LEAST = 20  # trials with a result; fewer say nothing
_BEST = 0.1  # the share of trials whose values are looked at
_CELLS = 32  # of a parameter's range
_SHUFFLES = 16  # random tenths
_FLOOR = 0.5  # of a trial, added to each cell: no density is 0


def importances(space: Space, ranked: Sequence[Params]) -> dict[str, float]:
    """The share of each parameter; they add up to 1, the largest stands first.

    `ranked` are the parameters of the trials that have a result, the best first. A parameter that
    is not always active is judged by the trials that have it. Empty while there are too few trials,
    and where every parameter has one value only.
    """
    if len(ranked) < LEAST:
        return {}
    found = {
        name: _divergence(dimension, [each[name] for each in ranked if name in each], len(ranked))
        for name, dimension in space.items()
        if dimension.kind != "constant"
    }
    total = math.fsum(found.values())
    if total <= 0:
        return {}
    largest_first = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return {name: value / total for name, value in largest_first}


def _divergence(dimension: Dimension, values: Sequence[object], trials: int) -> float:
    """What the best tenth of `values`, the best first, has that a random tenth has not.

    Weighed by the share of trials that have the parameter at all.
    """
    if len(values) < LEAST:
        return 0.0
    cells, width = _cells(dimension, values)
    count = max(3, round(len(cells) * _BEST))
    smooth = width if dimension.kind == "choice" else 0
    everywhere = _density(cells, width, smooth)
    best = _pearson(_density(cells[:count], width, smooth), everywhere)
    random = Random(0)
    chance = [
        _pearson(_density(random.sample(cells, count), width, smooth), everywhere)
        for _ in range(_SHUFFLES)
    ]
    mean = math.fsum(chance) / _SHUFFLES
    noise = math.sqrt(math.fsum((each - mean) ** 2 for each in chance) / (_SHUFFLES - 1))
    return max(0.0, best - mean - noise) * len(values) / trials


def _cells(dimension: Dimension, values: Sequence[object]) -> tuple[list[int], int]:
    """In which cell of the parameter's range each value lies, and how many cells there are."""
    if dimension.kind == "choice" or not all(_is_number(value) for value in values):
        names = {repr(value): 0 for value in (*dimension.values, *values)}
        places = {name: place for place, name in enumerate(names)}
        return [places[repr(value)] for value in values], len(places)
    numbers = [_scaled(dimension, float(value)) for value in values]  # type: ignore[arg-type]
    low, high = min(numbers), max(numbers)
    if not high > low:
        return [0] * len(numbers), 1
    size = (high - low) / _CELLS
    return [min(_CELLS - 1, int((number - low) / size)) for number in numbers], _CELLS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(dimension: Dimension, value: float) -> float:
    return math.log(value) if dimension.log and value > 0 else value


def _density(cells: Sequence[int], width: int, smooth: int) -> list[float]:
    """The share of each cell. Neighbours of a range share; `smooth` cells have no neighbours."""
    counts = [_FLOOR / width] * width
    for cell in cells:
        counts[cell] += 1
    if not smooth and width > 1:
        counts = _blurred(counts, max(1.0, _CELLS / 5 * len(cells) ** -0.2))
    total = math.fsum(counts)
    return [count / total for count in counts]


def _blurred(counts: Sequence[float], sigma: float) -> list[float]:
    """By a normal kernel, cut at the ends of the range, where nothing gets lost."""
    reach = range(-int(3 * sigma), int(3 * sigma) + 1)
    weights = {step: math.exp(-0.5 * (step / sigma) ** 2) for step in reach}
    found = [0.0] * len(counts)
    for place, count in enumerate(counts):
        near = [step for step in reach if 0 <= place + step < len(counts)]
        whole = math.fsum(weights[step] for step in near)
        for step in near:
            found[place + step] += count * weights[step] / whole
    return found


def _pearson(top: Iterable[float], everywhere: Iterable[float]) -> float:
    return math.fsum(
        (here - there) ** 2 / there for here, there in zip(top, everywhere, strict=True)
    )
