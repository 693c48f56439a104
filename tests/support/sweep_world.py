"""A scripted world for sweeps: a store, an AWS Batch and trials, on a clock that the test owns.

The trials are no processes, but what they read and write is the real thing: manifests, claims,
cut-offs, messages and marks by the modules of `batchml/runtime`.
"""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from batchml.model.run import JobStatus
from batchml.model.sweep import Dimension, EarlyStop, Goal, Params, SweepLimits, SweepSpec
from batchml.runtime.protocol import sweep as judge
from batchml.runtime.protocol import sweep as manifest
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol import sweep as rungs
from batchml.runtime.protocol.exit_codes import DUPLICATE
from batchml.runtime.protocol.sweep import (
    CONTRACT,
    CUTOFFS,
    RUNGS,
    TrialContract,
    claim_key,
    rung_prefix,
)
from batchml.runtime.storage.store import Store
from batchml.runtime.sweep.assignment import read_stop_request
from batchml.sweeps.control.controller import Controller
from batchml.sweeps.control.events import TrialBatch
from batchml.sweeps.control.lease import LOCAL_INTERVALS, ControllerIntervals, LeaseOwner
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.control.plan import choose_mode
from batchml.sweeps.control.pruning import rung_ends
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.watch import MAX_OBSERVED, FailedChild, JobObservation
from batchml.sweeps.summary import SweepSnapshot
from tests.support.fakes import FakeClock
from tests.support.sweep_stores import CountingStore, KillingStore, MemoryStore

KEY = "2sweepsweepsweeps"
DAY = 86_400.0


class Fault(Struct, frozen=True):
    """What befalls a trial. `at`: the step; 0 is before it begins."""

    kind: str  # "fails", "nan", "vanishes" (a container that never says anything again), "mute"
    at: int = 1
    why: str = "exit code 1"
    tail: tuple[str, ...] = ("Traceback", "ValueError: no such optimizer")


class Job:
    """A job of AWS Batch, and its children."""

    def __init__(self, job_id: str, wave: TrialBatch, size: int, width: int, after: str) -> None:
        self.id, self.wave, self.size, self.width, self.after = job_id, wave, size, width, after
        self.children = [JobStatus.RUNNABLE] * size
        self.codes: list[int | None] = [None] * size
        self.reasons = [""] * size
        self.started = 0  # children
        self.ended_at: float | None = None
        self.is_held = False  # each of its children needs one of the consumable resource

    @property
    def status(self) -> JobStatus:
        if not all(each.is_terminal for each in self.children):
            return JobStatus.RUNNING if self.started else JobStatus.RUNNABLE
        failed = JobStatus.FAILED in self.children
        return JobStatus.FAILED if failed else JobStatus.SUCCEEDED


