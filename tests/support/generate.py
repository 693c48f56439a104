"""Requests made from botocore's service models: valid ones, and ones with something done to them.

Everything comes from a seeded `random.Random`, so a failure is found again by its number.
"""

import copy
import json
import os
import random
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.local.home import AccessKeys
from batchml.local.server.protocol import HttpRequest, service_model
from tests.support.server_rig import KEYS, URL, sign

# How many times as long the suites that try chance run; 1 is for every day.
TORTURE = int(os.environ.get("BATCHML_TORTURE", "1"))

OPERATIONS = [
    (service, name)
    for service in ("batch", "ecs", "logs", "sts")
    for name in sorted(service_model(service).operation_names)
]

_TARGETS = {"ecs": "AmazonEC2ContainerServiceV20141113", "logs": "Logs_20140328"}

# What is there in a furnished server, by the names of members, so that some requests are accepted.
_KNOWN: dict[str, list[str]] = {
    "cluster": ["batchml-local"],
    "jobName": ["n", "n_1"], "jobQueue": ["q"], "jobDefinition": ["d", "d:1"],
    "type": ["container"], "jobDefinitionName": ["d", "e"], "computeEnvironment": ["ce"],
    "jobQueueName": ["q", "q2"],
    "computeEnvironmentName": ["ce", "ce2"], "logGroupName": ["/aws/batch/job"],
    "resourceArn": ["arn:aws:batch:us-east-1:000000000000:job-queue/q"],
}  # fmt: skip

ODD = [
    "", "a", "*", "a*", "Ref::k", "é😀", "-5", "0", "1", "64", "1_0", "\u0661", "9" * 5000,
    "x" * 300, "arn:aws:batch:::job/", "d:0", "d:99999999999999999999", "q/q", "..", "%2e%2e",
    "../../etc/passwd",
    "\x00", "a\x00b", "\n", "\x1b[31m", "\u202e", "\ud800", "\udfff\ud800", "' OR 1=1 --", "${x}",
    "$(id)", "<b>&amp;", "a" * 40_000, "NaN", "null", "\ufeff", "\uffff", "q" * 129, "\u212a",
]  # fmt: skip

_DEEP: Any = []
for _ in range(60):
    _DEEP = [{"a": _DEEP}]

_WRONG: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**30), 1.5, -0.0, 1e300, [], [[]],
    [None], ["a"] * 3000, {}, {"\ud800": "x"}, {"a": None}, {"": {"": {}}}, {"__proto__": 1}, _DEEP,
]  # fmt: skip


class Made(NamedTuple):
    """`operation` is what the request asks for, "" when it may be anything."""

    what: str
    service: str
    operation: str
    request: HttpRequest


class Target(Struct, frozen=True):
    """Whose keys sign, and where to."""

    keys: AccessKeys = KEYS
    url: str = URL


def fitting(shape: Any, chance: random.Random, often: float, name: str = "", depth: int = 0) -> Any:
    """A value that the shape allows; a member that may be left out is there as `often` as that."""
    kind = shape.type_name
    if kind == "structure":
        return {
            member: fitting(inner, chance, often, member, depth + 1)
            for member, inner in shape.members.items()
            if member in shape.required_members or (depth < 8 and chance.random() < often)
        }
    if kind == "list":
        low = max(shape.metadata.get("min", 0), 0)
        count = max(low, chance.choice([0, 1, 1, 2]))
        return [fitting(shape.member, chance, often, "", depth + 1) for _ in range(count)]
    if kind == "map":
        keys = ["k", "a.b", "é"][: chance.choice([0, 1, 2])]
        return {key: fitting(shape.value, chance, often, "", depth + 1) for key in keys}
    if kind == "string":
        if shape.enum:
            return chance.choice(shape.enum)
        if name in _KNOWN and chance.random() < 0.8:
            return chance.choice(_KNOWN[name])
        if chance.random() < often:
            return chance.choice(ODD)
        return chance.choice(
            ["q", "d", "ce", "1", "64", "a" * max(1, shape.metadata.get("min", 1))]
        )
    if kind in ("integer", "long"):
        edge = 2**31 if kind == "integer" else 2**63
        low = shape.metadata.get("min", 0)
        return chance.choice([low, low + 1, 2, 60, 100, shape.metadata.get("max", edge - 1), -edge])
    return {"boolean": chance.random() < 0.5, "timestamp": 1.5}.get(
        kind, chance.choice([0.5, 1, 1e9])
    )


def malformed(number: int, target: Target) -> Made:
    """Request `number`: any operation, most often with something wrong with it."""
    chance = random.Random(number)
    service, operation = chance.choice(OPERATIONS)
    if chance.random() < 0.6:
        service, operation = chance.choice([pair for pair in OPERATIONS if pair[0] == "batch"])
        if chance.random() < 0.3:  # what changes most, and takes most
            operation = chance.choice(["SubmitJob", "SubmitJob", "RegisterJobDefinition"])
    shape = service_model(service).operation_model(operation).input_shape
    often = chance.choice([0.02, 0.1, 0.3])
    params = fitting(shape, chance, often) if shape is not None else {}
    how = chance.choices(["nothing", "value", "text", "transport"], weights=[40, 30, 15, 15])[0]
    if how == "value":
        for _ in range(chance.choice([1, 1, 2, 4])):
            params = spoil(params, chance)
    body = json.dumps(params).encode()[:100_000]
    if how == "text":
        body = _garble(body, chance)
    request = _request(service, operation, params, body, target)
    what = f"request {number}: {operation}, {how}"
    if how == "transport":
        return Made(what, *_misdirect(service, operation, body, request, chance, target))
    return Made(what, service, operation, request)


