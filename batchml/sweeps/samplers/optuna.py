"""The methods gp, cmaes and nsga2, by Optuna and cmaes: `pip install 'batchml[optuna]'`.

Each time, a new study is made from all trials of the ledger, with a seed from the trial's number.
Parameters are passed as unit-scaled numbers and indexes of choices, so that every kind of parameter
works. A trial that was stopped early counts with its last value, a failed one with the worst value
of all.
"""

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from random import Random
from typing import Any

from batchml.errors import ConfigError
from batchml.model.sweep import Params, SweepSpec, Trial, TrialState, is_active, is_discrete
from batchml.sweeps.samplers.points import build_point, from_unit, point_key, seeded_random
from batchml.sweeps.samplers.sequences import find_unused, is_allowed
from batchml.sweeps.samplers.tpe import Coordinates, KernelAxis, locate, make_axes

NEEDS = {
    "gp": ("optuna", "scipy", "torch"),
    "cmaes": ("cmaes",),
    "nsga2": ("optuna",),
}
TRIES = 10  # draws for one trial, if `where` refuses them or they were tried before
_SIGMA = 0.3  # of CMA-ES at the start, as a share of a range

_FAILED = (TrialState.FAILED, TrialState.DIVERGED)


def missing_packages(method: str) -> list[str]:
    """The packages of a method that are not installed."""
    return [name for name in NEEDS.get(method, ()) if find_spec(name) is None]


def missing_package_mistakes(method: str) -> list[str]:
    """The mistake of a file whose method needs packages that are not installed; otherwise none."""
    packages = missing_packages(method)
    if not packages:
        return []
    return [
        f"method: {method} needs {', '.join(packages)}, not installed here: "
        "pip install 'batchml[optuna]', or take method = \"tpe\"."
    ]


def suggest_points(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Params]:
    """Points number `indices`. Raises ConfigError if a package is missing."""
    mistakes = missing_package_mistakes(spec.method)
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    asking = _Evolution(spec, trials) if spec.method == "cmaes" else _Study(spec, trials)
    discrete = is_discrete(spec.space)
    tried = {point_key(trial.params) for trial in trials} if discrete else set()
    for index in indices:
        random = seeded_random(spec.seed, index, spec.method)
        drawn = (asking.ask(random) for _ in range(TRIES))
        usable = (p for p in drawn if is_allowed(spec, p) and not (tried and point_key(p) in tried))
        params = next(usable, None) or find_unused(spec, tried, index)
        if params is None:
            return
        if discrete:
            tried.add(point_key(params))
        yield params


