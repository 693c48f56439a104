"""The dashboard as an ASGI application: requests in, pages, JSON documents and an event stream out.

Pages are made by functions of a table of routes. They ask a blocking client, so each runs on a
thread. The access rules are those of `access.py`; this module only obeys them.
"""

import asyncio
import gzip
import json
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import suppress
from functools import partial
from traceback import format_exception
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.cli.output import say
from batchml.cli.render import printable
from batchml.dashboard.access import (
    ACT,
    ENTER,
    STATIC,
    AccessSecrets,
    RequestHead,
    RequestRefusal,
    check,
    take_token,
)
from batchml.dashboard.html import Html, tag
from batchml.dashboard.layout import (
    WHOLE,
    empty_panels,
    error_page,
    fill_panels,
    offer_whole,
    static_file,
)
from batchml.dashboard.server.workers import Questions, Workers
from batchml.errors import (
    AccessError,
    BatchmlError,
    ConfigError,
    NotFound,
    ServiceUnreachable,
    UsageError,
)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY = 1 << 20  # bytes of a request
ALIVE = "/alive"  # tells that a tab is open, and whether it may read
QUESTION_HEADER = "x-batchml-question"
_THREADS = 24  # for panels
_PAGE_THREADS = 12  # for whole pages, which do not wait for panels
_ACT_THREADS = 12  # for actions, which wait for neither
_PATIENCE = 1.0  # seconds; then a panel asks again for its answer
_MOST_FIELDS = 1000  # of a query
_FAULT = "This is a fault of batchml: {}: {}. The terminal of the dashboard has more."
_KEPT_ANSWERS = 1000  # of actions
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types batchml"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_PLAIN = "plain"  # the parameter of a browser that has no scripts
_USE_SECOND = "This browser has no scripts: use the second link of the terminal."
_WORTH_GZIP = 1000  # bytes
_IMMUTABLE = "private, max-age=31536000, immutable"
_STATUS = {
    NotFound: 404, UsageError: 400, ConfigError: 400, AccessError: 403, ServiceUnreachable: 502,
}  # fmt: skip


class Response(Struct, frozen=True):
    """An answer. `stream` replaces `body` in a response without an end."""

    body: bytes = b""
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = {}
    stream: AsyncIterator[bytes] | None = None


class PageQuery(Struct, frozen=True):
    """The part of a request that a route reads: captured parts of the path, parameters, body."""

    path: str
    parts: tuple[str, ...] = ()
    params: Mapping[str, str] = {}
    lists: Mapping[str, tuple[str, ...]] = {}  # parameters that were given several times
    body: Mapping[str, Any] = {}

    def number(self, name: str, default: int, most: int) -> int:
        """A whole number from 0 to `most`. Raises UsageError."""
        given = self.params.get(name, "")
        if not given:
            return default
        if not (given.isascii() and given.isdigit() and len(given) < 10):
            raise UsageError(f"{name}={given}: write a whole number.")
        return min(int(given), most)


Answer = Html | Response | dict[str, Any]
Handler = Callable[[PageQuery], Answer]


class Route(Struct, frozen=True):
    """A path, whose groups are the parts of the query, and the function that answers it."""

    path: re.Pattern[str]
    answer: Handler


def route(path: str, answer: Handler) -> Route:
    """`*` in the path stands for one part without a slash."""
    return Route(re.compile(re.escape(path).replace(r"\*", "([^/]+)")), answer)


def answer_query(routes: Iterable[Route], query: PageQuery) -> Answer | None:
    """The answer of the route that has the path; None without one. Raises what the route raises."""
    for each in routes:
        found = each.path.fullmatch(query.path)
        if found:
            parts = tuple(unquote(part) for part in found.groups())
            return each.answer(_with_parts(query, parts))
    return None


