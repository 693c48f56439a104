"""What a sweep does next: a function of its ledger and of what was seen. Pure.

The controller carries it out: first what becomes of it is in the ledger, then it is done.
"""

from msgspec import Struct

from batchml.model.sweep import TrialState
from batchml.sweep import budgets
from batchml.sweep.book import Book
from batchml.sweep.budgets import Money
from batchml.sweep.plan import left_over, unconfirmed
from batchml.sweep.shape import Shape

USER, LIMIT, TARGET, FAILURES, DONE = "user", "limit", "target", "failures", "done"  # what ends one


class Facts(Struct, frozen=True):
    """What is not in the ledger."""

    now: float
    shape: Shape
    wanted: int | None  # trials that there will be; None: nothing says so
    purse: Money | None = None
    apart: float = 0.0  # seconds between two waves
    grace: float = 0.0  # seconds from the wish that all end until they are made to
    called_off: str | None = None  # why somebody asked all to end
    is_exhausted: bool = False  # the sampler has nothing more
    over: frozenset[int] = frozenset()  # waves whose job has ended, as far as that was looked at


class Begin(Struct, frozen=True):
    """New trials."""

    many: int


class Chain(Struct, frozen=True):
    """`halving`: all rungs."""

    many: int


class Promote(Struct, frozen=True):
    """These go on: (trial, step to go on to)."""

    trials: tuple[tuple[int, int], ...]


class Confirm(Struct, frozen=True):
    """The best again, with other seeds: (trial, how often)."""

    trials: tuple[tuple[int, int], ...]


class Stop(Struct, frozen=True):
    """Nothing new begins from now on, and what runs saves and ends."""

    by: str
    why: str


class CallOff(Struct, frozen=True):
    """Say so on the board."""

    why: str


class Reopen(Struct, frozen=True):
    """It was stopped, and there is something left to do."""

    why: str


class Terminate(Struct, frozen=True):
    """End the jobs of these waves."""

    waves: tuple[int, ...]
    why: str


class End(Struct, frozen=True):
    """It is over."""

    by: str
    why: str


Action = Begin | Chain | Promote | Confirm | Stop | CallOff | Reopen | Terminate | End


def decide(book: Book, facts: Facts) -> list[Action]:
    """The next steps; none while all is as it should be."""
    state, spec = book.state, book.spec
    if state.ended is not None:
        return []
    if state.stopping is not None:
        return _wind_down(book, facts)
    if facts.called_off is not None:
        return [Stop(USER, facts.called_off)]
    limit = budgets.exceeded(state, spec, book.tally, facts.purse, facts.now)
    if limit is not None:
        return [Stop(*limit)]
    if budgets.is_reached(book.state, spec, book.tally):
        if goes_on(book, facts) and not _confirms(book):
            return [Stop(TARGET, _target_words(book))]
    elif begun := _begin(book, facts):
        return begun
    if goes_on(book, facts):
        return []
    return _confirm(book, facts) or [End(*_end(book, facts))]


def goes_on(book: Book, facts: Facts) -> bool:
    """True while a trial waits or runs, or may still begin by itself."""
    return budgets.in_flight(book.state) > 0 or bool(_jobs_ahead(book, facts))


def _jobs_ahead(book: Book, facts: Facts) -> list[int]:
    """Waves whose job has not come to its end. Who is in a rung of `halving` is not known before,
    and what holds the width of an array may not go sooner."""
    if facts.shape is Shape.WAVES:
        return []
    return [number for number in book.state.waves if number not in facts.over]


def _wind_down(book: Book, facts: Facts) -> list[Action]:
    """What runs is asked to end; what has not after the grace is ended, as is what waits."""
    state, stopping = book.state, book.state.stopping
    assert stopping is not None
    if not goes_on(book, facts):
        by_user = facts.called_off not in (None, stopping.why)  # meanwhile
        if stopping.by == TARGET and not by_user and _confirm(book, facts):
            return [Reopen("the best are run again")]
        return [End(stopping.by, stopping.why)]
    actions: list[Action] = [] if facts.called_off is not None else [CallOff(stopping.why)]
    if facts.now - stopping.at >= facts.grace or not state.counts[TrialState.RUNNING]:
        waves = sorted({*book.tally.in_flight, *_jobs_ahead(book, facts)})
        actions.append(Terminate(tuple(waves), stopping.why))
    return actions


