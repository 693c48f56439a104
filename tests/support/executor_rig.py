"""Real attempts, driven as the core drives them: an executor, a loop, and a list of events."""

import asyncio
import json
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local.batch.events import (
    AttemptEnded,
    AttemptExit,
    AttemptPrepared,
    AttemptProgressed,
    AttemptStarted,
    Event,
    LogEnd,
)
from batchml.local.batch.state import Job, JobAttempt, SubmittedSpec
from batchml.local.executors.choice import ExecutorChoice, Permits
from batchml.local.executors.container_spec import spec_maker
from batchml.local.executors.processors import MachineProcessors, find_processors
from batchml.local.executors.spec import ExecutorHost
from batchml.local.executors.supervisor import AttemptSupervisor
from batchml.local.home import Home
from batchml.local.images import publish_runtime
from batchml.local.logs.check import LargeChecks, check_small
from batchml.local.machine import Needs
from batchml.local.store.identity import observe
from batchml.model.logcheck import LogCheck, LogState
from tests.support.needs import unavailable

IMAGE = "python:3.11-slim-bookworm"


# Of this machine and its Docker engine, in the words of image manifests.
PROCESSOR = "arm64" if platform.machine() in ("aarch64", "arm64") else "amd64"


def need_engine() -> None:
    """Skip, visibly, without a Docker engine that has the base image; fail where it is required."""
    missing = "docker is not installed" if shutil.which("docker") is None else ""
    if not missing and docker("image", "inspect", IMAGE).returncode != 0:
        missing = f"no Docker engine, or it has no {IMAGE}"
    if missing:
        unavailable(missing)


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=600)


def job_of(
    command: list[str],
    *,
    env: dict[str, str] | None = None,
    memory: int = 256,
    vcpus: int = 1,
    init: bool = True,
    **container: Any,
) -> Job:
    """A job of its own, as the engine hands it to an executor: with an init process, which the
    jobs that batchml submits have.
    """
    container = {"linuxParameters": {"initProcessEnabled": init}, **container}
    job_id = str(uuid.uuid4())
    variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
    return Job(
        id=job_id,
        spec=SubmittedSpec(
            id=job_id,
            name="contract",
            queue="default",
            definition="d:1",
            container={"image": IMAGE, "command": command, "environment": variables, **container},
            needs=Needs(vcpus, memory),
        ),
        sequence=1,
    )


def attempt_of(job: Job, number: int = 1, **more: Any) -> JobAttempt:
    return JobAttempt(number, uuid.uuid4().hex, "this-machine", **{"gpus": (), **more})


class Outcome(NamedTuple):
    exit: AttemptExit
    lines: list[bytes]  # of the program: without ours at the start
    started_at: int | None

    @property
    def text(self) -> str:
        return b"\n".join(self.lines).decode("utf-8", "replace")


