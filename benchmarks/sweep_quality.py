"""How good a search is: ours against random, grid, Sobol and Optuna's, where the best is known.

    python -m benchmarks.sweep_quality [--seeds 20] [--small]

Optuna's rows need `pip install optuna`; without it they are left out, and a line says so. Regret is
the loss of the best fully trained trial minus the best possible; `match` the share of the budget
after which a method is as good as random search at its end. Medians over the seeds.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
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
from benchmarks import sweep_problems as problems
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
SMALL, LARGE = (16, 64), (64, 256)  # workers, full trainings
Maker = Callable[[Problem, int, int], Search]  # problem, workers, seed


class Measured(NamedTuple):
    outcomes: list[Outcome]
    seconds: float  # of CPU for one ask, the simulator's own work included

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
    def ask(trials: Sequence[Trial], numbers: Sequence[int]) -> list[Params]:
        return [params for params, _ in suggest_trials(spec, trials, numbers)]

    return Search(ask, Asha(spec), stops_early=True) if stops else Search(ask)


def measure(
    make: Maker,
    problem: Problem,
    workers: int,
    trainings: int,
    seeds: Sequence[int],
    trials: int | None = None,
) -> Measured:
    start = time.process_time()
    outcomes = [
        simulate(
            problem, make(problem, workers, seed),
            workers=workers, trainings=trainings, seed=seed, trials=trials,
        )
        for seed in seeds
    ]  # fmt: skip
    asked = sum(len(outcome.trials) for outcome in outcomes)
    return Measured(outcomes, (time.process_time() - start) / asked)


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
        found["random + ASHA"] = partial(ours, method="random", stops=True)
    found["TPE"] = ours
    if curves:
        found["TPE + ASHA"] = partial(ours, stops=True)
    if find_spec("optuna"):
        found["Optuna's TPE"] = optunas
        if curves:
            found["Optuna's TPE + pruner"] = partial(optunas, stops=True)
    return found


def compare(problem: Problem, workers: int, trainings: int, seeds: Sequence[int]) -> None:
    """Print a table of all methods."""
    print(
        f"\n{problem.name}: {workers} at once, steps of {trainings} full trainings, "
        f"{len(seeds)} seeds\n"
        f"{'':24}{'regret':>10}{'of random':>11}{'match':>7}{'better':>8}{'time':>7}"
        f"{'trials':>8}{'ms/ask':>8}",
        flush=True,
    )
    base: Measured | None = None
    for name, make in makers(problem).items():
        found = measure(make, problem, workers, trainings, seeds)
        base = base or found
        print(f"{name:24}{_row(found, base, budget(problem, trainings))}", flush=True)


def _row(found: Measured, base: Measured, steps: int) -> str:
    match = share_to_match(found.outcomes, base.regret, steps)
    pairs = list(zip(found.outcomes, base.outcomes, strict=True))
    better = sum(one.regret() < other.regret() for one, other in pairs)
    worse = sum(one.regret() > other.regret() for one, other in pairs)
    ratio = found.regret / base.regret if base.regret else math.nan
    return (
        f"{found.regret:10.4g}{ratio:11.2f}"
        f"{f'{match:.2f}' if math.isfinite(match) else 'never':>7}{f'{better}:{worse}':>8}"
        f"{median(each.time for each in found.outcomes):7.0f}"
        f"{median(len(each.trials) for each in found.outcomes):8.0f}{found.seconds * 1000:8.2f}"
    )


def same_trials(problem: Problem, seeds: Sequence[int]) -> None:
    """What `trials = 64` means: as many trials for each, and what they cost."""
    workers, trainings = SMALL
    base = measure(partial(ours, method="random"), problem, workers, trainings, seeds)
    found = measure(partial(ours, stops=True), problem, workers, trainings, seeds, trials=trainings)
    steps = median(each.steps for each in found.outcomes) / budget(problem, trainings)
    print(
        f"{problem.name}: {trainings} trials of TPE + ASHA use {steps:.2f} of the steps of "
        f"{trainings} random ones; regret {found.regret:.4g} beside {base.regret:.4g}",
        flush=True,
    )


def asks() -> None:
    """CPU of suggestions from a ledger of some length, of which a few trials have just changed."""
    print(f"\n{'CPU per ask of TPE, ms':24}{'alone':>10}{'of 64':>8}{'first':>8}", flush=True)
    for problem in (problems.H6CURVES, problems.MIXED8CURVES):
        for count in (100, 1_000, 10_000):
            spec = spec_of(problem, "tpe", LARGE[0], 0)
            trials = _ledger(problem, spec, count)
            first = _cpu(spec, trials, 1)
            alone = [_cpu(spec, _grown(trials), 1) for _ in range(15)]
            many = _cpu(spec, _grown(trials), 64) / 64
            print(
                f"{problem.name:14}{count:10,}{median(alone) * 1000:10.1f}{many * 1000:8.1f}"
                f"{first * 1000:8.0f}",
                flush=True,
            )


def _ledger(problem: Problem, spec: SweepSpec, count: int) -> list[Trial]:
    drawn = suggest_trials(msgspec.structs.replace(spec, method="random"), [], range(count))
    trials = []
    for number, (params, _) in enumerate(drawn):
        steps = (1, 3, 9)[: 1 + number % 3]
        reports = [TrialReport(step, (problem.loss(params, step),)) for step in steps]
        trials.append(Trial(number, params, 0, state=TrialState.PRUNED, reports=reports))
    return trials


def _grown(trials: list[Trial]) -> list[Trial]:
    """One trial more, and one that has come further."""
    trials[len(trials) % 50].reports.append(TrialReport(20, (0.5,)))
    trials.append(Trial(len(trials), trials[7].params, 0, state=TrialState.RUNNING))
    return trials


def _cpu(spec: SweepSpec, trials: list[Trial], count: int) -> float:
    start = time.process_time()
    suggest_trials(spec, trials, range(len(trials), len(trials) + count))
    return time.process_time() - start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sweep_quality")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--small", action="store_true", help="only 16 at once, 64 trainings")
    options = parser.parse_args(arguments)
    os.nice(10)
    seeds = range(options.seeds)
    if not find_spec("optuna"):
        print("Optuna is not installed here: its rows are left out (pip install optuna).")
    curves = (problems.H6CURVES, problems.MIXED8CURVES, problems.mnist())
    for problem in curves:
        compare(problem, *SMALL, seeds)
    for problem in curves:
        same_trials(problem, seeds)
    asks()
    if options.small:
        return
    for problem in problems.FUNCTIONS:
        compare(problem, *LARGE, seeds)
    for problem in curves:
        compare(problem, *LARGE, seeds)


if __name__ == "__main__":
    main()
