"""What a server on a port must expect: malformed, forged and hostile requests.

The malformed ones come from the service models: a valid request for each operation, with something
done to it. None may end in a 5xx, a traceback or a hang, and each answer is in AWS's shape.
"""

import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.local import protocol
from batchml.local.home import Endpoint, Home
from batchml.local.messages import Requested
from batchml.local.operations import HANDLERS
from batchml.local.protocol import service_model
from batchml.local.reads import READS
from batchml.local.server import _LOG_OPERATIONS
from batchml.local.sigv4 import MAX_SKEW, Keys
from batchml.local.wire import Refused, Request, Response
from tests.contract.rig import KEYS, PORT, Rig, error_of, furnish, sign, sign_logs

SERVED_BATCH = sorted({*HANDLERS, *(name for service, name in READS if service == "batch")})
SERVED_LOGS = sorted(_LOG_OPERATIONS)
PLAIN_BATCH = sorted(protocol._routes().values())
ALL_LOGS = sorted(service_model("logs").operation_names)
ALL_STS = sorted(service_model("sts").operation_names)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    furnish(made.client("batch"))
    yield made
    made.close()


def shape_of(service: str, operation: str) -> Any:
    return service_model(service).operation_model(operation).input_shape


def request_for(service: str, operation: str, body: bytes) -> Request:
    if service == "batch":
        return sign(f"/v1/{operation.lower()}", body)
    if service == "logs":
        return sign_logs(operation, body)
    form = {"content-type": "application/x-www-form-urlencoded"}
    return sign("/", body, service="sts", headers=form)


def check(answer: Response, service: str, what: str) -> None:
    """Never a 5xx; an error is in AWS's shape."""
    assert 200 <= answer.status < 500, f"{what}: {answer.status} {answer.body[:300]!r}"
    if answer.status != 200:
        error_of(answer, service)


# --- malformed, from the models ---------------------------------------------------------------


def sample(shape: Any, depth: int = 0) -> Any:
    """A value with every member of the shape, to some depth."""
    kind = shape.type_name
    if kind == "structure":
        wanted = shape.members if depth < 4 else shape.required_members
        return {name: sample(shape.members[name], depth + 1) for name in wanted}
    if kind == "list":
        return [sample(shape.member, depth + 1)]
    if kind == "map":
        return {"key": sample(shape.value, depth + 1)}
    if kind == "string":
        return shape.enum[0] if shape.enum else "a" * max(1, shape.metadata.get("min", 1))
    return {"boolean": True, "double": 1.5, "float": 1.5}.get(kind, 1)


DEEP: Any = []
for _ in range(200):
    DEEP = [{"a": DEEP}]
WRONG: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 10**30, 1.5, 1e300, "", "a" * 40_000, "\x00", "\ud800", "é\n",
    "' OR 1=1 --", "../../etc/passwd", [], [[]], [None], ["a"] * 3000, {}, {"\ud800": "x"},
    {"a": None}, {"": {"": {}}}, DEEP,
]  # fmt: skip


def bodies_for(service: str, operation: str) -> Iterator[tuple[str, bytes]]:
    """Bodies with one thing wrong in each."""
    shape = shape_of(service, operation)
    valid = sample(shape) if shape is not None else {}
    encoded = json.dumps(valid).encode()
    for name in valid:
        yield f"without {name}", json.dumps({k: v for k, v in valid.items() if k != name}).encode()
    chance = random.Random(operation)
    for place, wrong in enumerate(WRONG):
        name = chance.choice(sorted(valid)) if valid else "x"
        yield f"{name} wrong {place}", json.dumps({**valid, name: wrong}).encode()
        yield f"all wrong {place}", json.dumps(wrong).encode()
    yield "cut", encoded[:-1]
    yield "bad UTF-8", encoded.replace(b'"a', b'"\xff\xfe', 1) + b"\xff"
    yield "NaN", b'{"x": NaN}'
    yield "infinite", b'{"maxResults": 1e999}'
    yield "nothing", b""
    yield "deep", b"[" * 30_000
    yield "deep objects", b'{"a":' * 10_000
    yield "UTF-16", encoded.decode().encode("utf-16")


