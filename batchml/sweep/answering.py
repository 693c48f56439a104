"""What becomes of an ask (`asking.py`): new limits, or waves of its own. Pure."""

from msgspec.structs import replace

from batchml.model.sweep import Limits
from batchml.sweep import budgets, plan
from batchml.sweep.asking import Ask, GoOn, Reconfirm, Rerun, TopUp
from batchml.sweep.book import Book
from batchml.sweep.deciding import USER
from batchml.sweep.events import Event, Limited, Reopened, Wave
from batchml.sweep.plan import Draw
from batchml.sweep.shape import Shape


def answer(book: Book, shape: Shape, asked: Ask, at: float, draw: Draw) -> list[Event]:
    """What to write into the ledger for one ask; nothing where that was done before.

    A sweep that is over is reopened. What was stopped before its end stays where it is, unless it
    was asked to go on: to run its failed trials again is no reason to begin others.
    """
    if any(wave.key == asked.key for wave in book.state.waves.values()):
        return []
    found: list[Event] = []
    match asked:
        case TopUp():
            found += _topped_up(book, asked, at)
        case GoOn(key):
            found.append(Limited(_asked_limits(book), at))
            if book.state.stopping is not None:
                found += _keyed(plan.cut_short(book, at, draw), key)
        case Rerun(key, numbers):
            found += _kept(book, at)
            found += _keyed(plan.again(book, shape, numbers, at, draw), key)
        case Reconfirm(key, top, seeds):
            chosen = plan.unconfirmed(book, top, seeds)
            found += _kept(book, at)
            found += _keyed(plan.confirming(book, chosen, at, draw), key)
    return [*_reopened(book, found, at), *found]


def _reopened(book: Book, found: list[Event], at: float) -> list[Event]:
    """What a sweep that is over needs before anything else. `found`: what becomes of it then."""
    state = book.state
    if state.ended is None:
        return []
    again = {each.number for wave in found if isinstance(wave, Wave) for each in wave.trials}
    left = [each.state for each in state.trials.values() if each.number not in again]
    return [
        Reopened(
            "it was asked to go on",
            at,
            paused=max(0.0, at - state.ended.at),
            failed=sum(each.is_failure for each in left),
            over=sum(each.is_ended for each in left),
        )
    ]


def _topped_up(book: Book, asked: TopUp, at: float) -> list[Event]:
    """The limits with those that were said. Who wants more after the target wants no target."""
    limits, held = _asked_limits(book), budgets.limits(book.state, book.spec)
    changes = {name: getattr(asked, name) for name in ("trials", "hours", "cost", "parallel")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if budgets.is_reached(book.state, book.spec, book.tally):
        changes["target"] = None
    found: list[Event] = [Limited(replace(limits, **changes), at)]
    if held != limits and asked.trials is None:  # what was stopped stays where it is
        found.append(Limited(replace(held, **changes), at, for_now=True))
    return found


def _kept(book: Book, at: float) -> list[Event]:
    """Of a sweep that its user stopped, no more trials than there are."""
    stopping, limits = book.state.stopping, budgets.limits(book.state, book.spec)
    if book.state.ended is None or stopping is None or stopping.by != USER:
        return []
    return [Limited(replace(limits, trials=book.tally.planned), at, for_now=True)]


def _asked_limits(book: Book) -> Limits:
    """The limits that were asked for last: without what `_kept` made of them."""
    return book.state.asked_limits or book.spec.limits


def _keyed(waves: list[Wave], key: str) -> list[Wave]:
    """The first of them has this key: by it one knows that the ask was done."""
    return [replace(waves[0], key=key), *waves[1:]] if waves else []
