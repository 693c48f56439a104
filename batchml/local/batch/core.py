"""The one loop that changes the state: events in, a commit, then effects and answers.

All events that wait when a round starts share one commit, so that many clients cost one fsync. An
answer is given, and a program is started, only after the commit that holds it.

A program is started at most once. Its runner gets the attempt before the commit and prepares it.
The commit records that the program may have begun; then the server sends the runner the message to
start it. So one commit covers the launch and the start of all attempts of a round, and a later
server reads in the journal alone whether a program may have begun.
"""

import asyncio
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
from batchml.local.batch import engine
from batchml.local.batch import persistent_heap as heap
from batchml.local.batch.events import (
    Answer,
    Begin,
    Effect,
    Event,
    Launch,
    Lose,
    Prepared,
    Refusal,
    Requested,
    SaveJob,
    Stop,
    Ticked,
)
from batchml.local.batch.state import Attempt, Job, State
from batchml.local.server.protocol import Refused, client_error
from batchml.local.store.journal import RememberedCall, Store
from batchml.model.names import bare_name

log = logging.getLogger("batchml.local")

REMEMBER_CALLS = 24 * 3600 * 1000  # ms
_FORGET_EVERY = 3600 * 1000  # ms
_RETRY_AFTER = 1.0  # seconds between tries when the disk is full
_JUMP = 1.0  # seconds; what the clock is off by less is no jump


class Executor(Protocol):
    def prepare(self, job: Job, attempt: Attempt) -> bool: ...
    def begin(self, task_id: str) -> None: ...
    def withdraw(self, task_id: str) -> None: ...
    def adopt(self, job: Job, attempt: Attempt) -> None: ...
    def stop(self, task_id: str) -> None: ...
    def lose(self, task_id: str, why: str, *, warned: bool) -> None: ...
    def look(self, task_id: str) -> None: ...


class _Item(Struct):
    event: Event
    answer: asyncio.Future[dict[str, Any]] | None = None
    call: tuple[str, str] | None = None  # key and digest, for calls that are remembered


