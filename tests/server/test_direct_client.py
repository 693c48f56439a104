"""The client without botocore is the same as botocore's client, against one real server.

For each operation: the same bytes on the wire, the same answers, the same errors, and what botocore
refuses to send is refused too.
"""

import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError, ParamValidationError

from batchml.aws.batch.direct import OPERATIONS, DirectClient
from batchml.aws.session import Access, Session
from batchml.local.home import Home, ServerEndpoint
from batchml.local.server.protocol import service_model
from tests.support.generate import ODD, TORTURE, fitting, spoil
from tests.support.local_server import define, wait_for_job
from tests.support.server_rig import furnish

CALLS = 60 * TORTURE  # of each operation
PAIRS = [(service, method) for service, known in OPERATIONS.items() for method in known]
TEXT = 'a\tb é😀 \\u0041 "quoted" </script> \x7f\u2028'
_SAME = ("content-type", "x-amz-target", "host")
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_REVISION = re.compile(r'("revision": |:job-definition/\w+:)\d+')


class Both:
    """Both clients of a service, each with the last request that it has sent."""

    def __init__(self, session: Session, service: str, settings: dict[str, Any]) -> None:
        self.direct = session.client(service, 1)
        assert isinstance(self.direct, DirectClient)
        self.sdk = session._sdk_client(service, 1, "")
        self.sent: dict[str, tuple[str, dict[str, str], bytes]] = {}
        self.settings = settings
        self.sdk.meta.events.register("before-send.*", self._note_sdk)
        self.direct.connect = self._connect

    def _note_sdk(self, request: Any, **_: Any) -> None:
        parts = urlsplit(request.url)
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else str(value)
            for name, value in request.headers.items()
        }
        headers.setdefault("host", parts.netloc)
        body = request.body or b""
        self.sent["sdk"] = (
            f"{request.method} {parts.path}", headers,
            body if isinstance(body, bytes) else body.encode(),
        )  # fmt: skip

    def _connect(self, address: tuple[str, int], limit: float) -> socket.socket:
        note = self._note_direct

        class Tapped(socket.socket):
            def sendall(self, data: Any, flags: int = 0) -> None:
                note(bytes(data))
                super().sendall(data, flags)

        connection = Tapped(socket.AF_INET, socket.SOCK_STREAM)
        connection.settimeout(limit)
        connection.connect(address)
        return connection

    def _note_direct(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        self.sent["direct"] = (
            first.removesuffix(" HTTP/1.1"), {name.lower(): value for name, value in pairs}, body
        )  # fmt: skip

    def ask(self, who: str, method: str, request: dict[str, Any]) -> tuple[str, Any, str]:
        """What comes of a call: the kind, the answer or the error, and the HTTP status."""
        if method == "delete_consumable_resource":
            sent = dict(self.sent)
            with suppress(ClientError):
                self.sdk.create_consumable_resource(consumableResourceName="c", totalQuantity=1)
            self.sent = sent
        self.sent.pop(who, None)
        try:
            answer = getattr(getattr(self, who), method)(**request)
        except ParamValidationError:
            return "not sent", None, ""
        except ClientError as error:
            return "refused", *_plain(error.response)
        return "answered", *_plain(answer)


def _plain(answer: dict[str, Any]) -> tuple[Any, str]:
    """An answer without what is new with each call."""
    metadata = answer["ResponseMetadata"]
    assert metadata["RequestId"] == metadata["HTTPHeaders"]["x-amzn-requestid"] != ""
    left = {name: value for name, value in answer.items() if name != "ResponseMetadata"}
    left = {"Error": left["Error"]} if "Error" in left else left
    text = _REVISION.sub(r"\g<1>0", _ID.sub("ID", json.dumps(left, sort_keys=True)))
    return json.loads(text), str(metadata["HTTPStatusCode"])


@pytest.fixture
def both(home: Home, server: ServerEndpoint, batch: Any, logs: Any) -> Callable[[str], Both]:
    furnish(batch)
    print_text = define(batch, ["printf", "%s\n", TEXT, "x" * 3000], "talks")
    talks = [
        batch.submit_job(jobName="talks", jobQueue="default", jobDefinition=print_text)["jobId"]
        for _ in range(3)
    ]
    ended = [wait_for_job(batch, job_id) for job_id in talks]
    waits = batch.submit_job(
        jobName="waits", jobQueue="q", jobDefinition="d", tags={"é": TEXT.replace("\x7f", "")},
        arrayProperties={"size": 3},
    )  # fmt: skip
    settings = {
        "jobs": [*talks, waits["jobId"], f"{waits['jobId']}:1"],
        "streams": [job["container"]["logStreamName"] for job in ended],
    }
    keys = home.keys()
    access = Access("us-east-1", "", server.url, keys.access_key_id, keys.secret_access_key)
    session = Session(access)
    return lambda service: Both(session, service, settings)


def make_request(
    service: str, operation: str, known: dict[str, Any], chance: random.Random
) -> dict[str, Any]:
    """A request that fits, or one with some mistakes; with things that the server has."""
    shape = service_model(service).operation_model(operation).input_shape
    often = chance.choice([0.02, 0.1, 0.3])
    request = fitting(shape, chance, often)
    if "jobs" in shape.members and chance.random() < 0.8:
        request["jobs"] = chance.sample(known["jobs"], chance.randrange(1, 5))
    if "jobId" in request and chance.random() < 0.7:
        request["jobId"] = chance.choice(known["jobs"])
    if "consumableResource" in shape.members and chance.random() < 0.7:
        request["consumableResource"] = "c"
    if "arrayJobId" in shape.members and chance.random() < 0.3:
        request["arrayJobId"] = known["jobs"][3]
    if operation == "RegisterJobDefinition" and chance.random() < 0.7:
        properties = {"image": "i", "vcpus": 1, "memory": 64, "command": ["true", TEXT]}
        properties["environment"] = [{"name": "k", "value": text} for text in chance.sample(ODD, 2)]
        request |= {"type": "container", "containerProperties": properties}
        request["jobDefinitionName"] = chance.choice(["d", "e", "talks"])
        for name in set(request) - {"type", "containerProperties", "jobDefinitionName", "tags"}:
            del request[name]
    if service == "logs" and chance.random() < 0.8:
        request |= {"logGroupName": "/aws/batch/job"}
        for name in ("startTime", "endTime", "nextToken"):
            if chance.random() < 0.8:
                request.pop(name, None)
        if operation == "GetLogEvents":
            request["logStreamName"] = chance.choice(known["streams"])
    if chance.random() < 0.3:
        for _ in range(chance.choice([1, 1, 2])):
            request = spoil(request, chance)
    named = isinstance(request, dict) and all(isinstance(name, str) for name in request)
    return request if named else {}


@pytest.mark.parametrize(("service", "method"), PAIRS, ids=[method for _, method in PAIRS])
def test_whatever_is_asked_both_clients_send_and_return_the_same(
    both: Callable[[str], Both], service: str, method: str
) -> None:
    clients = both(service)
    name = OPERATIONS[service][method].name
    kinds: Counter[str] = Counter()
    for number in range(CALLS):
        chance = random.Random(f"{name} {number}")
        request = make_request(service, name, clients.settings, chance)
        sdk = clients.ask("sdk", method, request)
        direct = clients.ask("direct", method, request)
        what = f"{name} {number}: {json.dumps(request)[:2000]}"
        kinds[sdk[0]] += 1
        if sdk[0] == "not sent":
            assert direct[0] == "refused" and direct[2].startswith("4"), what
            continue
        if sdk != direct:  # a job may have gone on between both calls
            assert clients.ask("sdk", method, request) == direct, what
        first, second = clients.sent["sdk"], clients.sent["direct"]
        assert first[0] == second[0], what
        assert [first[1].get(each) for each in _SAME] == [second[1].get(each) for each in _SAME]
        assert scope_of(first[1]) == scope_of(second[1])
        assert first[2] == second[2], what
    assert kinds["answered"] >= CALLS // 20, kinds
    assert kinds["refused"] + kinds["not sent"] >= CALLS // 20, kinds


def scope_of(headers: dict[str, str]) -> str:
    """Algorithm, keys, region and service of a signature, without its day."""
    found = re.match(r"(\S+ Credential=[^/]+)/\d{8}/(\S+?/aws4_request)", headers["authorization"])
    assert found is not None and re.fullmatch(r"\d{8}T\d{6}Z", headers["x-amz-date"])
    return f"{found[1]}/{found[2]}"


def test_all_pages_are_those_of_botocore(both: Callable[[str], Both]) -> None:
    clients = both("batch")
    for method, request in (
        ("list_jobs", {"jobQueue": "default", "jobStatus": "SUCCEEDED", "maxResults": 1}),
        ("describe_job_definitions", {"maxResults": 1}),
        ("describe_job_queues", {"maxResults": 1}),
        ("describe_job_queues", {"jobQueues": ["nothing"]}),
    ):
        sdk, direct = (
            [_plain(page) for page in client.get_paginator(method).paginate(**request)]
            for client in (clients.sdk, clients.direct)
        )
        assert sdk == direct
        assert len(sdk) > 1 or "maxResults" not in request
