"""Plan the next batches of trials, each the intent of one SubmitJob. Pure.

Batches and trials are numbered; a batch that is in the ledger is never planned again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.model.params import is_seed
from batchml.model.run import MAX_ARRAY
from batchml.model.sweep import MODELS, Params, SweepSpec, Trial, TrialState, count_points
from batchml.runtime.protocol.sweep import TrialEntry
from batchml.sweeps.control.events import PlannedTrial, TrialBatch
from batchml.sweeps.control.pruning import rung_ends
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import SweepTotals
from batchml.sweeps.results import rank_trials
from batchml.sweeps.samplers.choose import suggest_trials

# --- The submit mode ------------------------------------------------------------------------------


class SubmitMode(StrEnum):
    """How a sweep is submitted to AWS Batch. Decided once, before it starts."""

    ARRAY = "array"  # all trials at once; a consumable resource limits how many run
    RUNGS = "rungs"  # one array for each rung; each depends on the one before
    BATCHES = "waves"  # a controller submits a batch of trials whenever enough may begin


class ChosenMode(Struct, frozen=True):
    """How a sweep is submitted, and the reason."""

    mode: SubmitMode
    why: str  # for people


def choose_mode(spec: SweepSpec, *, hourly: float | None, timeout: float | None) -> ChosenMode:
    """Choose the mode for trials that cost `hourly` USD an hour and end after `timeout` seconds.

    An array runs without a controller, which would check the cost: so its cost must be within the
    limit even if every trial runs into its timeout.
    """
    if spec.early_stop.method == "halving":
        return ChosenMode(SubmitMode.RUNGS, "each rung is one array; no trial needs this terminal")
    if spec.method in MODELS:
        return ChosenMode(
            SubmitMode.BATCHES, f"{spec.method} learns from each result what to try next"
        )
    if spec.early_stop.resume:
        return ChosenMode(SubmitMode.BATCHES, "trials end at rungs, and the best of them continue")
    count = count_trials(spec)
    if count is None:
        return ChosenMode(SubmitMode.BATCHES, "the number of trials is not known")
    if spec.limits.cost is not None and not fits_cost_limit(spec, count, hourly, timeout):
        return ChosenMode(SubmitMode.BATCHES, "the cost is checked before each batch of trials")
    return ChosenMode(
        SubmitMode.ARRAY, "all trials are submitted at once; no trial needs this terminal"
    )


def count_trials(spec: SweepSpec) -> int | None:
    """The greatest possible number of trials; None where only other limits end the sweep."""
    points = len(spec.points) if spec.method == "list" else None
    if spec.method == "grid":
        points = count_points(spec.space)
    return min((each for each in (spec.limits.trials, points) if each is not None), default=None)


def fits_cost_limit(
    spec: SweepSpec, count: int, hourly: float | None, timeout: float | None
) -> bool:
    """Whether the cost stays within its limit even if every trial runs into its timeout."""
    if spec.limits.cost is None or hourly is None:
        return True
    return timeout is not None and count * timeout / 3600 * hourly <= spec.limits.cost


# --- Batches of trials ----------------------------------------------------------------------------


# Below, `make_key` makes the key of a new batch, and `at` is the time of planning.
MakeKey = Callable[[], str]


def first_target(spec: SweepSpec, mode: SubmitMode) -> int:
    """The step at which a trial that begins now ends; 0: when its program ends."""
    stop = spec.early_stop
    if stop.max and (mode is SubmitMode.RUNGS or stop.resume):
        return rung_ends(spec)[0]
    return stop.max


def seed_of(spec: SweepSpec, number: int) -> int:
    """The random seed of a trial: the same whenever the sweep is run again."""
    digest = blake2b(f"{spec.seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1  # fits a signed 32-bit number


def plan_new(
    totals: SweepTotals, mode: SubmitMode, count: int, at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Up to `count` new trials, as many as the sampler suggests, in batches of up to MAX_ARRAY."""
    state, spec = totals.state, totals.spec
    first, points = totals.tally.highest + 1, totals.tally.planned
    suggested = suggest_trials(
        spec, state.trials.values(), range(points, points + count), totals.observed
    )
    target = first_target(spec, mode)
    planned = [
        (target, PlannedTrial(number, params, seed_of(spec, number), origin))
        for number, (params, origin) in enumerate(suggested, first)
    ]
    return _batches_by_target(totals, planned, at, make_key)


def plan_rungs(totals: SweepTotals, count: int, at: float, make_key: MakeKey) -> list[TrialBatch]:
    """With `halving`: an array for each rung, which depends on the array before it.

    Only the first array names its trials: those of deeper rungs are known when it starts.
    """
    batches = plan_new(totals, SubmitMode.RUNGS, min(count, MAX_ARRAY), at, make_key)
    if not batches:
        return []
    first = replace(batches[0], rung=0)
    rest = [
        TrialBatch(
            first.number + rung, at, make_key(), (), target, rung, after=first.number + rung - 1
        )
        for rung, target in enumerate(rung_ends(totals.spec)[1:], 1)
    ]
    return [first, *rest]


