"""What can be done with a sweep that was started: go on, more of it, once more, an end.

Only a controller writes the ledger. What people want is left on the board; the controller that runs
takes it up, and where none runs, whoever asked becomes one.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.client.submission import Tell
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.holding import holder
from batchml.errors import UsageError
from batchml.model.names import new_key
from batchml.model.sweep import Trial, TrialState
from batchml.sweep import asking
from batchml.sweep.asking import Ask, GoOn, Reconfirm, Rerun, TopUp
from batchml.sweep.ledger import Ledger
from batchml.sweep.signals import called_off

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.runtime.storage.store import Store
    from batchml.sweep.lease import Refused
    from batchml.sweep.state import SweepState

_STOPPED = ("user", "failures")  # what a sweep that stopped can go on after as it is
_POLLS = 4  # of a controller, within which it has seen what was asked


# --- what is asked ------------------------------------------------------------------------------


def go_on(board: "Board") -> GoOn | None:
    """To go on with a sweep. None where a controller is all that it lacks.

    Raises UsageError for one that is over, with what can be done.
    """
    state = Ledger(board).load()
    by = state.stopping.by if state.stopping else ""
    if state.ended is not None and by not in _STOPPED:
        raise UsageError(
            f"This sweep is over: {state.ended.why}. More of it: batchml sweeps top-up {board.key} "
            f"--trials N. Failed trials again: batchml sweeps rerun {board.key} --failed."
        )
    is_stopped = bool(by in _STOPPED or called_off(board))
    return GoOn(_key()) if is_stopped else None


def top_up(
    frozen: Frozen,
    board: "Store",
    *,
    trials: int | None = None,
    hours: float | None = None,
    cost: float | None = None,
    parallel: int | None = None,
) -> TopUp:
    """Other limits from now on, in full. Raises UsageError with all that is wrong with them."""
    state = Ledger(board).load()
    before = state.limits or frozen.spec.limits
    given = {"trials": trials, "hours": hours, "cost": cost, "parallel": parallel}
    if all(value is None for value in given.values()):
        raise UsageError("top-up: give at least one of --trials, --hours, --cost, --parallel.")
    mistakes = [
        f"--{name} {value:g}: it must be above 0."
        for name, value in given.items()
        if value is not None and value <= 0
    ]
    planned = _planned(state)
    if trials is not None and 0 < trials <= planned:
        mistakes.append(
            f"--trials {trials}: there are {planned} trials already. It counts all of them, so "
            f"give more than that."
        )
    elif trials is not None and frozen.spec.early_stop.method == "halving":
        mistakes.append(
            f"--trials {trials}: the rungs of halving are those of the trials that it began with, "
            f"so more of them are a new sweep: batchml sweep FILE --trials {trials}."
        )
    if cost is not None and frozen.hourly is None:
        mistakes.append("--cost: what a trial costs was not known when the sweep was started.")
    if mistakes:
        raise UsageError("top-up: " + " ".join(mistakes))
    if replace(before, **{name: value for name, value in given.items() if value}) == before:
        raise UsageError("top-up: these are its limits already.")
    return TopUp(_key(), trials=trials, hours=hours, cost=cost, parallel=parallel)


def rerun(board: "Store", numbers: tuple[int, ...] = ()) -> Rerun | None:
    """These trials once more, from their beginning; none named: those that failed. None where none
    has. Raises UsageError for trials that there are not, or that have not ended."""
    state = Ledger(board).load()
    if not numbers:
        return Rerun(_key()) if failed(state) else None
    unknown = [number for number in numbers if number not in state.trials]
    going_on = [
        number
        for number in numbers
        if number in state.trials and not state.trials[number].state.is_ended
    ]
    if unknown or going_on:
        raise UsageError(
            "rerun:"
            + (f" no such trial: {_listed(unknown)}." if unknown else "")
            + (f" not at their end yet: {_listed(going_on)}." if going_on else "")
        )
    return Rerun(_key(), numbers)


def confirm(
    frozen: Frozen, board: "Store", top: int | None = None, seeds: int | None = None
) -> Reconfirm:
    """The best trials again, with other seeds. Raises UsageError where there are none yet."""
    from batchml.model.sweep import Confirm
    from batchml.sweep.standings import ranked

    usual = frozen.spec.confirm or Confirm()
    top, seeds = usual.top if top is None else top, usual.seeds if seeds is None else seeds
    if top < 1 or seeds < 1:
        raise UsageError("confirm: --top and --seeds must be above 0.")
    if not ranked(Ledger(board).load(), frozen.spec):
        raise UsageError("confirm: no trial of this sweep has a result yet.")
    return Reconfirm(_key(), top=top, seeds=seeds)


def failed(state: "SweepState") -> list[Trial]:
    """The trials that failed, and those of which nobody knows how they ended."""
    if not state.counts[TrialState.FAILED] + state.counts[TrialState.LOST]:
        return []
    return [trial for trial in state.trials.values() if trial.state.is_failure]


def _planned(state: "SweepState") -> int:
    return sum(1 for trial in state.trials.values() if trial.confirms is None)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:20])) + (", ..." if len(numbers) > 20 else "")


def _key() -> str:
    return new_key(os.urandom)


# --- who does it --------------------------------------------------------------------------------


def leave_ask(place: "Place", board: "Store", asked: Ask) -> "Refused | None":
    """Leave it on the board; the controller that has taken it up, or None where one is needed.

    Raises StoreError.
    """
    asking.ask(board, asked)
    (where,) = asking.places([asked])
    return until(place, board, lambda: board.get(where) is None)


def until(place: "Place", board: "Store", is_done: Callable[[], bool]) -> "Refused | None":
    """Wait until the controller that there is has done something; None where there is none.

    One that is there and slow is believed: it is what looks at the board next.
    """
    from batchml.sweep.pace import AWS, LOCAL

    pace = LOCAL if place.settings.is_local else AWS
    end = place.clock.monotonic() + _POLLS * pace.poll
    while (found := holder(place, board)) is not None:
        if is_done() or place.clock.monotonic() >= end:
            return found
        place.clock.sleep(min(1.0, pace.poll))
    return None


def stop(
    place: "Place",
    frozen: Frozen,
    board: "Board",
    *,
    now: bool = False,
    tell: Tell = lambda _: None,
    why: str = "stopped by the user",
) -> None:
    """Have every trial save and end, and begin no other; with `now`, without the grace.

    Returns once a controller is seeing to it, or, where none runs, once the sweep has ended.
    """
    from batchml.client.sweeping.ending import Stop

    stopping = Stop(place, frozen, board, tell)
    if not stopping.begin(why, now=now):
        for _ in stopping.pictures():
            pass
