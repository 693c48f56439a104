"""Choose the parameters of the next trials, by the sweep's method and its trials so far."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from batchml.model.sweep import MODELS, Params, SweepSpec, Trial
from batchml.sweeps.samplers import optuna, tpe
from batchml.sweeps.samplers.sequences import find_sequence
from batchml.sweeps.samplers.tpe import TrialObservations


class Suggestion(NamedTuple):
    """The parameters of one new trial."""

    params: Params
    origin: str  # the sampler: "tpe", "random", "sobol", "grid", "list", "gp", ...


def suggest_trials(
    spec: SweepSpec,
    trials: Collection[Trial],
    indices: Sequence[int],
    observed: TrialObservations | None = None,
) -> list[Suggestion]:
    """The parameters of the new points `indices`; each accounts for the points before it.

    `trials` are all trials so far. Confirming runs are no points, so points are counted without
    them. The same arguments give the same result after a restart. There are fewer suggestions than
    `indices` if no other points are left, or `where` allows none. `observed`: what was kept of the
    trials for `tpe`, with all their changes noted.
    """
    return list(_suggestions(spec, trials, indices, observed))


def _suggestions(
    spec: SweepSpec,
    trials: Collection[Trial],
    indices: Sequence[int],
    observed: TrialObservations | None,
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
        observed = observed or TrialObservations(spec, trials)
        yield from (Suggestion(*each) for each in tpe.suggest_points(spec, observed, rest))
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
