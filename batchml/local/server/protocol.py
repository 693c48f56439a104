"""The HTTP protocol of AWS: turn an HTTP request into an operation with checked input, and an
operation's output into an HTTP response.

Pure. Four services share one port, distinguished by the service name in the signature: Batch
(rest-json), CloudWatch Logs and the part of ECS that describes hosts (JSON 1.1), and STS (query).
Paths, members and limits come from botocore's service models.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from html import escape
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

MAX_DEPTH = 32  # levels of a value in a request

# --- Checks of a value against a botocore shape ---------------------------------------------------
# botocore itself checks required members, types and minima, and only in the client.
# docs/behaviours.md lists the further checks of requests, with the evidence for each ("Checks that
# are stricter than botocore's"). Tests use the same function to check the server's answers.

# "The values aren't case sensitive": AWS Batch API, EvaluateOnExit.
_ANY_CASE = ("RetryAction",)
# Unicode categories, which Python's patterns lack, and their closest equivalents.
_CATEGORIES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}


class ShapeProblem(NamedTuple):
    path: str
    text: str


def clean(shape: Any, value: Any) -> Any:
    """Return `value` without nulls and unknown members, as AWS drops them.

    Values of a wrong type are returned unchanged; `problems` reports them.
    """
    if shape.type_name == "structure" and isinstance(value, dict):
        members = shape.members
        return {
            name: clean(members[name], inner)
            for name, inner in value.items()
            if name in members and inner is not None
        }
    if shape.type_name == "list" and isinstance(value, list):
        return [clean(shape.member, inner) for inner in value if inner is not None]
    if shape.type_name == "map" and isinstance(value, dict):
        return {key: clean(shape.value, inner) for key, inner in value.items() if inner is not None}
    return value


class _Rules(NamedTuple):
    strict: bool
    maxima: bool


def problems(
    shape: Any, value: Any, *, strict: bool = False, maxima: bool = True
) -> Iterator[ShapeProblem]:
    """Yield the mistakes in `value`; nothing when it satisfies the shape.

    With `strict`, unknown members are mistakes. Without `maxima`, maximal lengths, maximal values
    and patterns are not checked. The minimal length of a map never is: AWS accepts empty `tags`,
    although its model requires one tag.
    """
    return _problems(shape, value, "", _Rules(strict, maxima))


def _problems(shape: Any, value: Any, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    if path.count(".") + path.count("[") > MAX_DEPTH:
        yield ShapeProblem(path, "is nested too deeply")
        return
    kind = shape.type_name
    if not _is_type(kind, value):
        yield ShapeProblem(path, f"must be of type {kind}, found {type(value).__name__}")
    elif kind == "structure":
        yield from _structure(shape, value, path, rules)
    elif kind == "list":
        yield from _size(shape, len(value), path, rules)
        for index, inner in enumerate(value):
            yield from _problems(shape.member, inner, f"{path}[{index}]", rules)
    elif kind == "map":
        yield from _size(shape, max(1, len(value)), path, rules)
        for key, inner in value.items():
            yield from _problems(shape.key, key, f"{path}.{key}", rules)
            yield from _problems(shape.value, inner, f"{path}.{key}", rules)
    elif kind == "string":
        yield from _string(shape, value, path, rules)
    elif kind in ("integer", "long", "float", "double"):
        yield from _range(shape, value, path, rules)


_TYPES: dict[str, tuple[type, ...]] = {
    "structure": (dict,),
    "map": (dict,),
    "list": (list,),
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (int, float, str),
}


def _is_type(kind: str, value: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, (object,)))


def _structure(
    shape: Any, value: dict[str, Any], path: str, rules: _Rules
) -> Iterator[ShapeProblem]:
    dot = f"{path}." if path else ""
    for name in shape.required_members:
        if value.get(name) is None:
            yield ShapeProblem(f"{dot}{name}", "must not be null")
    for name, inner in value.items():
        member = shape.members.get(name)
        if member is not None:
            yield from _problems(member, inner, f"{dot}{name}", rules)
        elif rules.strict:
            yield ShapeProblem(f"{dot}{name}", "is not a member of the shape")


def _string(shape: Any, value: str, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        yield ShapeProblem(path, "must be valid Unicode")
        return
    enum_value = value.upper() if shape.name in _ANY_CASE else value
    if shape.enum and enum_value not in shape.enum:
        yield ShapeProblem(path, f"must satisfy enum value set: [{', '.join(shape.enum)}]")
    yield from _size(shape, len(value), path, rules)
    pattern = shape.metadata.get("pattern") if rules.maxima else None
    compiled = _compile(pattern) if pattern else None
    if compiled is not None and not compiled.fullmatch(value):
        yield ShapeProblem(path, f"must satisfy regular expression pattern: {pattern}")


def _size(shape: Any, size: int, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    low, high = _bounds(shape, rules)
    if low is not None and size < low:
        yield ShapeProblem(path, f"must have length greater than or equal to {low}")
    if high is not None and size > high:
        yield ShapeProblem(path, f"must have length less than or equal to {high}")


def _range(shape: Any, value: float, path: str, rules: _Rules) -> Iterator[ShapeProblem]:
    low, high = _bounds(shape, rules)
    if low is not None and value < low:
        yield ShapeProblem(path, f"must have value greater than or equal to {low}")
    if high is not None and value > high:
        yield ShapeProblem(path, f"must have value less than or equal to {high}")
    if shape.type_name in ("integer", "long"):
        bits = 31 if shape.type_name == "integer" else 63
        if not -(2**bits) <= value < 2**bits:
            yield ShapeProblem(path, f"must fit {bits + 1} bits")


def _bounds(shape: Any, rules: _Rules) -> tuple[Any, Any]:
    return shape.metadata.get("min"), shape.metadata.get("max") if rules.maxima else None


@lru_cache(maxsize=512)
def _compile(pattern: str) -> re.Pattern[str] | None:
    """The pattern, or None for one that only Java understands, which is then not enforced."""
    for category, near in _CATEGORIES.items():
        pattern = pattern.replace(category, near)
    try:
        return re.compile(pattern)
    except re.error:
        return None


# --- HTTP types -----------------------------------------------------------------------------------


class HttpRequest(Struct, frozen=True):
    """One HTTP request. `path` is the raw, still escaped path; header names are lower-case."""

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


class HttpResponse(Struct, frozen=True):
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class ApiError(Exception):
    """An error response in AWS's shape: an error code, a message and an HTTP status."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