@pytest.mark.parametrize(
    ("service", "operations"),
    [
        ("batch", PLAIN_BATCH[0::3]),
        ("batch", PLAIN_BATCH[1::3]),
        ("batch", PLAIN_BATCH[2::3]),
        ("logs", SERVED_LOGS),
        ("logs", ALL_LOGS[::6]),
    ],
)
def test_a_malformed_request_is_refused_in_aws_s_shape(
    rig: Rig, service: str, operations: list[str]
) -> None:
    """B90."""
    count = 0
    for operation in operations:
        for what, body in bodies_for(service, operation):
            (answer,) = rig.handle(request_for(service, operation, body))
            check(answer, service, f"{operation} {what}")
            count += 1
    assert count > 50 * len(operations)


@pytest.mark.parametrize("operation", [*SERVED_BATCH, *SERVED_LOGS])
def test_a_missing_or_mistyped_member_is_always_named(rig: Rig, operation: str) -> None:
    service = "logs" if operation in SERVED_LOGS else "batch"
    shape = shape_of(service, operation)
    valid = sample(shape)
    for name, member in shape.members.items():
        wrong = {} if member.type_name != "structure" else "text"
        wrong = "text" if member.type_name == "map" else wrong
        changed = [{**valid, name: wrong}]
        if name in shape.required_members:
            changed.append({key: value for key, value in valid.items() if key != name})
        for params in changed:
            (answer,) = rig.handle(request_for(service, operation, json.dumps(params).encode()))
            assert answer.status == 400
            code, message = error_of(answer)
            assert code == (
                "ClientException" if service == "batch" else "InvalidParameterException"
            )
            assert f"'{name}'" in message


@pytest.mark.parametrize("operation", [*ALL_STS, "", "NoSuch", "\x00", "<b>&amp;", "\ud7ff\x1b"])
def test_a_malformed_sts_request_is_refused_in_aws_s_shape(rig: Rig, operation: str) -> None:
    bodies = [
        f"Action={operation}&Version=2011-06-15",
        f"Action={operation}&RoleArn=%00%ff&RoleSessionName=<x>",
        f"Action={operation}&DurationSeconds=abc&Tags.member.1.Key=%F0",
        f"Action={operation}&" + "a=b&" * 5000,
        f"action={operation}",
        "{}",
        "%",
        "Action",
    ]
    for body in (*(text.encode() for text in bodies), b"\xff\xfe", b""):
        (answer,) = rig.handle(request_for("sts", operation, body))
        check(answer, "sts", f"{operation!r} {body[:60]!r}")
        is_served = operation == "GetCallerIdentity" and body.startswith(b"Action=")
        assert (answer.status == 200) is is_served


def wild(shape: Any, chance: random.Random, depth: int = 0) -> Any:
    """A value that the shape allows, as odd as it can be."""
    kind = shape.type_name
    if kind == "structure":
        names = [n for n in shape.members if chance.random() < 0.5 or n in shape.required_members]
        return {name: wild(shape.members[name], chance, depth + 1) for name in names}
    if kind == "list":
        return [wild(shape.member, chance, depth + 1) for _ in range(chance.choice([0, 1, 1, 3]))]
    if kind == "map":
        return {chance.choice(["k", "a.b", "é"]): wild(shape.value, chance, depth + 1)}
    if kind == "string":
        odd = [
            "q",
            "d",
            "d:1",
            "ce",
            "1",
            "64",
            "",
            "*",
            "Ref::k",
            "é😀",
            "-5",
            "0",
            "1_0",
            "\u0661",
        ]
        return chance.choice(shape.enum or [*odd, "9" * 5000, "x" * 300, "arn:aws:batch:::job/"])
    if kind in ("integer", "long"):
        edge = 2**31 if kind == "integer" else 2**63
        return chance.choice([0, 1, 2, 60, 100, -1, edge - 1, -edge])
    return chance.random() < 0.5 if kind == "boolean" else 1.5


