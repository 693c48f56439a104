"""Plan the next batches of trials, each the intent of one SubmitJob. Pure.

Batches and trials are numbered; a batch that is in the ledger is never planned again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b

from msgspec import Struct

from batchml.model.run import MAX_ARRAY
from batchml.model.sweep import MODELS, SweepSpec, Trial, TrialState, count_points
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
    BATCHES = "waves"  # a controller plans a batch of trials whenever places are free


class ChosenMode(Struct, frozen=True):
    mode: SubmitMode
    why: str  # for people


def choose_mode(spec: SweepSpec, *, hourly: float | None, timeout: float | None) -> ChosenMode:
    """The mode of a sweep whose trials cost `hourly` USD an hour and end after `timeout` seconds.

    Without a controller nobody checks the cost, so then the worst case must be within the limit.
    """
    if spec.early_stop.method == "halving":
        return ChosenMode(SubmitMode.RUNGS, "each rung is one array; none needs this computer")
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
        SubmitMode.ARRAY, "all trials are submitted at once; none needs this computer"
    )


def count_trials(spec: SweepSpec) -> int | None:
    """The greatest possible number of trials; None where only other limits end the sweep."""
    limit = spec.limits.trials
    points = len(spec.points) if spec.method == "list" else None
    if spec.method == "grid":
        points = count_points(spec.space)
    known = [each for each in (limit, points) if each is not None]
    return min(known, default=None)


def fits_cost_limit(
    spec: SweepSpec, count: int, hourly: float | None, timeout: float | None
) -> bool:
    """Whether the cost stays within its limit even if every trial runs into its timeout."""
    if spec.limits.cost is None or hourly is None:
        return True
    return timeout is not None and count * timeout / 3600 * hourly <= spec.limits.cost


# --- Batches of trials ----------------------------------------------------------------------------


MakeKey = Callable[[], str]  # makes the key of a new batch


def first_target(spec: SweepSpec, mode: SubmitMode) -> int:
    """The step at which a trial that begins now ends; 0: its own end."""
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
    """Up to `count` new trials, as many as the sampler has; a batch for each 10,000."""
    state, spec = totals.state, totals.spec
    first = totals.tally.highest + 1
    suggested = suggest_trials(spec, list(state.trials.values()), range(first, first + count))
    trials = [
        PlannedTrial(number, params, seed_of(spec, number), origin)
        for number, (params, origin) in enumerate(suggested, first)
    ]
    return _batches(totals, trials, first_target(spec, mode), at, make_key)


def plan_rungs(totals: SweepTotals, count: int, at: float, make_key: MakeKey) -> list[TrialBatch]:
    """`halving`: an array for each rung, each after the one before. Only the first names trials:
    which trials the others have is known when they start."""
    batches = plan_new(totals, SubmitMode.RUNGS, min(count, MAX_ARRAY), at, make_key)
    if not batches:
        return []
    first = TrialBatch(
        batches[0].number, at, batches[0].key, batches[0].trials, batches[0].target, rung=0
    )
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
    """Trials that continue from checkpoints: (trial, step to run to). A batch for each step."""
    state = totals.state
    by_step: dict[int, list[PlannedTrial]] = {}
    for number, step in chosen:
        trial = state.trials[number]
        planned = PlannedTrial(number, trial.params, trial.seed, trial.origin, resumes=True)
        by_step.setdefault(step, []).append(planned)
    return _batches_by_target(totals, by_step, at, make_key)


def plan_reruns(
    totals: SweepTotals, mode: SubmitMode, numbers: Sequence[int], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Trials that are run again from their beginning; without numbers, all failed ones."""
    state = totals.state
    chosen = [
        trial
        for trial in (state.trials.get(each) for each in numbers or sorted(state.trials))
        if trial is not None and (trial.state.is_ended if numbers else trial.state.is_failure)
    ]
    by_target: dict[int, list[PlannedTrial]] = {}
    for each in chosen:
        full = totals.spec.early_stop.max  # a confirming run is trained without stops
        target = first_target(totals.spec, mode) if each.confirms is None else full
        planned = PlannedTrial(each.number, each.params, each.seed, each.origin, each.confirms)
        by_target.setdefault(target, []).append(planned)
    return _batches_by_target(totals, by_target, at, make_key)


