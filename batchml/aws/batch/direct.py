"""Calls to the embedded AWS Batch without the SDK.

To import botocore and make a client of it takes three times as long as all else in a command. The
operations below are JSON in both directions, without dates, binary values and members with other
names in the request, and the embedded server checks each request as botocore would: so nothing of
botocore's service models is needed. Other operations are sent by botocore, which is also imported
to raise its exceptions, so that `aws/errors.py` translates one kind of failure.

Sources: Smithy 2.0, "AWS restJson1" and "AWS JSON 1.1"; AWS General Reference, "Signature Version
4"; AWS SDKs and Tools Reference Guide, "Retry behavior".
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from batchml.clock import Clock, SystemClock
from batchml.runtime.storage.credentials import Credentials, sign

_READ = 65_536  # bytes
_BUSY = (500, 502, 503, 504)  # statuses after which SDKs send a call again
_THROTTLED = ("ThrottlingException", "TooManyRequestsException")
_LONGEST_PAUSE = 20.0  # seconds between two attempts, as in SDKs

Connect = Callable[[tuple[str, int], float], socket.socket]


class Operation(NamedTuple):
    """An operation with the members of its answer; the attributes that botocore's model has."""

    name: str
    members: tuple[str, ...] = ()
    target: str = ""  # of the header x-amz-target; "" for the operations of AWS Batch

    @property
    def output_shape(self) -> "Operation":
        return self

    @property
    def path(self) -> str:
        return "/" if self.target else f"/v1/{self.name.lower()}"


_LOGS = "Logs_20140328"

# By service, then by the name of the method in the SDK. Operations that change queues, compute
# environments or tags are seldom called, and some get a token from botocore: it sends them.
OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "batch": {
        "submit_job": Operation("SubmitJob", ("jobArn", "jobName", "jobId")),
        "describe_jobs": Operation("DescribeJobs", ("jobs",)),
        "list_jobs": Operation("ListJobs", ("jobSummaryList", "nextToken")),
        "cancel_job": Operation("CancelJob"),
        "terminate_job": Operation("TerminateJob"),
        "describe_job_queues": Operation("DescribeJobQueues", ("jobQueues", "nextToken")),
        "describe_compute_environments": Operation(
            "DescribeComputeEnvironments", ("computeEnvironments", "nextToken")
        ),
        "describe_job_definitions": Operation(
            "DescribeJobDefinitions", ("jobDefinitions", "nextToken")
        ),
        "register_job_definition": Operation(
            "RegisterJobDefinition", ("jobDefinitionName", "jobDefinitionArn", "revision")
        ),
        "create_consumable_resource": Operation(
            "CreateConsumableResource", ("consumableResourceName", "consumableResourceArn")
        ),
        "delete_consumable_resource": Operation("DeleteConsumableResource"),
    },
    "logs": {
        "get_log_events": Operation(
            "GetLogEvents", ("events", "nextForwardToken", "nextBackwardToken"), _LOGS
        ),
        "filter_log_events": Operation(
            "FilterLogEvents", ("events", "searchedLogStreams", "nextToken"), _LOGS
        ),
    },
}


class Endpoint(NamedTuple):
    """Where the server listens, and how a request to it is signed."""

    url: str
    region: str
    service: str
    access_key_id: str
    secret_access_key: str


class Waiting(NamedTuple):
    """The seconds to wait for an answer, and those after which `report` is called once a call.

    `answered` is called with each answer.
    """

    limit: float
    notice: float
    report: Callable[[], None]
    answered: Callable[[], None]


class Http(NamedTuple):
    """An answer of the server; the names of headers are in lower case."""

    status_code: int
    headers: dict[str, str]
    body: bytes


