"""The loop that changes the state: apply events, commit, then carry out effects and answer calls.

All events that wait when a round starts share one commit, so that many clients cost one fsync. An
answer is sent, and a program is started, only after the commit that contains it.

A program is started at most once. Its runner receives the attempt before the commit and prepares
it. The commit records that the program may have begun; then the server sends the runner the message
to start it. One commit thus covers the launch and the start of all attempts of a round, and the
journal alone tells a later server whether a program may have begun.
"""

import asyncio
import gc
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from immutables import Map
from msgspec import Struct

from batchml.clock import Clock
from batchml.errors import DiskFull, JournalBusy, LocalServerError
from batchml.local.batch import engine, persistent_heap
from batchml.local.batch.events import (
    AnswerCall,
    AttemptPrepared,
    BeginAttempt,
    CallReceived,
    ClockTicked,
    Effect,
    Event,
    LoseHost,
    PrepareAttempt,
    RefuseCall,
    SaveJob,
    StopAttempt,
)
from batchml.local.batch.state import BatchState, Job, JobAttempt
from batchml.local.server.protocol import ApiError, client_error
from batchml.local.store.journal import Journal, RememberedCall
from batchml.model.names import bare_name

log = logging.getLogger("batchml.local")

REMEMBER_CALLS = 24 * 3600 * 1000  # ms
_FORGET_EVERY = 3600 * 1000  # ms
_RETRY_AFTER = 1.0  # seconds between tries when the disk is full
_FREEZE_AFTER = 1000  # new jobs
_JUMP = 1.0  # seconds; a smaller deviation of the clock is not a jump


class Executor(Protocol):
    def prepare(self, job: Job, attempt: JobAttempt) -> bool: ...
    def begin(self, task_id: str) -> None: ...
    def withdraw(self, task_id: str) -> None: ...
    def adopt(self, job: Job, attempt: JobAttempt) -> None: ...
    def stop(self, task_id: str) -> None: ...
    def lose(self, task_id: str, fault: str, *, warned: bool) -> None: ...
    def check_progress(self, task_id: str) -> None: ...


class _QueuedEvent(Struct):
    """An event that waits for the next round, and the future of the caller who waits for it."""

    event: Event
    answer: asyncio.Future[dict[str, Any]] | None = None
    call: tuple[str, str] | None = None  # key and digest, for calls whose answers are remembered


