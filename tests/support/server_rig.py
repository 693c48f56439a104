"""The embedded server in this process: requests in, answers out, jobs that the test ends itself.

boto3 clients reach it through botocore's `before-send` event, so that signing, retries and parsing
are the real ones and only the socket is left out.
"""

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse, HeadersDict
from botocore.config import Config
from botocore.credentials import Credentials

from batchml.clock import SystemClock
from batchml.local.batch.core import Core
from batchml.local.batch.engine import restore
from batchml.local.batch.events import AttemptEnded, AttemptExit, AttemptStarted, Event
from batchml.local.batch.state import Job, JobAttempt
from batchml.local.home import AccessKeys
from batchml.local.logs.api import LogReads
from batchml.local.machine import MachineCapacity
from batchml.local.server.app import BatchServer
from batchml.local.server.protocol import HttpRequest, HttpResponse, problems
from batchml.local.store.journal import Journal
from tests.support.models import ec2

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
KEYS = AccessKeys("BMLLOCALTEST", "secret")


class HeldExecutor:
    """Starts nothing: the test says what becomes of an attempt."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.lost: list[tuple[str, str]] = []

    def prepare(self, job: Job, attempt: JobAttempt) -> bool:
        return True

    def begin(self, task_id: str) -> None: ...

    def withdraw(self, task_id: str) -> None: ...

    def adopt(self, job: Job, attempt: JobAttempt) -> None: ...

    def stop(self, task_id: str) -> None:
        self.stopped.append(task_id)

    def lose(self, task_id: str, why: str, *, warned: bool) -> None:
        self.lost.append((task_id, why))

    def check_progress(self, task_id: str) -> None: ...


class MovedClock(SystemClock):
    """The real time, and what the test adds to it."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class Rig:
    """A server on the state folder `folder`; make a second one there for a restarted server."""

    def __init__(self, folder: Path, vcpus: int = 4) -> None:
        self.folder = folder
        self.clock = MovedClock()
        self.store = Journal(folder / "journal.db")
        self.loop = asyncio.new_event_loop()
        self.executor = HeldExecutor()
        state = restore(
            self.store.load(MachineCapacity(vcpus, 8192, ("g0",))), int(self.clock.now() * 1000)
        )
        self.core = Core(state, self.store, self.clock)
        self.core.executor = self.executor
        self.logs = LogReads(self.store, self.log_of, self.clock)
        self.server = BatchServer(self.core, self.store, self.logs, KEYS, PORT, self.clock)
        self.running = self.loop.create_task(self.core.run())

    def log_of(self, task_id: str) -> Path:
        return self.folder / f"{task_id}.log"

    def close(self) -> None:
        self.core.close()
        self.loop.run_until_complete(asyncio.gather(self.running, return_exceptions=True))
        self.loop.close()
        self.logs.close()
        self.store.close()

    # --- requests ---------------------------------------------------------------------------

    def handle(self, *requests: HttpRequest) -> list[HttpResponse]:
        """The answers to requests that arrive together; the server must survive them."""

        async def all_of_them() -> list[HttpResponse]:
            return await asyncio.wait_for(
                asyncio.gather(*(self.server.handle(request) for request in requests)), 20
            )

        answers = self.loop.run_until_complete(all_of_them())
        assert not self.running.done(), "the core has ended"
        return answers

    def client(self, service: str, **config: Any) -> Any:
        made = boto3.client(
            service, region_name="us-east-1", endpoint_url=URL,
            aws_access_key_id=KEYS.access_key_id, aws_secret_access_key=KEYS.secret_access_key,
            config=Config(retries={"total_max_attempts": 1, "mode": "standard"}, **config),
        )  # fmt: skip
        made.meta.events.register("before-send.*.*", self._send)
        return made

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        (answer,) = self.handle(read(request.method, request.url, request.headers, request.body))
        headers = HeadersDict(dict(answer.headers))
        return AWSResponse(request.url, answer.status, headers, _Raw(answer.body))

    # --- what becomes of attempts -----------------------------------------------------------

    def report(self, event: Event) -> None:
        self.core.report(event)
        self.loop.run_until_complete(self._settled())

    async def _settled(self) -> None:
        """Two answered calls later, all that was reported before them has been applied."""
        for _ in range(2):
            once = {"amz-sdk-invocation-id": str(uuid.uuid4())}
            body = b'{"jobId": "none", "reason": "r"}'
            await self.server.handle(sign("/v1/canceljob", body, headers=once))

    def task(self, job_id: str) -> str:
        attempt = self.core.state.jobs[job_id].attempt
        assert attempt is not None, f"{job_id} has no attempt"
        return attempt.task_id

    def start(self, job_id: str) -> None:
        self.report(AttemptStarted(self.task(job_id), int(self.clock.now() * 1000)))

    def end(self, job_id: str, code: int = 0, **how: Any) -> None:
        now = int(self.clock.now() * 1000)
        self.report(AttemptEnded(self.task(job_id), AttemptExit(**{"code": code} | how), now))