def client_error(message: str) -> ApiError:
    """AWS Batch's error for a mistake of the caller."""
    return ApiError("ClientException", message)


def request_error(text: str, request_id: str) -> ApiError:
    """AWS Batch's error for a request that it cannot execute, in its words."""
    return client_error(f"Error executing request, Exception : {text}, RequestId: {request_id}")


# --- Requests -------------------------------------------------------------------------------------

MAX_BODY = 64 * 1024
MAX_HEADERS = 16 * 1024  # bytes, including the path and the query
MAX_HEADER_COUNT = 100

_TARGETS = {"ecs": "AmazonEC2ContainerServiceV20141113", "logs": "Logs_20140328"}
_TAGS = "/v1/tags/"

# `streaming-localhost` is listed because SDKs put `streaming-` before the host for StartLiveTail.
# Where that name resolves, the call then gets the error that StartLiveTail is not served.
_HOSTS = ("127.0.0.1", "localhost", "[::1]", "streaming-localhost")


class ApiCall(Struct, frozen=True):
    """A checked request: `params` is botocore's dict."""

    service: str
    operation: str
    params: dict[str, Any]
    request_id: str


@cache
def service_model(service: str) -> Any:
    """The botocore model of a service, by its name there: `batch`, `service-quotas`."""
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


@cache
def _routes() -> dict[str, str]:
    """`/v1/submitjob` -> `SubmitJob` for every operation of Batch with a plain path."""
    model = service_model("batch")
    routes: dict[str, str] = {}
    for name in model.operation_names:
        http = model.operation_model(name).http
        if http["method"] == "POST" and "{" not in http["requestUri"]:
            routes[http["requestUri"]] = name
    return routes


def check_size(request: HttpRequest) -> None:
    """Refuse large requests before they are processed. Raises ApiError."""
    if len(request.body) > MAX_BODY:
        raise ApiError("RequestEntityTooLargeException", "The body is too large.", 413)
    size = len(request.path) + len(request.query)
    size += sum(len(name) + len(value) for name, value in request.headers)
    if size > MAX_HEADERS or len(request.headers) > MAX_HEADER_COUNT:
        raise ApiError("RequestHeadersTooLargeException", "The headers are too large.", 431)


