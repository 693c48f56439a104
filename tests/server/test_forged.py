"""Requests that nobody with our keys has made, or that somebody else sends again.

A thousand of them, by chance but repeatably (BATCHML_TORTURE=20 makes it twenty thousand): none is
accepted, none changes anything. docs/behaviours.md B70-B75, B110, B114, B115.
"""

import http.client
import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from msgspec.structs import replace

from batchml.local.home import AccessKeys, Home, ServerEndpoint
from batchml.local.server import protocol
from batchml.local.server.auth import FRESH, MAX_SKEW, claimed_service
from batchml.local.server.protocol import HttpRequest
from tests.support.generate import TORTURE
from tests.support.server_rig import KEYS, PORT, URL, Rig, error_of, furnish, read, sign, sign_logs

QUEUE = "arn:aws:batch:us-east-1:000000000000:job-queue/q"
BODIES = {
    "SubmitJob": b'{"jobName": "evil", "jobQueue": "q", "jobDefinition": "d"}',
    "TerminateJob": b'{"jobId": "x", "reason": "r"}',
    "UpdateJobQueue": b'{"jobQueue": "q", "state": "DISABLED"}',
    "DeregisterJobDefinition": b'{"jobDefinition": "d:1"}',
    "RegisterJobDefinition": b'{"jobDefinitionName": "d", "type": "container", '
    b'"containerProperties": {"image": "i", "vcpus": 1, "memory": 64}}',
    "DescribeJobQueues": b"{}",
}
HOSTS = [
    "evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}", "localhost", "",
    f"127.0.0.1.nip.io:{PORT}", f"0.0.0.0:{PORT}", f"127.0.0.2:{PORT}", f"[::]:{PORT}",
    f"localhost.evil.example:{PORT}", f"batch.us-east-1.amazonaws.com:{PORT}", f"127.1:{PORT}",
    f"LOCALHOST:{PORT}x", f"localhost:{PORT}@evil.example", f"localhost.:{PORT}",
    f"user@localhost:{PORT}",
]  # fmt: skip
ORIGINS = [
    "http://evil.example",
    "null",
    f"http://127.0.0.1:{PORT}",
    "file://",
    "chrome-extension://a",
]
METHODS = ["OPTIONS", "HEAD", "PUT", "PATCH", "TRACE", "CONNECT", "post", "SUBMIT"]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    furnish(made.client("batch"))
    yield made
    made.close()


def base(chance: random.Random, **more: Any) -> HttpRequest:
    """A request as its owner makes it: most of them would change something."""
    kind = chance.random()
    if kind < 0.1 and "headers" not in more:
        return sign_logs("DescribeLogGroups", b"{}") if not more else sign(service="logs", **more)
    if kind < 0.2:
        return sign(f"/v1/tags/{quote(QUEUE, safe='')}", b'{"tags": {"evil": "yes"}}', **more)
    name = chance.choice(list(BODIES))
    return sign(f"/v1/{name.lower()}", BODIES[name], **more)


def without(request: HttpRequest, *names: str) -> HttpRequest:
    return replace(request, headers=tuple(h for h in request.headers if h[0] not in names))


def put(request: HttpRequest, name: str, value: str) -> HttpRequest:
    """With the header in place of the one that is there."""
    return replace(request, headers=(*without(request, name).headers, (name, value)))


def added(request: HttpRequest, name: str, value: str, *, first: bool = False) -> HttpRequest:
    extra = ((name, value),)
    headers = (*extra, *request.headers) if first else (*request.headers, *extra)
    return replace(request, headers=headers)


def authorized(request: HttpRequest, change: Callable[[str], str]) -> HttpRequest:
    return put(request, "authorization", change(request.header("authorization")))


class _Unsigned(SigV4Auth):  # type: ignore[misc]
    """Signs rightly, all but the body: AWS takes it for S3."""

    def payload(self, request: Any) -> str:
        return str(request.headers["x-amz-content-sha256"])


def unsigned_payload(chance: random.Random) -> HttpRequest:
    kinds = [
        "UNSIGNED-PAYLOAD",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    ]
    headers = {"content-type": "application/json", "x-amz-content-sha256": chance.choice(kinds)}
    name = chance.choice(list(BODIES))
    made = AWSRequest("POST", f"{URL}/v1/{name.lower()}", headers=headers, data=BODIES[name])
    _Unsigned(Credentials(*_pair(KEYS)), "batch", "us-east-1").add_auth(made)
    return read("POST", made.url, made.headers, BODIES[name])