class Dashboard:
    """The ASGI application. `events` opens the stream of changes for one tab."""

    def __init__(
        self,
        known: AccessSecrets,
        routes: list[Route],
        events: Callable[[PageQuery], AsyncIterator[bytes]],
        touch: Callable[[], None] = lambda: None,
        entered: Callable[[], None] = lambda: None,
        patience: float = _PATIENCE,
    ) -> None:
        """`touch` is called by each allowed request, `entered` when a token is used; each works
        once. `patience`: seconds for which a request waits for a panel.
        """
        self._known = known
        self._routes = routes
        self._events = events
        self._touch = touch
        self._tokens = known.tokens  # that were not used yet
        self._entered = entered
        self._questions = Questions(patience)
        self._panel_threads, self._page_threads = Workers(_THREADS), Workers(_PAGE_THREADS)
        self._act_threads = Workers(_ACT_THREADS)
        # (path, idempotency key) -> its answer, the newest last
        self._done: dict[tuple[str, str], asyncio.Task[Response]] = {}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"only http is served, not {scope['type']}")
        head = RequestHead(
            scope["method"], scope["path"],
            tuple((name.decode("latin-1").lower(), value.decode("latin-1"))
                  for name, value in scope["headers"]),
        )  # fmt: skip
        body = await _read_body(receive)
        response = await self.answer(head, scope.get("query_string", b"").decode("latin-1"), body)
        if self._known.is_remote:
            response = await asyncio.to_thread(compressed, response, head)
        await _send(response, receive, send, with_body=head.method != "HEAD")

    async def answer(
        self, head: RequestHead, query: str = "", body: bytes | None = b""
    ) -> Response:
        """Check a request, and answer it. Never raises. A body of None was too large."""
        refusal = check(head, self._known)
        if refusal is not None:
            return refused(refusal)
        if body is None:
            return refused(RequestRefusal(413, f"A request has at most {MAX_BODY >> 20} MiB."))
        try:
            found = read_query(head.path, query, body)
            if head.path.startswith(STATIC):
                kind, content = static_file(head.path.removeprefix(STATIC))
                return Response(content, kind, headers={"cache-control": _IMMUTABLE})
            if head.path == ENTER:
                return self._enter(head, found)
            self._touch()
            if head.path == ALIVE:
                return _to_response({})
            if head.path == "/events":
                stream = self._events(found) if head.method == "GET" else None
                return Response(b"", "text/event-stream", stream=stream)
            if head.path.startswith(ACT):
                return await self._act(head.header("idempotency-key"), found)
            name = head.header(QUESTION_HEADER)
            if not name:
                return await self._page(found, self._page_threads)
            panel = partial(self._page, found, self._panel_threads)
            answer = await self._questions.answer(name, f"{head.path}?{query}", panel)
            return answer or Response(status=202, headers={"cache-control": "no-store"})
        except BatchmlError as error:
            return failed(error)

    async def _page(self, query: PageQuery, threads: Workers) -> Response:
        """The answer of a route. Never raises."""
        try:
            made = await threads.run(partial(answer_query, self._routes, query))
        except BatchmlError as error:
            return failed(error)
        except Exception as error:  # a fault of ours ends neither the page nor the server
            say("\n".join(map(printable, "".join(format_exception(error)).split("\n"))))
            return refused(RequestRefusal(500, _FAULT.format(type(error).__name__, error)))
        if made is None:
            missing = error_page(f"There is no page {query.path}.", _to_runs())
            return Response(str(missing).encode(), status=404)
        if isinstance(made, Html):
            made = await self._for_every_browser(made, query)
        return _to_response(made)

    async def _for_every_browser(self, made: Html, query: PageQuery) -> Html:
        """The page with a link to all of its parts, or with these parts themselves."""
        paths = empty_panels(made)
        if not paths:
            return made
        if WHOLE not in query.params:
            return offer_whole(made, query.path, query.params)
        work = (self._panel_threads.run(partial(self._panel, each)) for each in paths)
        found = await asyncio.gather(*work)
        return fill_panels(made, dict(zip(paths, found, strict=True)))

    def _panel(self, address: str) -> Html:
        """A part of a page, or why it is not there."""
        path, _, query = address.partition("?")
        try:
            made = answer_query(self._routes, read_query(path, query))
        except BatchmlError as error:
            return tag("p", str(error), class_="dim")
        return made if isinstance(made, Html) else tag("p", "There is no such part.")

    async def _act(self, key: str, query: PageQuery) -> Response:
        """An action; repeated with the same key it is done once, and has the same answer."""
        if not key:
            return refused(RequestRefusal(400, "An action needs the header Idempotency-Key."))
        task = self._done.get((query.path, key))
        if task is None:
            task = self._done[query.path, key] = asyncio.create_task(
                self._page(query, self._act_threads)
            )
            for each in list(self._done)[:-_KEPT_ANSWERS]:
                if self._done[each].done():
                    del self._done[each]
        return await asyncio.shield(task)  # a tab that is closed does not stop the action

    def _enter(self, head: RequestHead, query: PageQuery) -> Response:
        """Exchange the token for the cookie and the secret to act, or show the page that does so.

        The page has the token in its fragment, which no server and no log sees. Browsers that do
        not find the name of that link send it as a parameter: one that says what it loads gets the
        page, too, and one without scripts the cookie alone, with which it may only read.
        """
        token = str((query.body if head.method == "POST" else query.params).get("token", ""))
        if not token and head.method != "POST":
            return _to_response(_entry_page(_USE_SECOND))
        if head.header("sec-fetch-dest") == "document" and _PLAIN not in query.params:
            address = f"{ENTER}?{urlencode({'token': token, _PLAIN: '1'})}"
            page = _entry_page(tag("a", "Go on without scripts", href=address))
            return Response(str(page).encode(), headers={"cache-control": "no-store"})
        left = take_token(token, self._tokens)
        if left is None:
            return refused(
                RequestRefusal(401, "This link has been used. Start `batchml dashboard` again.")
            )
        self._tokens = left
        self._entered()
        name, value = self._known.cookie_name, self._known.cookie
        cookie = {"set-cookie": f"{name}={value}; HttpOnly; SameSite=Strict; Path=/"}
        if head.method == "POST":
            answer = json.dumps({"act": self._known.act}).encode()
            return Response(answer, "application/json", headers=cookie)
        return Response(b"", status=303, headers={**cookie, "location": "/"})


