"""How single mistakes are answered: docs/behaviours.md B90-B94, B113.

By the thousand and by chance they come in test_malformed.py, forged ones in test_forged.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from botocore.exceptions import ClientError

from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.reads import READS
from batchml.local.logs.api import LOG_OPERATIONS
from batchml.local.server import protocol
from batchml.local.server.protocol import ApiError, HttpRequest, HttpResponse, service_model
from tests.support.server_rig import Rig, error_of, furnish, sign, sign_logs

SERVED_BATCH = sorted({*HANDLERS, *(name for service, name in READS if service == "batch")})
SERVED_LOGS = sorted(LOG_OPERATIONS)
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


def request_for(service: str, operation: str, body: bytes) -> HttpRequest:
    if service == "batch":
        return sign(f"/v1/{operation.lower()}", body)
    if service == "logs":
        return sign_logs(operation, body)
    form = {"content-type": "application/x-www-form-urlencoded"}
    return sign("/", body, service="sts", headers=form)


def check(answer: HttpResponse, service: str, what: str) -> None:
    """Never a 5xx; an error is in AWS's shape."""
    assert 200 <= answer.status < 500, f"{what}: {answer.status} {answer.body[:300]!r}"
    if answer.status != 200:
        error_of(answer, service)


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


@pytest.mark.parametrize("operation", [*sorted({*SERVED_BATCH} & {*PLAIN_BATCH}), *SERVED_LOGS])
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


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["a", ""]},
        {"resourceRequirements": [{"type": "VCPU", "value": "9" * 4000}]},
        {"resourceRequirements": [{"type": "VCPU", "value": "1_0"}]},
        {"resourceRequirements": [{"type": "MEMORY", "value": "3"}]},
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


def test_what_aws_takes_is_taken(rig: Rig) -> None:
    """B94: an empty `tags`, a variable without a name, no GPU, an action in small letters."""
    batch = rig.client("batch")
    rule = {"onExitCode": "1*", "action": "exit"}
    container: Any = {
        "environment": [{"value": "no name"}, {"name": "A", "value": "1"}],
        "resourceRequirements": [{"type": "GPU", "value": "0"}],
    }
    batch.register_job_definition(
        jobDefinitionName="lax", type="container", tags={},
        containerProperties={"image": "i", "vcpus": 1, "memory": 64, **container},
        retryStrategy={"attempts": 2, "evaluateOnExit": [rule]},
    )  # fmt: skip
    job = batch.submit_job(
        jobName="n", jobQueue="q", jobDefinition="lax", tags={}, containerOverrides=container
    )["jobId"]
    (found,) = batch.describe_jobs(jobs=[job])["jobs"]
    assert found["tags"] == {}
    assert found["container"]["environment"] == [{"name": "A", "value": "1"}]
    assert found["retryStrategy"]["evaluateOnExit"] == [{**rule, "action": "EXIT"}]
    (definition,) = batch.describe_job_definitions(jobDefinitionName="lax")["jobDefinitions"]
    assert definition["retryStrategy"]["evaluateOnExit"] == [{**rule, "action": "EXIT"}]
    shown = definition["containerProperties"]
    assert [name for name in shown if shown[name] == []] == [
        "command", "volumes", "mountPoints", "ulimits",
    ]  # fmt: skip
    tags = {"resourceArn": found["jobArn"], "tags": {}}
    assert batch.tag_resource(**tags)["ResponseMetadata"]["HTTPStatusCode"] == 200
    for many in (101, 5000):  # beyond AWS's range, which it does not say that it enforces
        assert batch.list_jobs(arrayJobId=job, maxResults=many)["jobSummaryList"] == []
        assert batch.describe_job_queues(maxResults=many)["jobQueues"]


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
        assert answer.status == 400
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
    unknown = CallReceived("NoSuchOperation", {}, 0, "id", "request-7")
    with pytest.raises(ApiError, match=r"server\.log has request-7") as refused:
        rig.loop.run_until_complete(rig.core.request(unknown))
    assert (refused.value.code, refused.value.status) == ("ServerException", 500)
    assert rig.handle(sign())[0].status == 200
    assert rig.core.state is before