class Core:
    def __init__(
        self,
        state: BatchState,
        journal: Journal,
        clock: Clock,
        guard: Callable[[], None] = lambda: None,
        read_only: str = "",
    ) -> None:
        """`guard` is called before each commit, and raises if the journal may not be written now.
        `read_only` is the reason if nothing may be changed, else empty.
        """
        self.state = state  # as of the last commit
        self.executor: Executor
        self._guard = guard
        self._journal = journal
        self._clock = clock
        self._items: list[_QueuedEvent] = []
        self._woken: asyncio.Future[None] | None = None  # `_next_items` waits for it
        self._writer = ThreadPoolExecutor(1, "journal")
        self._in_flight: dict[str, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._no_tick_before = 0.0  # on the monotonic clock
        self._clock_offset = clock.now() - clock.monotonic()  # wall clock minus monotonic clock
        self._forget_at = 0  # ms; when old answers are deleted next
        self._frozen = state.sequence  # the newest job that the garbage collector leaves alone
        self._closing = False
        self._read_only = read_only
        self._broken: ApiError | None = None

    # --- Events and calls -------------------------------------------------------------------

    def report(self, event: Event) -> None:
        """Queue an event for which nobody waits."""
        self._put(_QueuedEvent(event))

    async def request(self, event: CallReceived, invocation: str = "", body: bytes = b"") -> Any:
        """Apply a call and return its answer, once both are on disk.

        `invocation` is the id that an SDK keeps when it sends one call again. Such a call is
        applied once and gets the same answer each time. Raises ApiError.
        """
        if self._broken is not None:
            raise self._broken
        if self._read_only:
            raise client_error(self._read_only)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if not invocation:
            self._put(_QueuedEvent(event, answer))
            return await answer
        digest = hashlib.sha256(body).hexdigest()
        earlier_digest, earlier_answer = self._find_earlier_call(invocation)
        if earlier_answer is not None:
            if earlier_digest != digest:
                raise client_error("This invocation id was used for another request.")
            return await asyncio.shield(earlier_answer)
        self._in_flight[invocation] = (digest, answer)
        self._put(_QueuedEvent(event, answer, (invocation, digest)))
        try:
            return await asyncio.shield(answer)
        finally:
            # Also when the client has disconnected: else its call could be applied a second time.
            answer.add_done_callback(lambda _: self._in_flight.pop(invocation, None))

    def has_received(self, invocation: str) -> bool:
        """Whether this call is in progress or was answered: a repetition of it must not be
        refused.
        """
        return (
            invocation in self._in_flight or self._journal.remembered_call(invocation) is not None
        )

    def _find_earlier_call(self, key: str) -> tuple[str, asyncio.Future[dict[str, Any]] | None]:
        """The digest and the answer of the same call, if it was received before."""
        if key in self._in_flight:
            return self._in_flight[key]
        remembered = self._journal.remembered_call(key)
        if remembered is None:
            return "", None
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        done.set_result(msgspec.json.decode(remembered.answer))
        return remembered.digest, done

    # --- The loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Process events until `close`. An exception ends the server; the next start resumes from
        the journal.
        """
        try:
            while not self._closing:
                items = await self._next_items()
                try:
                    await self._round(items)
                except BaseException as error:
                    self._fail(items, error)
                    raise
        finally:
            # A cancelled commit continues in its thread, and the caller closes the journal next.
            # Closing it during a statement crashes the process in SQLite's module.
            self._writer.shutdown()

    def close(self) -> None:
        """End `run` between two rounds, so that each commit is followed by its effects and
        answers.
        """
        self._closing = True
        self.report(ClockTicked(self._now()))

    def _fail(self, items: list[_QueuedEvent], error: BaseException) -> None:
        """Fail all calls that wait: their answers will not come."""
        text = f"The embedded AWS Batch has failed and stops: {error}"
        self._broken = ApiError("ServerException", text, 500)
        for item in (*items, *self._items):
            if item.answer is not None and not item.answer.done():
                item.answer.set_exception(self._broken)

    def _put(self, item: _QueuedEvent) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _next_items(self) -> list[_QueuedEvent]:
        """All waiting events, or a tick when the next timeout is due.

        No asyncio.Queue and wait_for: they make a task for each round, which is slow with 10,000
        jobs.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._woken = loop.create_future()
            wait = self._until_deadline()
            timer = None if wait is None else loop.call_later(wait, self._wake)
            try:
                await self._woken
            finally:
                if timer is not None:
                    timer.cancel()
        items, self._items = self._items, []
        return items or [_QueuedEvent(ClockTicked(self._now()))]

    def _until_deadline(self) -> float | None:
        deadline = engine.next_deadline(self.state)
        if deadline is None:
            return None
        held_back = self._no_tick_before - self._clock.monotonic()
        return max(0.0, held_back, (deadline - self._now()) / 1000)

    async def _round(self, items: list[_QueuedEvent]) -> None:
        """Apply events and commit them together; then carry out the effects and answer the
        calls.
        """
        self._follow_clock()
        state = self.state
        effects: list[Effect] = []
        answers: list[tuple[_QueuedEvent, AnswerCall | RefuseCall]] = []
        for item in items:
            event = item.event
            if isinstance(event, CallReceived):
                try:
                    event = _add_finished(event, state, effects, self._journal)
                except LocalServerError as error:  # a job that the call names cannot be read
                    answers.append((item, RefuseCall("ServerException", str(error), 500)))
                    continue
            state, caused = _step(state, event)
            for effect in caused:
                if isinstance(effect, (AnswerCall, RefuseCall)):
                    answers.append((item, effect))
                else:
                    effects.append(effect)
        if effects:
            self._guard()
            launched = [effect for effect in effects if isinstance(effect, PrepareAttempt)]
            state = self._prepare(state, launched, effects)
            try:
                await self._commit(effects, answers)
            except (DiskFull, JournalBusy) as error:
                for launch in launched:
                    self.executor.withdraw(launch.attempt.task_id)
                self._postpone(items, error)
                return
        self.state = state
        self._spare_jobs()
        for effect in effects:
            if isinstance(effect, BeginAttempt):
                self.executor.begin(effect.task_id)
            elif isinstance(effect, StopAttempt):
                self.executor.stop(effect.task_id)
            elif isinstance(effect, LoseHost):
                job_id = state.by_task.get(effect.task_id)
                log.info("chaos: %s for %s, attempt %s", effect.fault, job_id, effect.task_id)
                self.executor.lose(effect.task_id, effect.fault, warned=effect.warned)
        for item, outcome in answers:
            _answer(item, outcome)
        await self._forget_old_calls()

    def _spare_jobs(self) -> None:
        """Take jobs from the garbage collector, which stops the server to search all of them: for
        seconds with 100,000. They have no cycles, and are freed without it.
        """
        if self.state.sequence >= self._frozen + _FREEZE_AFTER:
            self._frozen = self.state.sequence
            gc.collect()
            gc.freeze()

    def _prepare(
        self, state: BatchState, launched: list[PrepareAttempt], effects: list[Effect]
    ) -> BatchState:
        """Hand attempts to their runners. Attempts that are ready at once begin with this
        commit.
        """
        ready = [
            launch.attempt.task_id
            for launch in launched
            if self.executor.prepare(launch.job, launch.attempt)
        ]
        if ready:
            state, caused = engine.step(state, AttemptPrepared(tuple(ready), self._now()))
            effects += caused
        return state

    def _follow_clock(self) -> None:
        """Shift all deadlines when the clock was set, so that no timeout gets longer or shorter."""
        offset = self._clock.now() - self._clock.monotonic()
        jump, self._clock_offset = offset - self._clock_offset, offset
        if abs(jump) > _JUMP:
            log.warning("the clock was set by %+.0f s, or the machine slept", jump)
            self.state = _shift_times(self.state, int(jump * 1000))
            self._forget_at = self._now() + REMEMBER_CALLS  # else new answers might look old

    async def _commit(
        self, effects: list[Effect], answers: Sequence[tuple[_QueuedEvent, AnswerCall | RefuseCall]]
    ) -> None:
        calls = [
            RememberedCall(*item.call, msgspec.json.encode(outcome.body), self._now())
            for item, outcome in answers
            if item.call is not None and isinstance(outcome, AnswerCall)
        ]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._journal.commit, effects, calls)

    async def _forget_old_calls(self) -> None:
        if self._now() < self._forget_at:
            return
        self._forget_at = self._now() + _FORGET_EVERY
        before = self._now() - REMEMBER_CALLS
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._journal.forget_calls, before)
        except (DiskFull, JournalBusy) as error:
            log.error("%s", error)

    def _postpone(self, items: list[_QueuedEvent], error: Exception) -> None:
        """The disk cannot be written now: fail the calls, and apply other events again later."""
        log.error("%s", error)
        loop = asyncio.get_running_loop()
        for item in items:
            if isinstance(item.event, ClockTicked):  # the deadline is still due, and ticks again
                self._no_tick_before = self._clock.monotonic() + _RETRY_AFTER
            elif item.answer is None:
                loop.call_later(_RETRY_AFTER, self._put, item)
            elif not item.answer.done():
                item.answer.set_exception(ApiError("ServerException", str(error), 500))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def _step(state: BatchState, event: Event) -> tuple[BatchState, list[Effect]]:
    """Apply one event. A call that fails in the rules changes nothing and must not end the
    server.
    """
    try:
        return engine.step(state, event)
    except Exception:
        if not isinstance(event, CallReceived):
            raise
        log.exception("request %s failed", event.request_id)
        text = f"Internal error in the embedded AWS Batch; its server.log has {event.request_id}."
        return state, [RefuseCall("ServerException", text, 500)]


