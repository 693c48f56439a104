"""A lost answer to SubmitJob, in nine ways: one run, whoever the client is (B60, B61).

Between a client and the embedded server stands a relay. It passes the call on, so that it is
carried out, and then does something to the answer. What comes after passes unharmed.
"""

import os
import signal
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from batchml.aws.batch.jobs import JobApi
from batchml.aws.session import Access, Session
from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from tests.support.local_server import define

pytestmark = pytest.mark.shared_home
CLOCK = SystemClock()
Harm = Callable[[socket.socket, bytes], None]


def nothing(client: socket.socket, answer: bytes) -> None:
    """The connection is closed in an orderly way, without a word."""


def reset(client: socket.socket, answer: bytes) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def half_the_head(client: socket.socket, answer: bytes) -> None:
    client.sendall(answer[:40])


def half_the_body(client: socket.socket, answer: bytes) -> None:
    client.sendall(answer[: answer.index(b"\r\n\r\n") + 24])


def error(status: str) -> Harm:
    def send(client: socket.socket, answer: bytes) -> None:
        client.sendall(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())

    return send


def hang(client: socket.socket, answer: bytes) -> None:
    with suppress(OSError):
        client.recv(1)  # until the client has had enough


def not_http(client: socket.socket, answer: bytes) -> None:
    client.sendall(b"\x00\xff\x16\x03 what is this\r\n\r\n")


HARMS = {
    "closed": nothing,
    "reset": reset,
    "half the head": half_the_head,
    "half the body": half_the_body,
    "500": error("500 Internal Server Error"),
    "502": error("502 Bad Gateway"),
    "503": error("503 Service Unavailable"),
    "hang": hang,
    "not HTTP": not_http,
}


class Relay:
    """Stands on a port of its own before a server; does `harm` to the first answer to SubmitJob."""

    def __init__(self, server: ServerEndpoint, harm: Harm) -> None:
        self.harm: Harm | None = harm
        self.harmed = 0
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=[client], daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            while request := _message(client):
                with socket.create_connection(("127.0.0.1", self._server.port)) as upstream:
                    upstream.sendall(request)
                    answer = _message(upstream)
                if self.harm is not None and b" /v1/submitjob " in request:
                    harm, self.harm = self.harm, None
                    self.harmed += 1
                    harm(client, answer)
                    return
                client.sendall(answer)


def _message(source: socket.socket) -> bytes:
    """One HTTP message, whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = source.recv(65_536)
        if not part:
            return b""
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while len(body) < length:
        body += source.recv(65_536)
    return head + b"\r\n\r\n" + body


@pytest.fixture
def definition(batch: Any) -> str:
    return define(batch, ["true"])


@pytest.fixture
def name() -> str:
    """Of the test's run alone."""
    return uuid.uuid4().hex


@pytest.fixture(params=HARMS)
def relay(request: pytest.FixtureRequest, server: ServerEndpoint) -> Iterator[Relay]:
    made = Relay(server, HARMS[request.param])
    yield made
    made.close()


def runs_called(batch: Any, name: str) -> list[str]:
    found = batch.list_jobs(jobQueue="default", filters=[{"name": "JOB_NAME", "values": [name]}])
    return [job["jobId"] for job in found["jobSummaryList"]]


def through(relay: Relay, client: Any) -> Any:
    """Let a client connect to the relay while it signs for the server, as through a tunnel."""
    from botocore.httpsession import URLLib3Session

    server = f"127.0.0.1:{relay._server.port}"

    def send(request: Any, **_: Any) -> Any:
        request.headers["Host"] = server
        request.url = request.url.replace(server, f"127.0.0.1:{relay.port}")
        return session.send(request)

    session = URLLib3Session(timeout=(2, 1))
    client.meta.events.register("before-send.batch.*", send)
    return client


@pytest.mark.parametrize("mode", ["legacy", "standard"])
def test_stock_boto3_makes_one_run(
    home: Home, server: ServerEndpoint, batch: Any, definition: str, relay: Relay, mode: Any,
    name: str,
) -> None:  # fmt: skip
    keys = home.keys()
    client = through(
        relay,
        boto3.client(
            "batch", "us-east-1", endpoint_url=server.url,
            aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
            config=Config(retries={"mode": mode}),
        ),
    )  # fmt: skip
    told = ""
    # Some of the nine botocore does not send again. Then the caller is told, and the run is there.
    with suppress(BotoCoreError, ClientError):
        made = client.submit_job(jobName=name, jobQueue="default", jobDefinition=definition)
        told = made.get("jobId", "")  # botocore takes an answer that was cut off for an empty one
    assert relay.harmed == 1
    found = runs_called(batch, name)
    assert len(found) == 1
    assert told in ("", *found)


def test_our_client_makes_one_run(
    home: Home, server: ServerEndpoint, batch: Any, definition: str, relay: Relay, name: str
) -> None:
    keys = home.keys()
    session = Session(
        Access(
            "us-east-1",
            endpoint=server.url,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
        )
    )
    session.submitting_client().connect = lambda _, limit: socket.create_connection(
        ("127.0.0.1", relay.port), min(limit, 1)
    )
    told = JobApi(session).submit(
        {"jobName": name, "jobQueue": "default", "jobDefinition": definition}
    )
    assert relay.harmed == 1
    assert runs_called(batch, name) == [told]


def test_a_server_that_was_killed_is_started_again_and_asked_again(home: Home, name: str) -> None:
    endpoint = control.ensure_server(home, CLOCK)
    keys = home.keys()
    session = Session(
        Access(
            "us-east-1",
            endpoint=endpoint.url,
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            restart=lambda: control.ensure_server(home, CLOCK).url,
        )
    )
    definition = define(session.client("batch"), ["true"])
    os.kill(endpoint.pid, signal.SIGKILL)
    request = {"jobName": name, "jobQueue": "default", "jobDefinition": definition}
    job_id = JobApi(session).submit(request)
    assert runs_called(session.client("batch"), name) == [job_id]
