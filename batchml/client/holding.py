"""A run that is held for a person, an allocation or a notebook: it begins, is waited for, and ends.

It gives back what it holds once it was left idle (`batchml/runtime/sessions/alloc.py`), so that a
client that is killed, or a laptop that is closed, costs no more than that.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from batchml.client.whywait import Whys, verdict
from batchml.errors import BatchmlError
from batchml.model.group import SEAT_TAG
from batchml.model.names import amounts
from batchml.model.run import JobStatus
from batchml.runtime.exec.prompt import KIND
from batchml.runtime.sessions.alloc import LIMIT, RATE, spelled

if TYPE_CHECKING:
    from batchml.client.doors import Seat
    from batchml.client.order import Order
    from batchml.client.place import Place
    from batchml.client.submission import Prepared, Tell
    from batchml.model.run import Run
    from batchml.ops.cost import Usd


_WHY_AFTER = 10.0  # seconds of waiting after which it is asked what for,
_WHY_MOST = 300.0  # and asked again ever more seldom, up to so many seconds
_ENDING = 60.0  # seconds that a run is given to end as it was asked to
_TRIES, _BETWEEN = 20, 0.2  # of looks for the tools of a run of several nodes; seconds
_HELD_UP = (JobStatus.RUNNABLE, JobStatus.STARTING)  # and says itself by what
_HAS_TOOLS = ("/bin/sh", "-c", "command -v srun")
# Prints what is about to be lost.
_LEFT = "python3 -m batchml.runtime.sessions.alloc --left 2>/dev/null"
_STOP = ("/bin/sh", "-c", f'{_LEFT}; : > "$BATCHML_STOP_FILE"')


class Unheld(BatchmlError):
    """The run ended before anybody could use it; the exit code is that of its end."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


# --- to begin -------------------------------------------------------------------------------------


def ready(
    place: "Place", order: "Order", *, kind: str, idle_s: float | None, tell: "Tell"
) -> "Prepared":
    """What will be sent for an order of a run that is held; nothing is sent.

    `kind` is what for, `idle_s` the seconds without use after which it ends itself, None for never.
    Raises what `client.submission.prepare` does.
    """
    from batchml.client.submission import prepare

    hour = hour_of(place, order)
    if hour is not None and hour.high:
        tell(f"About {amounts(hour.low, hour.high)} an hour, for as long as it is held.")
    held = held_order(order, kind, idle_s, float(hour.high) if hour is not None else 0.0)
    prepared = prepare(place, held, dry_run=False)
    # A person is there, and holds anew: advice on attempts is for programs that train.
    notices = tuple(each for each in prepared.notices if "[retry]" not in each)
    return msgspec.structs.replace(prepared, notices=notices)


def check_here(place: "Place", environ: Mapping[str, str] = os.environ) -> None:
    """Look, before anything is held, for what this machine needs to get in.

    Raises NoDoor, with the line that installs it.
    """
    if not place.settings.is_local:
        from batchml.client.plugin import find_plugin

        find_plugin(environ)


def held_order(order: "Order", kind: str, idle_s: float | None, rate: float) -> "Order":
    """The order with what its run is told: when it is idle, and, where known, USD an hour."""
    told = {KIND: kind}
    if idle_s is not None and idle_s < math.inf:
        told[LIMIT] = f"{idle_s:g}"
    if rate > 0:
        told[RATE] = f"{rate:.6g}"
    env = {**told, **order.changes.get("env", {})}
    return msgspec.structs.replace(
        order, changes={**order.changes, "env": env}, own_tags={**order.own_tags, SEAT_TAG: kind}
    )


def hour_of(place: "Place", order: "Order") -> "Usd | None":
    """What an hour of the run will cost; None where that is not known, which stops nobody."""
    from batchml.client.costs import quote_of_job
    from batchml.client.order import read_order

    spec = read_order(place, order).spec
    try:
        return quote_of_job(place, spec).hour
    except BatchmlError:
        return None


# --- to wait --------------------------------------------------------------------------------------


def wait_until_running(
    place: "Place",
    job_id: str,
    tell: "Tell",
    *,
    see: Callable[[Mapping[str, "Run"]], None] | None = None,
    why: Callable[[], str] | None = None,
) -> "Run":
    """Wait until the run has its resources, and return it.

    `tell` hears the state each time it changes, and after ten seconds what the run waits for,
    again whenever that has changed. `see` is shown the run at every look. `why` says what it waits
    for; that of `explain` unless given.

    Raises Unheld when it ended instead, and what `client.waiting.wait` does.
    """
    from batchml.ops.watch import Outages, Poller, backoff
    from batchml.ops.watch.happenings import Lost

    poller = Poller(place.describe, place.clock, place.pace, renew=place.renew)
    outages, delays = Outages(place.clock, tell), backoff(place.pace)
    waits = _Waits(place, tell, why or (lambda: verdict(place, job_id)))
    while True:
        (seen,) = poller.look([job_id])
        if isinstance(seen, Lost):
            outages.lost(seen.error)
        else:
            if see is not None:
                see({job_id: seen})
            if seen.status.is_terminal:
                raise _unheld(place, seen)
            if waits.see(seen):
                delays = backoff(place.pace)
            if seen.status is JobStatus.RUNNING:
                return seen
        place.clock.sleep(next(delays))


