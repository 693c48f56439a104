"""The embedded AWS Batch: an ASGI application, wired to the core, the store and the executor."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from batchml.clock import Clock
from batchml.errors import LocalServerError
from batchml.local import protocol
from batchml.local.core import Core
from batchml.local.logreads import LogReads
from batchml.local.messages import Requested
from batchml.local.operations import HANDLERS
from batchml.local.protocol import Call
from batchml.local.reads import READS, View
from batchml.local.sigv4 import Keys, claimed_service, verify
from batchml.local.store import Store
from batchml.local.wire import Refused, Request, Response

log = logging.getLogger("batchml.local")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LOG_OPERATIONS = {
    "GetLogEvents": LogReads.get_log_events,
    "FilterLogEvents": LogReads.filter_log_events,
    "DescribeLogGroups": LogReads.describe_log_groups,
    "DescribeLogStreams": LogReads.describe_log_streams,
}

# Calls that make something new: sent twice by an SDK, they must not make two.
_REMEMBERED = ("SubmitJob", "RegisterJobDefinition")


class Server:
    """`handle` answers one request; called as an ASGI application it speaks HTTP."""

    def __init__(
        self, core: Core, store: Store, logs: LogReads, keys: Keys, port: int, clock: Clock
    ) -> None:
        self._core = core
        self._store = store
        self._logs = logs
        self._keys = keys
        self._port = port
        self._clock = clock
        self.last_request = clock.monotonic()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only http is served, not {scope['type']}")
        response = await self.handle(await _read_request(scope, receive))
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [
                    *((name.encode(), value.encode()) for name, value in response.headers),
                    (b"content-length", str(len(response.body)).encode()),
                ],
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    async def handle(self, request: Request) -> Response:
        """Check, route and answer one request. Never raises."""
        request_id = str(uuid.uuid4())
        service = claimed_service(request)
        try:
            if len(request.body) > protocol.MAX_BODY:
                raise Refused("RequestEntityTooLargeException", "The body is too large.", 413)
            protocol.check_origin(request, self._port)
            service = verify(request, self._keys, self._clock.now()).service
            self.last_request = self._clock.monotonic()
            call = protocol.read_call(request, service, request_id)
            return protocol.answer(call, await self._answer(call, request.body))
        except Refused as error:
            return protocol.refusal(error, service, request_id)
        except LocalServerError as error:
            return _server_error(str(error), service, request_id)
        except Exception:
            log.exception("request %s failed", request_id)
            text = f"Internal error in the embedded AWS Batch; its server.log has {request_id}."
            return _server_error(text, service, request_id)

    async def _answer(self, call: Call, body: bytes) -> Any:
        read = READS.get((call.service, call.operation))
        if read is not None:
            view = View(self._core.state, self._store, self._keys.access_key_id)
            return read(view, call.params)
        if call.service == "logs" and call.operation in _LOG_OPERATIONS:
            return _LOG_OPERATIONS[call.operation](self._logs, call.params)
        if call.service == "batch" and call.operation in HANDLERS:
            event = Requested(
                operation=call.operation,
                params=call.params,
                now=int(self._clock.now() * 1000),
                new_id=str(uuid.uuid4()),
                request_id=call.request_id,
            )
            remembered = call.invocation_id if call.operation in _REMEMBERED else ""
            return await self._core.request(event, remembered, body)
        raise protocol.not_served(call.service, call.operation)


def _server_error(text: str, service: str, request_id: str) -> Response:
    return protocol.refusal(Refused("ServerException", text, 500), service, request_id)


async def _read_request(scope: MutableMapping[str, Any], receive: Receive) -> Request:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        # One byte over the limit is enough to know.
        body = (body + message.get("body", b""))[: protocol.MAX_BODY + 1]
        if not message.get("more_body"):
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
