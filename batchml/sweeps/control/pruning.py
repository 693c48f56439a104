"""Results at the rungs, and the cut-offs by which running trials are stopped early. Pure.

The cut-off of a rung is the worst loss among the best 1/eta of the results there (L. Li and others,
"A system for massively parallel hyperparameter tuning", 2020, the stopping variant). With `median`
the cut-off of a step is the median of the results there.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from math import isfinite

from batchml.model.sweep import SweepSpec, Trial, TrialReport, TrialState
from batchml.runtime.protocol.sweep import (
    MEDIAN_AFTER,
    MEDIAN_OTHERS,
    Cutoffs,
    rung_passed,
    rung_steps,
)

_MOST_MEDIANS = 64  # steps that have one, also in a training of 10,000 steps

Result = tuple[float, int]  # loss, trial's number


def rung_ends(spec: SweepSpec) -> tuple[int, ...]:
    """The steps at which trials end, rung by rung; the last is the full training."""
    stop = spec.early_stop
    return (*rung_steps(stop.min, stop.max, stop.eta), stop.max)


class RungResults:
    """The results at each rung, sorted best first and kept up to date by the trials that change."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._goal, self._stop = spec.goal, spec.early_stop
        self.steps = rung_ends(spec)[:-1] if self._stop.max else ()
        self.results: list[list[Result]] = [[] for _ in self.steps]
        self._waiting: list[list[Result]] = [[] for _ in self.steps]  # trials that are paused there
        self._known: dict[tuple[int, int], float] = {}  # (trial, rung) -> loss
        self._paused: dict[int, tuple[int, Result]] = {}
        self._read: dict[int, int] = {}  # trial -> the last step whose report was read
        self._medians: dict[int, list[Result]] = {}
        self.is_changed = False  # reset by the controller when it publishes the cut-offs
        for trial in trials:
            self.note(trial)

    def note(self, trial: Trial) -> None:
        """Read the new results of a trial that has changed."""
        if not self._stop.max or trial.confirms is not None:
            return
        before = self._read.get(trial.number, 0)
        if trial.step < before:  # it began anew
            self._forget(trial.number)
            before = 0
        for report in trial.reports[bisect_left(trial.reports, before + 1, key=_step_of) :]:
            loss = self._goal.loss(report.values[0])
            if isfinite(loss):
                self._add(trial.number, before, report.step, loss)
            before = report.step
        self._read[trial.number] = before
        self._pause(trial)

    def cutoffs(self, version: int) -> Cutoffs:
        """The cut-offs to publish to the trials."""
        turn = self._goal.loss
        rungs = {
            number: (len(found), turn(self.threshold(found)))
            for number, found in enumerate(self.results)
            if self._stop.method != "median" and len(found) >= self._stop.eta
        }
        medians = {
            step: (len(found), turn(found[(len(found) - 1) // 2][0]))
            for step, found in self._medians.items()
            if len(found) >= MEDIAN_OTHERS
        }
        return Cutoffs(version, rungs, medians)

    def threshold(self, found: list[Result]) -> float:
        """The worst loss among the best 1/eta, at least one of them."""
        return found[max(1, len(found) // self._stop.eta) - 1][0]

    def promotable(self, limit: int) -> list[tuple[int, int]]:
        """At most `limit` trials to promote, the deepest and best first: (trial, step to run to).

        A rung promotes trials that are paused there and are among the best 1/eta of its results.
        """
        chosen: list[tuple[int, int]] = []
        ends = (*self.steps[1:], self._stop.max)
        for rung in reversed(range(len(self.steps))):
            found = self.results[rung]
            share = len(found) // self._stop.eta
            for result in self._waiting[rung]:
                if len(chosen) >= limit or bisect_left(found, result) >= share:
                    break
                chosen.append((result[1], ends[rung]))
        return chosen

    def best_paused(self) -> int | None:
        """The best trial at the deepest rung where any is paused."""
        for waiting in reversed(self._waiting):
            if waiting:
                return waiting[0][1]
        return None

    def _add(self, number: int, before: int, step: int, loss: float) -> None:
        rung = rung_passed(self.steps, before, step)
        if rung is not None:
            old = self._known.get((number, rung))
            if old is not None:
                _remove(self.results[rung], (old, number))
            self._known[number, rung] = loss
            insort(self.results[rung], (loss, number))
            self.is_changed = True
        if self._stop.method == "median" and self._has_median(step):
            insort(self._medians.setdefault(step, []), (loss, number))
            self.is_changed = True

    def _forget(self, number: int) -> None:
        """Forget the results of a trial from before it began anew."""
        for found in (*self.results, *self._medians.values()):
            found[:] = [result for result in found if result[1] != number]
        for rung in range(len(self.steps)):
            self._known.pop((number, rung), None)
        self.is_changed = True

    def _has_median(self, step: int) -> bool:
        apart = -(-self._stop.max // _MOST_MEDIANS)
        return step >= MEDIAN_AFTER * self._stop.max and step % apart == 0

    def _pause(self, trial: Trial) -> None:
        was = self._paused.pop(trial.number, None)
        if was is not None:
            _remove(self._waiting[was[0]], was[1])
        if trial.state is not TrialState.PAUSED:
            return
        for rung in reversed(range(len(self.steps))):
            loss = self._known.get((trial.number, rung))
            if loss is not None:
                self._paused[trial.number] = (rung, (loss, trial.number))
                insort(self._waiting[rung], (loss, trial.number))
                return


def _step_of(report: TrialReport) -> int:
    return report.step


def _remove(found: list[Result], result: Result) -> None:
    index = bisect_left(found, result)
    if index < len(found) and found[index] == result:
        del found[index]
