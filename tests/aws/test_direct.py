"""Calls without the SDK: what they send and raise is what botocore's client sends and raises."""

import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import botocore.session
import msgspec
import pytest

from batchml.aws.batch.direct import OPERATIONS, DirectClient
from batchml.aws.batch.jobs import JobApi
from batchml.aws.errors import ErrorClass, call, classify_error
from batchml.aws.session import Access, Session
from batchml.errors import AccessError, BatchmlError, ServiceError, ServiceUnreachable
from batchml.local.home import AccessKeys
from batchml.local.server.auth import verify
from batchml.local.server.protocol import HttpRequest

KEYS = AccessKeys("BMLLOCALKEY", "secret")


def ok(value: Any, *headers: str) -> bytes:
    return answer("200 OK", msgspec.json.encode(value), *headers)


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error(code: str, status: str = "400 Bad Request") -> bytes:
    body = msgspec.json.encode({"__type": code, "message": "words"})
    return answer(status, body, f"x-amzn-errortype: {code}")


class Service:
    """Answers on a port of its own with the given bytes; b"" closes the connection instead."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.requests: list[HttpRequest] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def session(self, **more: Any) -> Session:
        url = f"http://127.0.0.1:{self.port}"
        return Session(
            Access("us-east-1", "", url, KEYS.access_key_id, KEYS.secret_access_key, **more)
        )

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=[peer], daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb") as stream:
            while first := stream.readline():
                method, path, _ = first.decode().split(" ", 2)
                pairs = []
                while (line := stream.readline().decode().strip()) != "":
                    name, _, value = line.partition(": ")
                    pairs.append((name.lower(), value))
                body = stream.read(int(dict(pairs).get("content-length", "0")))
                self.requests.append(HttpRequest(method, path, "", tuple(pairs), body))
                reply = self.answers.pop(0)
                peer.sendall(reply)
                if not reply or reply.endswith(b"...") or b"connection: close" in reply:
                    return


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


def test_the_operations_are_those_of_the_service_models_and_need_no_conversion() -> None:
    for name, operations in OPERATIONS.items():
        model = botocore.session.get_session().get_service_model(name)
        for operation in operations.values():
            known = model.operation_model(operation.name)
            assert known.http == {"method": "POST", "requestUri": operation.path}
            assert operation.target == model.metadata.get("targetPrefix", "")
            assert operation.members == tuple(known.output_shape.members)
            assert plain(known.input_shape) and plain(known.output_shape), operation


def plain(shape: Any, seen: frozenset[str] = frozenset()) -> bool:
    """Whether JSON has all values of a shape as they are in Python, under the shape's own names."""
    if shape is None or shape.name in seen:
        return True
    seen |= {shape.name}
    if shape.type_name == "structure":
        members = shape.members.items()
        renamed = [name for name, each in members if each.serialization.get("name", name) != name]
        located = [name for name, each in members if "location" in each.serialization]
        tokens = [name for name, each in members if each.metadata.get("idempotencyToken")]
        return not (renamed or located or tokens) and all(plain(each, seen) for _, each in members)
    if shape.type_name == "list":
        return plain(shape.member, seen)
    if shape.type_name == "map":
        return plain(shape.value, seen)
    return shape.type_name not in ("timestamp", "blob")


def test_a_request_is_signed_as_the_server_expects(service: Service) -> None:
    service.answers = [ok({"jobs": []}), ok({"events": [], "nextForwardToken": "t"})]
    session = service.session()
    assert JobApi(session).describe(["a"]) == {}
    call(session.client("logs"), "GetLogEvents", logStreamName="s", startFromHead=True)
    first, second = service.requests
    assert (first.path, first.body) == ("/v1/describejobs", b'{"jobs": ["a"]}')
    assert second.path == "/"
    assert second.header("x-amz-target") == "Logs_20140328.GetLogEvents"
    for request, name in ((first, "batch"), (second, "logs")):
        now = signed_at(request)
        assert verify(request, KEYS, now).service == name


def signed_at(request: HttpRequest) -> float:
    stamp = request.header("x-amz-date")
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()