class Core:
    def __init__(
        self,
        state: State,
        store: Store,
        clock: Clock,
        guard: Callable[[], None] = lambda: None,
        read_only: str = "",
    ) -> None:
        """`guard` is called before each commit, and raises when it must not be made. `read_only`
        says why nothing may be changed, if so.
        """
        self.state = state  # as committed
        self.executor: Executor
        self._guard = guard
        self._store = store
        self._clock = clock
        self._items: list[_Item] = []
        self._woken: asyncio.Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "journal")
        self._in_flight: dict[str, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        self._no_tick_before = 0.0  # on the monotonic clock
        self._set_by = clock.now() - clock.monotonic()  # what the clock shows, but for its going
        self._forget_at = 0  # ms; when old answers are thrown away next
        self._closing = False
        self._read_only = read_only
        self._broken: Refused | None = None

    # --- in ---------------------------------------------------------------------------------

    def report(self, event: Event) -> None:
        """Something happened; no one waits for an answer."""
        self._put(_Item(event))

    async def request(self, event: Requested, invocation: str = "", body: bytes = b"") -> Any:
        """Apply a call and return its answer, once both are on disk.

        With `invocation` (the id that an SDK keeps over the re-sends of one call) the same call
        gets the same answer, however often it arrives; nothing is done twice. Raises Refused.
        """
        if self._broken is not None:
            raise self._broken
        if self._read_only:
            raise client_error(self._read_only)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if not invocation:
            self._put(_Item(event, answer))
            return await answer
        digest = hashlib.sha256(body).hexdigest()
        known_digest, known = self._known_call(invocation)
        if known is not None:
            if known_digest != digest:
                raise client_error("This invocation id was used for another request.")
            return await asyncio.shield(known)
        self._in_flight[invocation] = (digest, answer)
        self._put(_Item(event, answer, (invocation, digest)))
        try:
            return await asyncio.shield(answer)
        finally:
            # A client that went away must not make room for a second run of its call.
            answer.add_done_callback(lambda _: self._in_flight.pop(invocation, None))

    def knows(self, invocation: str) -> bool:
        """Whether this call is carried out, or was: it must not be refused when it comes again."""
        return invocation in self._in_flight or self._store.remembered(invocation) is not None

    def _known_call(self, key: str) -> tuple[str, asyncio.Future[dict[str, Any]] | None]:
        if key in self._in_flight:
            return self._in_flight[key]
        remembered = self._store.remembered(key)
        if remembered is None:
            return "", None
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        done.set_result(msgspec.json.decode(remembered.answer))
        return remembered.digest, done

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `close`. What it raises ends the server; the next start has what was committed."""
        try:
            while not self._closing:
                items = await self._next_items()
                try:
                    await self._round(items)
                except BaseException as error:
                    self._fail(items, error)
                    raise
        finally:
            # A commit that was cut off goes on in its thread, and whoever waits for the end of this
            # closes the journal next: under a running statement SQLite's module ends the process.
            self._writer.shutdown()

    def close(self) -> None:
        """End `run` between two rounds: no commit is cut off from its effects and answers."""
        self._closing = True
        self.report(Ticked(self._now()))

    def _fail(self, items: list[_Item], error: BaseException) -> None:
        """Nobody may wait for an answer that will not come."""
        text = f"The embedded AWS Batch has failed and stops: {error}"
        self._broken = Refused("ServerException", text, 500)
        for item in (*items, *self._items):
            if item.answer is not None and not item.answer.done():
                item.answer.set_exception(self._broken)

    def _put(self, item: _Item) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _next_items(self) -> list[_Item]:
        """Everything that waits, or a tick when the next timeout falls due.

        No asyncio.Queue and wait_for: they make a task a round, which ten thousand jobs feel.
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
        return items or [_Item(Ticked(self._now()))]

    def _until_deadline(self) -> float | None:
        deadline = engine.next_deadline(self.state)
        if deadline is None:
            return None
        held_back = self._no_tick_before - self._clock.monotonic()
        return max(0.0, held_back, (deadline - self._now()) / 1000)

    async def _round(self, items: list[_Item]) -> None:
        self._follow_clock()
        state = self.state
        effects: list[Effect] = []
        answers: list[tuple[_Item, Answer | Refusal]] = []
        for item in items:
            event = item.event
            if isinstance(event, Requested):
                try:
                    event = _with_finished(event, state, effects, self._store)
                except LocalServerError as error:  # it asks about what cannot be read
                    answers.append((item, Refusal("ServerException", str(error), 500)))
                    continue
            state, caused = _step(state, event)
            for effect in caused:
                if isinstance(effect, (Answer, Refusal)):
                    answers.append((item, effect))
                else:
                    effects.append(effect)
        if effects:
            self._guard()
            launched = [effect for effect in effects if isinstance(effect, Launch)]
            state = self._prepare(state, launched, effects)
            try:
                await self._commit(effects, answers)
            except (DiskFull, JournalBusy) as error:
                for launch in launched:
                    self.executor.withdraw(launch.attempt.task_id)
                self._postpone(items, error)
                return
        self.state = state
        for effect in effects:
            if isinstance(effect, Begin):
                self.executor.begin(effect.task_id)
            elif isinstance(effect, Stop):
                self.executor.stop(effect.task_id)
            elif isinstance(effect, Lose):
                job_id = state.by_task.get(effect.task_id)
                log.info("chaos: %s for %s, attempt %s", effect.why, job_id, effect.task_id)
                self.executor.lose(effect.task_id, effect.why, warned=effect.warned)
        for item, outcome in answers:
            _give(item, outcome)
        await self._forget_old_calls()

    def _prepare(self, state: State, launched: list[Launch], effects: list[Effect]) -> State:
        """Hand attempts to their runners. Those that are ready at once begin with this commit."""
        ready = [
            launch.attempt.task_id
            for launch in launched
            if self.executor.prepare(launch.job, launch.attempt)
        ]
        if ready:
            state, caused = engine.step(state, Prepared(tuple(ready), self._now()))
            effects += caused
        return state

    def _follow_clock(self) -> None:
        """When the clock was set, what is due moves along: a minute that has begun stays one."""
        set_by = self._clock.now() - self._clock.monotonic()
        jump, self._set_by = set_by - self._set_by, set_by
        if abs(jump) > _JUMP:
            log.warning("the clock was set by %+.0f s, or the machine slept", jump)
            self.state = _moved(self.state, int(jump * 1000))
            self._forget_at = self._now() + REMEMBER_CALLS

    async def _commit(
        self, effects: list[Effect], answers: Sequence[tuple[_Item, Answer | Refusal]]
    ) -> None:
        calls = [
            RememberedCall(*item.call, msgspec.json.encode(outcome.body), self._now())
            for item, outcome in answers
            if item.call is not None and isinstance(outcome, Answer)
        ]
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._store.commit, effects, calls)

    async def _forget_old_calls(self) -> None:
        if self._now() < self._forget_at:
            return
        self._forget_at = self._now() + _FORGET_EVERY
        before = self._now() - REMEMBER_CALLS
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._store.forget_calls, before)
        except (DiskFull, JournalBusy) as error:
            log.error("%s", error)

    def _postpone(self, items: list[_Item], error: Exception) -> None:
        """Nothing can be written now: callers are told so; what happened is written later."""
        log.error("%s", error)
        loop = asyncio.get_running_loop()
        for item in items:
            if isinstance(item.event, Ticked):  # still due: it comes again by itself
                self._no_tick_before = self._clock.monotonic() + _RETRY_AFTER
            elif item.answer is None:
                loop.call_later(_RETRY_AFTER, self._put, item)
            elif not item.answer.done():
                item.answer.set_exception(Refused("ServerException", str(error), 500))

    def _now(self) -> int:
        return int(self._clock.now() * 1000)


