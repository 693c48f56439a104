"""Tree-structured Parzen estimator: draws near what did well, where little that did badly lies.

J. Bergstra and others, "Algorithms for hyper-parameter optimization", 2011. Ours differs: kernels
of all parameters together; of a fixed width, for narrow ones make trials that run at once all
alike; a trial that has no result yet counts as a bad one (the constant liar), so that the next
goes elsewhere; what ended early or still runs counts by its place among all that came to the same
rung. Figures: docs/sweeps-figures.md.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from batchml.model.sweep import Params, SweepSpec, Trial
from batchml.sweep.kernels import Kernel, Mixture, Places, places
from batchml.sweep.known import Known, known
from batchml.sweep.points import generator, key
from batchml.sweep.sequences import satisfies, unused


class Tuning(NamedTuple):
    """Found on the problems of benchmarks/sweep_problems.py, with seeds that are not reported."""

    first: int = 10  # results before there is a model, and
    first_each: int = 2  # as many for each parameter
    candidates: int = 24
    draws: int = 8  # for each candidate, at most: `where` may refuse some, others were tried
    share: float = 0.1  # of the results that are good
    good: int = 12  # at most
    bad: int = 400  # at most: more are sampled down to these
    width: float = 0.15  # of kernels, in shares of a parameter's range
    other: float = 0.3  # of a kernel of a choice: how much is spread over all values
    prior: float = 1.0  # how many kernels a random draw weighs as much as


TUNING = Tuning()


def suggestions(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int], tuning: Tuning = TUNING
) -> Iterator[tuple[Params, str]]:
    """Points number `indices`, and whether the model or chance found each. Ends where no point
    is left."""
    now = known(spec, trials)
    tried = now.points | set(map(key, spec.points)) if now.is_discrete else set()
    enough = tuning.first + tuning.first_each * len(now.axes)
    model = None
    for index in indices:
        found: tuple[Params, Places | None] | None = None
        random = generator(spec.seed, index, "tpe")
        if now.axes and len(now.judged) >= enough:
            model = model or _model(now, random, tuning)
            found = _best(spec, model, tried, random, tuning)
        if found is not None:
            yield found[0], "tpe"
        else:
            params = unused(spec, tried, index)
            if params is None:
                return
            found = params, places(spec.space, now.axes, params)
            yield params, "random"
        if now.is_discrete:
            tried.add(key(found[0]))
        if model is not None and found[1] is not None:
            model.bad.add(found[1])


class _Model(NamedTuple):
    good: Mixture
    bad: Mixture


def _model(now: Known, random: Random, tuning: Tuning) -> _Model:
    good = now.best(min(math.ceil(tuning.share * len(now.judged)), tuning.good))
    bad = sorted(now.judged.difference(good))
    if len(bad) > tuning.bad:
        bad = random.sample(bad, tuning.bad)
    near, far = (list(map(now.places, each)) for each in (good, bad))
    kernel = Kernel(tuning.width, tuning.other)
    return _Model(
        Mixture(now.axes, near, kernel, tuning.prior),
        Mixture(now.axes, [*far, *now.waiting.values()], kernel, tuning.prior),
    )


def _best(
    spec: SweepSpec, model: _Model, tried: set[object], random: Random, tuning: Tuning
) -> tuple[Params, Places] | None:
    """Of some draws from the good kernels, the one that is most unlike the bad ones."""
    best, best_score = None, -math.inf
    left = tuning.candidates
    for _ in range(tuning.candidates * tuning.draws):
        params = model.good.draw(spec.space, random)
        if not satisfies(spec, params) or (tried and key(params) in tried):
            continue
        where = places(spec.space, model.good.axes, params)
        assert where is not None
        score = model.good.log_density(where) - model.bad.log_density(where)
        if score > best_score:
            best, best_score = (params, where), score
        left -= 1
        if not left:
            break
    return best