def _shift_times(state: BatchState, by: int) -> BatchState:
    """The state with every deadline `by` ms later."""
    return msgspec.structs.replace(
        state,
        deadlines=_shift_heap(state.deadlines, by),
        faults=_shift_heap(state.faults, by),
        no_capacity_until=state.no_capacity_until and state.no_capacity_until + by,
        blocked=Map(
            (name, msgspec.structs.replace(blocked, since=blocked.since + by))
            for name, blocked in state.blocked.items()
        ),
    )


def _shift_heap(times: persistent_heap.Heap, by: int) -> persistent_heap.Heap:
    return persistent_heap.from_items(
        ((at + by, name), item) for (at, name), item in persistent_heap.items(times)
    )


def _answer(item: _QueuedEvent, outcome: AnswerCall | RefuseCall) -> None:
    if item.answer is None or item.answer.done():
        return
    if isinstance(outcome, AnswerCall):
        item.answer.set_result(outcome.body)
    else:
        item.answer.set_exception(ApiError(outcome.code, outcome.message, outcome.status))


def _add_finished(
    event: CallReceived, state: BatchState, effects: Sequence[Effect], journal: Journal
) -> CallReceived:
    """Add the finished jobs that a call names: from this round's effects, else from the journal."""
    if "resourceArn" in event.params:
        name = bare_name(event.params["resourceArn"])
        found = _find_finished([name], state, effects, journal)
        return msgspec.structs.replace(event, found=found)
    if "dependsOn" not in event.params:
        return event
    entries = event.params["dependsOn"]
    job_ids = [bare_name(entry.get("jobId", "")) for entry in entries]
    ended = {
        job_id: job.status.value
        for job_id, job in _find_finished(job_ids, state, effects, journal).items()
    }
    pairs = {
        job_id
        for entry, job_id in zip(entries, job_ids, strict=True)
        if entry.get("type") == "N_TO_N" and job_id
    }
    for array in pairs:
        ended |= journal.ended_children(array)
    for effect in effects:
        if isinstance(effect, SaveJob) and not effect.live and effect.job.parent in pairs:
            ended[effect.job.id] = effect.job.status.value
    return msgspec.structs.replace(event, ended=ended)


def _find_finished(
    job_ids: Sequence[str], state: BatchState, effects: Sequence[Effect], journal: Journal
) -> dict[str, Job]:
    """The finished jobs among `job_ids`."""
    missing = [job_id for job_id in job_ids if job_id not in state.jobs]
    found = {i: job for i, job in journal.jobs(missing).items() if job.status.is_terminal}
    for effect in effects:
        if isinstance(effect, SaveJob) and effect.job.id in missing and not effect.live:
            found[effect.job.id] = effect.job
    return found