def presigned(chance: random.Random) -> HttpRequest:
    """With the signature in the query, right in every way: a link that can be passed on."""
    name = chance.choice(list(BODIES))
    method = chance.choice(["POST", "GET", "DELETE"])
    made = AWSRequest(method, f"{URL}/v1/{name.lower()}", data=BODIES[name])
    SigV4QueryAuth(Credentials(*_pair(KEYS)), "batch", "us-east-1", expires=300).add_auth(made)
    return read(method, made.url, made.headers, BODIES[name])


def _pair(keys: AccessKeys) -> tuple[str, str]:
    return keys.access_key_id, keys.secret_access_key


def _flipped(text: str, chance: random.Random) -> str:
    place = len(text) - 1 - chance.randrange(64)
    return (
        text[:place]
        + chance.choice([c for c in "0123456789abcdef" if c != text[place]])
        + text[place + 1 :]
    )


def unsigned(chance: random.Random) -> HttpRequest:
    gone = chance.choice(
        [["authorization"], ["authorization", "x-amz-date"], ["x-amz-date"], ["host"]]
    )
    return without(base(chance), *gone)


def other_keys(chance: random.Random) -> HttpRequest:
    keys = chance.choice(
        [
            AccessKeys(KEYS.access_key_id, "wrong"),
            AccessKeys("AKIAWRONG", KEYS.secret_access_key),
            AccessKeys("test", "test"), AccessKeys("BMLLOCALOTHER", "of another state folder"),
            AccessKeys(KEYS.access_key_id.lower(), KEYS.secret_access_key),
            AccessKeys(KEYS.access_key_id, KEYS.secret_access_key + " "),
        ]
    )  # fmt: skip
    return base(chance, keys=keys)