@pytest.mark.parametrize("seed", range(4))
def test_odd_requests_that_the_shapes_allow_are_survived(rig: Rig, seed: int) -> None:
    """B91. Many are accepted, so the state they meet is odd as well."""
    chance = random.Random(seed)
    accepted = 0
    for _ in range(500):
        operation = chance.choice([*SERVED_BATCH, *SERVED_LOGS, "SubmitJob", "SubmitJob"])
        service = "logs" if operation in SERVED_LOGS else "batch"
        params = wild(shape_of(service, operation), chance)
        if chance.random() < 0.7:  # closer to what is accepted
            known = {
                "jobName": "n", "jobQueue": "q", "jobDefinition": "d", "type": "container",
                "retryStrategy": {"attempts": 2}, "timeout": {}, "dependsOn": [],
                "arrayProperties": {}, "jobDefinitionName": "d", "logGroupName": "/aws/batch/job",
            }  # fmt: skip
            params |= {k: v for k, v in known.items() if k in shape_of(service, operation).members}
            for name in ("nodeOverrides", "nodeProperties", "shareIdentifier", "jobQueueType"):
                params.pop(name, None)
        (answer,) = rig.handle(request_for(service, operation, json.dumps(params).encode()))
        check(answer, service, f"{operation} {params}")
        accepted += answer.status == 200
    assert accepted > 50


@pytest.mark.parametrize(
    "container",
    [
        {"environment": [{"value": "no name"}]},
        {"environment": [{"name": "", "value": "x"}]},
        {"resourceRequirements": [{"type": "VCPU", "value": "9" * 4000}]},
        {"resourceRequirements": [{"type": "VCPU", "value": "1_0"}]},
        {"resourceRequirements": [{"type": "MEMORY", "value": "3"}]},
        {"resourceRequirements": [{"type": "GPU", "value": "0"}]},
        {"resourceRequirements": [{"type": "VCPU", "value": "0.5"}]},
    ],
)
def test_a_container_that_cannot_be_run_is_refused(rig: Rig, container: dict[str, Any]) -> None:
    batch = rig.client("batch")
    with pytest.raises(batch.exceptions.ClientException):
        batch.submit_job(jobName="n", jobQueue="q", jobDefinition="d", containerOverrides=container)
    with pytest.raises(batch.exceptions.ClientException):
        properties = {"image": "i", "vcpus": 1, "memory": 64, **container}
        batch.register_job_definition(
            jobDefinitionName="n", type="container", containerProperties=properties
        )


TOKENS = [
    "x", "f/", "f/-1", "b/99999999999999999999", "f/1e9", "é", "W10=", "e30=", "bnVsbA==",
    "LTE=", "MWU5OTk=", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk5", "W1tb", "eyJhIjotMX0=",
    "eyJhIjoxZTk5OX0=", "eyJhIjoiYiJ9", "/w==", "W1tb" * 5000, "eyJzdGFydCI6LTF9", "dHJ1ZQ==",
]  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_a_made_up_token_is_refused(rig: Rig, token: str) -> None:
    batch, logs = rig.client("batch"), rig.client("logs")
    job_id = batch.submit_job(jobName="n", jobQueue="q", jobDefinition="d")["jobId"]
    (job,) = batch.describe_jobs(jobs=[job_id])["jobs"]
    group = "/aws/batch/job"
    stream = job["container"]["logStreamName"]
    calls: dict[str, dict[str, Any]] = {
        "ListJobs": {"jobQueue": "q", "jobStatus": "STARTING"},
        "DescribeJobDefinitions": {},
        "GetLogEvents": {"logGroupName": group, "logStreamName": stream},
        "FilterLogEvents": {"logGroupName": group},
        "DescribeLogStreams": {"logGroupName": group},
    }
    for operation, params in calls.items():
        service = "logs" if operation in SERVED_LOGS else "batch"
        body = json.dumps({**params, "nextToken": token}).encode()
        (answer,) = rig.handle(request_for(service, operation, body))
        check(answer, service, operation)
        # `{}` is what a token of offsets may well be; everything else was never given out.
        assert answer.status == 400 or (token == "e30=" and service == "logs")
    assert logs.describe_log_groups()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200), ("application/x-amz-json-1.1", 200),
        ("application/json; charset=utf-8", 200), ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415), ("multipart/form-data", 415), ("", 415),
    ],
)  # fmt: skip
def test_only_json_is_read(rig: Rig, content_type: str, status: int) -> None:
    (answer,) = rig.handle(sign(headers={"content-type": content_type}))
    assert answer.status == status
    check(answer, "batch", content_type)


