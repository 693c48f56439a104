"""Early stopping: the trials' results at the rungs, cut-offs for running trials, promotions. Pure.

A rung is a step at which trials are compared. Its cut-off is the worst loss among the best 1/eta of
the results at the rung (L. Li and others, "A system for massively parallel hyperparameter tuning",
2020, the stopping variant). With `median` the cut-off of a step is the median of all results at it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import isfinite
from operator import attrgetter

from batchml.model.sweep import SweepSpec, Trial, TrialState
from batchml.runtime.protocol.sweep import MEDIAN_AFTER, MEDIAN_OTHERS, Cutoffs, rung_passed

_MOST_MEDIANS = 64  # steps with a published median, also in a training of 10,000 steps

Result = tuple[float, int]  # loss, trial's number


def rung_ends(spec: SweepSpec) -> tuple[int, ...]:
    """The steps at which trials end, rung by rung; the last is the end of a full training."""
    return (*spec.early_stop.rungs, spec.early_stop.max)


class RungResults:
    """The results at each rung, sorted best first and kept up to date by the trials that change."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._goal, self._stop = spec.goal, spec.early_stop
        self.steps = self._stop.rungs
        self.results: list[list[Result]] = [[] for _ in self.steps]
        self._paused_at: list[list[Result]] = [[] for _ in self.steps]  # results of paused trials
        self._losses: dict[tuple[int, int], float] = {}  # (trial, rung) -> loss
        self._rung_of_paused: dict[int, tuple[int, Result]] = {}  # trial -> its rung and result
        self._last_read: dict[int, int] = {}  # trial -> the last step whose report was read
        self._medians: dict[int, list[Result]] = {}  # step -> all results at it
        self.is_changed = False  # reset by the controller when it publishes the cut-offs
        for trial in trials:
            self.note(trial)

    def note(self, trial: Trial) -> None:
        """Read the new results of a trial that has changed."""
        if not self._stop.max or trial.confirms is not None:
            return
        before = self._last_read.get(trial.number, 0)
        if trial.step < before:  # it began anew
            self._forget(trial.number)
            before = 0
        first_new = bisect_left(trial.reports, before + 1, key=attrgetter("step"))
        for report in trial.reports[first_new:]:
            loss = self._goal.loss(report.values[0])
            if isfinite(loss):
                self._add(trial.number, before, report.step, loss)
            before = report.step
        self._last_read[trial.number] = before
        self._update_paused(trial)

    def cutoffs(self, version: int) -> Cutoffs:
        """The cut-offs to publish to the trials."""
        to_value = self._goal.loss  # its own inverse: a loss becomes a value of the metric
        rungs = {
            rung: (len(results), to_value(self._threshold(results)))
            for rung, results in enumerate(self.results)
            if len(results) >= self._stop.eta
        }
        medians = {
            step: (len(results), to_value(results[(len(results) - 1) // 2][0]))
            for step, results in self._medians.items()
            if len(results) >= MEDIAN_OTHERS
        }
        return Cutoffs(version, rungs, medians)

    def _threshold(self, results: list[Result]) -> float:
        """The worst loss among the best 1/eta of the results, at least one of them."""
        return results[max(1, len(results) // self._stop.eta) - 1][0]

    def promotable(self, limit: int) -> list[tuple[int, int]]:
        """At most `limit` trials to promote, the deepest and best first: (trial, step to run to).

        A rung promotes trials that are paused there and are among the best 1/eta of its results.
        """
        chosen: list[tuple[int, int]] = []
        ends = (*self.steps[1:], self._stop.max)
        for rung in reversed(range(len(self.steps))):
            results = self.results[rung]
            best = len(results) // self._stop.eta
            for result in self._paused_at[rung]:
                if len(chosen) >= limit or bisect_left(results, result) >= best:
                    break
                chosen.append((result[1], ends[rung]))
        return chosen

    def best_paused(self) -> int | None:
        """The best trial at the deepest rung where any is paused."""
        return next((paused[0][1] for paused in reversed(self._paused_at) if paused), None)

    def _add(self, number: int, before: int, step: int, loss: float) -> None:
        rung = rung_passed(self.steps, before, step)
        if rung is not None:
            old = self._losses.get((number, rung))
            if old is not None:
                _remove(self.results[rung], (old, number))
            self._losses[number, rung] = loss
            insort(self.results[rung], (loss, number))
            self.is_changed = True
        if self._stop.method == "median" and self._has_median(step):
            insort(self._medians.setdefault(step, []), (loss, number))
            self.is_changed = True

    def _forget(self, number: int) -> None:
        """Forget the results of a trial from before it began anew."""
        for results in (*self.results, *self._medians.values()):
            results[:] = [result for result in results if result[1] != number]
        for rung in range(len(self.steps)):
            self._losses.pop((number, rung), None)
        self.is_changed = True

    def _has_median(self, step: int) -> bool:
        interval = -(-self._stop.max // _MOST_MEDIANS)
        return step >= MEDIAN_AFTER * self._stop.max and step % interval == 0

    def _update_paused(self, trial: Trial) -> None:
        """Note at which rung the trial is paused, or that it no longer is."""
        before = self._rung_of_paused.pop(trial.number, None)
        if before is not None:
            _remove(self._paused_at[before[0]], before[1])
        if trial.state is not TrialState.PAUSED:
            return
        for rung in reversed(range(len(self.steps))):
            loss = self._losses.get((trial.number, rung))
            if loss is not None:
                self._rung_of_paused[trial.number] = (rung, (loss, trial.number))
                insort(self._paused_at[rung], (loss, trial.number))
                return


def _remove(results: list[Result], result: Result) -> None:
    index = bisect_left(results, result)
    if index < len(results) and results[index] == result:
        del results[index]