class _Study:
    """An Optuna study of all trials, running ones included, so that the next differs from them."""

    def __init__(self, spec: SweepSpec, trials: Sequence[Trial]) -> None:
        import optuna  # type: ignore[import-not-found,unused-ignore]

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spec = spec
        self._axes = {axis.name: axis for axis in make_axes(spec.space)}
        self._optuna: Any = optuna
        self._study: Any = optuna.create_study(directions=["minimize"] * len(spec.goals))
        self._sampler: Any = self._sampled_by(0)
        for trial, losses in _losses_so_far(spec, trials):
            self._add(trial, losses)

    def ask(self, random: Random) -> Params:
        self._study.sampler = self._sampled_by(random.getrandbits(31))
        asked = self._study.ask()
        params: Params = {}
        for name, dimension in self._spec.space.items():
            if not is_active(dimension, params):
                continue
            axis = self._axes.get(name)
            if axis is None:
                params[name] = dimension.values[0]
            elif axis.values:
                index = asked.suggest_categorical(name, range(axis.values))
                params[name] = dimension.values[index]
            else:
                params[name] = from_unit(dimension, asked.suggest_float(name, 0.0, 1.0))
        return params

    def _sampled_by(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._spec.method == "gp":
            return samplers.GPSampler(seed=seed)
        return samplers.NSGAIISampler(seed=seed, population_size=self._population())

    def _population(self) -> int:
        """50, Optuna's default; smaller where trials would not suffice for four generations."""
        trials = self._spec.limits.trials or 200
        return max(4, min(50, trials // 4))

    def _add(self, trial: Trial, losses: Sequence[float] | None) -> None:
        where = locate(self._spec.space, tuple(self._axes.values()), trial.params)
        if where is None:
            return
        named = list(zip(self._axes.values(), where, strict=True))
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.RUNNING,
                params={a.name: self._param(a, at) for a, at in named if at is not None},
                distributions={a.name: self._range(a) for a, at in named if at is not None},
            )
        )
        if losses is None:
            return
        added = self._study.get_trials(deepcopy=False)[-1]
        if self._spec.method == "nsga2":
            self._sampler.get_trial_generation(self._study, added)
        self._study.tell(added.number, list(losses))

    def _param(self, axis: KernelAxis, at: float) -> float:
        return int(at) if axis.values else at

    def _range(self, axis: KernelAxis) -> Any:
        kinds = self._optuna.distributions
        if axis.values:
            return kinds.CategoricalDistribution(range(axis.values))
        return kinds.FloatDistribution(0.0, 1.0)


class _Evolution:
    """CMA-ES over the numbers; choices and conditional parameters are drawn at random.

    Trials that have ended count in the order of their numbers, a generation at a time.
    """

    def __init__(self, spec: SweepSpec, trials: Sequence[Trial]) -> None:
        import cmaes  # type: ignore[import-not-found,unused-ignore]
        import numpy  # type: ignore[import-not-found,unused-ignore]

        self._spec = spec
        self._axes = tuple(
            axis
            for axis in make_axes(spec.space)
            if not axis.values and not spec.space[axis.name].when
        )
        size = max(2, len(self._axes))  # CMA-ES needs two numbers
        self._evolution: Any = cmaes.CMA(
            mean=numpy.full(size, 0.5),
            sigma=_SIGMA,
            bounds=numpy.array([[0.0, 1.0]] * size),
            seed=0,
        )
        found: list[tuple[Any, float]] = []
        for trial, losses in _losses_so_far(spec, trials):
            where = locate(spec.space, self._axes, trial.params)
            if losses is not None and where is not None and None not in where:
                found.append((numpy.array(_filled(where, size)), losses[0]))
        count = self._evolution.population_size
        for start in range(0, len(found) - count + 1, count):
            self._evolution.tell(found[start : start + count])

    def ask(self, random: Random) -> Params:
        self._evolution.reseed_rng(random.getrandbits(31))
        drawn = map(float, self._evolution.ask())
        at = {axis.name: position for axis, position in zip(self._axes, drawn, strict=False)}
        return build_point(
            self._spec.space,
            lambda name, dimension: from_unit(
                dimension, at[name] if name in at else random.random()
            ),
        )


def _filled(where: Coordinates, size: int) -> list[float]:
    known = [position for position in where if position is not None]
    return known + [0.5] * (size - len(known))


def _losses_so_far(
    spec: SweepSpec, trials: Sequence[Trial]
) -> Iterator[tuple[Trial, Sequence[float] | None]]:
    """Each trial that counts, with its losses; None: no result yet."""
    worst: list[float] = [0.0] * len(spec.goals)
    losses = {trial.number: _losses(spec, trial) for trial in trials}
    known = [each for each in losses.values() if each is not None]
    if known:
        worst = [max(column) for column in zip(*known, strict=True)]
    for trial in trials:
        if trial.confirms is not None:
            continue
        if trial.state in _FAILED:
            yield trial, worst
        elif trial.state.is_ended and losses[trial.number] is not None:
            yield trial, losses[trial.number]
        elif not trial.state.is_ended:
            yield trial, None


def _losses(spec: SweepSpec, trial: Trial) -> list[float] | None:
    values = trial.values
    if values is None or not all(map(math.isfinite, values)):
        return None
    return [goal.loss(value) for goal, value in zip(spec.goals, values, strict=True)]