class _Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> list[bytes]:
        return [self._body]


def read(method: str, url: str, headers: Any, body: Any) -> HttpRequest:
    """botocore's request as the server sees it."""
    parts = urlsplit(url)
    texts = [
        (name.lower(), value.decode() if isinstance(value, bytes) else str(value))
        for name, value in headers.items()
    ]
    body = body.read() if hasattr(body, "read") else body
    given = body if isinstance(body, bytes) else (body or "").encode()
    return HttpRequest(method, parts.path, parts.query, (("host", parts.netloc), *texts), given)


def sign(
    path: str = "/v1/describejobqueues", body: bytes = b"{}", *, service: str = "batch",
    method: str = "POST", headers: dict[str, str] | None = None, keys: AccessKeys = KEYS,
    url: str = URL,
) -> HttpRequest:  # fmt: skip
    """A correctly signed request."""
    given = {"content-type": "application/json", **(headers or {})}
    request = AWSRequest(method, url + path, headers=given, data=body)
    credentials = Credentials(keys.access_key_id, keys.secret_access_key)
    SigV4Auth(credentials, service, "us-east-1").add_auth(request)
    return read(method, request.url, request.headers, body)


def sign_logs(operation: str, body: bytes) -> HttpRequest:
    headers = {
        "x-amz-target": f"Logs_20140328.{operation}",
        "content-type": "application/x-amz-json-1.1",
    }
    return sign("/", body, service="logs", headers=headers)


def error_of(answer: HttpResponse, service: str = "batch") -> tuple[str, str]:
    """The code and the message of an error in AWS's shape; fails for anything else."""
    headers = dict(answer.headers)
    assert headers["x-amz-request-id" if service == "s3" else "x-amzn-requestid"]
    if service in ("s3", "sts"):
        from xml.etree import ElementTree

        root = ElementTree.fromstring(answer.body.decode())
        error = root if service == "s3" else root.find("Error")
        assert error is not None
        found = error.findtext("Code"), error.findtext("Message")
    else:
        body = json.loads(answer.body)
        assert set(body) == {"__type", "message"}
        assert headers["x-amzn-errortype"] == body["__type"]
        assert headers["content-type"] == "application/json"
        found = body["__type"], body["message"]
    assert found[0] and found[1]
    assert "Traceback" not in found[1]
    return found[0], found[1]


class Checked:
    """Checks each raw answer of a client against the shape of its operation, strictly."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.wrong: list[str] = []
        self.last: dict[str, Any] = {}

    def watch(self, client: Any) -> Any:
        client.meta.events.register("before-parse.*.*", self._check)
        return client

    def _check(self, operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
        if response_dict["status_code"] != 200 or operation_model.service_model.protocol == "query":
            return
        self.last = json.loads(response_dict["body"])
        self.seen.add(operation_model.name)
        if operation_model.output_shape is not None:
            for path, text in problems(operation_model.output_shape, self.last, strict=True):
                self.wrong.append(f"{operation_model.name}: {path} {text}")


def furnish(batch: Any, make: Callable[[str], str] = str) -> None:
    """An environment `ce`, a queue `q` and a definition `d`."""
    batch.create_compute_environment(
        computeEnvironmentName=make("ce"),
        type="MANAGED",
        computeResources=ec2(4),
    )
    batch.create_job_queue(
        jobQueueName=make("q"),
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": make("ce")}],
    )
    batch.register_job_definition(
        jobDefinitionName=make("d"),
        type="container",
        containerProperties={"image": "i", "command": ["true"], "vcpus": 1, "memory": 64},
    )