def _step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """One step. A request that the rules fail on changes nothing, and must not end the server."""
    try:
        return engine.step(state, event)
    except Exception:
        if not isinstance(event, Requested):
            raise
        log.exception("request %s failed", event.request_id)
        text = f"Internal error in the embedded AWS Batch; its server.log has {event.request_id}."
        return state, [Refusal("ServerException", text, 500)]


def _moved(state: State, by: int) -> State:
    """The state with all that time alone will bring `by` ms later."""
    return msgspec.structs.replace(
        state,
        deadlines=_later(state.deadlines, by),
        faults=_later(state.faults, by),
        no_capacity_until=state.no_capacity_until and state.no_capacity_until + by,
        blocked=Map(
            (name, msgspec.structs.replace(blocked, since=blocked.since + by))
            for name, blocked in state.blocked.items()
        ),
    )


def _later(times: heap.Heap, by: int) -> heap.Heap:
    return heap.made(((at + by, name), item) for (at, name), item in heap.items(times))


def _give(item: _Item, outcome: Answer | Refusal) -> None:
    if item.answer is None or item.answer.done():
        return
    if isinstance(outcome, Answer):
        item.answer.set_result(outcome.body)
    else:
        item.answer.set_exception(Refused(outcome.code, outcome.message, outcome.status))


def _with_finished(
    event: Requested, state: State, effects: Sequence[Effect], store: Store
) -> Requested:
    """Look up jobs that a call names and that have left the state: in this round's effects, then
    in the store.
    """
    if "resourceArn" in event.params:
        name = bare_name(event.params["resourceArn"])
        found = _finished([name], state, effects, store)
        return msgspec.structs.replace(event, found=found)
    if "dependsOn" not in event.params:
        return event
    entries = event.params["dependsOn"]
    asked = [bare_name(entry.get("jobId", "")) for entry in entries]
    ended = {
        job_id: job.status.value for job_id, job in _finished(asked, state, effects, store).items()
    }
    pairs = {
        job_id
        for entry, job_id in zip(entries, asked, strict=True)
        if entry.get("type") == "N_TO_N" and job_id
    }
    for array in pairs:
        ended |= store.ended_children(array)
    for effect in effects:
        if isinstance(effect, SaveJob) and not effect.live and effect.job.parent in pairs:
            ended[effect.job.id] = effect.job.status.value
    return msgspec.structs.replace(event, ended=ended)


def _finished(
    asked: Sequence[str], state: State, effects: Sequence[Effect], store: Store
) -> dict[str, Job]:
    missing = [job_id for job_id in asked if job_id not in state.jobs]
    found = {i: job for i, job in store.jobs(missing).items() if job.status.is_terminal}
    for effect in effects:
        if isinstance(effect, SaveJob) and effect.job.id in missing and not effect.live:
            found[effect.job.id] = effect.job
    return found