class World:
    """The store, the jobs and the time. `curve(params, step, seed)` is what a trial prints."""

    def __init__(
        self,
        spec: SweepSpec,
        store: Store | None = None,
        *,
        curve: Callable[[Params, int, int], float] | None = None,
        step_seconds: float = 1.0,
        faults: Mapping[int, Fault] | None = None,
        hourly: float | None = None,
        timeout: float | None = None,
        slots: int = 10_000,
        intervals: ControllerIntervals = LOCAL_INTERVALS,
        grace: float = 5.0,
        looks_every: float = 1.0,
    ) -> None:
        self.spec, self.curve = spec, curve or quadratic
        self.store: Store = store if store is not None else MemoryStore()
        self.intervals, self.slots, self.step_seconds = intervals, slots, step_seconds
        self.looks_every = looks_every
        self.faults = dict(faults or {})
        self.counters = ("", "")  # what lines of the program count: `make_message`
        self.clock = WorldClock(self)
        self.jobs = FakeJobs(self, hourly, timeout)
        self.runs: list[tuple[int, int]] = []  # (trial, wave) of each child that trained
        self.trained: list[tuple[int, int]] = []  # (trial, step), each step once it was done
        self.running = self.running_held = self.most_running = 0
        self.told: list[str] = []
        self.asked: Counter[str] = Counter()  # calls of the controllers to the store
        self.lose: Callable[[dict[str, Any]], bool] = lambda message: False
        self.twice: Callable[[dict[str, Any]], bool] = lambda message: False
        self.delay: Callable[[dict[str, Any]], float] = lambda message: 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        stop = spec.early_stop
        found = choose_mode(spec, hourly=hourly, timeout=timeout)
        self.contract = TrialContract(
            KEY, tuple((goal.metric, goal.direction) for goal in spec.goals), ("train",), {}, {},
            step=stop.step, method=stop.method, rungs=rung_ends(spec)[:-1] if stop.max else (),
            max=stop.max, eta=stop.eta, resume=stop.resume, shape=found.mode.value, grace=grace,
        )  # fmt: skip
        self.store.put(CONTRACT, self.contract.to_json())

    # -- for tests --------------------------------------------------------------------------------

    def controller(self, store: Any = None, who: str = "first") -> Controller:
        jobs: Any = self.jobs
        if isinstance(store, KillingStore):
            jobs = MortalJobs(self.jobs, store)
        return Controller(
            self.spec, CountingStore(store or self.store, self.asked), jobs, self.clock,
            self.intervals,
            LeaseOwner("ann", f"machine-of-{who}", 7), self.told.append,
        )  # fmt: skip

    def run(self, store: Any = None, who: str = "first", most: float = DAY) -> SweepSnapshot:
        """A controller until the sweep is over; the last picture. Fails when it takes too long."""
        end = self.clock.now() + most
        for snapshot in self.controller(store, who).snapshots():
            assert self.clock.now() < end, f"not over: {snapshot}"
        return snapshot

    def snapshots(self, who: str = "first") -> Generator[SweepSnapshot, None, None]:
        return self.controller(who=who).snapshots()

    def requests(self) -> int:
        """Requests that the controller made to the store, a list or a value being one."""
        return sum(self.asked.values())

    def state(self) -> SweepState:
        return SweepLedger(self.store).load()

    # -- time -------------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, act))

    def pass_time(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            when, _, act = heapq.heappop(self._queue)
            self.clock.time = max(self.clock.time, when)
            act()
        self.clock.time = until

    # -- containers -------------------------------------------------------------------------------

    def start_children(self) -> None:
        """Start what waits, as far as there is room."""
        for job in self.jobs.made.values():
            if not self._is_ready(job):
                continue
            held = self.jobs.quantity if job.is_held else None
            for index in range(job.started, job.size):
                if self.running >= self.slots:
                    return
                if held is not None and self.running_held >= held:
                    break
                if job.children[index] is JobStatus.RUNNABLE:
                    self._start(job, index)
                job.started = index + 1

    def _is_ready(self, job: Job) -> bool:
        if job.started >= job.size:
            return False
        parent = self.jobs.by_id.get(job.after)
        if parent is None or parent.status is JobStatus.SUCCEEDED:
            return True
        if parent.status is JobStatus.FAILED:
            for index in range(job.size):
                self._ended(job, index, 1, "Dependent Job failed", ran=False)
        return False

    def _start(self, job: Job, index: int) -> None:
        job.children[index] = JobStatus.RUNNING
        self.running += 1
        self.running_held += job.is_held
        self.most_running = max(self.most_running, self.running)
        self._go_on(job, index, self._child(job, index))

    def _go_on(self, job: Job, index: int, life: Generator[float, None, int]) -> None:
        if job.children[index].is_terminal:
            return  # it was terminated meanwhile
        try:
            seconds = next(life)
        except StopIteration as end:
            self._ended(
                job, index, end.value, "" if end.value == 0 else "Essential container exited"
            )
            return
        self.at(self.clock.now() + seconds, lambda: self._go_on(job, index, life))

    def _ended(self, job: Job, index: int, code: int, reason: str, ran: bool = True) -> None:
        if job.children[index].is_terminal:
            return
        job.children[index] = JobStatus.FAILED if code else JobStatus.SUCCEEDED
        job.codes[index], job.reasons[index] = code, reason
        self.running -= ran
        self.running_held -= ran and job.is_held
        if job.status.is_terminal:
            job.ended_at = self.clock.now()
        self.at(self.clock.now(), self.start_children)

    def _child(self, job: Job, index: int) -> Generator[float, None, int]:
        """What a container does: the exit code at its end. Yields the seconds that it works."""
        yield 0.1
        entry = self._entry(job, index)
        if entry is None:
            return 0
        name = f"{job.id}:{index}" if job.size > 1 else job.id
        if not self.store.create(claim_key(job.wave.number, entry.trial), name.encode()):
            return DUPLICATE
        trial = _Trial(self, job, entry, messages.MessageSender(
            job.wave.number, entry.trial, 1, index, name, self.clock.now()))  # fmt: skip
        code: int = yield from trial.life()
        return code

    def _entry(self, job: Job, index: int) -> manifest.TrialEntry | None:
        wave, rung = job.wave.number, job.wave.rung
        if not rung:
            return manifest.read(self.store, KEY, wave, index, job.width)
        best = rungs.ranked(self.store.keys(rung_prefix(rung - 1)))
        if index >= len(best):
            return None
        entry = manifest.read(self.store, KEY, 1, best[index], job.width)
        return entry._replace(target=self.contract.target_of(rung), resumes=True)


class _Trial:
    """One run of a trial, as `batchml.runtime` does it."""

    def __init__(self, world: World, job: Job, entry: manifest.TrialEntry, sender: Any) -> None:
        self.world, self.job, self.entry, self.sender = world, job, entry, sender
        self.contract, self.seq = world.contract, 0
        self.points: list[list[Any]] = []
        self.decisions: list[judge.PrunerDecision] = []
        self.fault = world.faults.get(entry.trial, Fault("", -1))

    def life(self) -> Generator[float, None, int]:
        world, entry, contract = self.world, self.entry, self.contract
        if self.fault.kind == "vanishes" and self.fault.at == 0:
            return 1
        if (why := self.stopped()) is not None:
            return self.end(messages.KILLED, 143, why)
        world.runs.append((entry.trial, self.sender.wave))
        self.tell(messages.START)
        limit = entry.target or contract.max or 3
        begun = max((each for each in contract.rungs if each < limit), default=0)
        before, best, value = begun if entry.resumes else 0, None, 0.0
        for step in range(before + 1, limit + 1):
            yield world.step_seconds
            if step == self.fault.at and self.fault.kind in ("fails", "vanishes"):
                if self.fault.kind == "vanishes":
                    return 137
                return self.end(messages.FAILED, 1, self.fault.why, self.fault.tail)
            world.trained.append((entry.trial, step))
            value = world.curve(entry.params, step, entry.seed)
            if (step == self.fault.at and self.fault.kind == "nan") or not math.isfinite(value):
                return self.end(messages.DIVERGED, 0, "nan")
            best = judge.best_of(contract, best, value)
            if self.fault.kind != "mute":
                self.points.append([step, [value], world.clock.now()])
            rung = rungs.rung_passed(contract.rungs, before, step)
            decision = self.judged(step, value, best, rung)
            before = step
            if decision is not None and not decision.goes_on:
                return self.end(messages.PRUNED, 0)
            if rung is not None:
                self.tell(messages.REPORT)
            if (why := self.stopped()) is not None:
                return self.end(messages.KILLED, 143, why)
        if self.fault.kind == "mute":
            return self.end(messages.FAILED, 1, "loss never printed; last lines were: done")
        self.mark(limit, value)
        is_part = 0 < entry.target < contract.max
        return self.end(messages.PAUSED if is_part else messages.DONE, 0)

    def judged(self, step: int, value: float, best: float, rung: int | None) -> Any:
        if self.entry.full:
            return None
        cutoffs = judge.Cutoffs.from_json(self.world.store.get(CUTOFFS))
        decision = judge.decide(self.contract, cutoffs, step, value, best, rung)
        if decision is not None:
            self.decisions.append(decision)
        return decision

    def mark(self, step: int, value: float) -> None:
        if self.job.wave.rung is not None and step in self.contract.rungs:
            rung, loss = self.contract.rungs.index(step), self.contract.loss(value)
            self.world.store.put(rungs.mark_key(rung, loss, self.entry.trial), b"")

    def stopped(self) -> str | None:
        word = read_stop_request(self.world.store, self.entry.trial)
        return word.reason_at(self.world.clock.now()) or None

    def end(self, state: str, code: int, why: str = "", tail: Sequence[str] = ()) -> int:
        self.tell(messages.END, (state, code, why, tail))
        return 0 if self.contract.shape == RUNGS else code

    def tell(self, kind: str, end: tuple[Any, ...] | None = None) -> None:
        world = self.world
        message = messages.make_message(
            self.sender, self.seq, kind, world.clock.now(), self.points, self.decisions,
            counters=world.counters,
        )  # fmt: skip
        if end is not None:
            message = messages.add_end(message, *end)
        sender = self.sender
        key = messages.message_key(sender.wave, sender.trial, sender.attempt, self.seq)
        self.seq += 1
        self.points, self.decisions = [], []
        if world.lose(message):
            return
        data = messages.encode_message(message)
        late = world.delay(message)
        if late:
            world.at(world.clock.now() + late, lambda: world.store.put(key, data))
        else:
            world.store.put(key, data)
        if world.twice(message):
            world.at(world.clock.now() + 2.0, lambda: world.store.put(key, data))


class WorldClock(FakeClock):
    """While anyone sleeps the world goes on."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.others = 0.0  # seconds of processor time that all but the controller took

    def sleep(self, seconds: float) -> None:
        before = time.process_time()
        self._world.pass_time(self.time + seconds)
        self.others += time.process_time() - before


class FakeJobs:
    """The protocol of `sweeps/control/watch.py` over the scripted world; counts calls."""

    def __init__(self, world: World, hourly: float | None, timeout: float | None) -> None:
        self._world = world
        self.hourly, self.timeout = hourly, timeout
        self.made: dict[str, Job] = {}  # by the wave's key: a name is sent once
        self.by_id: dict[str, Job] = {}
        self.quantity: int | None = None
        self.calls: Counter[str] = Counter()
        self.released = False
        self.error: Exception | None = None  # raised by the next submission

    def submit(self, wave: TrialBatch, size: int, width: int, after: str = "") -> str:
        self.calls["submit"] += 1
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        job = self.made.get(wave.key)
        if job is None:
            job = Job(f"job-{len(self.made) + 1}", wave, size, width, after)
            job.is_held = self.quantity is not None
            self.made[wave.key] = self.by_id[job.id] = job
            self._world.at(self._world.clock.now(), self._world.start_children)
        return job.id

    def observe(self, job_ids: Sequence[str]) -> dict[str, JobObservation]:
        assert 0 < len(job_ids) <= MAX_OBSERVED
        self.calls["look"] += 1
        return {job_id: _look(self.by_id[job_id]) for job_id in job_ids if job_id in self.by_id}

    def failed_children(self, job_id: str) -> list[FailedChild]:
        self.calls["failed_children"] += 1
        job = self.by_id[job_id]
        return [
            FailedChild(index, f"{job_id}:{index}", job.codes[index], job.reasons[index])
            for index, status in enumerate(job.children)
            if status is JobStatus.FAILED
        ]

    def terminate(self, job_ids: Sequence[str], why: str) -> None:
        self.calls["terminate"] += 1
        for job_id in job_ids:
            job = self.by_id[job_id]
            for index, status in enumerate(job.children):
                if not status.is_terminal:
                    self._world._ended(job, index, 143, why, ran=status is JobStatus.RUNNING)

    def limit_running(self, quantity: int) -> None:
        self.calls["hold"] += 1
        self.quantity = quantity
        self._world.at(self._world.clock.now(), self._world.start_children)

    def remove_limit(self, *, is_patient: bool = False) -> bool:
        assert not any(JobStatus.RUNNING in job.children for job in self.made.values())
        self.released = True
        return True


class MortalJobs:
    """Jobs of a controller that is killed at a write, a submission being one."""

    def __init__(self, jobs: FakeJobs, store: KillingStore) -> None:
        self._jobs, self._store = jobs, store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._jobs, name)
        if name not in ("submit", "terminate", "hold", "release"):
            return found
        return lambda *args, **more: self._store.mortal(lambda: found(*args, **more))


def _look(job: Job) -> JobObservation:
    if job.size == 1:
        return JobObservation(
            job.status, exit_code=job.codes[0], reason=job.reasons[0], stopped_at=job.ended_at
        )
    return JobObservation(job.status, dict(Counter(job.children)), stopped_at=job.ended_at)


def quadratic(params: Params, step: int, seed: int) -> float:
    """A loss that falls with each step, and is least at x = 0.3."""
    return (float(params["x"]) - 0.3) ** 2 + 1 / (1 + step)


def spec_of(
    method: Any = "random",
    stopping: Any = "none",
    *,
    trials: int | None = 6,
    parallel: int = 3,
    steps: int = 9,
    resume: bool = False,
    space: dict[str, Dimension] | None = None,
    **more: Any,
) -> SweepSpec:
    limits = {key: more.pop(key) for key in SweepLimits.__struct_fields__ if key in more}
    space = space or {"x": Dimension("float", 0.0, 1.0)}
    return SweepSpec(
        "sweep", "job", (Goal("loss", "min"),), space, method,
        EarlyStop(stopping, max=steps if stopping != "none" else 0, resume=resume),
        SweepLimits(trials, parallel, **limits), seed=1, **more,
    )  # fmt: skip
