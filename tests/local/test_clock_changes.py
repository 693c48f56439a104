"""A clock that is set while the server runs. docs/behaviours.md B30, B42, B60; fault B21."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import pytest

from batchml.local.batch import engine
from batchml.local.batch.core import Core
from batchml.local.batch.events import AttemptProgressed, AttemptStarted, CallReceived
from batchml.local.batch.reads import READS, ReadView
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.machine import MachineCapacity
from batchml.local.store.journal import Journal
from tests.support.models import ec2

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

HOUR, DAY = 3600.0, 86_400.0
JUMPS = [HOUR, -HOUR, DAY, -DAY]


class Time:
    """A clock that goes as fast as the loop has nothing to do, and that can be set."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.set_by = 1_700_000_000.0

    def now(self) -> float:
        return self.set_by + self.passed

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class Skipping(selectors.DefaultSelector):
    """Waits for files, and skips the time that a loop would wait for."""

    def __init__(self, time: Time) -> None:
        super().__init__()
        self._time = time

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self._time.sleep(timeout)
        return found


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, time: Time) -> None:
        super().__init__(Skipping(time))
        self._now = time

    def time(self) -> float:
        return self._now.monotonic()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """At once: time must not be skipped while a thread is at work."""
        done: asyncio.Future[T] = self.create_future()
        done.set_result(func(*args))
        return done


class Held:
    """An executor that starts nothing, and notes when it was told to stop."""

    def __init__(self, time: Time) -> None:
        self._time = time
        self.stops: list[float] = []

    def prepare(self, job: Job, attempt: JobAttempt) -> bool:
        return True

    def begin(self, task_id: str) -> None: ...

    def withdraw(self, task_id: str) -> None: ...

    def adopt(self, job: Job, attempt: JobAttempt) -> None: ...

    def stop(self, task_id: str) -> None:
        self.stops.append(self._time.monotonic())

    def lose(self, task_id: str, why: str, *, warned: bool) -> None: ...

    def check_progress(self, task_id: str) -> None: ...


class Bench:
    """A core at work on a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.time = Time()
        self.store = Journal(folder / "journal.db")
        state = engine.restore(self.store.load(MachineCapacity(4, 8192)))
        self.core = Core(state, self.store, self.time)
        self.core.executor = self.executor = Held(self.time)
        self._count = 0

    def run(self, scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = Loop(self.time)

        async def play() -> None:
            running = loop.create_task(self.core.run())
            await scene()
            self.core.close()
            await running

        try:
            loop.run_until_complete(play())
        finally:
            loop.close()
            self.store.close()

    async def call(self, operation: str, invocation: str = "", **params: Any) -> dict[str, Any]:
        self._count += 1
        event = CallReceived(operation, params, self._ms(), f"j{self._count}", "r")
        return dict(await self.core.request(event, invocation, b"body"))

    async def prepared(self) -> None:
        """Make an environment, a queue and a definition."""
        resources = ec2(4)
        await self.call(
            "CreateComputeEnvironment", computeEnvironmentName="ce", type="MANAGED",
            computeResources=resources,
        )  # fmt: skip
        order = [{"order": 1, "computeEnvironment": "ce"}]
        await self.call(
            "CreateJobQueue", jobQueueName="q", priority=1, computeEnvironmentOrder=order
        )
        needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
        container = {"image": "i", "command": ["true"], "resourceRequirements": needs}
        await self.call(
            "RegisterJobDefinition", jobDefinitionName="d", type="container",
            containerProperties=container,
        )  # fmt: skip

    async def submit(self, invocation: str = "", **more: Any) -> str:
        made = await self.call(
            "SubmitJob", invocation, jobName="j", jobQueue="q", jobDefinition="d", **more
        )
        return str(made["jobId"])

    def begin(self, job_id: str) -> str:
        """The job's program runs; its task."""
        attempt = self.core.state.jobs[job_id].attempt
        assert attempt is not None
        self.core.report(AttemptStarted(attempt.task_id, self._ms()))
        return attempt.task_id

    def read(self, operation: str, **params: Any) -> dict[str, Any]:
        view = ReadView(self.core.state, self.store, "key", self._ms())
        return dict(READS["batch", operation](view, params))

    def _ms(self) -> int:
        return int(self.time.now() * 1000)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("something_happens", [False, True])
@pytest.mark.parametrize("jump", JUMPS)
def test_a_timeout_comes_when_its_time_has_passed_whatever_the_clock_shows(
    bench: Bench, jump: float, something_happens: bool
) -> None:
    async def scene() -> None:
        await bench.prepared()
        early = bench.begin(await bench.submit(timeout={"attemptDurationSeconds": 7200}))
        await asyncio.sleep(600)
        bench.time.set_by += jump
        if something_happens:
            bench.core.report(AttemptProgressed(early, "news", 0))
        bench.begin(await bench.submit(timeout={"attemptDurationSeconds": 3600}))
        await asyncio.sleep(3590)
        assert bench.executor.stops == []
        await asyncio.sleep(20)
        assert bench.executor.stops == [pytest.approx(600 + 3600, abs=0.01)]
        await asyncio.sleep(2985)
        assert len(bench.executor.stops) == 1
        await asyncio.sleep(20)
        assert bench.executor.stops[1:] == [pytest.approx(7200, abs=0.01)]

    bench.run(scene)


@pytest.mark.parametrize("jump", JUMPS)
def test_jobs_are_listed_in_the_order_of_their_submission_whatever_the_clock_shows(
    bench: Bench, jump: float
) -> None:
    """B42. createdAt is what the clock showed."""

    async def scene() -> None:
        await bench.prepared()
        ids = []
        for _ in range(3):
            ids.append(await bench.submit())
            bench.time.set_by += jump
        listed = bench.read("ListJobs", jobQueue="q", jobStatus="STARTING")["jobSummaryList"]
        assert [job["jobId"] for job in listed] == ids[::-1]

    bench.run(scene)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_call_that_is_sent_again_after_the_clock_was_set_is_the_same_call(
    bench: Bench, jump: float
) -> None:
    """B60."""

    async def scene() -> None:
        await bench.prepared()
        made = await bench.submit("invocation")
        bench.time.set_by += jump
        await bench.submit()
        assert await bench.submit("invocation") == made

    bench.run(scene)