def test_calls_share_a_connection_until_the_server_closes_it(service: Service) -> None:
    service.answers = [ok({"jobs": []}), ok({"jobs": []}, "connection: close"), ok({"jobs": []})]
    api = JobApi(service.session())
    for _ in range(3):
        api.describe(["a"])
    assert service.connections == 2


def test_all_pages_of_a_list_are_read(service: Service) -> None:
    queue = {"priority": 1, "jobQueueName": "a"}
    service.answers = [
        ok({"jobQueues": [queue], "nextToken": "t"}),
        ok({"jobQueues": [queue | {"jobQueueName": "b"}]}),
    ]
    assert JobApi(service.session()).queues() == ["a", "b"]
    assert service.requests[1].body == b'{"nextToken": "t"}'


@pytest.mark.parametrize(
    "lost",
    [
        b"",
        ok({"jobId": "j"})[:-3] + b"...",
        b"\x00\xff what is this\r\n\r\n...",
        answer("503 Service Unavailable"),
        error("TooManyRequestsException", "429 Too Many Requests"),
        ok({}),
    ],
    ids=["closed", "not HTTP and cut", "not HTTP", "503", "throttled", "cut off"],
)
def test_a_call_without_a_usable_answer_is_sent_again_as_the_same_call(
    service: Service, lost: bytes
) -> None:
    service.answers = [lost, ok({"jobId": "j", "jobName": "n", "jobArn": "a"})]
    request = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
    assert JobApi(service.session()).submit(request) == "j"
    first, second = service.requests
    assert first.body == second.body
    same = "amz-sdk-invocation-id"
    assert first.header(same) == second.header(same) != ""


@pytest.mark.parametrize(
    ("reply", "kind", "fate"),
    [
        (error("ClientException"), ServiceError, ErrorClass.REFUSED),
        (error("AccessDeniedException", "403 Forbidden"), AccessError, ErrorClass.REFUSED),
        (answer("200 OK", b"<html>"), ServiceUnreachable, ErrorClass.UNKNOWN),
        (error("ServerException", "500 Internal Server Error"), ServiceError, ErrorClass.UNKNOWN),
        (b"", ServiceUnreachable, ErrorClass.UNKNOWN),
    ],
    ids=["refused", "denied", "another program", "500", "closed"],
)
def test_failures_are_those_of_botocore(
    service: Service, reply: bytes, kind: type[BatchmlError], fate: ErrorClass
) -> None:
    session = service.session()
    found = []
    direct = session.client("batch", 1)
    assert isinstance(direct, DirectClient)
    for client in (direct, session._sdk_client("batch", 1, "")):
        service.answers = [reply] * 5  # an answer that is no JSON counts as cut off
        with pytest.raises(kind) as caught:
            assert call(client, "DescribeJobs", jobs=["a"])["jobs"]
        assert classify_error(caught.value) is fate
        found.append(str(caught.value).split(": ")[:2])
    assert found[0] == found[1]


def test_a_server_that_is_started_again_gets_the_calls_that_follow(service: Service) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    port = gone.getsockname()[1]
    gone.close()
    service.answers = [ok({"jobs": []}), ok({"jobs": []})]
    restarts: list[str] = []

    def restart() -> str:
        restarts.append("once")
        return f"http://127.0.0.1:{service.port}"

    access = Access(
        "us-east-1", "", f"http://127.0.0.1:{port}", KEYS.access_key_id, KEYS.secret_access_key,
        restart=restart,
    )  # fmt: skip
    api = JobApi(Session(access))
    assert api.describe(["a"]) == api.describe(["a"]) == {}
    assert restarts == ["once"]


def test_other_operations_are_sent_by_botocore(service: Service) -> None:
    service.answers = [ok({"tags": {"a": "b"}})]
    client = service.session().client("batch")
    assert client.list_tags_for_resource(resourceArn="arn:x")["tags"] == {"a": "b"}
    assert service.requests[0].path == "/v1/tags/arn%3Ax"


def test_recorded_calls_are_sent_by_botocore(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("BATCHML_RECORDING", str(tmp_path / "calls"))
    service.answers = [ok({"jobs": []})]
    JobApi(service.session()).describe(["a"])
    assert b'"DescribeJobs"' in (tmp_path / "calls").read_bytes()
