"""Wait for runs to end, with an optional timeout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from batchml.clock import Clock
from batchml.runs.find import with_child_failures
from batchml.runs.rerun.rules import numbering
from batchml.runs.watch.follow import follow as follow_run
from batchml.runs.watch.poller import recalling
from batchml.runs.watch.poller import wait as wait_for_runs

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.model.run import Run
    from batchml.runs.watch.events import RunEvent


class DeadlineClock:
    """A clock that raises TimeoutError for a sleep beyond a moment."""

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


def with_deadline(clock: Clock, timeout: float | None) -> Clock:
    """`clock`, or one that ends after `timeout` seconds."""
    return clock if timeout is None else DeadlineClock(clock, timeout)


def wait(
    context: "Context",
    job_ids: Sequence[str],
    timeout: float | None = None,
    tell: Callable[[str], None] | None = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
    news: Callable[[str], None] = lambda _: None,
) -> "Iterator[Run]":
    """Yield each run when it has ended.

    `tell` gets a message when contact stays lost, `see` gets each state of the runs on the way,
    `news` messages about runs that move to another queue. Raises TimeoutError, ServiceUnreachable,
    AccessError.
    """
    from batchml.runs.fallback.watch import QueueMoves

    def describe(ids: Sequence[str]) -> "dict[str, Run]":
        told = context.describe(ids)
        if see is not None:
            see(told)
        return told

    moves = QueueMoves(context, describe)

    def described(ids: Sequence[str]) -> "dict[str, Run]":
        found = moves(ids)
        while moves.news:
            news(moves.news.pop(0))
        return found

    ended = wait_for_runs(
        described,
        job_ids,
        clock=with_deadline(context.clock, timeout),
        pace=context.pace,
        recall=_recalling(context),
        renew=context.renew,
        tell=tell,
    )
    yield from map(moves.true, ended)


def wait_and_keep(
    context: "Context",
    job_ids: Sequence[str],
    timeout: float | None = None,
    tell: Callable[[str], None] | None = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
    news: Callable[[str], None] = lambda _: None,
) -> "Iterator[Run]":
    """Like `wait`; the ends are kept in the history, which remembers longer than AWS Batch."""
    ended: list[Run] = []
    try:
        for found in wait(context, job_ids, timeout, tell, see, news):
            run = with_child_failures(context, found)
            ended.append(run)
            yield run
    finally:
        if ended:
            ours = {record.job_id for record in context.history.recent(context.env)}
            with suppress(OSError):  # a full disk is no reason to lose what is known now
                context.history.add_ends(run for run in ended if run.job_id in ours)


def follow(
    context: "Context",
    job_id: str,
    timeout: float | None = None,
    known: "Run | None" = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
) -> "Iterator[RunEvent]":
    """Yield the events of a run until it has ended. Raises as `wait` does.

    `known` is the run if it has ended: then AWS, which may have forgotten it, is not asked. `see`
    gets each state of the run and of its parts on the way.
    """
    from batchml.runs.fallback.watch import QueueMoves, follow_moves

    numbers = numbering(context, job_id, known)

    def describe(job_ids: Sequence[str]) -> "dict[str, Run]":
        if known is not None and list(job_ids) == [job_id]:
            return {job_id: known}
        told = context.describe(job_ids)
        numbers.learn(told.get(job_id))
        if see is not None:
            see(told)
        return told

    moves = QueueMoves(context, describe)
    happenings = follow_run(
        moves,
        context.open_log,
        job_id,
        clock=with_deadline(context.clock, timeout),
        pace=context.pace,
        recall=_recalling(context),
        renew=context.renew,
    )
    yield from numbers.renumber(follow_moves(moves, happenings))


def _recalling(context: "Context") -> "Callable[[str], Run | None]":
    """How to find a run that AWS Batch does not describe; nothing is read before that happens."""

    def recall(job_id: str) -> "Run | None":

        return recalling(context.batch, context.history, context.env)(job_id)

    return recall