def check_origin(request: HttpRequest, port: int) -> None:
    """Refuse requests that browsers send for web pages, before anything is parsed. Raises
    ApiError.
    """
    allowed = {f"{host}:{port}" for host in _HOSTS}
    if request.header("host") not in allowed:
        raise ApiError(
            "MisdirectedRequest", "The embedded AWS Batch does not serve this host name.", 421
        )
    from_browser = request.header("origin") or request.header("referer")
    if from_browser or request.header("sec-fetch-site") not in ("", "none"):
        raise ApiError("AccessDeniedException", "Requests from web pages are refused.", 403)
    if request.method not in ("POST", "GET", "DELETE"):
        raise ApiError(
            "MethodNotAllowedException",
            f"The embedded AWS Batch does not serve {request.method}.",
            405,
        )


def check_service(service: str) -> None:
    """Refuse a call of S3, which a client sent to this server by mistake. Raises ApiError.

    The status is not a 5xx, after which clients would try again.
    """
    if service == "s3":
        raise ApiError(
            "InvalidRequest",
            "The embedded AWS Batch does not serve S3. Point AWS_ENDPOINT_URL_S3 at an S3 store: "
            "`batchml local start --endpoint s3=URL` and `batchml local env` set it. "
            "A plain AWS_ENDPOINT_URL, or endpoint_url of an S3 client, must not name this server.",
        )


def read_call(request: HttpRequest, service: str, request_id: str) -> ApiCall:
    """Return the operation and its checked input. Raises ApiError, naming up to 20 mistakes."""
    if service not in _READERS:
        raise ApiError(
            "UnknownOperationException",
            f"The embedded AWS Batch does not serve {service!r}, only batch, ecs, logs and sts.",
            404,
        )
    operation, params = _READERS[service](request)
    shape = service_model(service).operation_model(operation).input_shape
    # aws/batch/direct.py sends what no SDK has checked: nulls and unknown members are mistakes.
    is_unchecked = request.header("user-agent") == "batchml"
    if shape is None:
        params = {}
    elif not is_unchecked:
        params = clean(shape, params)
    # Batch's model has maxima that Batch is not known to enforce; the operations check its
    # documented limits.
    rules = {"strict": is_unchecked, "maxima": service != "batch"}
    mistakes = list(problems(shape, params, **rules)) if shape is not None else []
    if mistakes:
        raise _invalid(service, mistakes, request_id)
    return ApiCall(service, operation, params, request_id)


def _invalid(service: str, mistakes: list[ShapeProblem], request_id: str) -> ApiError:
    listed = "; ".join(f"Value at '{path}' {text}" for path, text in mistakes[:20])
    text = f"{len(mistakes)} validation error{'s' if len(mistakes) > 1 else ''} detected: {listed}"
    if service == "batch":
        return request_error(text, request_id)
    return ApiError("InvalidParameterException", text)


def _read_batch(request: HttpRequest) -> tuple[str, Any]:
    if request.path.startswith(_TAGS):
        return _read_tags(request)
    operation = _routes().get(request.path) if request.method == "POST" else None
    if operation is None:
        raise ApiError("UnknownOperationException", "No such operation.", 404)
    return operation, _json_object(request)


def _read_tags(request: HttpRequest) -> tuple[str, Any]:
    """The three operations that name their resource in the path, escaped or not."""
    try:
        # The ARN is unescaped only after routing, because an escaped slash is part of the
        # resource's name.
        arn = unquote(request.path.removeprefix(_TAGS), errors="strict")
        keys = [
            value
            for name, value in parse_qsl(
                request.query, keep_blank_values=True, errors="strict", max_num_fields=200
            )
            if name == "tagKeys"
        ]
    except ValueError:
        raise ApiError("SerializationException", "The path or query is not UTF-8.") from None
    if request.method == "POST":
        return "TagResource", {**_json_object(request), "resourceArn": arn}
    if request.method == "DELETE":
        return "UntagResource", {"resourceArn": arn, "tagKeys": keys}
    return "ListTagsForResource", {"resourceArn": arn}


def _read_targeted(service: str, request: HttpRequest) -> tuple[str, Any]:
    """The operation of a JSON 1.1 request, which a header names."""
    prefix, _, operation = request.header("x-amz-target").partition(".")
    if prefix != _TARGETS[service] or operation not in service_model(service).operation_names:
        raise ApiError("UnknownOperationException", "No such operation.", 400)
    return operation, _json_object(request)