class DirectClient:
    """A client of one service, with the methods of botocore's. Threads may share it.

    `decide` gets what botocore gives to the handlers of "needs-retry", and returns the seconds
    until the call is sent again, or None to follow the SDK's rules. `make_sdk_client` makes
    botocore's client of the service.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        attempts: int,
        waiting: Waiting,
        decide: Callable[..., float | None],
        make_sdk_client: Callable[[], Any],
        clock: Clock | None = None,
        connect: Connect | None = None,
    ) -> None:
        self.connect = connect or _connect
        self._endpoint = endpoint
        self._attempts = attempts
        self._waiting = waiting
        self._decide = decide
        self._make_sdk_client = make_sdk_client
        self._sdk_client: Any = None
        self._clock = clock or SystemClock()
        self._operations = OPERATIONS[endpoint.service]
        self._idle: list[tuple[tuple[str, int], socket.socket]] = []  # connections without a call
        self._process = os.getpid()

    def __getattr__(self, name: str) -> Any:
        operation = self._operations.get(name)
        if operation is not None:
            return partial(self._call, operation)
        return getattr(self._sdk, name)

    def get_paginator(self, name: str) -> Any:
        operation = self._operations.get(name)
        if operation is None:
            return self._sdk.get_paginator(name)
        return _Paginator(partial(self._call, operation))

    @property
    def _sdk(self) -> Any:
        if self._sdk_client is None:
            self._sdk_client = self._make_sdk_client()
        return self._sdk_client

    def _call(self, operation: Operation, **request: Any) -> dict[str, Any]:
        """Send a call until it has an answer that counts. Raises what botocore's client raises."""
        body = json.dumps(request).encode()  # as botocore: with escapes, also of lone surrogates
        headers = {
            "content-type": "application/json",
            "user-agent": "batchml",  # the server then checks the request as botocore would
            # The same for all attempts, by which the server recognizes a call that is sent again.
            "amz-sdk-invocation-id": os.urandom(16).hex(),
        }
        if operation.target:
            headers["content-type"] = "application/x-amz-json-1.1"
            headers["x-amz-target"] = f"{operation.target}.{operation.name}"
        notice = self._clock.monotonic() + self._waiting.notice
        for attempt in count(1):
            asked = {"url": self._endpoint.url + operation.path}
            answer, parsed, failure = None, dict[str, Any](), None
            try:
                answer = self._exchange(operation.path, headers, body, notice)
                parsed = _parse(answer)
                self._waiting.answered()
            except OSError as error:
                failure = _as_sdk_error(error, asked["url"])
            pause = self._decide(
                caught_exception=failure, request_dict=asked, operation=operation,
                response=None if answer is None else (answer, parsed), attempts=attempt,
            )  # fmt: skip
            # Another address: the server was started again.
            self._endpoint = self._endpoint._replace(url=asked["url"].removesuffix(operation.path))
            if pause is None and attempt < self._attempts and (failure or _is_busy(parsed)):
                pause = _pause(attempt)
            if pause is None:
                if failure is not None:
                    raise failure
                return _checked(operation, parsed)
            self._clock.sleep(pause)
        raise AssertionError("unreachable")

    def _exchange(self, path: str, headers: dict[str, str], body: bytes, notice: float) -> Http:
        """Send one request and receive its answer. Raises OSError."""
        at = self._endpoint
        parts = urlsplit(at.url)
        signed = sign(
            Credentials(at.access_key_id, at.secret_access_key), at.region, "POST", parts.netloc,
            path, "", headers, hashlib.sha256(body).hexdigest(), self._clock.now(), at.service,
        )  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
        address = (parts.hostname or "", parts.port or 80)
        connection = self._connection(address)
        try:
            connection.settimeout(self._waiting.limit)
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{head}"
                f"content-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            answer = _read_answer(lambda: self._receive(connection, notice))
        except BaseException:
            connection.close()
            raise
        if answer.headers.get("connection", "").lower() == "close":
            connection.close()
        else:
            self._idle.append((address, connection))
        return answer

    def _connection(self, address: tuple[str, int]) -> socket.socket:
        """An idle connection that the server has not closed, or a new one."""
        if self._process != os.getpid():  # a fork: its parent uses the connections
            self._idle, self._process = [], os.getpid()
        with suppress(IndexError):  # not `while self._idle`: another thread may take the last one
            while True:
                of, connection = self._idle.pop()
                if of == address and _is_open(connection):
                    return connection
                connection.close()
        try:
            return self.connect(address, self._waiting.limit)
        except TimeoutError as error:
            raise _ConnectTimeout(str(error)) from error
        except OSError as error:
            raise _NotConnected(str(error)) from error

    def _receive(self, connection: socket.socket, notice: float) -> bytes:
        """The next bytes; b"" at the end of the connection. Raises TimeoutError after the limit."""
        end = self._clock.monotonic() + self._waiting.limit
        while True:
            now = self._clock.monotonic()
            is_reported = notice <= now
            if is_reported:
                self._waiting.report()
            if now >= end:
                raise TimeoutError("Read timed out.")
            connection.settimeout(max(0.001, (end if is_reported else min(notice, end)) - now))
            try:
                return connection.recv(_READ)
            except TimeoutError:
                continue