@pytest.mark.parametrize("path", ["/", "/v1/", "/v1/nosuch", "/v2/submitjob", "/v1/SubmitJob"])
def test_an_unknown_path_is_answered_in_json(rig: Rig, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        (answer,) = rig.handle(sign(path, method=method))
        assert (answer.status, error_of(answer)[0]) == (404, "UnknownOperationException")
    (answer,) = rig.handle(sign(path, service="sqs"))
    assert (answer.status, error_of(answer)[0]) == (404, "UnknownOperationException")


def test_a_call_of_s3_that_came_here_by_mistake_is_answered_as_by_s3(rig: Rig) -> None:
    """B92a."""
    s3 = rig.client("s3")
    calls = [
        lambda: s3.put_object(Bucket="b", Key="k", Body=b"x" * (protocol.MAX_BODY + 1)),
        lambda: s3.list_objects_v2(Bucket="b"),
        s3.list_buckets,
    ]
    for call in calls:
        with pytest.raises(ClientError, match="AWS_ENDPOINT_URL_S3") as refused:
            call()
        assert refused.value.response["Error"]["Code"] == "InvalidRequest"
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400


def test_a_live_tail_that_reaches_the_server_gets_the_error_that_it_is_not_served(rig: Rig) -> None:
    """B92b: SDKs send it to `streaming-` and the host."""
    logs = rig.client("logs", inject_host_prefix=False)
    with pytest.raises(ClientError, match="StartLiveTail is not served") as refused:
        logs.start_live_tail(
            logGroupIdentifiers=["arn:aws:logs:us-east-1:000000000000:log-group:g"]
        )
    assert refused.value.response["Error"]["Code"] == "UnknownOperationException"


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


# --- limits of a request (B113) ---------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"x-long": "a" * protocol.MAX_HEADERS},
        {f"x-{number}": "a" for number in range(protocol.MAX_HEADER_COUNT)},
    ],
)
def test_headers_over_the_limit_are_refused(rig: Rig, headers: dict[str, str]) -> None:
    for service in ("batch", "logs", "sts"):
        (answer,) = rig.handle(sign(headers=headers, service=service))
        assert answer.status == 431
        assert error_of(answer, service)[0] == "RequestHeadersTooLargeException"


@pytest.mark.parametrize(
    "body",
    [
        b'{"maxResults": 1' + b"0" * 19 + b"}", b'{"maxResults": -1' + b"0" * 5000 + b"}",
        b'{"x": 1e999}', b'{"x": -1e999}', b'{"x": NaN}', b'{"x": Infinity}', b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"), "{}".encode("utf-32"), b'{"x": "\xed\xa0\x80"}', b'{"x": "\xff"}',
        b"[]", b"1", b"null", b'"x"', b"{} {}", b"{'x': 1}", b"{x: 1}", b'{"x": 1,}', b'{"x": 01}',
    ],
)  # fmt: skip
def test_what_is_no_plain_json_object_is_refused(rig: Rig, body: bytes) -> None:
    (answer,) = rig.handle(sign(body=body))
    assert (answer.status, error_of(answer)[0]) == (400, "SerializationException")


@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_a_body_is_nested_as_deep_as_the_limit_and_no_deeper(rig: Rig, kind: str) -> None:
    close = "]" if kind == "[" else "}"
    for depth, status in (
        (protocol.MAX_DEPTH - 1, 200), (protocol.MAX_DEPTH, 400), (900, 400), (8_000, 400),
    ):  # fmt: skip
        body = '{"x":' + kind * depth + "1" * (kind != "[") + close * depth + "}"
        (answer,) = rig.handle(sign(body=body.encode()))
        assert answer.status == status, depth
        check(answer, "batch", str(depth))


# --- tags: the operations with a path of their own --------------------------------------------

QUEUE = "arn:aws:batch:us-east-1:000000000000:job-queue/q"


@pytest.mark.parametrize("path", [quote(QUEUE, safe=""), quote(QUEUE, safe=":"), QUEUE])
def test_a_resource_is_named_in_the_path_escaped_or_not(path: str) -> None:
    for method, name in (("GET", "ListTagsForResource"), ("DELETE", "UntagResource")):
        call = protocol.read_call(
            sign(f"/v1/tags/{path}?tagKeys=k", b"", method=method), "batch", ""
        )
        assert (call.operation, call.params["resourceArn"]) == (name, QUEUE)
    body = b'{"tags": {"k": "v"}, "resourceArn": "another"}'
    call = protocol.read_call(sign(f"/v1/tags/{path}", body), "batch", "")
    assert (call.operation, call.params) == (
        "TagResource", {"tags": {"k": "v"}, "resourceArn": QUEUE},
    )  # fmt: skip


def test_keys_of_tags_come_in_the_query() -> None:
    keys = ["a", "b c", "é&=%", "a+b", ""]
    query = "&".join(f"tagKeys={quote(key, safe='')}" for key in keys)
    request = sign(f"/v1/tags/x?{query}&other=1", b"", method="DELETE")
    with pytest.raises(ApiError, match=r"tagKeys\[4\].*greater than or equal to 1"):
        protocol.read_call(request, "batch", "")
    request = sign(f"/v1/tags/x?{query.removesuffix('&tagKeys=')}", b"", method="DELETE")
    assert protocol.read_call(request, "batch", "").params["tagKeys"] == keys[:4]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/v1/tags/x"), ("DELETE", "/v1/tags/x?tagKeys"), ("POST", "/v1/tags/x"),
        ("GET", "/v1/tags/%ff"), ("DELETE", "/v1/tags/x?tagKeys=%ff"),
        ("DELETE", "/v1/tags/x?" + "tagKeys=a&" * 201),
    ],
)  # fmt: skip
def test_a_malformed_request_for_tags_is_refused(rig: Rig, method: str, path: str) -> None:
    (answer,) = rig.handle(sign(path, b"", method=method))
    assert answer.status == 400
    check(answer, "batch", path)
