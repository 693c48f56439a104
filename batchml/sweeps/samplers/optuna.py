"""The methods gp, cmaes and nsga2, by the packages optuna and cmaes (`batchml[optuna]`).

For each suggestion a new study is made from all trials so far, with a seed from the new trial's
number. Parameters are passed as unit-scaled numbers and indexes of choices, so that every kind of
parameter works. A trial that was stopped early counts with its last value, a failed trial with the
worst value of all.
"""

from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from random import Random
from typing import Any

from batchml.errors import ConfigError
from batchml.model.job import Scalar
from batchml.model.sweep import Dimension, Params, SweepSpec, Trial, TrialState, is_discrete
from batchml.sweeps.results import losses_of
from batchml.sweeps.samplers.points import build_point, from_unit, point_key, seeded_random
from batchml.sweeps.samplers.sequences import find_unused, is_allowed
from batchml.sweeps.samplers.tpe import Coordinates, KernelAxis, locate, make_axes

PACKAGES_BY_METHOD = {
    "gp": ("optuna", "scipy", "torch"),
    "cmaes": ("cmaes",),
    "nsga2": ("optuna",),
}
TRIES = 10  # draws for one trial, if `where` refuses them or they were tried before
_SIGMA = 0.3  # the first step size of CMA-ES, as a share of a parameter's range

_FAILED = (TrialState.FAILED, TrialState.DIVERGED)


def missing_packages(method: str) -> list[str]:
    """The packages of a method that are not installed."""
    return [name for name in PACKAGES_BY_METHOD.get(method, ()) if find_spec(name) is None]


def missing_package_mistakes(method: str) -> list[str]:
    """The mistake of a file whose method needs packages that are not installed; otherwise none."""
    packages = missing_packages(method)
    if not packages:
        return []
    return [
        f"method: {method} needs {', '.join(packages)}, not installed on this machine: "
        "pip install 'batchml[optuna]', or set method = \"tpe\"."
    ]


def suggest_points(
    spec: SweepSpec, trials: Collection[Trial], indices: Sequence[int]
) -> Iterator[Params]:
    """Points number `indices`. Ends if no point is left; ConfigError if a package is missing."""
    mistakes = missing_package_mistakes(spec.method)
    if mistakes:
        raise ConfigError(spec.name, mistakes)
    sampler = _Evolution(spec, trials) if spec.method == "cmaes" else _Study(spec, trials)
    discrete = is_discrete(spec.space)
    tried = {point_key(trial.params) for trial in trials} if discrete else set()
    for index in indices:
        random = seeded_random(spec.seed, index, spec.method)
        drawn = (sampler.ask(random) for _ in range(TRIES))
        usable = (p for p in drawn if is_allowed(spec, p) and not (tried and point_key(p) in tried))
        params = next(usable, None) or find_unused(spec, tried, index)
        if params is None:
            return
        if discrete:
            tried.add(point_key(params))
        yield params


class _Study:
    """An Optuna study of all trials, running ones too, so that the next trial differs."""

    def __init__(self, spec: SweepSpec, trials: Collection[Trial]) -> None:
        import optuna  # type: ignore[import-not-found,unused-ignore]

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._spec = spec
        self._axes = {axis.name: axis for axis in make_axes(spec.space)}
        self._optuna: Any = optuna
        self._study: Any = optuna.create_study(directions=["minimize"] * len(spec.goals))
        self._sampler: Any = self._make_sampler(0)
        for trial, losses in _losses_so_far(spec, trials):
            self._add(trial, losses)

    def ask(self, random: Random) -> Params:
        """Suggest a point."""
        self._study.sampler = self._make_sampler(random.getrandbits(31))
        asked = self._study.ask()

        def pick(name: str, dimension: Dimension) -> Scalar:
            axis = self._axes.get(name)
            if axis is None:
                return dimension.values[0]
            if axis.values:
                index: int = asked.suggest_categorical(name, range(axis.values))
                return dimension.values[index]
            return axis.scale.value(asked.suggest_float(name, 0.0, 1.0))

        return build_point(self._spec.space, pick)

    def _make_sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._spec.method == "gp":
            return samplers.GPSampler(seed=seed)
        # 50 is Optuna's default; smaller where the trials do not suffice for four generations.
        population = max(4, min(50, (self._spec.limits.trials or 200) // 4))
        return samplers.NSGAIISampler(seed=seed, population_size=population)

    def _add(self, trial: Trial, losses: Sequence[float] | None) -> None:
        coordinates = locate(tuple(self._axes.values()), trial.params)
        if coordinates is None:
            return
        pairs = list(zip(self._axes.values(), coordinates, strict=True))
        active = [(axis, position) for axis, position in pairs if position is not None]
        self._study.add_trial(
            self._optuna.trial.create_trial(
                state=self._optuna.trial.TrialState.RUNNING,
                params={axis.name: int(at) if axis.values else at for axis, at in active},
                distributions={axis.name: self._distribution(axis) for axis, _ in active},
            )
        )
        if losses is None:
            return
        added = self._study.get_trials(deepcopy=False)[-1]
        if self._spec.method == "nsga2":
            self._sampler.get_trial_generation(self._study, added)
        self._study.tell(added.number, list(losses))

    def _distribution(self, axis: KernelAxis) -> Any:
        kinds = self._optuna.distributions
        if axis.values:
            return kinds.CategoricalDistribution(range(axis.values))
        return kinds.FloatDistribution(0.0, 1.0)


class _Evolution:
    """CMA-ES over the numbers; choices and conditional parameters are drawn at random.

    Trials that have ended count in the order of their numbers, a generation at a time.
    """

    def __init__(self, spec: SweepSpec, trials: Collection[Trial]) -> None:
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
        results: list[tuple[Any, float]] = []
        for trial, losses in _losses_so_far(spec, trials):
            coordinates = locate(self._axes, trial.params)
            if losses is not None and coordinates is not None and None not in coordinates:
                results.append((numpy.array(_fill_up(coordinates, size)), losses[0]))
        count = self._evolution.population_size
        for start in range(0, len(results) - count + 1, count):
            self._evolution.tell(results[start : start + count])

    def ask(self, random: Random) -> Params:
        """Suggest a point."""
        self._evolution.reseed_rng(random.getrandbits(31))
        drawn = map(float, self._evolution.ask())
        at = {axis.name: position for axis, position in zip(self._axes, drawn, strict=False)}
        return build_point(
            self._spec.space,
            lambda name, dimension: from_unit(
                dimension, at[name] if name in at else random.random()
            ),
        )


def _fill_up(coordinates: Coordinates, size: int) -> list[float]:
    """The coordinates, with 0.5 for axes that the space does not have."""
    known = [position for position in coordinates if position is not None]
    return known + [0.5] * (size - len(known))


def _losses_so_far(
    spec: SweepSpec, trials: Collection[Trial]
) -> Iterator[tuple[Trial, Sequence[float] | None]]:
    """Each trial that counts, with its losses; None: no result yet."""
    losses = {trial.number: losses_of(trial, spec) for trial in trials}
    known = [each for each in losses.values() if each is not None]
    worst: Sequence[float] = [max(column) for column in zip(*known, strict=True)]
    worst = worst or [0.0] * len(spec.goals)
    for trial in trials:
        if trial.confirms is not None:
            continue
        if trial.state in _FAILED:
            yield trial, worst
        elif trial.state.is_ended and losses[trial.number] is not None:
            yield trial, losses[trial.number]
        elif not trial.state.is_ended:
            yield trial, None
