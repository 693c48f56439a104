"""The embedded AWS Batch: an ASGI application, wired to the core, the store and the executor."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from batchml.clock import Clock
from batchml.errors import LocalServerError
from batchml.local import access, protocol
from batchml.local.chaos import is_throttled
from batchml.local.core import Core
from batchml.local.logreads import LOG_OPERATIONS, LogReads
from batchml.local.messages import Requested
from batchml.local.operations import HANDLERS
from batchml.local.protocol import Call
from batchml.local.reads import READS, View
from batchml.local.replays import Replays
from batchml.local.sigv4 import Caller, Keys, claimed_key, claimed_service, verify
from batchml.local.store import Store
from batchml.local.wire import Refused, Request, Response

log = logging.getLogger("batchml.local")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LONGEST_ID = 128
_DRAIN = 16 * protocol.MAX_BODY  # of a body that is too large, so that its sender hears so


# How each service says that requests come too fast: code, message, status.
_TOO_MANY = {
    "batch": ("TooManyRequestsException", "Too Many Requests", 429),
    "logs": ("ThrottlingException", "Rate exceeded", 400),
}


def _nobody(_key: str) -> None: ...


class Server:
    """`handle` answers one request; called as an ASGI application it speaks HTTP."""

    def __init__(
        self,
        core: Core,
        store: Store,
        logs: LogReads,
        keys: Keys,
        port: int,
        clock: Clock,
        held_back: Callable[[], str] = lambda: "",
    ) -> None:
        """`held_back` says why programs cannot be started on this machine now, if so."""
        self._held_back = held_back
        self._core = core
        self._store = store
        self._logs = logs
        self._keys = keys
        self._port = port
        self._clock = clock
        self._requests = 0
        self._replays = Replays(clock.now())
        self.last_request = clock.monotonic()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only http is served, not {scope['type']}")
        request = await _read_request(scope, receive)
        if request is None:
            return
        response = await self.handle(request, scope.get("state", {}).get("trust", _nobody))
        is_unread = len(request.body) > protocol.MAX_BODY
        closing = [(b"connection", b"close")] if is_unread else []
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [
                    *((name.encode(), value.encode()) for name, value in response.headers),
                    (b"content-length", str(len(response.body)).encode()),
                    *closing,
                ],
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    async def handle(self, request: Request, trust: Callable[[str], None] = _nobody) -> Response:
        """Check, route and answer one request. Never raises.

        `trust` is called with the key once the request has turned out to be signed rightly.
        """
        request_id = str(uuid.uuid4())
        service = claimed_service(request)
        try:
            protocol.check_service(service)
            protocol.check_size(request)
            protocol.check_origin(request, self._port)
            caller = verify(request, self._keys_for(request), self._clock.now())
            service = caller.service
            trust(caller.access_key_id)
            self.last_request = self._clock.monotonic()
            self._throttle(request, caller)
            call = protocol.read_call(request, service, request_id)
            access.check_permitted(caller.access_key_id, service, call.operation)
            return await self._answer(call, request, caller)
        except Refused as error:
            return protocol.refusal(error, service, request_id)
        except LocalServerError as error:
            return _server_error(str(error), service, request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            text = f"Internal error in the embedded AWS Batch; its server.log has {request_id}."
            return _server_error(text, service, request_id)

    async def _answer(self, call: Call, request: Request, caller: Caller) -> Response:
        read = READS.get((call.service, call.operation))
        if read is not None:
            now = int(self._clock.now() * 1000)
            caller_id, held_back = caller.access_key_id, self._held_back()
            view = View(self._core.state, self._store, caller_id, now, held_back)
            return protocol.answer(call, read(view, call.params))
        if call.service == "logs" and call.operation in LOG_OPERATIONS:
            return protocol.answer(call, *await self._logs.answer(call.operation, call.params))
        if call.service == "batch" and call.operation in HANDLERS:
            event = Requested(
                operation=call.operation,
                params=call.params,
                now=int(self._clock.now() * 1000),
                new_id=str(uuid.uuid4()),
                request_id=call.request_id,
            )
            identity = self._identity(request, caller)
            return protocol.answer(
                call, await self._core.request(event, identity, _content(request))
            )
        raise protocol.not_served(call.service, call.operation)

    def _keys_for(self, request: Request) -> Keys:
        """What a request is to be signed with: keys of an attempt that lives, or the server's."""
        task_id = access.task_of(claimed_key(request))
        alive = bool(task_id) and task_id in self._core.state.by_task
        return access.job_keys(self._keys, task_id) if alive else self._keys

    def _throttle(self, request: Request, caller: Caller) -> None:
        """Refuse the part of the requests that is asked for, none that was carried out before."""
        if caller.service not in _TOO_MANY:
            return
        self._requests += 1
        refused = is_throttled(self._core.state.chaos, self._requests)
        if refused and not self._core.knows(_identity(request, caller)):
            raise Refused(*_TOO_MANY[caller.service])

    def _identity(self, request: Request, caller: Caller) -> str:
        """What makes a call one call, however often it arrives. Raises Refused."""
        identity = _identity(request, caller)
        if self._store.remembered(identity) is None:
            self._replays.check(caller.signature, caller.signed_at, self._clock.now())
        return identity


def _identity(request: Request, caller: Caller) -> str:
    given = request.header("amz-sdk-invocation-id")
    return given if 0 < len(given) <= _LONGEST_ID else f"signature/{caller.signature}"


def _content(request: Request) -> bytes:
    return f"{request.method} {request.path}?{request.query}\n".encode() + request.body


def _server_error(text: str, service: str, request_id: str) -> Response:
    return protocol.refusal(Refused("ServerException", text, 500), service, request_id)


async def _read_request(scope: MutableMapping[str, Any], receive: Receive) -> Request | None:
    """The request, or None when its sender went away. A body that is too large is not kept."""
    body = b""
    passed = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        passed += len(part)
        # One byte over the limit is enough to know.
        body = (body + part)[: protocol.MAX_BODY + 1]
        if not message.get("more_body") or passed > _DRAIN:
            break
    return Request(
        method=scope["method"],
        path=scope["raw_path"].decode("ascii", "replace"),
        query=scope["query_string"].decode("ascii", "replace"),
        headers=tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]),
        body=body,
    )


async def idle(
    server: Server, core: Core, clock: Clock, limit: float, poll: Callable[[], None]
) -> None:
    """Return once there has been no unfinished job and no request for `limit` seconds."""
    busy_until = clock.monotonic() + limit
    while clock.monotonic() < busy_until:
        await asyncio.sleep(1)
        poll()
        if core.state.jobs:
            busy_until = clock.monotonic() + limit
        busy_until = max(busy_until, server.last_request + limit)