def refused(refusal: RequestRefusal) -> Response:
    more = [tag("p", tag("a", "Go on", href=refusal.go))] if refusal.go else []
    return Response(str(error_page(refusal.text, *more)).encode(), status=refusal.status)


def compressed(response: Response, head: RequestHead) -> Response:
    """The answer as gzip if the browser takes it and it is worth it: for a network, not for this
    machine, where it costs more than it saves.
    """
    takes = {part.partition(";")[0].strip() for part in head.header("accept-encoding").split(",")}
    is_text = response.kind.startswith("text/") or response.kind == "application/json"
    if "gzip" not in takes or not is_text or len(response.body) < _WORTH_GZIP:
        return response
    headers = {**response.headers, "content-encoding": "gzip", "vary": "accept-encoding"}
    return replace(response, body=gzip.compress(response.body, 1, mtime=0), headers=headers)


def failed(error: BatchmlError) -> Response:
    """The page of an error of batchml, whose text says what to do next."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    return Response(str(error_page(str(error), _to_runs())).encode(), status=status)


def _to_runs() -> Html:
    return tag("p", tag("a", "All runs", href="/"))


def _entry_page(plain: Html | str) -> Html:
    """The page whose script exchanges the token of its address. `plain`: for want of scripts."""
    return error_page("Opening ...", tag("noscript", plain), script="enter.js")


def _to_response(made: Answer) -> Response:
    if isinstance(made, Response):
        return made
    if isinstance(made, Html):
        return Response(str(made).encode(), headers={"cache-control": "no-cache"})
    # NaN and infinity are no JSON: handlers replace them.
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(made), "application/json", headers=headers)


def read_query(path: str, query: str, body: bytes = b"") -> PageQuery:
    """The query of a request. Raises UsageError for a body that is no JSON object."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise UsageError(f"The query has more than {_MOST_FIELDS} parts.") from error
    lists: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        lists[name] = (*lists.get(name, ()), value)
    try:
        document = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise UsageError("The body of the request is not JSON.") from error
    if not isinstance(document, dict):
        raise UsageError("The body of the request is not a JSON object.")
    return PageQuery(path, (), dict(pairs), lists, document)


def _with_parts(query: PageQuery, parts: tuple[str, ...]) -> PageQuery:
    return PageQuery(query.path, parts, query.params, query.lists, query.body)


async def _read_body(receive: Receive) -> bytes | None:
    parts, size = [], 0
    while True:
        message = await receive()
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            return None
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _send(response: Response, receive: Receive, send: Send, *, with_body: bool) -> None:
    headers = {"content-type": response.kind, **_HEADERS, **response.headers}
    if response.stream is None:
        headers["content-length"] = str(len(response.body))
    elif "cache-control" not in headers:
        headers["cache-control"] = "no-store"
    await send({
        "type": "http.response.start",
        "status": response.status,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    })  # fmt: skip
    if response.stream is None:
        await send({"type": "http.response.body", "body": response.body if with_body else b""})
        return
    sending = asyncio.ensure_future(_send_parts(response.stream, send))
    leaving = asyncio.ensure_future(_wait_until_left(receive))
    try:
        # The server drops what is sent to a browser that has left, without an error: a stream
        # without an end would go on.
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not sending.done():
            sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending


async def _send_parts(stream: AsyncIterator[bytes], send: Send) -> None:
    async for part in stream:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