def plan_continuations(totals: SweepTotals, at: float, make_key: MakeKey) -> list[TrialBatch]:
    """Continuations of trials that a stop has ended, from their checkpoints if they left any."""
    by_target: dict[int, list[PlannedTrial]] = {}
    for trial in totals.state.trials.values():
        if trial.state is TrialState.KILLED:
            planned = PlannedTrial(
                trial.number, trial.params, trial.seed, trial.origin, trial.confirms, resumes=True
            )
            by_target.setdefault(trial.target, []).append(planned)
    return _batches_by_target(totals, by_target, at, make_key)


def choose_for_confirmation(totals: SweepTotals, top: int, seeds: int) -> list[tuple[int, int]]:
    """The best trials to run again: (trial, number of runs)."""
    return [(trial.number, seeds) for trial in rank_trials(totals.state, totals.spec)[:top]]


def plan_confirmations(
    totals: SweepTotals, chosen: Iterable[tuple[int, int]], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """Runs of trials with new seeds, to their full end. `chosen`: (trial, number of runs)."""
    state, spec = totals.state, totals.spec
    number = totals.tally.highest + 1
    trials: list[PlannedTrial] = []
    for original, seeds in chosen:
        params = state.trials[original].params
        for _ in range(seeds):
            trials.append(PlannedTrial(number, params, seed_of(spec, number), "confirm", original))
            number += 1
    return _batches(totals, trials, spec.early_stop.max, at, make_key)


def find_unfinished_rung(state: SweepState, spec: SweepSpec) -> list[tuple[int, int]]:
    """The trials that a rung of `halving` still lacks: (trial, step to run to).

    For a sweep none of whose rungs has a job that runs. A rung is filled with the best trials that
    are paused at the rung before it; trials that took part already count.
    """
    ends = rung_ends(spec)
    first = state.batches.get(1)
    for rung in range(1, len(ends) if first else 0):
        quota = rung_size(len(first.trials) if first else 0, rung, spec.early_stop.eta)
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
    """How many of `first` trials take part in a rung, counted from 0."""
    size: int = max(1, first // eta**rung)
    return size


def count_children(batch: TrialBatch, state: SweepState, spec: SweepSpec) -> int:
    """The number of children of the batch's job."""
    if batch.trials or not batch.rung:
        return len(batch.trials)
    first = state.batches[batch.number - batch.rung]
    return rung_size(len(first.trials), batch.rung, spec.early_stop.eta)


def manifest_entries(batch: TrialBatch) -> list[TrialEntry]:
    """The lines of the batch's manifest. They depend on the batch alone, so they never change."""
    return [
        TrialEntry(
            each.number, each.params, each.seed, batch.target, each.resumes,
            full=each.confirms is not None,
        )
        for each in batch.trials
    ]  # fmt: skip


def next_number(state: SweepState) -> int:
    return max(state.batches, default=0) + 1


def trials_in(batch: TrialBatch, state: SweepState) -> list[Trial]:
    """The trials that are in this batch now, those of a rung included, which it does not name."""
    if batch.trials:
        named = (state.trials[each.number] for each in batch.trials)
        return [trial for trial in named if trial.wave == batch.number]
    return [trial for trial in state.trials.values() if trial.wave == batch.number]


def _batches(
    totals: SweepTotals, trials: Sequence[PlannedTrial], target: int, at: float, make_key: MakeKey
) -> list[TrialBatch]:
    return _batches_by_target(totals, {target: trials}, at, make_key)


def _batches_by_target(
    totals: SweepTotals, trials: Mapping[int, Sequence[PlannedTrial]], at: float, make_key: MakeKey
) -> list[TrialBatch]:
    """As few batches as the size of arrays allows, each of trials with one target."""
    parts = [
        (target, some[start : start + MAX_ARRAY])
        for target, some in trials.items()
        for start in range(0, len(some), MAX_ARRAY)
    ]
    first = next_number(totals.state)
    return [
        TrialBatch(first + index, at, make_key(), tuple(part), target)
        for index, (target, part) in enumerate(parts)
    ]
