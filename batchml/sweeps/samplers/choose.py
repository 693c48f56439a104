"""Choose the parameters of the next trials, from the sweep's file, its ledger and their numbers."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batchml.model.sweep import MODELS, Params, SweepSpec, Trial
from batchml.sweeps.samplers import optuna, tpe
from batchml.sweeps.samplers.sequences import find_sequence


class Suggestion(NamedTuple):
    params: Params
    origin: str  # which sampler: "tpe", "random", "sobol", "grid", "list", "gp", ...


def suggest_trials(
    spec: SweepSpec, trials: Sequence[Trial], numbers: Sequence[int]
) -> list[Suggestion]:
    """The parameters of trials that start together; each accounts for those before it.

    `trials` are those of the ledger; the same arguments give the same result after a restart. Fewer
    than `numbers` are returned if no other points are left, or `where` allows none.
    """
    indices = [number - _confirming(trials, number) for number in numbers]
    return list(_suggestions(spec, trials, indices))


def _suggestions(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Suggestion]:
    begun = sum(1 for index in indices if index < len(spec.points))
    learns = uses_results(spec)
    for index in indices[: begun if learns else None]:
        suggestion = fixed_suggestion(spec, index)
        if suggestion is None:
            return
        yield suggestion
    if learns and begun < len(indices):
        yield from _learned(spec, trials, indices[begun:])


def uses_results(spec: SweepSpec) -> bool:
    """Whether suggestions depend on results. With `halving` they are made before any result."""
    return spec.method in MODELS and spec.early_stop.method != "halving"


def _learned(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Suggestion]:
    if spec.method == "tpe":
        return (Suggestion(*each) for each in tpe.suggest_points(spec, trials, indices))
    return (Suggestion(each, spec.method) for each in optuna.suggest_points(spec, trials, indices))


def fixed_suggestion(spec: SweepSpec, index: int) -> Suggestion | None:
    """Point number `index` of a method that needs no results. The file's own points come first."""
    if index < len(spec.points):
        return Suggestion(spec.points[index], "list")
    kind = spec.method if spec.method in ("list", "grid", "sobol") else "random"
    params = find_sequence(spec, kind).at(index - (0 if kind == "list" else len(spec.points)))
    return None if params is None else Suggestion(params, kind)


def _confirming(trials: Sequence[Trial], number: int) -> int:
    """The number of confirming runs before `number`: they are no new points."""
    return sum(1 for trial in trials if trial.confirms is not None and trial.number < number)
