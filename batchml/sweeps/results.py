"""Results of a sweep: the best trials, confirming runs, the importance of parameters. Pure."""

import math
from collections.abc import Iterable, Sequence
from math import fsum, isfinite, sqrt
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.model.sweep import Dimension, Params, Space, SweepSpec, Trial, TrialState

if TYPE_CHECKING:
    from batchml.sweeps.control.state import SweepState

BAD_STATES = frozenset((TrialState.FAILED, TrialState.LOST, TrialState.DIVERGED))

Rank = tuple[bool, int, float, int]


def losses_of(trial: Trial, spec: SweepSpec) -> tuple[float, ...] | None:
    """The losses of a trial at its last step, one for each goal; None without finite values."""
    if trial.values is None or not all(map(isfinite, trial.values)):
        return None
    return tuple(goal.loss(value) for goal, value in zip(spec.goals, trial.values, strict=False))


def rank_key(trial: Trial, spec: SweepSpec) -> Rank | None:
    """The key by which trials are sorted, the best first; None for a trial that is not ranked.

    DONE trials come first, then the trials with most steps, then by the first goal. Failed trials
    are not ranked, because they have no model, and confirming runs are not candidates.
    """
    losses = losses_of(trial, spec)
    if trial.state in BAD_STATES or trial.confirms is not None or not losses:
        return None
    return (trial.state is not TrialState.DONE, -trial.step, losses[0], trial.number)


def rank_trials(state: "SweepState", spec: SweepSpec) -> list[Trial]:
    """All trials with a result, best first. O(n log n); for the best one alone see `BestTrial`."""
    keyed = ((rank_key(trial, spec), trial) for trial in state.trials.values())
    return [trial for key, trial in sorted((key, trial) for key, trial in keyed if key is not None)]


def best_trial(state: "SweepState", spec: SweepSpec) -> Trial | None:
    return BestTrial(spec, state.trials.values()).trial


def failed_trials(state: "SweepState") -> list[Trial]:
    """The failed and the lost trials, by their number."""
    return [trial for _, trial in sorted(state.trials.items()) if trial.state.is_failure]


class BestTrial:
    """The best trial. `note` keeps it up to date."""

    def __init__(self, spec: SweepSpec, trials: Iterable[Trial] = ()) -> None:
        self._spec = spec
        self._key: Rank | None = None
        self.trial: Trial | None = None
        self.restart(trials)

    def note(self, trial: Trial) -> bool:
        """Compare a trial that has changed. False if the best got worse, so `restart` is needed."""
        key = rank_key(trial, self._spec)
        if self.trial is not None and trial.number == self.trial.number:
            if key is None or (self._key is not None and key > self._key):
                return False
            self._key, self.trial = key, trial
        elif key is not None and (self._key is None or key < self._key):
            self._key, self.trial = key, trial
        return True

    def restart(self, trials: Iterable[Trial]) -> None:
        """Compare all trials anew."""
        self._key = self.trial = None
        for trial in trials:
            self.note(trial)


def pareto_front(state: "SweepState", spec: SweepSpec) -> list[Trial]:
    """The trials that no other beats or equals in every goal, sorted by the first goal.

    Only trials of equal length are compared: DONE trials, if there are any, otherwise the trials
    with most steps. Empty for a sweep with one goal.
    """
    ranked = rank_trials(state, spec)
    if not ranked or len(spec.goals) < 2:
        return []
    first = ranked[0]
    if first.state is TrialState.DONE:
        alike = [trial for trial in ranked if trial.state is TrialState.DONE]
    else:
        alike = [trial for trial in ranked if trial.step == first.step]
    points = [(losses_of(trial, spec) or (), trial) for trial in alike]
    points.sort(key=lambda point: (point[0], point[1].number))
    front: list[tuple[tuple[float, ...], Trial]] = []
    for point, trial in points:  # sorted by the first goal: only an earlier point can be better
        if not any(_dominates(other, point) for other, _ in front):
            front.append((point, trial))
    return [trial for _, trial in front]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `one` is at least as good in every goal."""
    return all(a <= b for a, b in zip(one, other, strict=False))


class ConfirmedTrial(Struct, frozen=True):
    """A trial and its confirming runs. `values`: the first goal's, of the trial and of all runs."""

    trial: Trial
    values: tuple[float, ...]
    mean: float
    deviation: float  # standard deviation of a sample; 0 for a single value


def confirmed_trials(state: "SweepState", spec: SweepSpec) -> list[ConfirmedTrial]:
    """The trials with confirming runs that are DONE, the best mean first."""
    values_of: dict[int, list[float]] = {}
    for trial in state.trials.values():
        is_done = trial.confirms in state.trials and trial.state is TrialState.DONE
        if is_done and trial.confirms is not None and trial.values and isfinite(trial.values[0]):
            values_of.setdefault(trial.confirms, []).append(trial.values[0])
    confirmed = [_average(state.trials[number], values) for number, values in values_of.items()]
    return sorted(confirmed, key=lambda each: (spec.goal.loss(each.mean), each.trial.number))


