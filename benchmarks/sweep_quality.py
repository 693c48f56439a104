"""How good a search is: ours against random, grid, Sobol and Optuna's, where the best is known.

Optuna's rows need `pip install optuna`; without it they are left out, and a line says so. Regret is
the loss of the best fully trained trial minus the best possible; `match` the share of the budget
after which a method is as good as random search at its end. Medians over the seeds.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import msgspec

from batchml.model.sweep import (
    Dimension,
    Method,
    Params,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
    is_active,
)
from batchml.sweeps.samplers.choose import suggest_trials
from batchml.sweeps.samplers.tpe import TrialObservations
from benchmarks import sweep_problems as problems
from benchmarks.rows import Finding, LeftOut, Row, alone, paired
from benchmarks.running import main
from benchmarks.sweep_problems import Problem
from benchmarks.sweep_simulator import (
    Asha,
    Outcome,
    Search,
    budget,
    share_to_match,
    simulate,
    spec_of,
)

SEEDS = 20
_BEFORE = 100  # suggestions, before one is measured
SMALL, LARGE = (16, 64), (64, 256)  # workers, full trainings
Maker = Callable[[Problem, int, int], Search]  # problem, workers, seed


class Measured(NamedTuple):
    outcomes: list[Outcome]

    @property
    def regret(self) -> float:
        return median(outcome.regret() for outcome in self.outcomes)


def ours(
    problem: Problem, workers: int, seed: int, *, method: Method = "tpe", stops: bool = False
) -> Search:
    """One of our samplers, with ASHA or without."""
    spec = spec_of(problem, method, workers, seed)
    if method == "grid":
        spec = msgspec.structs.replace(spec, space=problem.grid)
    return _search(spec, stops)


def _search(spec: SweepSpec, stops: bool) -> Search:
    observed = TrialObservations(spec)

    def ask(trials: Sequence[Trial], numbers: Sequence[int]) -> list[Params]:
        for trial in trials:
            observed.note(trial)
        return [params for params, _ in suggest_trials(spec, trials, numbers, observed)]

    return Search(ask, Asha(spec), stops_early=True) if stops else Search(ask)


def measure_search(
    make: Maker,
    problem: Problem,
    workers: int,
    trainings: int,
    seeds: Sequence[int],
    trials: int | None = None,
) -> Measured:
    outcomes = [
        simulate(
            problem, make(problem, workers, seed),
            workers=workers, trainings=trainings, seed=seed, trials=trials,
        )
        for seed in seeds
    ]  # fmt: skip
    return Measured(outcomes)


class _Optuna:
    """Optuna as it comes: TPESampler, and SuccessiveHalvingPruner with our rungs. Its pruner sees
    every report at once."""

    def __init__(self, problem: Problem, workers: int, seed: int, *, stops: bool) -> None:
        import optuna  # type: ignore[import-not-found,unused-ignore]

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        pruners = optuna.pruners
        self._space = problem.space
        self._study: Any = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed),
            pruner=pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
            if stops
            else pruners.NopPruner(),
        )
        self._asked: dict[int, Any] = {}

    def add(self, trials: Sequence[Any]) -> None:
        """Trials of Optuna's own type, that have ended."""
        self._study.add_trials(trials)

    def ask(self, trials: Sequence[Trial], numbers: Sequence[int]) -> list[Params]:
        return [self._one(number) for number in numbers]

    def _one(self, number: int) -> Params:
        asked = self._asked[number] = self._study.ask()
        params: Params = {}
        for name, dimension in self._space.items():
            if is_active(dimension, params):
                params[name] = _suggested(asked, name, dimension)
        return params

    def goes_on(self, trial: Trial) -> bool:
        asked = self._asked[trial.number]
        asked.report(trial.reports[-1].values[0], trial.step)
        return not asked.should_prune()

    def tell(self, trial: Trial) -> None:
        asked = self._asked[trial.number]
        if trial.state is TrialState.PRUNED:
            self._study.tell(asked, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(asked, trial.reports[-1].values[0])


def _suggested(asked: Any, name: str, dimension: Dimension) -> Any:
    low, high = dimension.low, dimension.high
    if dimension.kind == "int":
        return asked.suggest_int(name, int(low), int(high), log=dimension.log)
    if dimension.kind == "float":
        return asked.suggest_float(name, low, high, log=dimension.log)
    return asked.suggest_categorical(name, dimension.values)


def optunas(problem: Problem, workers: int, seed: int, *, stops: bool = False) -> Search:
    peer = _Optuna(problem, workers, seed, stops=stops)
    if stops:
        return Search(peer.ask, peer.goes_on, peer.tell, stops_early=True)
    return Search(peer.ask, tell=peer.tell)


def makers(problem: Problem) -> dict[str, Maker]:
    """By name; random search first."""
    found: dict[str, Maker] = {
        "random": partial(ours, method="random"),
        "grid": partial(ours, method="grid"),
        "sobol": partial(ours, method="sobol"),
    }
    curves = problem.steps > 1
    if curves:
        found["random_asha"] = partial(ours, method="random", stops=True)
    found["tpe"] = ours
    if curves:
        found["tpe_asha"] = partial(ours, stops=True)
    if find_spec("optuna"):
        found["optuna"] = optunas
        if curves:
            found["optuna_pruner"] = partial(optunas, stops=True)
    return found


def compare(
    problem: Problem, workers: int, trainings: int, seeds: Sequence[int], methods: Sequence[str]
) -> Iterator[Finding]:
    """The regret of each method beside random search's, and its match."""
    every = makers(problem)
    base = measure_search(every["random"], problem, workers, trainings, seeds)
    what = f"{problem.name}, {workers} at once, {trainings} trainings, {len(seeds)} seeds"
    for name in methods or [*every][1:]:
        found = measure_search(every[name], problem, workers, trainings, seeds)
        row = f"sweep_quality/{problem.name}_{workers}.{name}"
        yield Row(
            name=f"{row}.regret", measured=f"regret of {name}: {what}", unit="", ours=found.regret,
            beside="random search", theirs=base.regret,
            ratio=found.regret / base.regret if base.regret else None, goal=1,
        )  # fmt: skip
        match = share_to_match(found.outcomes, base.regret, budget(problem, trainings))
        if math.isfinite(match):
            yield alone(f"{row}.match", f"match of {name}: {what}", "of the steps", [match])


def same_trials(problem: Problem, seeds: Sequence[int]) -> Iterator[Finding]:
    """What `trials = 64` means: as many trials for each, and what they cost."""
    workers, trainings = SMALL
    base = measure_search(partial(ours, method="random"), problem, workers, trainings, seeds)
    found = measure_search(
        partial(ours, stops=True), problem, workers, trainings, seeds, trials=trainings
    )
    steps = median(each.steps for each in found.outcomes) / budget(problem, trainings)
    yield paired(
        f"sweep_quality/{problem.name}.same_trials_regret",
        f"regret of {trainings} trials of TPE + ASHA on {problem.name}, {len(seeds)} seeds", "",
        [(found.regret, base.regret)], beside="as many random trials", goal=1,
    )  # fmt: skip
    yield alone(
        f"sweep_quality/{problem.name}.same_trials",
        f"steps of {trainings} trials of TPE + ASHA on {problem.name}, {len(seeds)} seeds",
        "of random search's", [steps],
    )  # fmt: skip


def ask_times(counts: Sequence[int], peers: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    """CPU ms of one suggestion of TPE from ledgers of some lengths, of which a few trials have
    just changed: ours, alone and of 64 at once, and Optuna's at the sizes of `peers`.

    Measured of a sampler that has made so many suggestions that it has met each trial, as one has
    in a sweep of this length. Those right after a start compute more kernels.
    """
    problem = problems.MIXED8CURVES
    found: dict[str, list[tuple[int, float]]] = {"alone": [], "of 64 at once": []}
    for count in counts:
        spec = spec_of(problem, "tpe", LARGE[0], 0)
        trials = _ledger(problem, spec, count)
        observed = TrialObservations(spec, trials)
        for _ in range(_BEFORE):
            _cpu(spec, _grown(trials, observed), observed, 1)
        alone_ = [_cpu(spec, _grown(trials, observed), observed, 1) for _ in range(15)]
        found["alone"].append((count, median(alone_) * 1000))
        together = _cpu(spec, _grown(trials, observed), observed, 64)
        found["of 64 at once"].append((count, together / 64 * 1000))
        if count in peers and find_spec("optuna"):
            found.setdefault("Optuna", []).append((count, _optuna_ask(problem, trials)))
    return found


def _optuna_ask(problem: Problem, trials: Sequence[Trial]) -> float:
    """The same of Optuna, from a study in memory."""
    import optuna  # type: ignore[import-not-found,unused-ignore]

    peer = _Optuna(problem, 1, 0, stops=False)
    distributions = {name: _distribution(optuna, each) for name, each in problem.space.items()}
    peer.add([
        optuna.trial.create_trial(
            params=trial.params, value=trial.reports[-1].values[0],
            distributions={name: distributions[name] for name in trial.params},
        )
        for trial in trials if trial.reports and trial.state.is_ended
    ])  # fmt: skip
    taken = []
    for number in range(3):
        start = time.process_time()
        peer.ask([], [number])
        taken.append(time.process_time() - start)
    return median(taken) * 1000


def _distribution(optuna: Any, dimension: Dimension) -> Any:
    kinds = optuna.distributions
    if dimension.kind == "int":
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    if dimension.kind == "float":
        return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    return kinds.CategoricalDistribution(dimension.values)


def _ledger(problem: Problem, spec: SweepSpec, count: int) -> list[Trial]:
    drawn = suggest_trials(msgspec.structs.replace(spec, method="random"), [], range(count))
    trials = []
    for number, (params, _) in enumerate(drawn):
        steps = (1, 3, 9)[: 1 + number % 3]
        reports = [TrialReport(step, (problem.loss(params, step),)) for step in steps]
        trials.append(Trial(number, params, 0, state=TrialState.PRUNED, reports=reports))
    return trials


def _grown(trials: list[Trial], observed: TrialObservations) -> list[Trial]:
    """One trial more, and one that has come further."""
    further = trials[len(trials) % 50]
    further.reports.append(TrialReport(20, (0.5,)))
    trials.append(Trial(len(trials), trials[7].params, 0, state=TrialState.RUNNING))
    observed.note(further)
    observed.note(trials[-1])
    return trials


def _cpu(spec: SweepSpec, trials: list[Trial], observed: TrialObservations, count: int) -> float:
    start = time.process_time()
    suggest_trials(spec, trials, range(len(trials), len(trials) + count), observed)
    return time.process_time() - start


def measure(full: bool) -> Iterator[Finding]:
    os.nice(10)
    if not find_spec("optuna"):
        yield LeftOut(name="sweep_quality/optuna", why="Optuna is not installed here")
    if not full:
        methods = ["tpe_asha", *(["optuna_pruner"] if find_spec("optuna") else [])]
        yield from compare(problems.mnist(), *SMALL, range(SEEDS // 4), methods)
        return
    curves = (problems.H6CURVES, problems.MIXED8CURVES, problems.mnist())
    for problem in curves:
        yield from compare(problem, *SMALL, range(SEEDS), ())
        yield from same_trials(problem, range(SEEDS))
    for problem in (*problems.FUNCTIONS, *curves):
        yield from compare(problem, *LARGE, range(SEEDS), ())


if __name__ == "__main__":
    main(measure)
