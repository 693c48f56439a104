"""A sweep without containers: workers, starts, stragglers and early stopping in simulated time.

Starting a trial costs as much as one step; trials differ in speed, and three in a hundred take
three times as long. A batch of trials begins once a tenth of the workers is free, as in the
controller, and trials compare themselves with cut-offs that are up to half a step old.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from batchml.model.sweep import (
    EarlyStop,
    Goal,
    Method,
    Params,
    SweepLimits,
    SweepSpec,
    Trial,
    TrialReport,
    TrialState,
)
from batchml.sweeps.control.pruning import RungResults, rung_ends
from batchml.sweeps.samplers.points import seeded_random
from benchmarks.sweep_problems import Problem

START = 1  # steps that the start of a container costs; a function has none
SPREAD = 0.25  # of the trials' speed, of its logarithm
STRAGGLERS, LATE = 0.03, 3.0
FREE = 0.1  # of the workers, before a wave begins
PUBLISHED = 0.5  # steps from one version of the cut-offs to the next
PARTS = 64  # of the budget, at the ends of which methods are compared


class Search(NamedTuple):
    """A way to search. `goes_on` is asked after each report but the last, and sees it."""

    ask: Callable[[Sequence[Trial], Sequence[int]], Sequence[Params]]
    goes_on: Callable[[Trial], bool] = lambda trial: True
    tell: Callable[[Trial], None] = lambda trial: None  # of its end
    stops_early: bool = False


class Point(NamedTuple):
    """The incumbent: of the trials trained to the end, the best by what it printed."""

    steps: int  # used so far by all trials, starts included
    regret: float  # without noise


class Outcome(NamedTuple):
    history: list[Point]
    trials: list[Trial]
    steps: int
    time: float  # in steps of one trial

    def regret(self, steps: float = math.inf) -> float:
        """Of the incumbent once so many steps were used; infinite before there is one."""
        known = [point.regret for point in self.history if point.steps <= steps]
        return known[-1] if known else math.inf


class Asha:
    """The stopping type, as trials and the controller do it together."""

    def __init__(self, spec: SweepSpec) -> None:
        self._goal, self._eta = spec.goal, spec.early_stop.eta
        self._rungs = RungResults(spec)
        self._cutoffs = self._rungs.cutoffs(0)
        self._fresh = PUBLISHED

    def __call__(self, trial: Trial) -> bool:
        report = trial.reports[-1]
        if report.at >= self._fresh:
            self._cutoffs = self._rungs.cutoffs(0)
            self._fresh = report.at + PUBLISHED
        self._rungs.note(trial)
        rung = self._rungs.steps.index(report.step)
        count, cutoff = self._cutoffs.rungs.get(rung, (0, math.nan))
        loss = self._goal.loss
        return count < self._eta or loss(report.values[0]) <= loss(cutoff)


def spec_of(problem: Problem, method: Method, workers: int, seed: int) -> SweepSpec:
    return SweepSpec(
        problem.name,
        "none",
        (Goal("loss", "min"),),
        problem.space,
        method=method,
        early_stop=EarlyStop("asha" if problem.steps > 1 else "none", max=problem.steps),
        limits=SweepLimits(parallel=workers),
        seed=seed,
    )


def budget(problem: Problem, trainings: int) -> int:
    """Steps of so many full trainings."""
    return trainings * (problem.steps + _start(problem))


def simulate(
    problem: Problem,
    search: Search,
    *,
    workers: int,
    trainings: int,
    seed: int,
    trials: int | None = None,
) -> Outcome:
    """One sweep: until the steps of so many `trainings` are used, or `trials` have ended."""
    most = trials if trials is not None or search.stops_early else trainings
    return _Simulation(problem, search, workers, budget(problem, trainings), seed, most).run()


def share_to_match(outcomes: Sequence[Outcome], regret: float, steps: int) -> float:
    """The share of `steps` after which the median regret is no more than that. Or infinity."""
    for part in range(1, PARTS + 1):
        spent = steps * part / PARTS
        if median(outcome.regret(spent) for outcome in outcomes) <= regret:
            return part / PARTS
    return math.inf


def _start(problem: Problem) -> int:
    return START if problem.steps > 1 else 0


class _Simulation:
    def __init__(
        self,
        problem: Problem,
        search: Search,
        workers: int,
        steps: int,
        seed: int,
        most: int | None,
    ) -> None:
        self._problem, self._search = problem, search
        self._workers, self._budget, self._seed = workers, steps, seed
        self._most = most
        self._start = _start(problem)
        self._ends = rung_ends(spec_of(problem, "random", workers, seed))
        self._trials: list[Trial] = []
        self._events: list[tuple[float, int]] = []  # when which trial reaches its next rung
        self._time, self._used = 0.0, 0
        self._history: list[Point] = []
        self._printed = math.inf  # by the incumbent

    def run(self) -> Outcome:
        self._fill()
        while self._events and self._used < self._budget:
            self._time, number = heapq.heappop(self._events)
            self._report(self._trials[number])
            self._fill()
        return Outcome(self._history, self._trials, self._used, self._time)

    def _fill(self) -> None:
        free = self._workers - len(self._events)
        if free < math.ceil(self._workers * FREE):
            return
        if self._most is not None:
            free = min(free, self._most - len(self._trials))
        numbers = range(len(self._trials), len(self._trials) + free)
        if not numbers:
            return
        for number, params in zip(numbers, self._search.ask(self._trials, numbers), strict=False):
            trial = Trial(number, params, number, state=TrialState.RUNNING)
            self._trials.append(trial)
            self._go(trial, self._start)

    def _go(self, trial: Trial, start: int) -> None:
        dice = seeded_random(self._seed, trial.number, "pace")
        intervals = math.exp(dice.gauss(0, SPREAD)) * (LATE if dice.random() < STRAGGLERS else 1)
        steps = self._next(trial) - trial.step + start
        heapq.heappush(self._events, (self._time + steps * intervals, trial.number))

    def _next(self, trial: Trial) -> int:
        return next(step for step in self._ends if step > trial.step)

    def _report(self, trial: Trial) -> None:
        step = self._next(trial)
        self._used += step - trial.step + (0 if trial.reports else self._start)
        loss = self._problem.loss(trial.params, step)
        noise = seeded_random(self._seed, trial.number, step).gauss(0, self._problem.noise)
        trial.reports.append(TrialReport(step, (loss + noise,), self._time))
        if step == self._problem.steps:
            trial.state = TrialState.DONE
            if loss + noise < self._printed:
                self._printed = loss + noise
                self._history.append(Point(self._used, loss - self._problem.best))
        elif not self._search.goes_on(trial):
            trial.state = TrialState.PRUNED
        if trial.state.is_ended:
            self._search.tell(trial)
        else:
            self._go(trial, 0)