def _average(trial: Trial, confirming: Sequence[float]) -> ConfirmedTrial:
    values = (*(trial.values or ())[:1], *confirming)
    mean = fsum(values) / len(values)
    variance = fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return ConfirmedTrial(trial, values, mean, sqrt(variance))


# --- Importances ----------------------------------------------------------------------------------
# Which parameters decide how good a trial is: an estimate that takes milliseconds.
#
# After PED-ANOVA (Watanabe, Bansal, Hutter: "PED-ANOVA: Efficiently Quantifying Hyperparameter
# Importance in Arbitrary Subspaces", IJCAI 2023): a parameter matters as far as its values among
# the best tenth of the trials have another distribution than among all trials. The distance of the
# two is the Pearson divergence of their densities. All trials stand for the space, so a sampler
# that tried some regions more often does not make their parameters look important.
#
# With few trials two random samples differ as well. So the average divergence of a random tenth is
# subtracted: a parameter that decides nothing comes out near 0.


LEAST = 20  # trials with a result that an estimate needs
_BEST = 0.1  # the share of trials that counts as the best
_CELLS = 32  # cells of a parameter's range
_SHUFFLES = 16  # random tenths
_FLOOR = 0.5  # trials that are added to each cell, so that no density is 0


def importances(space: Space, best_first: Sequence[Params]) -> dict[str, float]:
    """The importance of each parameter, largest first; they add up to 1.

    `best_first`: the parameters of the trials with a result, the best trial first. A parameter that
    is not always active is rated by the trials that have it. Empty with too few trials, and if
    every parameter has one value only.
    """
    if len(best_first) < LEAST:
        return {}
    divergences = {
        name: _divergence(
            dimension, [each[name] for each in best_first if name in each], len(best_first)
        )
        for name, dimension in space.items()
        if dimension.kind != "constant"
    }
    total = math.fsum(divergences.values())
    if total <= 0:
        return {}
    largest_first = sorted(divergences.items(), key=lambda item: (-item[1], item[0]))
    return {name: value / total for name, value in largest_first}


def _divergence(dimension: Dimension, values: Sequence[object], trials: int) -> float:
    """The divergence of the best tenth of `values` (best first), less that of a random tenth.

    Weighted by the share of trials that have the parameter.
    """
    if len(values) < LEAST:
        return 0.0
    cells, width = _cells(dimension, values)
    count = max(3, round(len(cells) * _BEST))
    is_choice = dimension.kind == "choice"
    everywhere = _density(cells, width, is_choice)
    best = _pearson(_density(cells[:count], width, is_choice), everywhere)
    random = Random(0)
    chance = [
        _pearson(_density(random.sample(cells, count), width, is_choice), everywhere)
        for _ in range(_SHUFFLES)
    ]
    mean = math.fsum(chance) / _SHUFFLES
    noise = math.sqrt(math.fsum((each - mean) ** 2 for each in chance) / (_SHUFFLES - 1))
    return max(0.0, best - mean - noise) * len(values) / trials


def _cells(dimension: Dimension, values: Sequence[object]) -> tuple[list[int], int]:
    """The cell of the parameter's range in which each value lies, and the number of cells."""
    if dimension.kind == "choice" or not all(_is_number(value) for value in values):
        names = {repr(value): 0 for value in (*dimension.values, *values)}
        indexes = {name: index for index, name in enumerate(names)}
        return [indexes[repr(value)] for value in values], len(indexes)
    numbers = [_scaled(dimension, float(value)) for value in values]  # type: ignore[arg-type]
    low, high = min(numbers), max(numbers)
    if not high > low:
        return [0] * len(numbers), 1
    size = (high - low) / _CELLS
    return [min(_CELLS - 1, int((number - low) / size)) for number in numbers], _CELLS


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(dimension: Dimension, value: float) -> float:
    return math.log(value) if dimension.log and value > 0 else value


def _density(cells: Sequence[int], width: int, is_choice: bool) -> list[float]:
    """The share of each cell. Cells of a range are smoothed with their neighbours."""
    counts = [_FLOOR / width] * width
    for cell in cells:
        counts[cell] += 1
    if not is_choice and width > 1:
        counts = _smooth(counts, max(1.0, _CELLS / 5 * len(cells) ** -0.2))
    total = math.fsum(counts)
    return [count / total for count in counts]


def _smooth(counts: Sequence[float], sigma: float) -> list[float]:
    """Smooth by a normal kernel, which is cut off and rescaled at the ends of the range."""
    reach = range(-int(3 * sigma), int(3 * sigma) + 1)
    weights = {step: math.exp(-0.5 * (step / sigma) ** 2) for step in reach}
    smoothed = [0.0] * len(counts)
    for index, count in enumerate(counts):
        steps = [step for step in reach if 0 <= index + step < len(counts)]
        total = math.fsum(weights[step] for step in steps)
        for step in steps:
            smoothed[index + step] += count * weights[step] / total
    return smoothed


def _pearson(best: Iterable[float], all_trials: Iterable[float]) -> float:
    """The Pearson divergence of two densities."""
    return math.fsum((a - b) ** 2 / b for a, b in zip(best, all_trials, strict=True))
