"""An embedded AWS Batch for a replay: in this process, on an empty state, and without programs.

No program is started. The replay reports the events of each attempt that the recording implies: it
started, it ended with an exit code, its host was lost. The server updates its jobs, and its answers
are compared.
"""

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchml.clock import Clock
from batchml.local.batch.core import Core
from batchml.local.batch.engine import restore
from batchml.local.batch.events import (
    AttemptEnded,
    AttemptExit,
    AttemptStarted,
    ClockTicked,
    Event,
)
from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.reads import READS
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.home import AccessKeys
from batchml.local.logs.api import LOG_OPERATIONS, LogReads
from batchml.local.machine import MachineCapacity
from batchml.local.server.app import BatchServer
from batchml.local.server.daemon import create_defaults
from batchml.local.server.protocol import HttpRequest, HttpResponse, service_model
from batchml.local.store.journal import Journal
from batchml.runtime.storage.credentials import Credentials, sign

_PORT, _REGION = 8123, "us-east-1"
_HOST = f"127.0.0.1:{_PORT}"
_KEYS = AccessKeys("BMLREPLAY", "replay")
# Room for every job of a recording, so that only its compute environments limit what runs.
ENOUGH_VCPUS, _MEMORY, _GPUS = 100_000, 100_000_000, tuple(f"gpu-{n}" for n in range(64))
_LOG_TARGET = "Logs_20140328"
ENDED = ("SUCCEEDED", "FAILED")
_OUTCOMES = (*ENDED, "RUNNING")
# The recording's description of a job (JobDetail or JobSummary), by its id in this server.
FactOf = Callable[[str], Mapping[str, Any]]
_KILLED = 137  # the exit code of a program that SIGKILL ended


class ReplayClock:
    """The times of the recording, on the day of the replay."""

    def __init__(self, clock: Clock) -> None:
        self._start = clock.now()
        self.passed = 0.0

    def now(self) -> float:
        return self._start + self.passed

    def monotonic(self) -> float:
        return self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class _NoExecutor:
    """Starts no program: the replay reports the events of attempts."""

    def prepare(self, job: Job, attempt: JobAttempt) -> bool:
        return True

    def begin(self, task_id: str) -> None: ...

    def withdraw(self, task_id: str) -> None: ...

    def adopt(self, job: Job, attempt: JobAttempt) -> None: ...

    def stop(self, task_id: str) -> None: ...

    def lose(self, task_id: str, why: str, *, warned: bool) -> None: ...

    def check_progress(self, task_id: str) -> None: ...


