"""A Picture, and a Summary, of a sweep's book. Pure."""

from batchml.model.sweep import Trial
from batchml.sweep import budgets
from batchml.sweep.book import Book
from batchml.sweep.budgets import Money
from batchml.sweep.deciding import DONE
from batchml.sweep.idling import idle
from batchml.sweep.standings import confirmed, pareto
from batchml.sweep.summary import Picture, Summary


def picture(book: Book, wanted: int | None, purse: Money | None, now: float) -> Picture:
    """How it stands. `wanted`: trials that there will be, where that is known."""
    state, spec = book.state, book.spec
    limits, begun = budgets.limits(state, spec), budgets.began_at(state)
    until = state.ended.at if state.ended else now
    hours = max(0.0, until - begun - state.paused) / 3600 if begun is not None else 0.0
    return Picture(
        now,
        dict(state.counts),
        book.tally.planned,
        wanted,
        limits.parallel,
        book.leader.trial,
        begun,
        hours,
        limits.hours,
        purse.spent if purse else None,
        purse.committed if purse else None,
        limits.cost,
        _eta(book, wanted, hours, until),
        book.tally.steps,
        book.tally.saved,
        tuple(line for notice in state.notices.values() for line in notice.words.splitlines()),
        state.stopping.why if state.stopping else "",
        state.ended.why if state.ended else "",
    )


def _eta(book: Book, wanted: int | None, hours: float, now: float) -> float | None:
    """Seconds to the end at the pace so far, or until its hours are over. None while nothing runs:
    it may wait for somebody who goes on with it."""
    state = book.state
    if state.ended is not None:
        return 0.0
    if not budgets.in_flight(state):
        return None
    over, limit = budgets.ended(state), budgets.limits(state, book.spec).hours
    all_of_them = len(state.trials)
    if wanted is not None and state.stopping is None:
        all_of_them += max(0, wanted - book.tally.planned)
    known = []
    if over and not _by_rungs(book) and (wanted is not None or state.stopping is not None):
        known.append(_busy(book, now) * max(0, all_of_them - over) / over)
    if limit is not None:
        known.append(max(0.0, limit - hours) * 3600)
    return min(known, default=None)


def _busy(book: Book, now: float) -> float:
    """Seconds in which trials were under way. It is over, or idle: the longer one has both."""
    state, begun = book.state, budgets.began_at(book.state)
    if begun is None:
        return 0.0
    still = max(state.paused, idle(state.trials.values(), begun, now))
    return max(0.0, now - begun - still)


def _by_rungs(book: Book) -> bool:
    """Trials end at rungs and go on later: the pace of the first says nothing of the last."""
    stop = book.spec.early_stop
    return stop.method == "halving" or stop.resume


def summary(book: Book, shown: Picture) -> Summary:
    """What came of it, or how it stands."""
    state = book.state
    by = "" if state.ended is None else state.stopping.by if state.stopping else DONE
    front: tuple[Trial, ...] = ()
    if len(book.spec.goals) > 1:
        front = tuple(pareto(state, book.spec))
    why = state.ended.why if state.ended else state.stopping.why if state.stopping else ""
    again = tuple(confirmed(state, book.spec))
    return Summary(shown, by, why, book.tally.first_failure, front, again)