class _Paginator:
    def __init__(self, call: Callable[..., dict[str, Any]]) -> None:
        self._call = call

    def paginate(self, **request: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call(**request)
            yield page
            token = page.get("nextToken")
            if not token or token == request.get("nextToken"):
                return
            request["nextToken"] = token


class _NotConnected(OSError):
    """The connection was refused, or there is no such host."""


class _ConnectTimeout(OSError):
    """The connection was not accepted in time."""


def _connect(address: tuple[str, int], limit: float) -> socket.socket:
    """Connect over IPv4. `socket.create_connection` imports Python's tables of Unicode first."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.settimeout(limit)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _is_open(connection: socket.socket) -> bool:
    """Whether the server has not closed a connection on which it has nothing to send."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _read_answer(receive: Callable[[], bytes]) -> Http:
    """Read one answer. Raises ConnectionError if it is cut off or not HTTP."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = receive()
        if not part:
            raise ConnectionError("the connection was closed without an answer")
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    pairs = (line.partition(":")[::2] for line in lines)
    headers = {name.strip().lower(): value.strip() for name, value in pairs}
    size = headers.get("content-length", "0")
    if not (version.startswith("HTTP/1.") and status[:3].isdecimal() and size.isdecimal()):
        raise ConnectionError("the answer is not HTTP")
    length = int(size)
    parts = [body]
    missing = length - len(body)
    while missing > 0:
        part = receive()
        if not part:
            raise ConnectionError(f"the answer was cut off: {missing} bytes are missing")
        parts.append(part)
        missing -= len(part)
    return Http(int(status[:3]), headers, b"".join(parts)[:length])


def _parse(answer: Http) -> dict[str, Any]:
    """The answer as botocore returns it: without members if it is not JSON."""
    try:
        read = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        read = {}
    parsed: dict[str, Any] = read if isinstance(read, dict) else {}
    if answer.status_code >= 300:
        named = answer.headers.get("x-amzn-errortype", "") or str(parsed.get("__type", ""))
        code = named.partition(":")[0].rpartition("#")[2] or str(answer.status_code)
        message = str(parsed.get("message", parsed.get("Message", "")))
        parsed = {"Error": {"Code": code, "Message": message}}
    parsed["ResponseMetadata"] = {
        "HTTPStatusCode": answer.status_code,
        "HTTPHeaders": answer.headers,
        "RequestId": answer.headers.get("x-amzn-requestid", ""),
    }
    return parsed


def _is_busy(parsed: Mapping[str, Any]) -> bool:
    """Whether SDKs send a call again after this answer."""
    code = parsed.get("Error", {}).get("Code")
    return parsed["ResponseMetadata"]["HTTPStatusCode"] in _BUSY or code in _THROTTLED


def _pause(attempt: int) -> float:
    """The seconds before the next attempt: random, as those of SDKs."""
    from random import random

    return min(_LONGEST_PAUSE, random() * 2.0 ** (attempt - 1))


def _checked(operation: Operation, parsed: dict[str, Any]) -> dict[str, Any]:
    """The answer. Raises botocore's ClientError if it is an error."""
    if "Error" in parsed:
        from botocore.exceptions import ClientError

        raise ClientError(parsed, operation.name)
    return parsed


def _as_sdk_error(error: Exception, url: str) -> Exception:
    """The exception that botocore raises for such a failure."""
    from botocore import exceptions

    found: Exception
    if isinstance(error, _NotConnected):
        found = exceptions.EndpointConnectionError(endpoint_url=url, error=error)
    elif isinstance(error, _ConnectTimeout):
        found = exceptions.ConnectTimeoutError(endpoint_url=url, error=error)
    elif isinstance(error, TimeoutError):
        found = exceptions.ReadTimeoutError(endpoint_url=url, error=error)
    else:
        found = exceptions.ConnectionClosedError(endpoint_url=url, error=error)
    return found