class Rig:
    """One server's worth of executor; `restart` is the next server."""

    def __init__(self, kind: str, home: Home, environ: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.home = home
        self.permits = Permits()
        self.processors = find_processors()
        self.claimed: set[int] = set()  # processors that other servers have given away
        self.change: Callable[[dict[str, Any]], None] = lambda spec: None
        self.events: list[Event] = []
        self.given: dict[str, tuple[Job, JobAttempt]] = {}
        environ = {**os.environ, **(environ or {})}
        home.journal.touch()
        self.identity = observe(home)
        runtime = publish_runtime(home.runtimes)
        self.host = ExecutorHost(home, runtime, environ, identity=self.identity.id)
        self._clock = SystemClock()
        self._loop = asyncio.new_event_loop()
        self._open()

    def _open(self) -> None:
        self.executor = AttemptSupervisor(
            self.home, self.identity, self.host.environ, self._loop, self._clock, self._heard,
            self._make_spec, ExecutorChoice(self.kind).kind,
            processors=MachineProcessors(self.processors, lambda _: self.claimed),
        )  # fmt: skip

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, AttemptPrepared):
            for task_id in event.task_ids:
                self._loop.call_soon(self.executor.begin, task_id)

    def _make_spec(self, kind: str, job: Job, attempt: JobAttempt) -> dict[str, Any]:
        spec = spec_maker(self.host, self.permits)(kind, job, attempt)
        self.change(spec)
        return spec

    def close(self) -> None:
        for task_id in self.given:
            if self.ended(task_id) is None:
                self.executor.stop(task_id)
        self.until(lambda: all(self.ended(task_id) for task_id in self.given), 60)
        self.executor.close()
        self._loop.close()

    def containers(self) -> list[str]:
        """Ids of the containers of this state folder that the Docker engine has, ended ones too."""
        mine = f"label=batchml.home={self.identity.id}"
        return docker("ps", "-a", "-q", "--filter", mine).stdout.split()

    # --- as the core does ---------------------------------------------------------------------

    def start(self, command: list[str], **job: Any) -> str:
        return self.start_job(job_of(command, **job))

    def start_job(self, job: Job, attempt: JobAttempt | None = None) -> str:
        attempt = attempt or attempt_of(job)
        self.given[attempt.task_id] = (job, attempt)
        if self.executor.prepare(job, attempt):
            self.executor.begin(attempt.task_id)
        return attempt.task_id

    def run(self, command: list[str], **job: Any) -> Outcome:
        return self.outcome(self.start(command, **job))

    def restart(self) -> None:
        """The server ends; another adopts what goes on."""
        self.executor.close()
        self.reopen()

    def reopen(self) -> None:
        self._open()
        for task_id, (job, attempt) in self.given.items():
            if self.ended(task_id) is None:
                self.executor.adopt(job, replace(attempt, may_have_begun=True))

    # --- what has come of it ------------------------------------------------------------------

    def until(self, condition: Callable[[], Any], limit: float = 60.0) -> Any:
        """Let the loop run until the condition gives something true."""
        end = self._clock.monotonic() + limit
        while True:
            self.wait(0.005)
            found = condition()
            if found:
                return found
            assert self._clock.monotonic() < end, f"not within {limit} s; events: {self.events}"

    def ended(self, task_id: str) -> AttemptExit | None:
        found = (e for e in self.events if isinstance(e, AttemptEnded) and e.task_id == task_id)
        return next((event.exit for event in found), None)

    def outcome(self, task_id: str, limit: float = 60.0) -> Outcome:
        exit_ = self.until(lambda: self.ended(task_id), limit)
        assert self._count(task_id) == 1, "an attempt ends once"
        assert exit_.log is not None or exit_.lost, "who ends an attempt proves its log"
        if exit_.log is not None:
            path, end = f"{self.home.attempt(task_id)}/log", LogEnd(exit_.log)
            found = check_small(path, end) or LargeChecks().check(task_id, path, end)
            assert found == LogCheck(LogState.COMPLETE, exit_.log.shown)
        return Outcome(exit_, self.lines(task_id), self.started(task_id))

    def until_line(self, task_id: str, line: bytes) -> None:
        self.until(lambda: line in self.lines(task_id))

    def lines(self, task_id: str) -> list[bytes]:
        path = self.home.attempt(task_id) / "log"
        if not path.exists():
            return []
        found = [line.partition(b" ")[2] for line in path.read_bytes().split(b"\n")[:-1]]
        return found

    def started(self, task_id: str) -> int | None:
        found = (e for e in self.events if isinstance(e, AttemptStarted) and e.task_id == task_id)
        return next((event.now for event in found), None)

    def notes(self, task_id: str) -> list[str]:
        return [
            e.text for e in self.events if isinstance(e, AttemptProgressed) and e.task_id == task_id
        ]

    def output(self, task_id: str) -> Path:
        return self.home.runs / self.given[task_id][0].id / "output"

    def wait(self, seconds: float) -> None:
        """Let the loop run for a while."""
        self.finish(asyncio.sleep(seconds))

    def finish(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop.run_until_complete(work)

    def runner(self, task_id: str) -> int:
        """The pid of an attempt's runner."""
        record = (self.home.attempt(task_id) / "runner.json").read_text()
        return int(json.loads(record)["pid"])

    def _count(self, task_id: str) -> int:
        return sum(isinstance(e, AttemptEnded) and e.task_id == task_id for e in self.events)
