"""Waves: the next trials of a sweep, as the intent of one SubmitJob. Pure.

Every wave is numbered, and so is every trial; a wave that the ledger has is never planned again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from batchml.model.run import MAX_ARRAY
from batchml.model.sweep import SweepSpec, Trial, TrialState
from batchml.runtime.protocol.manifest import Entry
from batchml.sweep.book import Book
from batchml.sweep.cutoffs import levels
from batchml.sweep.events import Planned, Wave
from batchml.sweep.sampling import suggestions
from batchml.sweep.shape import Shape
from batchml.sweep.standings import ranked
from batchml.sweep.state import SweepState

Draw = Callable[[], str]  # a new key for a wave


def first_target(spec: SweepSpec, shape: Shape) -> int:
    """The step at which a trial that begins is to end; 0: its own end."""
    stop = spec.early_stop
    if stop.max and (shape is Shape.RUNGS or stop.resume):
        return levels(spec)[0]
    return stop.max


def seed_of(spec: SweepSpec, number: int) -> int:
    """What a trial's own dice begin with: the same whenever the sweep is run again."""
    digest = blake2b(f"{spec.seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1  # a signed number of 32 bits takes it everywhere


def fresh(book: Book, shape: Shape, many: int, at: float, draw: Draw) -> list[Wave]:
    """New trials, as many as the sampler has up to `many`: a wave for each 10,000."""
    state, spec = book.state, book.spec
    first = book.tally.highest + 1
    found = suggestions(spec, list(state.trials.values()), range(first, first + many))
    trials = [
        Planned(number, params, seed_of(spec, number), origin)
        for number, (params, origin) in enumerate(found, first)
    ]
    return _waves(book, trials, first_target(spec, shape), at, draw)


def chain(book: Book, many: int, at: float, draw: Draw) -> list[Wave]:
    """`halving`: an array for each rung, each after the one before it. Only the first has trials:
    who is in the others is known when they start."""
    waves = fresh(book, Shape.RUNGS, min(many, MAX_ARRAY), at, draw)
    if not waves:
        return []
    first = Wave(waves[0].number, at, waves[0].key, waves[0].trials, waves[0].target, rung=0)
    rest = [
        Wave(first.number + rung, at, draw(), (), target, rung, after=first.number + rung - 1)
        for rung, target in enumerate(levels(book.spec)[1:], 1)
    ]
    return [first, *rest]


def promoted(book: Book, chosen: Iterable[tuple[int, int]], at: float, draw: Draw) -> list[Wave]:
    """Trials that go on from their checkpoints: (trial, step to go on to); a wave for each step."""
    state = book.state
    by_step: dict[int, list[Planned]] = {}
    for number, step in chosen:
        trial = state.trials[number]
        planned = Planned(number, trial.params, trial.seed, trial.origin, resumes=True)
        by_step.setdefault(step, []).append(planned)
    return _by_target(book, by_step, at, draw)


def again(book: Book, shape: Shape, numbers: Sequence[int], at: float, draw: Draw) -> list[Wave]:
    """Trials that begin anew. None named: those that failed."""
    state = book.state
    chosen = [
        trial
        for trial in (state.trials.get(each) for each in numbers or sorted(state.trials))
        if trial is not None and (trial.state.is_ended if numbers else trial.state.is_failure)
    ]
    by_target: dict[int, list[Planned]] = {}
    for each in chosen:
        full = book.spec.early_stop.max  # one that runs another again is trained in one go
        target = first_target(book.spec, shape) if each.confirms is None else full
        planned = Planned(each.number, each.params, each.seed, each.origin, each.confirms)
        by_target.setdefault(target, []).append(planned)
    return _by_target(book, by_target, at, draw)


def cut_short(book: Book, at: float, draw: Draw) -> list[Wave]:
    """Trials that a stop has ended, to their end: from their checkpoints, where they left some."""
    by_target: dict[int, list[Planned]] = {}
    for trial in book.state.trials.values():
        if trial.state is TrialState.KILLED:
            planned = Planned(
                trial.number, trial.params, trial.seed, trial.origin, trial.confirms, resumes=True
            )
            by_target.setdefault(trial.target, []).append(planned)
    return _by_target(book, by_target, at, draw)


def unconfirmed(book: Book, top: int, seeds: int) -> list[tuple[int, int]]:
    """(trial, how often to run it again) of the best."""
    return [(trial.number, seeds) for trial in ranked(book.state, book.spec)[:top]]


def confirming(book: Book, chosen: Iterable[tuple[int, int]], at: float, draw: Draw) -> list[Wave]:
    """Trials again, each with new seeds, to their full end: (trial, how often)."""
    state, spec = book.state, book.spec
    number = book.tally.highest + 1
    trials: list[Planned] = []
    for original, seeds in chosen:
        params = state.trials[original].params
        for _ in range(seeds):
            trials.append(Planned(number, params, seed_of(spec, number), "confirm", original))
            number += 1
    return _waves(book, trials, spec.early_stop.max, at, draw)


def left_over(state: SweepState, spec: SweepSpec) -> list[tuple[int, int]]:
    """(trial, step to go on to) of a rung that did not come to its end: `halving` goes on there.

    To be asked when no job of the chain goes on. A rung is filled from the best that wait at the
    one before it, those who took part already counted.
    """
    ends = levels(spec)
    first = state.waves.get(1)
    for rung in range(1, len(ends) if first else 0):
        quota = rung_size(len(first.trials) if first else 0, rung, spec.early_stop.eta)
        took_part = sum(
            trial.target >= ends[rung] and trial.confirms is None for trial in state.trials.values()
        )
        waiting = [
            trial
            for trial in ranked(state, spec)
            if trial.state is TrialState.PAUSED and trial.target == ends[rung - 1]
        ]
        if took_part < quota and waiting:
            return [(trial.number, ends[rung]) for trial in waiting[: quota - took_part]]
    return []


def rung_size(first: int, rung: int, eta: int) -> int:
    """How many of `first` trials take part in a rung, counted from 0."""
    size: int = max(1, first // eta**rung)
    return size


def size(wave: Wave, state: SweepState, spec: SweepSpec) -> int:
    """How many children the wave's job has."""
    if wave.trials or not wave.rung:
        return len(wave.trials)
    first = state.waves[wave.number - wave.rung]
    return rung_size(len(first.trials), wave.rung, spec.early_stop.eta)


def entries(wave: Wave) -> list[Entry]:
    """The lines of the wave's manifest: of nothing but the wave, so that they never change."""
    return [
        Entry(
            each.number, each.params, each.seed, wave.target, each.resumes,
            full=each.confirms is not None,
        )
        for each in wave.trials
    ]  # fmt: skip


def next_number(state: SweepState) -> int:
    return max(state.waves, default=0) + 1


def trials_of(wave: Wave, state: SweepState) -> list[Trial]:
    """The trials that are in this wave now, also those that joined it by themselves."""
    if wave.trials:
        named = (state.trials[each.number] for each in wave.trials)
        return [trial for trial in named if trial.wave == wave.number]
    return [trial for trial in state.trials.values() if trial.wave == wave.number]


def _waves(book: Book, trials: Sequence[Planned], target: int, at: float, draw: Draw) -> list[Wave]:
    return _by_target(book, {target: trials}, at, draw)


def _by_target(
    book: Book, trials: Mapping[int, Sequence[Planned]], at: float, draw: Draw
) -> list[Wave]:
    """As few as AWS Batch allows, those with one target together."""
    parts = [
        (target, some[start : start + MAX_ARRAY])
        for target, some in trials.items()
        for start in range(0, len(some), MAX_ARRAY)
    ]
    first = next_number(book.state)
    return [
        Wave(first + place, at, draw(), tuple(part), target)
        for place, (target, part) in enumerate(parts)
    ]
