"""Follow one run to its end, with its children or nodes: its states and every line of its logs."""

from collections.abc import Callable, Generator, Iterator

from msgspec.structs import replace

from batchml.aws.logs import MAX_STREAMS, StreamReader
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
from batchml.runs.watch.parts import OpenLog, PartSchedule, WatchedJob
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

KILLED = 137  # the exit code of a container that was killed with SIGKILL

_MAX_PARTS_POLLED = 400  # parts that are described in one round: four calls
_MAX_PAGES = 20  # pages of logs in one round; then the states are polled again
_PAUSE_FACTOR = 9  # without a rate limit, the pause is nine times as long as the calls took
_MAX_PAUSE = 2.0  # seconds of that pause
_MAX_ENDED_PARTS = 8  # parts that have ended whose logs are read one by one in one round
_LEAST_TOGETHER = 4  # logs that are read together; fewer are read one by one
_MAX_PAGES_TOGETHER = 5  # of logs that are read together


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

    `recall` finds a run that DescribeJobs does not return. `renew` is called when AWS refuses the
    credentials, so that the next call reads new credentials.

    Raises ServiceUnreachable if the run cannot be found, or AWS cannot be reached, for too long;
    AccessError if the user does not sign in again. If a log cannot be read, there is a message,
    and the events go on.
    """
    watch = _Watch(describe, open_log, job_id, clock, pace, recall, renew)
    while True:
        yield from watch.poll()
        yield from watch.read_output()
        if watch.is_over:
            assert watch.run is not None
            yield RunEnded(with_failures(watch.run, watch.failed))
            return
        watch.sleep()


class _Watch:
    """The last known states of a run and of its parts, and how far their logs were read."""

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
        self._state_cadence = PollCadence(pace.shortest, pace.longest)
        self._log_cadence = PollCadence(pace.shortest, pace.longest_log)
        self._schedule: PartSchedule | None = None
        self._parts: dict[int, WatchedJob] = {}  # a run without parts is part 0
        self._hosts: list[dict[str, str]] = []
        self._changed_at = clock.monotonic()
        self._is_unreadable = False
        self._most_together = MAX_STREAMS  # logs that are read together
        self.failed: list[Run] = []  # failed children of an array

    @property
    def is_over(self) -> bool:
        """True if the run has ended, and its output was read as far as possible."""
        if self.run is None or not self.run.status.is_terminal:
            return False
        if self._is_unreadable:
            return True
        if any(part.has_ended and not part.is_done for part in self._parts.values()):
            return False
        # Parts may end after their run: they are waited for, for a limited time.
        is_still = self._clock.monotonic() - self._changed_at >= self._pace.startup_limit
        return is_still or self._schedule is None or self._schedule.all_ended

    def sleep(self) -> None:
        """Sleep until the next poll is due."""
        until = self._state_cadence.next
        if self._has_output():
            until = min(until, self._log_cadence.next)
        self._clock.sleep(max(0.0, until - self._clock.monotonic()))

    # --- States -------------------------------------------------------------------------------

    def poll(self) -> list[RunEvent]:
        """Poll the states of the run and of some parts, if that is due; few parts need one call."""
        began = self._clock.monotonic()
        if self._state_cadence.next > began:
            return []
        ids = self._part_ids()
        if self.run is None or not self.run.status.is_terminal:
            ids = [self._job_id, *ids]
        had_schedule = self._schedule is not None
        events = list(self._describe(ids))
        news = any(not isinstance(event, ContactLost) for event in events)
        if self._schedule is not None and not had_schedule:
            events += self._describe(self._part_ids())
        now = self._clock.monotonic()
        self._state_cadence.done(now, news=news, rest=self._pause_after(now - began))
        return events

    def _pause_after(self, seconds: float) -> float:
        """Seconds without polls after calls that took `seconds`: on this machine they slow down
        the run, unless it has ended.
        """
        is_over = self.run is not None and self.run.status.is_terminal
        if self._pace.describe_rate is not None or is_over:
            return 0.0
        return min(_PAUSE_FACTOR * seconds, _MAX_PAUSE)

    def _part_ids(self) -> list[str]:
        """The ids of the children or nodes to describe now."""
        if self._schedule is None or self.run is None:
            return []
        return [
            self._schedule.job_id(n) for n in self._schedule.choose(self.run, _MAX_PARTS_POLLED)
        ]

    def _describe(self, ids: list[str]) -> Iterator[RunEvent]:
        for found in self._poller.poll_calls(ids):
            if isinstance(found, ContactLost):
                yield found
                return
            ids_of_call, runs = found
            for job_id in ids_of_call:
                if job_id == self._job_id:
                    run = runs.get(job_id) or self._poller.find_missing(job_id)
                    yield from [run] if isinstance(run, ContactLost) else self._note_run(run)
                else:
                    self._note_part(job_id, runs.get(job_id))

    def _note_run(self, run: Run) -> Iterator[RunEvent]:
        last, self.run = self.run, run
        if last is None or (run.status, run.children) != (last.status, last.children):
            yield StatusChanged(run)
            if run.status.is_terminal:
                self._gate.run_ended()
        last_reason = "" if last is None else last.status_reason
        is_waiting = run.status in (JobStatus.STARTING, JobStatus.RUNNABLE)
        if is_waiting and run.status_reason not in ("", last_reason):
            yield RunMessage(run, run.status_reason)
        if last is None and (run.array_size or (run.nodes and run.node_index is None)):
            self._schedule = PartSchedule(run)
        if self._schedule is None:
            self._parts.setdefault(0, self._part(None)).update(run)
        if last is None or (run.status, run.attempts) != (last.status, last.attempts):
            self._note_change()

    def _note_change(self) -> None:
        """Note a change: there may be more output to read."""
        self._changed_at = self._clock.monotonic()
        self._log_cadence.hurry(self._changed_at)

    def _part(self, number: int | None) -> WatchedJob:
        return WatchedJob(
            number, self._open_log, clock=self._clock, pace=self._pace, gate=self._gate
        )

    def _note_part(self, job_id: str, run: Run | None) -> None:
        """Note the state of a child or node. A part that never started has no output."""
        assert self.run is not None and self._schedule is not None
        number = self._schedule.number(job_id)
        if run is None:
            self._schedule.note_missing(number, self.run)
            return
        if run.status.is_terminal and not (self._schedule.is_array or self.run.status.is_terminal):
            # The job goes on without this node, or runs it again in the next attempt.
            run = replace(run, status=JobStatus.RUNNING)
        self._schedule.update(number, run)
        if run.status is JobStatus.FAILED and self._schedule.is_array:
            self.failed.append(run)
        if run.status.is_terminal:
            self._note_change()
        if not run.attempts:
            return
        if number not in self._parts:
            self._parts[number] = self._part(number)
        part = self._parts[number]
        before = part.run
        part.update(run)
        if before is None or (run.status, run.attempts) != (before.status, before.attempts):
            self._note_change()

    # --- Output -------------------------------------------------------------------------------

    def _has_output(self) -> bool:
        return any(part.current() is not None for part in self._parts.values())

    def _parts_to_read(self) -> list[WatchedJob]:
        """The parts to read in this round: a few that have ended, then the others in turn.

        With many parts, those without new output in the last round wait for `settle` seconds.
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

    def read_output(self) -> Iterator[RunEvent]:
        """Read new output, if that is due; at most `_MAX_PAGES` pages."""
        if self._log_cadence.next > self._clock.monotonic():
            return
        together = yield from self._read_together()
        if together is None:
            self._log_cadence.done(self._clock.monotonic(), news=False)
            return
        pages, took = together
        news, left = pages > 0, pages >= _MAX_PAGES
        for part in self._parts_to_read():
            had_ended = part.may_have_ended
            while not left and (current := part.current()) is not None:
                began = self._clock.monotonic()
                events = self._read_page(part)
                took += self._clock.monotonic() - began
                pages += 1
                news = news or bool(events)
                yield from events
                if events and isinstance(events[-1], ContactLost):
                    self._log_cadence.done(self._clock.monotonic(), news=False)
                    return
                if part.current() == current and current[0].caught_up:
                    break
                left = pages >= _MAX_PAGES
            if part.may_have_ended and not had_ended:
                self._state_cadence.hurry(self._clock.monotonic())
        yield from self._drop_done_parts()
        if news:
            self._changed_at = self._clock.monotonic()
        # A run without parts is read without a pause, so that its lines appear at once.
        rest = self._pause_after(took) if self._schedule is not None else 0.0
        self._log_cadence.done(self._clock.monotonic(), news=news, rest=rest)
        if left or any(part.has_ended and not part.is_caught_up for part in self._parts_to_read()):
            self._log_cadence.next = 0.0

    def _read_together(self) -> Generator[RunEvent, None, tuple[int, float] | None]:
        """Read whole short logs of parts that have ended, many in one call.

        Returns the number of pages and the seconds that their calls took; None after a failure.
        """
        pages, took = 0, 0.0
        while pages < _MAX_PAGES and len(parts := self._parts_to_read_together()) > 0:
            reader = StreamReader.together([log for _, log in parts])
            began, is_over, failure = self._clock.monotonic(), False, None
            try:
                for _ in range(_MAX_PAGES_TOGETHER):
                    pages += 1
                    is_over = self._gate.read_together(reader)
                    if is_over:
                        break
            except BatchmlError as error:
                failure = error
            took += self._clock.monotonic() - began
            if failure is not None and is_temporary(failure) and not _is_denied(failure):
                yield from self._handle_failure(failure)
                return None
            if not (is_over or failure):
                self._most_together //= 2  # the logs are long
            # If one stream does not exist, or the call is not allowed, each log is read alone.
            found = {} if failure else reader.pages()
            yield from self._news(
                [event for part, log in parts for event in part.take_whole(found.get(log.stream))]
            )
        return pages, took

    def _parts_to_read_together(self) -> list[tuple[WatchedJob, StreamReader]]:
        """Parts that have ended and were not read, with their logs, which are in one group."""
        logs = [(part, log) for part in self._parts.values() if (log := part.unread()) is not None]
        if len(logs) < _LEAST_TOGETHER:
            return []
        logs = [(part, log) for part, log in logs if log.group == logs[0][1].group]
        logs.sort(key=lambda each: each[0].number)
        logs = logs[: self._most_together]
        return logs if len(logs) >= _LEAST_TOGETHER else []

    def _read_page(self, part: WatchedJob) -> list[RunEvent]:
        """The events of one page of a part's output, or of a failed call."""
        try:
            events = part.read()
        except BatchmlError as error:
            return self._handle_failure(error)
        return self._news(events)

    def _news(self, events: list[RunEvent]) -> list[RunEvent]:
        """The events to yield for those of read pages."""
        new = [event for event in events if not self._is_known_host(event)]
        return [*new, PollingPaused()] if new else []

    def _is_known_host(self, event: RunEvent) -> bool:
        """True if the same host was reported for another part."""
        if type(event) is not HostAssigned:
            return False
        if event.host in self._hosts:
            return True
        self._hosts.append(event.host)
        return False

    def _handle_failure(self, error: BatchmlError) -> list[RunEvent]:
        """The events after a failed call. The run is followed to its end even in a long outage."""
        assert self.run is not None
        if is_temporary(error) and not _is_denied(error) and self._may_come_back(error):
            return [ContactLost(str(error))]
        self._is_unreadable = True
        events: list[RunEvent] = [RunMessage(self.run, f"Its output cannot be read: {error}")]
        for part in self._parts.values():
            events += part.give_up()
        return events

    def _may_come_back(self, error: BatchmlError) -> bool:
        """True if the log may be read later: while the run goes on, and for some time after it."""
        assert self.run is not None
        try:
            self._gate.failed(error)
        except BatchmlError:
            return not self.run.status.is_terminal
        return True

    def _drop_done_parts(self) -> Iterator[RunEvent]:
        """Drop parts that are done, to save memory; report those that failed."""
        if self._schedule is None or self.run is None:
            return
        for number in [number for number, part in self._parts.items() if part.is_done]:
            run = self._parts.pop(number).run
            if run is not None and run.status is JobStatus.FAILED:
                kind = "Child" if self._schedule.is_array else "Node"
                outcome = describe_outcome(
                    run if self._schedule.is_array else as_node(run, self.run)
                )
                yield RunMessage(self.run, f"{kind} {number} FAILED: {outcome}")


def as_node(node: Run, whole: Run) -> Run:
    """The node; as stopped, with the reason of the run, if it ended because the run was stopped."""
    was_ended = node.exit_code in (None, STOPPED, KILLED)
    if not was_ended or classify(whole).outcome is not OutcomeClass.CANCELLED:
        return node
    return replace(node, is_terminated=True, status_reason=whole.status_reason)


def _is_denied(error: BatchmlError) -> bool:
    """True if signing in again would not help."""
    return isinstance(error, AccessError) and "Denied" in error.code
