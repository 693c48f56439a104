"""Follow one run to its end, with its children or nodes: one poller, and no line is lost."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from batchml.clock import Clock
from batchml.context import PollIntervals
from batchml.errors import AccessError, BatchmlError
from batchml.model.outcome import describe_outcome
from batchml.model.run import JobStatus, OutcomeClass, Run, classify, with_failures
from batchml.runs.watch.events import (
    ContactLost,
    HostAssigned,
    PollingPaused,
    RunEnded,
    RunEvent,
    RunMessage,
    StatusChanged,
)
from batchml.runs.watch.parts import OpenLog, RunParts, WatchedJob
from batchml.runs.watch.poller import (
    Describe,
    Limiter,
    LogGate,
    PollCadence,
    Recall,
    RunPoller,
    ServiceContact,
    is_temporary,
)
from batchml.runtime.protocol.exit_codes import STOPPED

KILLED = 137  # what AWS says of a container that had to be killed

_MAX_PARTS_POLLED = 400  # parts asked about in one round: four calls
_MAX_PAGES = 20  # pages of logs in one round, before states are asked for again
_PAUSE_FACTOR = 9  # without a rate limit, the pause is nine times as long as the calls took,
_MAX_PAUSE = 2.0  # seconds, at most
_MAX_ENDED_PARTS = 8  # parts that have ended, read side by side


def follow(
    describe: Describe,
    open_log: OpenLog,
    job_id: str,
    *,
    clock: Clock,
    pace: PollIntervals,
    recall: Recall | None = None,
    renew: Callable[[], None] | None = None,
) -> Iterator[RunEvent]:
    """Yield the events of a run until it has ended and its output has been read.

    `recall` finds a run that DescribeJobs does not return. `renew` is called after failed
    credentials, so that new ones are read.

    Raises ServiceUnreachable when the run cannot be found or reached for too long, and AccessError
    when nobody signs in again. A log that cannot be read yields a message and does not end the
    events.
    """
    watch = _Watch(describe, open_log, job_id, clock, pace, recall, renew)
    while True:
        yield from watch.look()
        yield from watch.read()
        if watch.is_over:
            assert watch.run is not None
            yield RunEnded(with_failures(watch.run, watch.failed))
            return
        watch.rest()


class _Watch:
    """The state of a run and of its parts, as far as it was seen."""

    def __init__(
        self,
        describe: Describe,
        open_log: OpenLog,
        job_id: str,
        clock: Clock,
        pace: PollIntervals,
        recall: Recall | None,
        renew: Callable[[], None] | None,
    ) -> None:
        self.run: Run | None = None
        self._job_id = job_id
        self._open_log = open_log
        self._clock = clock
        self._pace = pace
        self._poller = RunPoller(describe, clock, pace, recall=recall, renew=renew)
        self._gate = LogGate(
            Limiter(clock, pace.log_rate), ServiceContact(clock, pace, renew, is_known=True)
        )
        self._looks = PollCadence(pace.shortest, pace.longest)
        self._reads = PollCadence(pace.shortest, pace.longest_log)
        self._family: RunParts | None = None
        self._parts: dict[int, WatchedJob] = {}  # the run itself is part 0 when it has no others
        self._hosts: list[dict[str, str]] = []
        self._moved_at = clock.monotonic()
        self._is_unreadable = False
        self.failed: list[Run] = []  # children

    @property
    def is_over(self) -> bool:
        """The run has ended, and its output was read as far as possible."""
        if self.run is None or not self.run.status.is_terminal:
            return False
        if self._is_unreadable:
            return True
        if any(part.has_ended and not part.is_done for part in self._parts.values()):
            return False
        # Parts that do not end although their run has ended: waited for, for a limited time.
        is_still = self._clock.monotonic() - self._moved_at >= self._pace.startup_limit
        return is_still or self._family is None or self._family.all_ended

    def rest(self) -> None:
        """Sleep until the next poll is due."""
        until = self._looks.next
        if self._reading():
            until = min(until, self._reads.next)
        self._clock.sleep(max(0.0, until - self._clock.monotonic()))

    # --- how it is ----------------------------------------------------------------------------

    def look(self) -> list[RunEvent]:
        """Ask for the state of the run and some parts, if that is due; few parts need one call."""
        began = self._clock.monotonic()
        if self._looks.next > began:
            return []
        ids = self._part_ids()
        if self.run is None or not self.run.status.is_terminal:
            ids = [self._job_id, *ids]
        had_family = self._family is not None
        happenings = list(self._ask(ids))
        news = any(not isinstance(happening, ContactLost) for happening in happenings)
        if self._family is not None and not had_family:
            happenings += self._ask(self._part_ids())
        now = self._clock.monotonic()
        self._looks.done(now, news=news, rest=self._rest_after(now - began))
        return happenings

    def _rest_after(self, seconds: float) -> float:
        """Seconds without polls after calls that took `seconds`."""
        return min(_PAUSE_FACTOR * seconds, _MAX_PAUSE) if self._pace.describe_rate is None else 0.0

    def _part_ids(self) -> list[str]:
        """The ids of children or nodes to ask about now."""
        if self._family is None or self.run is None:
            return []
        return [self._family.job_id(n) for n in self._family.chosen(self.run, _MAX_PARTS_POLLED)]

    def _ask(self, ids: list[str]) -> Iterator[RunEvent]:
        for found in self._poller.answers(ids):
            if isinstance(found, ContactLost):
                yield found
                return
            asked, runs = found
            for job_id in asked:
                if job_id == self._job_id:
                    seen = runs.get(job_id) or self._poller.missing(job_id)
                    yield from [seen] if isinstance(seen, ContactLost) else self._seen(seen)
                else:
                    self._seen_part(job_id, runs.get(job_id))

    def _seen(self, run: Run) -> Iterator[RunEvent]:
        last, self.run = self.run, run
        if last is None or (run.status, run.children) != (last.status, last.children):
            yield StatusChanged(run)
            if run.status.is_terminal:
                self._gate.run_ended()
        told = "" if last is None else last.status_reason
        held_up = run.status in (JobStatus.STARTING, JobStatus.RUNNABLE)
        if held_up and run.status_reason not in ("", told):
            yield RunMessage(run, run.status_reason)
        if last is None and (run.array_size or (run.nodes and run.node_index is None)):
            self._family = RunParts(run)
        if self._family is None:
            self._parts.setdefault(0, self._part(None)).seen(run)
        if last is None or (run.status, run.attempts) != (last.status, last.attempts):
            self._move()

    def _move(self) -> None:
        """Note a change: there may be more output to read."""
        self._moved_at = self._clock.monotonic()
        self._reads.hurry(self._moved_at)

    def _part(self, number: int | None) -> WatchedJob:
        return WatchedJob(
            number, self._open_log, clock=self._clock, pace=self._pace, gate=self._gate
        )

    def _seen_part(self, job_id: str, run: Run | None) -> None:
        """Note the state of a child or node. A part that never started has no output."""
        assert self.run is not None and self._family is not None
        number = self._family.number(job_id)
        if run is None:
            self._family.missing(number, self.run)
            return
        if run.status.is_terminal and not (self._family.is_array or self.run.status.is_terminal):
            # The job goes on without this node, or runs it again in the next attempt.
            run = replace(run, status=JobStatus.RUNNING)
        self._family.seen(number, run)
        if run.status is JobStatus.FAILED and self._family.is_array:
            self.failed.append(run)
        if run.status.is_terminal:
            self._move()
        if not run.attempts:
            return
        if number not in self._parts:
            self._parts[number] = self._part(number)
        part = self._parts[number]
        before = part.run
        part.seen(run)
        if before is None or (run.status, run.attempts) != (before.status, before.attempts):
            self._move()

    # --- what it prints -----------------------------------------------------------------------

    def _reading(self) -> bool:
        return any(part.current() is not None for part in self._parts.values())

    def _due(self) -> list[WatchedJob]:
        """The parts to read in this round: a few that have ended, then the others in turn.

        Of many parts, none that the last round caught up with.
        """
        parts = [part for part in self._parts.values() if part.current() is not None]
        over = sorted((part for part in parts if part.has_ended), key=lambda part: part.number)
        going_on = [part for part in parts if not part.has_ended]
        chosen = sorted(over[:_MAX_ENDED_PARTS], key=lambda part: (part.is_caught_up, part.number))
        chosen += sorted(going_on, key=lambda part: (part.last_read, part.number))
        if len(chosen) <= _MAX_ENDED_PARTS:
            return chosen
        before = self._clock.monotonic() - self._pace.settle
        return [part for part in chosen if not part.is_caught_up or part.last_read <= before]

    def read(self) -> Iterator[RunEvent]:
        """Read new output, if that is due; a limited amount."""
        if self._reads.next > self._clock.monotonic():
            return
        news = left = False
        pages, took = 0, 0.0
        for part in self._due():
            had_ended = part.may_have_ended
            while not left and (current := part.current()) is not None:
                began = self._clock.monotonic()
                happenings = self._page(part)
                took += self._clock.monotonic() - began
                pages += 1
                news = news or bool(happenings)
                yield from happenings
                if happenings and isinstance(happenings[-1], ContactLost):
                    self._reads.done(self._clock.monotonic(), news=False)
                    return
                if part.current() == current and current[0].caught_up:
                    break
                left = pages >= _MAX_PAGES
            if part.may_have_ended and not had_ended:
                self._looks.hurry(self._clock.monotonic())
        yield from self._let_go()
        if news:
            self._moved_at = self._clock.monotonic()
        # One run's lines are shown as they come; those of many parts may be some at a time.
        rest = self._rest_after(took) if self._family is not None else 0.0
        self._reads.done(self._clock.monotonic(), news=news, rest=rest)
        if left or any(part.has_ended and not part.is_caught_up for part in self._due()):
            self._reads.next = 0.0

    def _page(self, part: WatchedJob) -> list[RunEvent]:
        """One page of a part's output, or why there is none."""
        try:
            happenings = part.read()
        except BatchmlError as error:
            return self._failed(error)
        new = [happening for happening in happenings if not self._is_known(happening)]
        return [*new, PollingPaused()] if new else []

    def _is_known(self, happening: RunEvent) -> bool:
        """Whether the same host was reported for another part."""
        if type(happening) is not HostAssigned:
            return False
        if happening.how in self._hosts:
            return True
        self._hosts.append(happening.how)
        return False

    def _failed(self, error: BatchmlError) -> list[RunEvent]:
        """Note that no page came. The run is followed to its end even if the outage lasts."""
        assert self.run is not None
        if is_temporary(error) and not _is_denied(error) and self._may_come_back(error):
            return [ContactLost(str(error))]
        self._is_unreadable = True
        told: list[RunEvent] = [RunMessage(self.run, f"Its output cannot be read: {error}")]
        for part in self._parts.values():
            told += part.give_up()
        return told

    def _may_come_back(self, error: BatchmlError) -> bool:
        """While the run goes on its log may come back; after the end only for a limited time."""
        assert self.run is not None
        try:
            self._gate.failed(error)
        except BatchmlError:
            return not self.run.status.is_terminal
        return True

    def _let_go(self) -> Iterator[RunEvent]:
        """Drop parts that are done, of up to 10,000; report those that failed."""
        if self._family is None or self.run is None:
            return
        for number in [number for number, part in self._parts.items() if part.is_done]:
            run = self._parts.pop(number).run
            if run is not None and run.status is JobStatus.FAILED:
                what = "Child" if self._family.is_array else "Node"
                said = describe_outcome(run if self._family.is_array else as_node(run, self.run))
                yield RunMessage(self.run, f"{what} {number} FAILED: {said}")


def as_node(node: Run, whole: Run) -> Run:
    """A node that ended because its run was stopped is reported as stopped, with the reason."""
    was_ended = node.exit_code in (None, STOPPED, KILLED)
    if not was_ended or classify(whole).outcome is not OutcomeClass.CANCELLED:
        return node
    return replace(node, is_terminated=True, status_reason=whole.status_reason)


def _is_denied(error: BatchmlError) -> bool:
    """True where signing in again would not help."""
    return isinstance(error, AccessError) and "Denied" in error.code