class _Waits:
    """What a person is told while a run waits."""

    def __init__(self, place: "Place", tell: "Tell", why: Callable[[], str]) -> None:
        self._tell = tell
        self._whys = Whys(
            place.clock, lambda words: tell(f"  {words}"), why, first=_WHY_AFTER, most=_WHY_MOST
        )
        self._status = self._reason = ""

    def see(self, run: "Run") -> bool:
        """Tell what is new of it; whether anything is."""
        is_new = run.status.value != self._status
        if is_new:
            self._status = run.status.value
            self._tell(f"Job [{run.name} - {run.job_id}] is {self._status}.")
        if run.status in _HELD_UP and run.status_reason not in ("", self._reason):
            is_new, self._reason = True, run.status_reason  # such as how far its environment is
            self._tell(f"  {self._reason}")
        self._whys.see(not run.status.holds_resources)
        return is_new


def wait_for_tools(place: "Place", seat: "Seat") -> None:
    """Until a shell inside finds `srun`, by which it reaches the other nodes, for a moment at
    most: a run is RUNNING a little before its program is."""
    from batchml.client.doors import ask_inside

    for _ in range(_TRIES):
        if not ask_inside(place, seat, _HAS_TOOLS).code:
            return
        place.clock.sleep(_BETWEEN)


def _unheld(place: "Place", run: "Run") -> Unheld:
    from batchml.model.outcome import describe_outcome
    from batchml.model.run import classify

    ended = classify(run)
    return Unheld(
        f"{run.name} ended before it could be used, {ended.outcome}: {describe_outcome(run)}.\n"
        f"  batchml explain {run.job_id}{place.option}\n"
        f"  batchml logs {run.job_id}{place.option}",
        ended.exit_code or 1,
    )


# --- to end ---------------------------------------------------------------------------------------


def end(place: "Place", job_id: str, tell: "Tell" = lambda _: None) -> "Run | None":
    """End what is held as done, so that it is SUCCEEDED, and return it once it has ended.

    It finds its stop file, and ends itself; files of its working folder that go with it are told
    of. One that does not within a minute, or that cannot be
    told, is terminated, which is said; one that does not run yet is cancelled. None for a run that
    is still going down then.
    """
    run = place.describe([job_id]).get(job_id)
    if run is None or run.status.is_terminal:
        return run
    if run.status.value == "RUNNING" and _is_told(place, job_id, tell):
        ended = _wait(place, job_id)
        if ended is not None:
            return ended
        tell("It does not end by itself: it is terminated.")
    cancel(place, job_id, "Ended by its user")
    return _wait(place, job_id)


def cancel(place: "Place", job_id: str, reason: str) -> None:
    """Give the run up, whatever state it is in."""
    from batchml.client.gang_parts import stop_all

    stop_all(place, [job_id], reason)


def _is_told(place: "Place", job_id: str, tell: "Tell") -> bool:
    from batchml.client.doors import ask_inside, find_seat

    try:
        asked = ask_inside(place, find_seat(place, job_id), _STOP)
    except BatchmlError:
        return False
    lost = asked.out.decode("utf-8", "replace").strip()
    if lost:
        tell("".join(char if char.isprintable() else "?" for char in lost))
    return asked.code == 0


def _wait(place: "Place", job_id: str) -> "Run | None":
    from batchml.client.waiting import wait_and_keep

    try:
        (run,) = wait_and_keep(place, [job_id], timeout=_ENDING)
    except TimeoutError:
        return None
    return run


def last_words(place: "Place", job_id: str) -> str:
    """`It ran 63 h 12 min and cost $63.50.` So far, for a run that goes on; no money on a machine
    without a price, nor where AWS did not say it."""
    from batchml.client.costs import bill_of

    try:
        run, bill = bill_of(place, job_id)
    except BatchmlError:
        return ""
    if not bill.seconds:
        return "It never ran, and cost nothing."
    is_over = run.status.is_terminal
    said = f"It ran {spelled(bill.seconds)}" if is_over else f"It runs for {spelled(bill.seconds)}"
    if bill.is_free or not bill.usd.high:
        return f"{said}."
    least = "at least " if bill.is_least else ""
    cost = f"{least}{amounts(bill.usd.low, bill.usd.high)}"
    return f"{said} and cost {cost}{'' if is_over else ' so far'}."
