"""Tree-structured Parzen estimator: draws near good trials and far from bad ones.

J. Bergstra and others, "Algorithms for hyper-parameter optimization", 2011. Differences: kernels
over all parameters together; kernels of a fixed width, because narrow ones make trials that run at
once all alike; a trial without a result counts as bad (the constant liar), so that the next one
differs; trials that ended early or still run count by their rank among all that came to the same
rung. Figures: docs/sweeps-figures.md.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from batchml.model.sweep import Params, SweepSpec, Trial
from batchml.sweeps.samplers.kernels import Coordinates, Kernel, Mixture, locate
from batchml.sweeps.samplers.observations import TrialObservations, observe_trials
from batchml.sweeps.samplers.points import point_key, seeded_random
from batchml.sweeps.samplers.sequences import find_unused, is_allowed


class TpeSettings(NamedTuple):
    """Chosen on the problems of benchmarks/sweep_problems.py, with seeds that are not reported."""

    first: int = 10  # results before a model is used, and
    first_each: int = 2  # more of them for each parameter
    candidates: int = 24
    draws: int = 8  # for each candidate at most: `where` refuses some, others were tried
    share: float = 0.1  # of the results, which count as good
    good: int = 12  # at most
    bad: int = 400  # at most; of more a sample is taken
    width: float = 0.15  # of kernels, as a share of a parameter's range
    other: float = 0.3  # of a choice's kernel: the share that is spread over all values
    prior: float = 1.0  # the weight of a random draw, in kernels


SETTINGS = TpeSettings()


def suggest_points(
    spec: SweepSpec,
    trials: Sequence[Trial],
    indices: Sequence[int],
    settings: TpeSettings = SETTINGS,
) -> Iterator[tuple[Params, str]]:
    """Points number `indices`, with the origin "tpe" or "random". Ends if no point is left."""
    observed = observe_trials(spec, trials)
    tried = observed.points | set(map(point_key, spec.points)) if observed.is_discrete else set()
    enough = settings.first + settings.first_each * len(observed.axes)
    model = None
    for index in indices:
        found: tuple[Params, Coordinates | None] | None = None
        random = seeded_random(spec.seed, index, "tpe")
        if observed.axes and len(observed.with_results) >= enough:
            model = model or _model(observed, random, settings)
            found = _best(spec, model, tried, random, settings)
        if found is not None:
            yield found[0], "tpe"
        else:
            params = find_unused(spec, tried, index)
            if params is None:
                return
            found = params, locate(spec.space, observed.axes, params)
            yield params, "random"
        if observed.is_discrete:
            tried.add(point_key(found[0]))
        if model is not None and found[1] is not None:
            model.bad.add(found[1])


class _Model(NamedTuple):
    good: Mixture
    bad: Mixture


def _model(observed: TrialObservations, random: Random, settings: TpeSettings) -> _Model:
    good = observed.best(min(math.ceil(settings.share * len(observed.with_results)), settings.good))
    bad = sorted(observed.with_results.difference(good))
    if len(bad) > settings.bad:
        bad = random.sample(bad, settings.bad)
    good_points, bad_points = (list(map(observed.coordinates, each)) for each in (good, bad))
    kernel = Kernel(settings.width, settings.other)
    return _Model(
        Mixture(observed.axes, good_points, kernel, settings.prior),
        Mixture(observed.axes, [*bad_points, *observed.waiting.values()], kernel, settings.prior),
    )


def _best(
    spec: SweepSpec, model: _Model, tried: set[object], random: Random, settings: TpeSettings
) -> tuple[Params, Coordinates] | None:
    """Of some draws from the good kernels, the one with the least density of the bad ones."""
    best, best_score = None, -math.inf
    left = settings.candidates
    for _ in range(settings.candidates * settings.draws):
        params = model.good.draw(spec.space, random)
        if not is_allowed(spec, params) or (tried and point_key(params) in tried):
            continue
        where = locate(spec.space, model.good.axes, params)
        assert where is not None
        score = model.good.log_density(where) - model.bad.log_density(where)
        if score > best_score:
            best, best_score = (params, where), score
        left -= 1
        if not left:
            break
    return best
