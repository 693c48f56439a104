"""What to try next: a function of the sweep's file, of its ledger and of the trial's number."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batchml.model.sweep import MODELS, Params, SweepSpec, Trial
from batchml.sweep.sequences import sequence


class Suggestion(NamedTuple):
    params: Params
    origin: str  # which sampler: "tpe", "random", "sobol", "grid", "list", "gp", ...


def suggest(spec: SweepSpec, trials: Sequence[Trial], number: int) -> Suggestion | None:
    """The parameters of trial `number`; None: there is nothing left to try, or `where` allows none.

    `trials` are those of the ledger. The same arguments give the same answer after a restart.
    """
    found = suggestions(spec, trials, [number])
    return found[0] if found else None


def suggestions(
    spec: SweepSpec, trials: Sequence[Trial], numbers: Sequence[int]
) -> list[Suggestion]:
    """The parameters of several trials that start together: each knows of those before it.

    Fewer than asked for where the points run out.
    """
    indices = [number - _confirming(trials, number) for number in numbers]
    return list(_found(spec, trials, indices))


def _found(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Suggestion]:
    begun = sum(1 for index in indices if index < len(spec.points))
    learns = uses_results(spec)
    for index in indices[: begun if learns else None]:
        suggestion = fixed(spec, index)
        if suggestion is None:
            return
        yield suggestion
    if learns and begun < len(indices):
        yield from _learned(spec, trials, indices[begun:])


def uses_results(spec: SweepSpec) -> bool:
    """Whether suggestions depend on results. Those of `halving` are all made before the first."""
    return spec.method in MODELS and spec.early_stop.method != "halving"


def _learned(
    spec: SweepSpec, trials: Sequence[Trial], indices: Sequence[int]
) -> Iterator[Suggestion]:
    if spec.method == "tpe":
        from batchml.sweep import tpe

        return (Suggestion(*each) for each in tpe.suggestions(spec, trials, indices))
    from batchml.sweep import optuna_door

    return (
        Suggestion(each, spec.method) for each in optuna_door.suggestions(spec, trials, indices)
    )


def fixed(spec: SweepSpec, index: int) -> Suggestion | None:
    """Point number `index` where no results are asked: the file's own points stand first."""
    if index < len(spec.points):
        return Suggestion(spec.points[index], "list")
    kind = spec.method if spec.method in ("list", "grid", "sobol") else "random"
    params = sequence(spec, kind).at(index - (0 if kind == "list" else len(spec.points)))
    return None if params is None else Suggestion(params, kind)


def _confirming(trials: Sequence[Trial], number: int) -> int:
    """How many of the trials before `number` run again what was there: they are no points."""
    return sum(1 for trial in trials if trial.confirms is not None and trial.number < number)
