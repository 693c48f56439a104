"""Waiting for runs to end, for as long as the caller wants to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from batchml.clock import Clock

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.watch import Happening


class Until:
    """A clock on which nobody sleeps past a moment: who tries gets TimeoutError instead."""

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


def until(clock: Clock, timeout: float | None) -> Clock:
    """`clock`, or one that ends after `timeout` seconds."""
    return clock if timeout is None else Until(clock, timeout)


def wait(
    place: "Place",
    job_ids: Sequence[str],
    timeout: float | None = None,
    tell: Callable[[str], None] | None = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
    news: Callable[[str], None] = lambda _: None,
) -> "Iterator[Run]":
    """Yield each run when it has ended; `tell` is told when contact stays lost.

    `see` gets whatever is seen of the runs on the way, and `news` what is to be said of runs that
    move to another queue. Raises TimeoutError, ServiceUnreachable,
    AccessError.
    """
    from batchml.client.fallback import Moves
    from batchml.ops import watch

    def describe(ids: Sequence[str]) -> "dict[str, Run]":
        told = place.describe(ids)
        if see is not None:
            see(told)
        return told

    moves = Moves(place, describe)

    def described(ids: Sequence[str]) -> "dict[str, Run]":
        found = moves(ids)
        while moves.news:
            news(moves.news.pop(0))
        return found

    ended = watch.wait(
        described,
        job_ids,
        clock=until(place.clock, timeout),
        pace=place.pace,
        recall=_recalling(place),
        renew=place.renew,
        tell=tell,
    )
    yield from map(moves.true, ended)


def judged(place: "Place", run: "Run") -> "Run":
    """A run; an array that failed knows how its children did, for one call."""
    if not run.children or run.failures:
        return run
    from batchml.aws.batch.jobs import judged

    return judged(place.connect(), run)


def wait_and_keep(
    place: "Place",
    job_ids: Sequence[str],
    timeout: float | None = None,
    tell: Callable[[str], None] | None = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
    news: Callable[[str], None] = lambda _: None,
) -> "Iterator[Run]":
    """`wait`, and keep the ends in the history, which remembers longer than AWS Batch does."""
    ended: list[Run] = []
    try:
        for found in wait(place, job_ids, timeout, tell, see, news):
            run = judged(place, found)
            ended.append(run)
            yield run
    finally:
        if ended:
            ours = {record.job_id for record in place.history.recent(place.env)}
            with suppress(OSError):  # a full disk is no reason to lose what is known now
                place.history.all_ended(run for run in ended if run.job_id in ours)


def follow(
    place: "Place",
    job_id: str,
    timeout: float | None = None,
    known: "Run | None" = None,
    see: "Callable[[Mapping[str, Run]], None] | None" = None,
) -> "Iterator[Happening]":
    """Yield what happens to a run until it has ended. Raises as `wait` does.

    `known` is the run where it has ended: AWS is not asked about it, and may have forgotten it.
    `see` gets whatever is seen of the run and of its parts on the way.
    """
    from batchml.client.fallback import Moves, following
    from batchml.client.numbering import numbering
    from batchml.ops import watch

    numbers = numbering(place, job_id, known)

    def describe(job_ids: Sequence[str]) -> "dict[str, Run]":
        if known is not None and list(job_ids) == [job_id]:
            return {job_id: known}
        told = place.describe(job_ids)
        numbers.learn(told.get(job_id))
        if see is not None:
            see(told)
        return told

    moves = Moves(place, describe)
    happenings = watch.follow(
        moves,
        place.open_log,
        job_id,
        clock=until(place.clock, timeout),
        pace=place.pace,
        recall=_recalling(place),
        renew=place.renew,
    )
    yield from numbers.told(following(moves, happenings))


def _recalling(place: "Place") -> "Callable[[str], Run | None]":
    """How to find a run that AWS Batch does not describe; nothing is asked before that is so."""

    def recall(job_id: str) -> "Run | None":
        from batchml.ops.watch.recall import recalling

        return recalling(place.batch, place.history, place.env)(job_id)

    return recall
