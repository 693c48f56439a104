"""Wait for runs to end, or follow a run, with an optional timeout, also to another queue."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from batchml.clock import Clock
from batchml.runs.find import with_child_failures
from batchml.runs.rerun.rules import numbering
from batchml.runs.watch.follow import follow as follow_run
from batchml.runs.watch.poller import make_recall, poll_until_ended

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.run import Run
    from batchml.runs.watch.events import RunEvent


class DeadlineClock:
    """A clock whose `sleep` raises TimeoutError after some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.monotonic() + seconds
        self._seconds = seconds

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        left = self._end - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError(f"Not ended after {self._seconds:g} seconds. The runs go on.")
        self._clock.sleep(min(seconds, left))


class WatchStopped(Exception):
    """The event that ends the watching of a run was set."""


class StoppableClock:
    """A clock whose `sleep` raises WatchStopped as soon as an event is set."""

    def __init__(self, clock: Clock, stop: threading.Event) -> None:
        self._clock = clock
        self._stop = stop

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise WatchStopped


def with_deadline(clock: Clock, timeout: float | None) -> Clock:
    """`clock` itself without a timeout, else a DeadlineClock."""
    return clock if timeout is None else DeadlineClock(clock, timeout)


def wait_for_runs(
    context: "Context",
    job_ids: Sequence[str],
    timeout: float | None = None,
    tell: Callable[[str], None] | None = None,
    on_states: "Callable[[Mapping[str, Run]], None] | None" = None,
    on_move: Callable[[str], None] = lambda _: None,
) -> "Iterator[Run]":
    """Yield each run when it has ended, and keep its end in the history.

    `tell` gets a message about a long outage, `on_states` the runs after each poll, `on_move` a
    message about a run that moves to another queue. Raises TimeoutError after `timeout` seconds,
    ServiceUnreachable, AccessError.
    """
    from batchml.runs.fallback.watch import QueueMoves

    def describe(ids: Sequence[str]) -> "dict[str, Run]":
        runs = context.describe(ids)
        if on_states is not None:
            on_states(runs)
        return runs

    moves = QueueMoves(context, describe)

    def describe_moved(ids: Sequence[str]) -> "dict[str, Run]":
        found = moves(ids)
        while moves.news:
            on_move(moves.news.pop(0))
        return found

    ended: list[Run] = []
    polled = poll_until_ended(
        describe_moved,
        job_ids,
        clock=with_deadline(context.clock, timeout),
        pace=context.pace,
        recall=make_recall(lambda: context.batch, context.history, context.env),
        renew=context.renew,
        tell=tell,
    )
    try:
        for run in map(moves.with_own_id, polled):
            ended.append(with_child_failures(context, run))
            yield ended[-1]
    finally:
        if ended:
            ours = context.history.records(context.env)
            with suppress(OSError):  # a full disk must not hide the ends
                context.history.add_ends(run for run in ended if ours.get(run.job_id))


def follow(
    context: "Context",
    job_id: str,
    timeout: float | None = None,
    ended: "Run | None" = None,
    on_states: "Callable[[Mapping[str, Run]], None] | None" = None,
    stop: threading.Event | None = None,
) -> "Iterator[RunEvent]":
    """Yield the events of a run until it has ended. Raises what `wait_for_runs` raises.

    `ended` is the run if it has ended: it is not described again, since AWS Batch may have
    forgotten it. `on_states` gets the run and its parts after each poll. The events end early when
    `stop` is set, which another thread may do.
    """
    from batchml.runs.fallback.watch import QueueMoves, follow_moves

    numbers = numbering(context, job_id, ended)

    def describe(job_ids: Sequence[str]) -> "dict[str, Run]":
        if ended is not None and list(job_ids) == [job_id]:
            return {job_id: ended}
        runs = context.describe(job_ids)
        numbers.learn(runs.get(job_id))
        if on_states is not None:
            on_states(runs)
        return runs

    clock = with_deadline(context.clock, timeout)
    moves = QueueMoves(context, describe)
    events = follow_run(
        moves,
        context.open_log,
        job_id,
        clock=clock if stop is None else StoppableClock(clock, stop),
        pace=context.pace,
        recall=make_recall(lambda: context.batch, context.history, context.env),
        renew=context.renew,
    )
    with suppress(WatchStopped):
        yield from numbers.renumber(follow_moves(moves, events))
