"""Exactly one run of each submission: with any answer lost, and with the client killed anywhere.

Between the client and a service stands a relay, which loses the call or its answer. The services:
one that is AWS's in that it makes a second job of a call that is sent again and lists jobs late,
and the embedded server, reached as if it were AWS, so that its own memory of calls is no help.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import SubmissionRequests
from batchml.aws.session import Access, Session
from batchml.history import History
from batchml.local.home import Home, ServerEndpoint
from batchml.model.names import keyed_name, new_key
from batchml.model.run import Record
from batchml.runs.send import AWS_LISTING_DELAY, Submitter
from batchml.runs.submit import submit
from tests.server.test_lost_answers import HARMS, Harm, Relay, _message
from tests.support.batch_http import BatchAccount, serving
from tests.support.fakes import FakeClock
from tests.support.local_server import client_for

CONTAINER = {
    "image": "any",
    "command": ["true"],
    "resourceRequirements": [
        {"type": "VCPU", "value": "1"},
        {"type": "MEMORY", "value": "64"},
    ],
}


class Road(Relay):
    """A relay that may also lose the call itself, so that the service never hears of it."""

    def __init__(self, port: int) -> None:
        super().__init__(ServerEndpoint(0, port), HARMS["closed"])
        self.harm = None

    def lose(self, harm: Harm, arrives: bool) -> None:
        """What happens to the next submission."""
        self.harm, self._arrives = harm, arrives

    def _relay(self, client: socket.socket) -> None:
        if self.harm is None or self._arrives:
            super()._relay(client)
            return
        with client, suppress(OSError):
            while request := _message(client):
                if self.harm is not None and b" /v1/submitjob " in request:
                    harm, self.harm = self.harm, None
                    self.harmed += 1
                    harm(client, b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{}")
                    return
                with socket.create_connection(("127.0.0.1", self._server.port)) as upstream:
                    upstream.sendall(request)
                    client.sendall(_message(upstream))


class User:
    """A client that takes what answers at a port for AWS."""

    def __init__(self, folder: Path, port: int, address: str, clock: FakeClock) -> None:
        self.clock = clock
        self.history = History(folder / "history.jsonl")
        self.session = Session(Access("us-east-1"))
        self._port, self._address = port, address
        for client in (self.session.client("batch"), self.session.submitting_client()):
            client.meta.events.register("before-send.batch.*", self._send)

    def _send(self, request: Any, **_: Any) -> Any:
        """Signed for the service and sent to the relay; nobody waits for long."""
        from botocore.httpsession import URLLib3Session

        request.headers["Host"] = self._address
        request.url = f"http://127.0.0.1:{self._port}/v1/{request.url.rpartition('/')[2]}"
        return URLLib3Session(timeout=(2, 0.5)).send(request)

    def submit(self, number: int = 0) -> str:
        key = new_key(lambda size: number.to_bytes(size, "big"))
        name = keyed_name("once", key)
        record = Record(
            key=key, name="once", job_name=name, env="aws", queue="default",
            at=int(self.clock.now() * 1000),
        )  # fmt: skip
        register = {
            "jobDefinitionName": "d", "type": "container", "containerProperties": CONTAINER,
        }  # fmt: skip
        request = {"jobName": name, "jobQueue": "default", "jobDefinition": "d"}
        requests = SubmissionRequests(register, request)
        submitter = Submitter(JobApi(self.session), self.history, self.clock)
        return submit(submitter, requests, record)


@pytest.fixture
def as_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Point a stock client at a port of this machine, with keys."""

    def point(address: str, key: str = "AKIDTEST", secret: str = "secret") -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", f"http://{address}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)

    return point


def test_a_lost_answer_of_aws_leaves_one_run(as_aws: Callable[..., None], tmp_path: Path) -> None:
    """In nine ways, whether the call arrived or not, and listed at once or late."""
    clock = FakeClock()
    with serving(BatchAccount(clock)) as account:
        account.definitions.add("d")
        as_aws(f"127.0.0.1:{account.port}")
        road = Road(account.port)
        user = User(tmp_path, road.port, f"127.0.0.1:{account.port}", clock)
        told: list[str] = []
        for number, (name, harm) in enumerate(HARMS.items()):
            for arrives in (True, False):
                account.lag = 45.0 if number % 2 else 0.0
                account.calls.clear()
                began = clock.now()
                road.lose(harm, arrives)
                told.append(user.submit(len(told)))
                assert road.harmed == len(told)
                assert account.live == told, name
                assert account.calls.count("submitjob") == 1, f"{name}: it was looked up"
                assert clock.now() - began <= AWS_LISTING_DELAY
        road.close()
    assert [record.job_id for record in user.history.newest_first("aws")] == told[::-1]


def test_a_lost_answer_of_the_embedded_server_leaves_one_run(
    as_aws: Callable[..., None], tmp_path: Path, home: Home, server: ServerEndpoint
) -> None:
    keys = home.keys()
    as_aws(f"127.0.0.1:{server.port}", keys.access_key_id, keys.secret_access_key)
    road = Road(server.port)
    user = User(tmp_path, road.port, f"127.0.0.1:{server.port}", FakeClock())
    batch = client_for(home, server, "batch")
    batch.register_job_definition(
        jobDefinitionName="d", type="container", containerProperties=CONTAINER
    )
    told: list[str] = []
    for harm in HARMS.values():
        for arrives in (True, False):
            road.lose(harm, arrives)
            told.append(user.submit(len(told)))
    road.close()
    assert road.harmed == len(told) == 18
    kept = {record.job_id: record.job_name for record in user.history.newest_first("aws")}
    filters = [{"name": "JOB_NAME", "values": ["once-*"]}]
    pages = batch.get_paginator("list_jobs").paginate(jobQueue="default", filters=filters)
    made = {job["jobId"]: job["jobName"] for page in pages for job in page["jobSummaryList"]}
    assert made == kept
    assert len(set(made.values())) == 18


def test_throttling_a_missing_definition_and_a_second_run_over_http(
    as_aws: Callable[..., None], tmp_path: Path
) -> None:
    clock = FakeClock()
    with serving(BatchAccount(clock)) as account:
        account.throttle = 3
        as_aws(f"127.0.0.1:{account.port}")
        user = User(tmp_path, account.port, f"127.0.0.1:{account.port}", clock)
        first = user.submit()
        assert account.calls == [*["submitjob"] * 4, "describejobdefinitions",
                                 "registerjobdefinition", "submitjob"]  # fmt: skip
        # Four more of the same name, as if calls had been carried out late; pages of two.
        account.jobs += [
            {**account.jobs[0], "jobId": f"{'0' * 8}-0000-4000-8000-{number:012d}"}
            for number in range(1, 5)
        ]
        found = JobApi(user.session).find_by_name("default", account.jobs[0]["jobName"].upper())
    assert [job.job_id for job in found] == [job["jobId"] for job in account.jobs]
    assert found[0].job_id == first