def _request(service: str, operation: str, params: Any, body: bytes, target: Target) -> HttpRequest:
    http = service_model(service).operation_model(operation).http
    headers = {"content-type": "application/json"}
    path = http["requestUri"]
    if service in _TARGETS:
        headers = {
            "x-amz-target": f"{_TARGETS[service]}.{operation}",
            "content-type": "application/x-amz-json-1.1",
        }
    if service == "sts":
        headers = {"content-type": "application/x-www-form-urlencoded"}
        if body.startswith(b"{"):
            body = f"Action={operation}&Version=2011-06-15&".encode() + body
    if "{" in path:
        path = _tag_path(params)
    return sign(
        path, body, service=service, method=http["method"], headers=headers, keys=target.keys,
        url=target.url,
    )  # fmt: skip


def _tag_path(params: Any) -> str:
    from urllib.parse import quote

    given = params if isinstance(params, dict) else {}
    arn, keys = given.get("resourceArn", ""), given.get("tagKeys") or []
    path = "/v1/tags/" + quote(str(arn)[:2000], safe="", errors="replace")
    if isinstance(keys, list):
        query = "&".join(f"tagKeys={quote(str(key)[:200], errors='replace')}" for key in keys[:60])
        path += f"?{query}" if query else ""
    return path


def spoil(value: Any, chance: random.Random) -> Any:
    """The value with one thing wrong, somewhere in it."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        changed = dict(value)
        name = chance.choice(sorted(changed))
        act = chance.random()
        if act < 0.15:
            del changed[name]
        elif act < 0.25:
            odd = chance.choice(ODD)
            changed[odd] = changed.pop(name)
        elif act < 0.35:
            changed[chance.choice(ODD)] = chance.choice(_WRONG)
        else:
            changed[name] = spoil(changed[name], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        if chance.random() < 0.2 and len(value) <= 3:
            return value * chance.choice([2, 101, 501])
        return [*value[:place], spoil(value[place], chance), *value[place + 1 :]]
    if isinstance(value, str) and chance.random() < 0.7:
        return chance.choice(ODD)
    if isinstance(value, (int, float)) and chance.random() < 0.5:
        return chance.choice([-value, value + 1, value * 10**9, str(value), float(value)])
    return copy.deepcopy(chance.choice(_WRONG))


def _garble(body: bytes, chance: random.Random) -> bytes:
    """Something that is no JSON, or JSON as nobody writes it."""
    text = body.decode()
    place = chance.randrange(len(body)) if body else 0
    return chance.choice(
        [
            body[:place],
            body + b"}",
            body + body,
            b"\xef\xbb\xbf" + body,
            text.encode("utf-16"),
            text.encode("utf-32"),
            body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :],
            body[:place] + b"\xff\xfe" + body[place:],
            body.replace(b'"', b"'"),
            body.replace(b":", b": NaN, ", 1),
            body.replace(b"{", b'{"jobName": 1e999, ', 1),
            body.replace(b"{", b'{"jobName": "a", "jobName": "b", "jobQueue": [], ', 1),
            body.replace(b"{", b'{"maxResults": ' + b"9" * 5000 + b", ", 1),
            body.replace(b"{", b"{/* comment */", 1),
            body.replace(b"{", b"\x00{", 1),
            b"[" * 30_000,
            b'{"a":' * 10_000,
            b"",
            b" ",
            b"null",
            b'"' + b"a" * 60_000 + b'"',
            b"[" + body + b"]",
            b" " * 65_000 + body,
        ]
    )


def _misdirect(
    service: str,
    operation: str,
    body: bytes,
    good: HttpRequest,
    chance: random.Random,
    target: Target,
) -> tuple[str, str, HttpRequest]:
    """Signed rightly, but to the wrong place or in the wrong way."""
    odd = chance.choice(
        ["/..", "/../", "//", "/%00", "/%2e%2e", "?x=1&x=2", "/é", "x" * 3000, "/."]
    )
    paths = [
        good.path.upper(), good.path + odd.replace("é", "%C3%A9"), "/", "/v1", "/v1/",
        "/v2/submitjob", "/v1/tags/", "/v1/tags/%ff", "/v1/tags/" + "a" * 5000,
        "/v1/../v1/submitjob", "/v1//submitjob",
        "/v1/tags/a?tagKeys", "/v1/tags/a?tagKeys=%ff&tagKeys=", "/v1/tags/a?" + "tagKeys=a&" * 300,
    ]  # fmt: skip
    kind = chance.randrange(5)
    content = dict(good.headers).get("content-type", "")
    headers = {"content-type": content}
    method, path, other = good.method, good.path, service
    if kind == 0:
        path = chance.choice(paths)
    elif kind == 1:
        headers["content-type"] = chance.choice(
            ["", "text/plain", "text/html", "multipart/form-data", "application/xml", "x" * 500,
             "application/json; charset=utf-16", "application/x-www-form-urlencoded"]
        )  # fmt: skip
    elif kind == 2:
        method = chance.choice(["GET", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE", "get"])
    elif kind == 3:
        other = chance.choice(["batch", "logs", "sts", "s3", "ec2", "batch2", "a" * 200])
    else:
        headers["x-amz-target"] = chance.choice(
            ["", "Logs_20140328", "Logs_20140328.", "Logs_20140328.X", f"Batch.{operation}",
             "." * 100, "Logs_20140328.GetLogEvents", "a" * 17_000]
        )  # fmt: skip
    made = sign(
        path, body, service=other, method=method, headers=headers, keys=target.keys, url=target.url
    )
    return other, "", made