def plan_promotions(
    totals: SweepTotals, chosen: Iterable[tuple[int, int]], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Trials that continue from their checkpoints. `chosen`: (trial, the step it runs to)."""
    trials = totals.state.trials
    planned = [(step, _plan_again(trials[number], resumes=True)) for number, step in chosen]
    return _batches_by_target(totals, planned, at, make_key)


def plan_reruns(
    totals: SweepTotals, mode: SubmitMode, numbers: Sequence[int], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Trials that are run again from their beginning; without numbers, all failed ones."""
    trials, planned = totals.state.trials, []
    target, full = first_target(totals.spec, mode), totals.spec.early_stop.max
    for number in numbers or sorted(trials):
        trial = trials.get(number)
        if trial is not None and (trial.state.is_ended if numbers else trial.state.is_failure):
            # A confirming run is trained in full, without rungs.
            end = target if trial.confirms is None else full
            planned.append((end, _plan_again(trial)))
    return _batches_by_target(totals, planned, at, make_key)


def plan_continuations(totals: SweepTotals, at: float, make_key: MakeKey) -> list[TrialBatch]:
    """Continuations of trials that a stop has ended, from their checkpoints if they have any."""
    planned = [
        (trial.target, _plan_again(trial, resumes=True))
        for trial in totals.state.trials.values()
        if trial.state is TrialState.KILLED
    ]
    return _batches_by_target(totals, planned, at, make_key)


def _plan_again(trial: Trial, *, resumes: bool = False) -> PlannedTrial:
    return PlannedTrial(
        trial.number, trial.params, trial.seed, trial.origin, trial.confirms, resumes
    )


def choose_for_confirmation(totals: SweepTotals, top: int, seeds: int) -> list[tuple[int, int]]:
    """The best trials to run again: (trial, number of runs)."""
    return [(trial.number, seeds) for trial in rank_trials(totals.state, totals.spec)[:top]]


def plan_confirmations(
    totals: SweepTotals, chosen: Iterable[tuple[int, int]], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Runs of trials in full with new seeds. `chosen`: (trial, number of runs)."""
    trials, spec = totals.state.trials, totals.spec
    originals = [number for number, seeds in chosen for _ in range(seeds)]
    planned = [
        PlannedTrial(number, trials[original].params, seed_of(spec, number), "confirm", original)
        for number, original in enumerate(originals, totals.tally.highest + 1)
    ]
    full = spec.early_stop.max
    return _batches_by_target(totals, ((full, each) for each in planned), at, make_key)


def find_unfinished_rung(state: SweepState, spec: SweepSpec) -> list[tuple[int, int]]:
    """The trials that a rung of `halving` still lacks: (trial, the step it runs to).

    For a sweep whose jobs have all ended. A rung is filled with the best trials that are paused at
    the rung before it; trials that took part already count.
    """
    ends = rung_ends(spec)
    first = state.batches.get(1)
    if first is None:
        return []
    for rung in range(1, len(ends)):
        quota = rung_size(len(first.trials), rung, spec.early_stop.eta)
        took_part = sum(
            trial.target >= ends[rung] and trial.confirms is None for trial in state.trials.values()
        )
        waiting = [
            trial
            for trial in rank_trials(state, spec)
            if trial.state is TrialState.PAUSED and trial.target == ends[rung - 1]
        ]
        if took_part < quota and waiting:
            return [(trial.number, ends[rung]) for trial in waiting[: quota - took_part]]
    return []


def rung_size(first: int, rung: int, eta: int) -> int:
    """The number of trials that reach a rung, counted from 0, if `first` trials begin."""
    return max(1, int(first // eta**rung))


def count_children(batch: TrialBatch, state: SweepState, spec: SweepSpec) -> int:
    """The number of children of the batch's job."""
    if batch.trials or not batch.rung:
        return len(batch.trials)
    first = state.batches[batch.number - batch.rung]
    return rung_size(len(first.trials), batch.rung, spec.early_stop.eta)


def params_of(trial: Trial | PlannedTrial, job: Mapping[str, Any]) -> Params:
    """The parameters of a trial that differ from those of the job.

    A confirming run has its own seed also as the job's parameter for a seed, such as `seed = 0`.
    Otherwise the program would repeat the trial.
    """
    if trial.confirms is None:
        return trial.params
    seeds = {
        name: trial.seed
        for name, value in job.items()
        if is_seed(name) and type(value) is int and name not in trial.params
    }
    return {**trial.params, **seeds}


def manifest_entries(batch: TrialBatch, job: Mapping[str, Any]) -> list[TrialEntry]:
    """The lines of the batch's manifest. They depend on the batch and the parameters of the job, so
    they never change.
    """
    return [
        TrialEntry(
            each.number, params_of(each, job), each.seed, batch.target, each.resumes,
            full=each.confirms is not None,
        )
        for each in batch.trials
    ]  # fmt: skip


def trials_in(batch: TrialBatch, state: SweepState) -> list[Trial]:
    """The trials that are in this batch now. A batch of a deeper rung does not name its trials."""
    if batch.trials:
        named = (state.trials[each.number] for each in batch.trials)
        return [trial for trial in named if trial.wave == batch.number]
    return [trial for trial in state.trials.values() if trial.wave == batch.number]


def _batches_by_target(
    totals: SweepTotals,
    planned: Iterable[tuple[int, PlannedTrial]],
    at: float,
    make_key: MakeKey,
) -> list[TrialBatch]:
    """As few batches as the size of arrays allows, each with trials of one target.

    `planned`: (target, trial).
    """
    by_target: dict[int, list[PlannedTrial]] = {}
    for target, trial in planned:
        by_target.setdefault(target, []).append(trial)
    parts = [
        (target, trials[start : start + MAX_ARRAY])
        for target, trials in by_target.items()
        for start in range(0, len(trials), MAX_ARRAY)
    ]
    first = next(reversed(totals.state.batches), 0) + 1
    return [
        TrialBatch(number, at, make_key(), tuple(trials), target)
        for number, (target, trials) in enumerate(parts, first)
    ]