class ReplayServer:
    """The server, with its state in `folder`. Call `close` at the end.

    `vcpus` are those of its own compute environment, which recordings of `local` describe.
    """

    def __init__(self, folder: Path, clock: ReplayClock, vcpus: int = ENOUGH_VCPUS) -> None:
        self._folder = folder
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._journal = Journal(folder / "journal.db")
        state = restore(
            self._journal.load(MachineCapacity(vcpus, _MEMORY, _GPUS)), self._milliseconds()
        )
        self._core = Core(state, self._journal, clock)
        self._core.executor = _NoExecutor()
        self._logs = LogReads(self._journal, self._log_path, clock)
        self._server = BatchServer(self._core, self._journal, self._logs, _KEYS, _PORT, clock)
        self._running = self._loop.create_task(self._core.run())
        self._loop.run_until_complete(create_defaults(self._core, clock))

    def close(self) -> None:
        self._core.close()
        self._loop.run_until_complete(asyncio.gather(self._running, return_exceptions=True))
        self._loop.close()
        self._logs.close()
        self._journal.close()

    def ask(self, service: str, operation: str, params: Mapping[str, Any]) -> HttpResponse:
        return self._handle(_request(service, operation, params, self._clock.now()))

    @staticmethod
    def serves(service: str, operation: str) -> bool:
        """Whether the embedded server has an answer. Only Batch and Logs are compared."""
        if service == "logs":
            return operation in LOG_OPERATIONS
        return service == "batch" and (operation in HANDLERS or (service, operation) in READS)

    def has(self, kind: str, name: str) -> bool:
        """Whether a resource or job exists: `kind` is that of its ARN."""
        state = self._core.state
        if kind == "job":
            answer = self.ask("batch", "DescribeJobs", {"jobs": [name]})
            return bool(json.loads(answer.body).get("jobs"))
        if kind == "job-definition":
            return any(key == name or key.startswith(f"{name}:") for key in state.definitions)
        return name in (state.queues if kind == "job-queue" else state.environments)

    # --- Events of jobs ---------------------------------------------------------------------

    def advance(self, job_id: str, status: str, fact_of: FactOf) -> None:
        """Report the events that bring a job to its recorded status.

        Attempts that have ended in the recording, end. Children of arrays get the statuses of the
        array's summary, and nodes the status of their job. A waiting job is left alone.
        """
        jobs = self._core.state.jobs
        if job_id not in jobs:
            return
        below = [each for each in jobs.values() if each.id.startswith((f"{job_id}:", f"{job_id}#"))]
        fact = fact_of(job_id)
        attempts = fact.get("attempts") if fact.get("status") == status else None
        if below:
            below.sort(key=lambda each: each.index or each.node or 0)
            self._advance_children(below, status, fact, fact_of)
            return
        for number, attempt in enumerate(attempts or ()):
            self._end_attempt(job_id, number, attempt)
        if status == "RUNNING":
            self._start(job_id)
        elif status in ENDED and attempts is None:
            self._start(job_id)
            self._end(job_id, _exit_of(fact, status))

    def _advance_children(
        self, children: Sequence[Job], status: str, fact: Mapping[str, Any], fact_of: FactOf
    ) -> None:
        summary = dict((fact.get("arrayProperties") or {}).get("statusSummary") or {})
        for child in children:
            known = str(fact_of(child.id).get("status", ""))
            wanted = known if summary.get(known) else ""
            wanted = wanted or next((each for each in _OUTCOMES if summary.get(each)), "")
            if wanted:
                summary[wanted] -= 1
            # A multi-node job is RUNNING as soon as its main node is; the other nodes follow later.
            if status != "RUNNING" or wanted or child.node in (None, 0):
                self.advance(child.id, wanted or status, fact_of)

    def _start(self, job_id: str) -> None:
        job = self._core.state.jobs.get(job_id)
        if job is not None and job.attempt is not None and job.status.value == "STARTING":
            self._report(AttemptStarted(job.attempt.task_id, self._milliseconds(), "198.18.0.1"))

    def _end_attempt(self, job_id: str, number: int, attempt: Mapping[str, Any]) -> None:
        """End the attempt with this number, unless it has ended."""
        job = self._core.state.jobs.get(job_id)
        if job is None or len(job.attempts) > number:
            return
        exit_ = _exit_of(attempt, "")
        if not exit_.start_failure:
            self._start(job_id)
        self._end(job_id, exit_)

    def _end(self, job_id: str, exit_: AttemptExit) -> None:
        job = self._core.state.jobs.get(job_id)
        if job is not None and job.attempt is not None:
            self._report(AttemptEnded(job.attempt.task_id, exit_, self._milliseconds()))

    def tick(self) -> None:
        """Tell the server that time has passed."""
        self._report(ClockTicked(self._milliseconds()))

    def add_log(self, stream: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to a log, as the recording's answer has them."""
        path = self._log_path(stream.rpartition("/")[2])
        with open(path, "ab") as file:
            for event in events:
                line = str(event.get("message", "")).replace("\n", " ")
                file.write(f"{event.get('timestamp', 0)} {line}\n".encode())

    # --- The loop ---------------------------------------------------------------------------

    def _handle(self, request: HttpRequest) -> HttpResponse:
        return self._loop.run_until_complete(self._server.handle(request))

    def _report(self, event: Event) -> None:
        self._core.report(event)
        # After two answered calls, all events that were reported before them have been applied.
        for _ in range(2):
            self.ask("batch", "CancelJob", {"jobId": f"none-{uuid.uuid4()}", "reason": "none"})

    def _milliseconds(self) -> int:
        return int(self._clock.now() * 1000)

    def _log_path(self, task_id: str) -> Path:
        return self._folder / f"{task_id}.log"


def _exit_of(fact: Mapping[str, Any], status: str) -> AttemptExit:
    """The end of an attempt, by its description in an answer."""
    container = fact.get("container") or {}
    code, reason = container.get("exitCode"), str(container.get("reason", ""))
    why = str(fact.get("statusReason", ""))
    if why.startswith("Host EC2"):
        return AttemptExit(lost=why)
    if code is None and reason:
        return AttemptExit(start_failure=reason)
    if code is None:
        code = 0 if status == "SUCCEEDED" else 1 if status == "FAILED" else _KILLED
    return AttemptExit(code=int(code), oom=reason.startswith("OutOfMemoryError"))


def _request(service: str, operation: str, params: Mapping[str, Any], now: float) -> HttpRequest:
    """A signed request, as an SDK sends it."""
    model = service_model(service).operation_model(operation)
    method, path, query, given = model.http["method"], model.http["requestUri"], "", dict(params)
    # Each call has its own id: a call that is repeated in the recording was a new one.
    headers = {"content-type": "application/json", "amz-sdk-invocation-id": str(uuid.uuid4())}
    if service == "logs":
        headers["content-type"] = "application/x-amz-json-1.1"
        headers["x-amz-target"] = f"{_LOG_TARGET}.{operation}"
    elif "{resourceArn}" in path:
        path = path.replace("{resourceArn}", quote(str(given.pop("resourceArn", "")), safe=""))
        keys = given.pop("tagKeys", []) if method == "DELETE" else []
        query = "&".join(f"tagKeys={quote(str(key), safe='')}" for key in sorted(keys))
    body = b"" if method in ("GET", "DELETE") else json.dumps(given).encode()
    signed = sign(
        Credentials(_KEYS.access_key_id, _KEYS.secret_access_key), _REGION, method, _HOST,
        quote(path, safe="/~-_."), query, headers, hashlib.sha256(body).hexdigest(), now, service,
    )  # fmt: skip
    named = (("host", _HOST), *signed.items())
    return HttpRequest(method, path, query, tuple(named), body)
