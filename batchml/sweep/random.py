"""Random points: each by its own number, so that a restart repeats none and any order will do."""

from batchml.model.sweep import Params, SweepSpec
from batchml.sweep.points import built, generator
from batchml.sweep.unit import from_unit


def draw(spec: SweepSpec, index: int, again: int = 0) -> Params:
    """Point number `index`; with `again` the one instead of it, when that one does not do."""
    numbers = generator(spec.seed, index, again)
    return built(spec.space, lambda name, dimension: from_unit(dimension, numbers.random()))