def test_an_operation_that_is_not_served_gets_a_typed_error(rig: Rig) -> None:
    """B92."""
    unserved = [name for name in PLAIN_BATCH if name not in SERVED_BATCH]
    assert unserved
    for operation in unserved:
        body = json.dumps(sample(shape_of("batch", operation))).encode()
        (answer,) = rig.handle(request_for("batch", operation, body))
        assert (answer.status, error_of(answer)[0]) == (400, "ClientException")
    for method in ("GET", "POST", "DELETE"):
        (answer,) = rig.handle(sign("/v1/tags/arn%3Aaws", method=method))
        assert error_of(answer)[0] == "ClientException"


def test_a_request_that_the_rules_fail_on_does_not_end_the_server(rig: Rig) -> None:
    """B91."""
    before = rig.core.state
    unknown = Requested("NoSuchOperation", {}, 0, "id", "request-7")
    with pytest.raises(Refused, match=r"server\.log has request-7") as refused:
        rig.loop.run_until_complete(rig.core.request(unknown))
    assert (refused.value.code, refused.value.status) == ("ServerException", 500)
    assert rig.handle(sign())[0].status == 200
    assert rig.core.state is before


@pytest.mark.parametrize("path", ["/", "/v1/", "/v1/nosuch", "/v2/submitjob", "/v1/SubmitJob"])
def test_an_unknown_path_is_answered_in_json(rig: Rig, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        (answer,) = rig.handle(sign(path, method=method))
        assert (answer.status, error_of(answer)[0]) == (404, "UnknownOperationException")
    (answer,) = rig.handle(sign(path, service="s3"))
    assert (answer.status, error_of(answer)[0]) == (404, "UnknownOperationException")


@pytest.mark.parametrize("member", ["tags", "parameters"])
def test_a_mistake_that_cannot_be_quoted_is_still_named(rig: Rig, member: str) -> None:
    """Half a surrogate pair as a key ends up in the message, and has no UTF-8."""
    job = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d", member: {"\ud800": "x"}}
    (answer,) = rig.handle(request_for("batch", "SubmitJob", json.dumps(job).encode()))
    assert answer.status == 400
    assert f"'{member}.?' must be valid Unicode" in error_of(answer)[1]


def test_a_body_over_the_limit_is_refused(rig: Rig) -> None:
    """B93."""
    for size, status in ((protocol.MAX_BODY, 200), (protocol.MAX_BODY + 1, 413)):
        (answer,) = rig.handle(sign(body=b"{}".ljust(size)))
        assert answer.status == status
        check(answer, "batch", str(size))


# --- forged ----------------------------------------------------------------------------------

BODIES = {
    "SubmitJob": b'{"jobName": "evil", "jobQueue": "q", "jobDefinition": "d"}',
    "TerminateJob": b'{"jobId": "x", "reason": "r"}',
    "UpdateJobQueue": b'{"jobQueue": "q", "state": "DISABLED"}',
    "DescribeJobQueues": b"{}",
}
BROWSER = [
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": f"http://127.0.0.1:{PORT}"},
    {"origin": "file://"}, {"referer": "http://evil.example/page"},
    {"referer": f"http://localhost:{PORT}/"}, {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "same-origin"},
    {"origin": "http://evil.example", "access-control-request-method": "POST"},
]  # fmt: skip
HOSTS = [
    "evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1:{PORT + 1}", "localhost",
    f"127.0.0.1.nip.io:{PORT}", f"0.0.0.0:{PORT}", f"127.0.0.2:{PORT}", f"[::]:{PORT}",
    f"localhost.evil.example:{PORT}", f"batch.us-east-1.amazonaws.com:{PORT}", f"127.1:{PORT}",
]  # fmt: skip


def without(request: Request, *names: str) -> Request:
    return replace(request, headers=tuple(h for h in request.headers if h[0] not in names))


def forged() -> Iterator[tuple[str, Request]]:
    for operation, body in BODIES.items():
        path = f"/v1/{operation.lower()}"
        good = sign(path, body)
        yield "unsigned", without(good, "authorization")
        yield "unsigned and undated", without(good, "authorization", "x-amz-date")
        yield "wrong secret", sign(path, body, keys=Keys(KEYS.access_key_id, "wrong"))
        yield "wrong key", sign(path, body, keys=Keys("AKIAWRONG", KEYS.secret_access_key))
        yield "both wrong", sign(path, body, keys=Keys("test", "test"))
        yield "another body", replace(good, body=body + b" ")
        yield "another path", replace(sign("/v1/describejobs", body), path=path)
        yield "a query", replace(good, query="a=b")
        yield (
            "presigned",
            replace(
                without(good, "authorization"),
                query="X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature",
            ),
        )
        for extra in BROWSER:
            yield f"browser {extra}", sign(path, body, headers=extra)
            yield (
                f"unsigned browser {extra}",
                replace(good, headers=(*good.headers, *extra.items())),
            )
        for host in HOSTS:
            yield f"host {host}", sign(path, body, url=f"http://{host}")
        yield "no host", without(good, "host")
        for method in ("OPTIONS", "HEAD", "PUT", "PATCH", "TRACE", "CONNECT"):
            yield method, sign(path, body, method=method)


def test_no_forged_request_is_accepted(rig: Rig) -> None:
    """B70-B75."""
    before = rig.core.state
    count = 0
    for what, request in forged():
        (answer,) = rig.handle(request)
        assert answer.status in (403, 405, 421), f"{what}: {answer.status}"
        error_of(answer)
        assert not any("access-control" in name for name, _ in answer.headers)
        count += 1
    assert count >= 100
    assert rig.core.state is before


@pytest.mark.parametrize("ahead", [MAX_SKEW + 2, 3600, 86_400, -MAX_SKEW - 2, -86_400])
def test_a_request_that_was_seen_is_of_no_use_at_another_time(rig: Rig, ahead: float) -> None:
    seen = [sign(f"/v1/{name.lower()}", body) for name, body in BODIES.items()]
    rig.clock.ahead = ahead
    for answer in rig.handle(*seen):
        assert (answer.status, error_of(answer)[0]) == (403, "InvalidSignatureException")
    assert not rig.core.state.jobs


def test_what_is_signed_for_one_service_is_not_taken_by_another(rig: Rig) -> None:
    body = BODIES["SubmitJob"]
    (answer,) = rig.handle(sign("/v1/submitjob", body, service="logs"))
    assert answer.status == 400
    assert not rig.core.state.jobs


def test_the_request_they_were_made_from_is_accepted(rig: Rig) -> None:
    """Without this the forged ones might be refused for any reason."""
    answers = rig.handle(
        *(sign(f"/v1/{name.lower()}", body) for name, body in BODIES.items()),
        sign(url=f"http://localhost:{PORT}"),
        sign(url=f"http://[::1]:{PORT}"),
        sign(headers={"sec-fetch-site": "none"}),
    )
    assert [answer.status for answer in answers] == [200] * 7


# --- over HTTP --------------------------------------------------------------------------------


def test_hostile_requests_over_http_leave_the_server_well(
    home: Home, server: Endpoint, batch: Any
) -> None:
    keys = home.keys()

    def send(request: Request, body: Any = None) -> tuple[int, bytes]:
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
    tricks: list[tuple[Request, int]] = [
        (huge, 413),
        (without(good, "authorization"), 403),
        (replace(good, headers=(("host", "evil.example"), *good.headers[1:])), 421),
        (replace(good, headers=(*good.headers, ("origin", "http://evil.example"))), 403),
        (sign("/v1/submitjob", b"\xff", keys=keys, url=server.url), 400),
        (sign("/v1/submitjob", b"[" * 30_000, keys=keys, url=server.url), 400),
        (sign("/v1/submitjob", b'{"jobName": "\\ud800"}', keys=keys, url=server.url), 400),
        (sign("/v1/%ff%00", keys=keys, url=server.url), 404),
    ]
    for request, status in tricks:
        found, body = send(request)
        assert found == status
        assert json.loads(body)["__type"]
    assert batch.describe_job_queues()["jobQueues"][0]["status"] == "VALID"
    assert "Traceback" not in home.log.read_text()