def _read_sts(request: HttpRequest) -> tuple[str, Any]:
    form = dict(parse_qsl(request.body.decode("utf-8", "replace")))
    operation = form.pop("Action", "")
    form.pop("Version", None)
    if operation not in service_model("sts").operation_names:
        raise ApiError("InvalidAction", f"Could not find operation {operation}.", 400)
    return operation, form


_READERS: dict[str, Callable[[HttpRequest], tuple[str, Any]]] = {
    "batch": _read_batch,
    "ecs": partial(_read_targeted, "ecs"),
    "logs": partial(_read_targeted, "logs"),
    "sts": _read_sts,
}


def not_served_error(service: str, operation: str) -> ApiError:
    """The error for an operation that AWS has and this server does not."""
    text = f"{operation} is not served by the embedded AWS Batch."
    code = "ClientException" if service == "batch" else "UnknownOperationException"
    return ApiError(code, text)


def _json_object(request: HttpRequest) -> dict[str, Any]:
    if not re.match(r"application/(x-amz-)?json", request.header("content-type") or "-"):
        if request.body:
            raise ApiError("SerializationException", "Content-Type must be JSON.", 415)
        return {}
    try:
        # Decode the body as UTF-8 first: given bytes, json.loads would also accept UTF-16 and lone
        # surrogates.
        body = json.loads(
            request.body.decode() or "{}",
            parse_constant=_no_constant, parse_int=_whole_number, parse_float=_number,
        )  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise ApiError("SerializationException", f"The body is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError("SerializationException", "The body must be a JSON object.")
    if request.body.count(b"{") + request.body.count(b"[") > MAX_DEPTH and _is_deep(body):
        raise ApiError("SerializationException", f"The body has more than {MAX_DEPTH} levels.")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")


def _whole_number(text: str) -> int:
    if len(text.removeprefix("-")) > 19:
        raise ValueError("a number is too large")
    return int(text)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [part for part in level if isinstance(part, (dict, list))]
        level = [
            part
            for whole in inner
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
    return any(isinstance(part, (dict, list)) for part in level)


def answer_response(
    call: ApiCall, body: Mapping[str, Any], headers: tuple[tuple[str, str], ...] = ()
) -> HttpResponse:
    """The HTTP response for an answer."""
    if call.service == "sts":
        return _xml_answer(call, body)
    kind = "application/json" if call.service == "batch" else "application/x-amz-json-1.1"
    return HttpResponse(
        200, (*_headers(kind, call.request_id), *headers), msgspec.json.encode(body)
    )


def error_response(error: ApiError, service: str, request_id: str) -> HttpResponse:
    """The HTTP response for an error, which every SDK maps to a typed exception."""
    # The message may quote invalid input, such as half a surrogate pair.
    message = error.message.encode("utf-8", "replace").decode()
    if service == "sts":
        text = (
            "<ErrorResponse><Error><Type>Sender</Type>"
            f"<Code>{error.code}</Code><Message>{_in_xml(message)}</Message></Error>"
            f"<RequestId>{request_id}</RequestId></ErrorResponse>"
        )
        return HttpResponse(error.status, _headers("text/xml", request_id), text.encode())
    if service == "s3":
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{error.code}</Code><Message>{_in_xml(message)}</Message>"
            f"<RequestId>{request_id}</RequestId><HostId>batchml</HostId></Error>"
        )
        named = (("content-type", "application/xml"), ("x-amz-request-id", request_id))
        return HttpResponse(error.status, named, text.encode())
    headers = (*_headers("application/json", request_id), ("x-amzn-errortype", error.code))
    body = {"__type": error.code, "message": message}
    return HttpResponse(error.status, headers, msgspec.json.encode(body))


def _xml_answer(call: ApiCall, body: Mapping[str, Any]) -> HttpResponse:
    name = call.operation
    texts = {key: escape(str(value), quote=False) for key, value in body.items()}
    inside = "".join(f"<{key}>{text}</{key}>" for key, text in texts.items())
    text = (
        f'<{name}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
        f"<{name}Result>{inside}</{name}Result>"
        f"<ResponseMetadata><RequestId>{call.request_id}</RequestId></ResponseMetadata>"
        f"</{name}Response>"
    )
    return HttpResponse(200, _headers("text/xml", call.request_id), text.encode())


def _headers(kind: str, request_id: str) -> tuple[tuple[str, str], ...]:
    return (("content-type", kind), ("x-amzn-requestid", request_id))


def _in_xml(text: str) -> str:
    """`text` for XML 1.0, which cannot contain control characters in any form."""
    known = re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    return escape(known, quote=False)