def _begin(book: Book, facts: Facts) -> list[Action]:
    left = _left(book, facts)
    match facts.shape:
        case Shape.ARRAY:
            cost = budgets.limits(book.state, book.spec).cost
            many = min(left or 0, budgets.affordable(cost, facts.purse))
            return [Begin(many)] if many > 0 else []
        case Shape.RUNGS:
            return _rungs(book, facts, left)
        case Shape.WAVES:
            return _wave(book, facts, left)


def _left(book: Book, facts: Facts) -> int | None:
    """How many new trials there will be; None: nothing says so."""
    if facts.is_exhausted:
        return 0
    return None if facts.wanted is None else max(0, facts.wanted - book.tally.planned)


def _rungs(book: Book, facts: Facts, left: int | None) -> list[Action]:
    if not book.state.waves:
        return [Chain(book.spec.limits.parallel if left is None else left)] if left != 0 else []
    if goes_on(book, facts):
        return []
    rest = left_over(book.state, book.spec)  # of a chain that broke
    return [Promote(tuple(rest))] if rest else []


def _wave(book: Book, facts: Facts, left: int | None) -> list[Action]:
    state, spec = book.state, book.spec
    busy = budgets.in_flight(state)
    newest = next(reversed(state.waves.values()), None)
    if busy and newest is not None and facts.now - newest.at < facts.apart:
        return []
    chosen: list[tuple[int, int]] = []
    if spec.early_stop.resume:
        chosen = book.rungs.promotable(budgets.limits(state, spec).parallel)
    ahead = None if left is None else left + len(chosen)
    if ahead == 0 and not busy:
        chosen = _last_promotion(book)
        ahead = len(chosen)
    many = budgets.room(state, spec, ahead, facts.purse)
    chosen = chosen[:many]
    actions: list[Action] = [Promote(tuple(chosen))] if chosen else []
    many -= len(chosen)
    if left is not None:
        many = min(many, left)
    return [*actions, Begin(many)] if many > 0 else actions


def _last_promotion(book: Book) -> list[tuple[int, int]]:
    """Too few trials for the last rungs to fill: the best of them is trained in full anyway."""
    if not book.spec.early_stop.resume or book.state.counts[TrialState.DONE]:
        return []
    number = book.rungs.best_paused()
    return [] if number is None else [(number, book.spec.early_stop.max)]


def _confirms(book: Book) -> bool:
    """True when the best are being run again, or were."""
    return len(book.state.trials) > book.tally.planned


def _confirm(book: Book, facts: Facts) -> list[Action]:
    """The best again, once, if the file wants it and there is money for all of them."""
    confirm = book.spec.confirm
    if confirm is None or _confirms(book):
        return []
    chosen = unconfirmed(book, confirm.top, confirm.seeds)
    cost = budgets.limits(book.state, book.spec).cost
    many = sum(seeds for _, seeds in chosen)
    if not chosen or many > budgets.affordable(cost, facts.purse):
        return []
    return [Confirm(tuple(chosen))]


def _target_words(book: Book) -> str:
    target = budgets.limits(book.state, book.spec).target
    return f"{book.spec.goal.metric} reached {target:g}"


def _end(book: Book, facts: Facts) -> tuple[str, str]:
    state = book.state
    planned, allowed = book.tally.planned, budgets.limits(state, book.spec)
    if budgets.is_reached(state, book.spec, book.tally):
        return TARGET, _target_words(book)
    left = _left(book, facts)
    if left != 0 and budgets.affordable(allowed.cost, facts.purse) < 1:
        return LIMIT, f"what is left of its {allowed.cost:g} USD is less than a trial costs"
    if facts.is_exhausted and (facts.wanted is None or planned < facts.wanted):
        return DONE, f"every point was tried: {planned}"
    return DONE, _over_words(book)


def _over_words(book: Book) -> str:
    """Runs that confirm the best are no trials of their own."""
    planned = book.tally.planned
    again = len(book.state.trials) - planned
    what = f"all {planned} trials" if planned != 1 else "its only trial"
    if again:
        what += f" and {again} confirming {'run' if again == 1 else 'runs'}"
    none = ", and none has a result" if planned and book.leader.trial is None else ""
    return f"{what} {'is' if planned == 1 and not again else 'are'} over{none}"
