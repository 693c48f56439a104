"""Choose the parameters of the next trials, by the sweep's method and its trials so far."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batchml.model.sweep import MODELS, Params, SweepSpec, Trial
from batchml.sweeps.samplers import optuna, tpe
from batchml.sweeps.samplers.sequences import find_sequence


class Suggestion(NamedTuple):
    """The parameters of one new trial."""

    params: Params
    origin: str  # the sampler: "tpe", "random", "sobol", "grid", "list", "gp", ...


def suggest_trials(
    spec: SweepSpec, trials: Sequence[Trial], numbers: Sequence[int]
) -> list[Suggestion]:
    """The parameters of the new trials `numbers`; each accounts for the trials before it.

    `trials` are all trials so far. The same arguments give the same result after a restart. There
    are fewer suggestions than `numbers` if no other points are left, or `where` allows none.
    """
    confirming = [trial.number for trial in trials if trial.confirms is not None]
    # Confirming runs have numbers too, and are no new points.
    indices = [number - sum(each < number for each in confirming) for number in numbers]
    return list(_suggestions(spec, trials, indices))


def _suggestions(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Suggestion]:
    # With `halving` all suggestions are made before any result.
    uses_results = spec.method in MODELS and spec.early_stop.method != "halving"
    from_file = sum(index < len(spec.points) for index in indices)
    for index in indices[: from_file if uses_results else None]:
        suggestion = _fixed_suggestion(spec, index)
        if suggestion is None:
            return
        yield suggestion
    rest = indices[from_file:]
    if not uses_results or not rest:
        return
    if spec.method == "tpe":
        yield from (Suggestion(*each) for each in tpe.suggest_points(spec, trials, rest))
    else:
        points = optuna.suggest_points(spec, trials, rest)
        yield from (Suggestion(params, spec.method) for params in points)


def _fixed_suggestion(spec: SweepSpec, index: int) -> Suggestion | None:
    """Point number `index` of a method that needs no results. The file's own points come first."""
    if index < len(spec.points):
        return Suggestion(spec.points[index], "list")
    if spec.method == "list":
        return None
    kind = spec.method if spec.method in ("grid", "sobol") else "random"
    params = find_sequence(spec, kind).at(index - len(spec.points))
    return None if params is None else Suggestion(params, kind)