def altered(chance: random.Random) -> HttpRequest:
    """One thing changed after it was signed."""
    good = base(chance)
    changes: list[Callable[[], HttpRequest]] = [
        lambda: replace(good, body=good.body + b" "),
        lambda: replace(good, body=good.body[:-1] or b"{}"),
        lambda: replace(good, body=BODIES["SubmitJob"] + b"\n"),
        lambda: replace(good, path="/v1/deletejobqueue"),
        lambda: replace(good, path=good.path + "x"),
        lambda: replace(good, path="/v1/" + good.path.removeprefix("/v1/").upper()),
        lambda: replace(good, query="a=b"),
        lambda: replace(good, query="tagKeys=k"),
        lambda: replace(good, method="DELETE" if good.method != "DELETE" else "POST"),
        lambda: replace(good, method="GET" if good.method != "GET" else "POST"),
        lambda: put(good, "content-type", "application/x-amz-json-1.1; x"),
        lambda: put(good, "x-amz-date", good.header("x-amz-date")[:-7] + "000000Z"),
        lambda: put(good, "host", f"localhost:{PORT}"),
        lambda: added(good, "x-amz-target", "Logs_20140328.DeleteLogGroup", first=True),
        lambda: added(good, "x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        lambda: added(good, "x-amz-security-token", "token"),
    ]
    return chance.choice(changes)()


def wrong_authorization(chance: random.Random) -> HttpRequest:
    changes: list[Callable[[str], str]] = [
        lambda a: "", lambda a: "Basic YTpi", lambda a: "Bearer x", lambda a: a[:-1],
        lambda a: a + "0",
        lambda a: a.replace("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256"),
        lambda a: a.replace("AWS4-HMAC-SHA256", "AWS4-HMAC-SHA1"),
        lambda a: a.replace("us-east-1", "eu-west-1"), lambda a: a.replace("/batch/", "/sts/"),
        lambda a: a.replace("/20", "/19", 1), lambda a: a.replace("aws4_request", "aws4_requesT"),
        lambda a: a.replace("content-type;", ""), lambda a: a.replace("host;", ""),
        lambda a: a.replace(";x-amz-date", ""), lambda a: a.replace("host;", "host;host;"),
        lambda a: a.replace("SignedHeaders=", "SignedHeaders=;"), lambda a: a.upper(),
        lambda a: a + "\n",
        lambda a: a.replace("Signature=", "Signature=0,Signature="), lambda a: _flipped(a, chance),
        lambda a: a.replace("host;", "host;" + "a;" * 3000), lambda a: _flipped(a, chance),
        lambda a: a[:-64] + "0" * 64, lambda a: a[:-64], lambda a: " " + a,
        lambda a: a.replace(", ", ";"),
    ]  # fmt: skip
    change = chance.choice(changes)
    good = base(chance)
    if change(good.header("authorization")) == good.header("authorization"):
        return authorized(good, lambda a: a[:-1])  # the change was for another kind of request
    return authorized(good, change)


def twice(chance: random.Random) -> HttpRequest:
    good = base(chance)
    name = chance.choice(["authorization", "x-amz-date", "host", "content-type"])
    value = chance.choice([good.header(name), "other"])
    return added(good, name, value, first=chance.random() < 0.5)


def browser(chance: random.Random) -> HttpRequest:
    """Signed rightly, as if the keys had leaked into a page, or not signed at all."""
    kind = chance.choice(["origin", "referer", "sec-fetch-site", "preflight", "form"])
    origin = chance.choice(ORIGINS)
    if kind == "form":
        body = b'{"jobName": "evil", "jobQueue": "q", "jobDefinition": "d", "x": "=b"}'
        content = chance.choice(
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
        )
        headers = (("host", f"127.0.0.1:{PORT}"), ("content-type", content), ("origin", origin))
        return HttpRequest("POST", "/v1/submitjob", "", headers, body)
    if kind == "preflight":
        asked = (
            ("host", f"127.0.0.1:{PORT}"), ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-private-network", "true"),
            ("access-control-request-headers", "authorization,content-type,x-amz-date"),
        )  # fmt: skip
        return HttpRequest("OPTIONS", "/v1/submitjob", "", asked, b"")
    site = chance.choice(["cross-site", "same-site", "same-origin"])
    value = {"origin": origin, "referer": origin + "/page", "sec-fetch-site": site}[kind]
    if chance.random() < 0.5:
        return added(base(chance), kind, value)
    return base(chance, headers={kind: value})


def rebound(chance: random.Random) -> HttpRequest:
    """Signed for the name by which a page got here."""
    host = chance.choice([host for host in HOSTS if host])
    if chance.random() < 0.3:
        return put(base(chance), "host", chance.choice(HOSTS))
    try:
        return base(chance, url=f"http://{host}")
    except ValueError:
        return put(base(chance), "host", host)


def other_method(chance: random.Random) -> HttpRequest:
    made = base(chance, method=chance.choice(METHODS))
    return added(made, "x-http-method-override", "POST") if chance.random() < 0.3 else made


KINDS: list[Callable[[random.Random], HttpRequest]] = [
    unsigned, other_keys, altered, wrong_authorization, twice, browser, rebound, other_method,
    unsigned_payload, presigned,
]  # fmt: skip
_PART = 250


@pytest.mark.parametrize("part", range(1000 * TORTURE // _PART))
def test_no_forged_request_is_accepted(rig: Rig, part: int) -> None:
    """B70-B75."""
    before = rig.core.state
    for number in range(part * _PART, (part + 1) * _PART):
        make = KINDS[number % len(KINDS)]
        request = make(random.Random(number))
        (answer,) = rig.handle(request)
        what = f"{make.__name__}(random.Random({number})): {answer.status}"
        assert answer.status in (403, 405, 421), what
        error_of(answer, claimed_service(request))
        assert not any("access-control" in name for name, _ in answer.headers), what
        assert rig.core.state is before, what


def test_the_requests_they_were_made_from_are_accepted(rig: Rig) -> None:
    """Without this the forged ones might be refused for any reason."""
    good = [base(random.Random(number)) for number in range(60)]
    assert {rig.handle(request)[0].status for request in good} <= {200, 400}
    assert rig.core.state.jobs
    answers = rig.handle(
        sign(url=f"http://localhost:{PORT}"),
        sign(url=f"http://[::1]:{PORT}"),
        sign(headers={"sec-fetch-site": "none"}),
        *(sign(f"/v1/{name.lower()}", body) for name, body in BODIES.items() if name[0] != "D"),
    )
    assert 200 in {answer.status for answer in answers[3:]}
    assert [answer.status for answer in answers[:3]] == [200] * 3


@pytest.mark.parametrize("ahead", [MAX_SKEW + 2, 3600, 86_400, -MAX_SKEW - 2, -86_400])
def test_a_recorded_request_is_refused_at_another_time(rig: Rig, ahead: float) -> None:
    """B73."""
    before = rig.core.state
    seen = [sign(f"/v1/{name.lower()}", body) for name, body in BODIES.items()]
    rig.clock.ahead = ahead
    for answer in rig.handle(*seen):
        assert (answer.status, error_of(answer)[0]) == (403, "InvalidSignatureException")
    assert rig.core.state is before


@pytest.mark.parametrize("seed", range(4 * TORTURE))
def test_a_request_that_is_sent_again_does_nothing_again(rig: Rig, seed: int) -> None:
    """B114, B115: whatever that is not signed is changed, and whatever has happened meanwhile."""
    chance = random.Random(seed)
    seen = []
    for number in range(25):
        body = json.dumps({"jobName": f"j{number}", "jobQueue": "q", "jobDefinition": "d"}).encode()
        made = sign("/v1/submitjob", body)
        if chance.random() < 0.7:
            made = added(made, "amz-sdk-invocation-id", f"{seed}-{number}")
        seen.append(made)
    first = [json.loads(answer.body)["jobId"] for answer in rig.handle(*seen)]
    assert len({*first}) == len(seen)
    made_once = {*rig.core.state.jobs}
    rig.clock.ahead = FRESH + 1
    for _ in range(100):
        place = chance.randrange(len(seen))
        again = seen[place]
        for _ in range(chance.choice([0, 1, 2])):
            name = chance.choice(
                ["user-agent", "amz-sdk-invocation-id", "amz-sdk-request", "x-forwarded-for"]
            )
            again = put(again, name, f"{chance.random()}")
        (answer,) = rig.handle(again)
        assert answer.status in (200, 429)
        if answer.status == 200:
            assert json.loads(answer.body)["jobId"] == first[place]
        rig.clock.ahead = min(rig.clock.ahead + chance.choice([0, 1, 5]), MAX_SKEW - 5)
        if chance.random() < 0.1 and rig.core.state.jobs:
            job_id = chance.choice(sorted(rig.core.state.jobs))
            batch = rig.client("batch")
            batch.terminate_job(jobId=job_id, reason=f"{chance.random()}")
    assert {*rig.core.state.jobs} <= made_once


def test_what_is_signed_for_one_service_is_not_taken_by_another(rig: Rig) -> None:
    before = rig.core.state
    for service in ("logs", "sts", "s3", "ecs"):
        for name, body in BODIES.items():
            (answer,) = rig.handle(sign(f"/v1/{name.lower()}", body, service=service))
            assert answer.status in (400, 404)
    assert rig.core.state is before


# --- over HTTP --------------------------------------------------------------------------------


def test_hostile_requests_over_http_leave_the_server_well(
    home: Home, server: ServerEndpoint, batch: Any
) -> None:
    keys = home.keys()

    def send(request: HttpRequest) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.putrequest(request.method, request.path, skip_host=True)
        for name, value in request.headers:
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(request.body)))
        connection.endheaders(request.body)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    good = sign(keys=keys, url=server.url)
    assert send(good)[0] == 200
    huge = sign(keys=keys, url=server.url, body=b" " * (protocol.MAX_BODY + 1))
    tricks: list[tuple[HttpRequest, int]] = [
        (huge, 413),
        (without(good, "authorization"), 403),
        (replace(good, headers=(("host", "evil.example"), *good.headers[1:])), 421),
        (replace(good, headers=(*good.headers, ("origin", "http://evil.example"))), 403),
        (sign("/v1/submitjob", b"\xff", keys=keys, url=server.url), 400),
        (sign("/v1/submitjob", b"[" * 30_000, keys=keys, url=server.url), 400),
        (sign("/v1/submitjob", b'{"jobName": "\\ud800"}', keys=keys, url=server.url), 400),
        (sign("/v1/%ff%00", keys=keys, url=server.url), 404),
        (sign(headers={"x-long": "a" * 16_200}, keys=keys, url=server.url), 431),
        (sign(method="OPTIONS", keys=keys, url=server.url), 405),
    ]
    for request, status in tricks:
        found, body = send(request)
        assert found == status
        assert json.loads(body)["__type"]
    assert batch.describe_job_queues()["jobQueues"][0]["status"] == "VALID"
    assert "Traceback" not in home.log.read_text()


def test_a_body_without_end_is_cut_off(home: Home, server: ServerEndpoint, batch: Any) -> None:
    """B93."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 10**9:
                sent += peer.send(bytes(65_536))
    assert batch.describe_job_queues()["jobQueues"]


def test_a_thousand_silent_connections_harm_nobody(
    home: Home, server: ServerEndpoint, batch: Any
) -> None:
    """B110. (Ten thousand as well, where a process may open as many files.)"""
    port = urlsplit(server.url).port
    peers = []
    try:
        for number in range(600 * TORTURE):
            peer = socket.create_connection(("127.0.0.1", port), timeout=20)
            peer.sendall(b"POST /v1/describejobs HTTP/1.1\r\nhost: "[: number % 40])
            peers.append(peer)
            if number % 100 == 0:
                assert batch.describe_job_queues()["jobQueues"]
        assert batch.describe_job_queues()["jobQueues"]
    finally:
        for peer in peers:
            peer.close()
    assert "Traceback" not in home.log.read_text()
