"""Requests to the application, without a connection."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from batchml.dashboard.access import RequestHead, make_secrets
from batchml.dashboard.app import Dashboard, PageQuery, Response, route
from batchml.dashboard.html import Html, tag
from batchml.dashboard.layout import page
from batchml.errors import ConfigError, NotFound, UsageError

KNOWN = make_secrets(8123, links=2)
FIRST, SECOND = KNOWN.tokens
HOST = ("host", "127.0.0.1:8123")
COOKIE = ("cookie", f"{KNOWN.cookie_name}={KNOWN.cookie}")
POST = (HOST, ("origin", "http://127.0.0.1:8123"), ("content-type", "application/json"))
ACT = (*POST, COOKIE, ("x-batchml-act", KNOWN.act))


async def no_events(query: PageQuery) -> AsyncIterator[bytes]:
    yield b""


def fails(query: PageQuery) -> Html:
    raise NotFound("Run", query.parts[0], [], "")


class Rig:
    def __init__(self) -> None:
        self.acts: list[Any] = []
        routes = [
            route("/", lambda query: tag("p", "hello")),
            route("/run/*", fails),
            route("/number", lambda query: {"n": query.number("n", 7, 100)}),
            route("/act/note", self.note),
        ]
        self.app = Dashboard(KNOWN, routes, no_events)

    def note(self, query: PageQuery) -> dict[str, Any]:
        self.acts.append(dict(query.body))
        return {"done": len(self.acts)}

    def ask(
        self, method: str, path: str, *headers: tuple[str, str], query: str = "",
        body: bytes | None = b"",
    ) -> Response:  # fmt: skip
        return asyncio.run(self.app.answer(RequestHead(method, path, headers), query, body))


def test_a_page_and_its_errors() -> None:
    rig = Rig()
    page = rig.ask("GET", "/", HOST, COOKIE)
    assert (page.status, page.body) == (200, b"<p>hello</p>")
    missing = rig.ask("GET", "/run/%3Cscript%3E", HOST, COOKIE)
    assert missing.status == 404 and b"<script>" not in missing.body.partition(b"<main")[2]
    nowhere = rig.ask("GET", "/nothing", HOST, COOKIE)
    assert nowhere.status == 404 and b"There is no page /nothing." in nowhere.body
    for each in (missing, nowhere):
        assert b'<a href="/">All runs</a>' in each.body.partition(b"<main")[2]
    wrong = rig.ask("GET", "/number", HOST, COOKIE, query="n=-1")
    assert wrong.status == 400 and b"write a whole number" in wrong.body


def test_a_number_has_bounds() -> None:
    rig = Rig()
    for given, found in (("", 7), ("n=5", 5), ("n=999", 100), ("n=", 7)):
        assert json.loads(rig.ask("GET", "/number", HOST, COOKIE, query=given).body)["n"] == found


def test_a_token_is_taken_once_and_gives_cookie_and_secret() -> None:
    rig = Rig()
    body = json.dumps({"token": FIRST}).encode()
    wrong = rig.ask("POST", "/enter", *POST, body=b'{"token": "x"}')
    assert (wrong.status, "set-cookie" in wrong.headers) == (401, False)
    first = rig.ask("POST", "/enter", *POST, body=body)
    assert json.loads(first.body) == {"act": KNOWN.act}
    assert first.headers["set-cookie"] == (
        f"{KNOWN.cookie_name}={KNOWN.cookie}; HttpOnly; SameSite=Strict; Path=/"
    )
    assert rig.ask("POST", "/enter", *POST, body=body).status == 401
    assert rig.ask("GET", "/enter", HOST, query=f"token={FIRST}").status == 401
    for status in (303, 401):  # the other link has a token of its own
        assert rig.ask("GET", "/enter", HOST, query=f"token={SECOND}").status == status


def test_a_browser_without_scripts_enters_by_a_link_and_gets_no_secret() -> None:
    entered = Rig().ask("GET", "/enter", HOST, query=f"token={SECOND}")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    assert KNOWN.act.encode() not in entered.body


def test_a_browser_with_scripts_enters_by_either_link_to_act() -> None:
    rig, given = Rig(), f"token={SECOND}"
    document = ("sec-fetch-dest", "document")
    page = rig.ask("GET", "/enter", HOST, document, query=given)
    assert (page.status, page.headers["cache-control"]) == (200, "no-store")
    assert b"/static/enter." in page.body and "set-cookie" not in page.headers
    assert KNOWN.act.encode() not in page.body
    # Its scripts are off: the link within the page.
    plain = rig.ask("GET", "/enter", HOST, document, query=f"{given}&plain=1")
    assert (plain.status, plain.headers["location"]) == (303, "/")


def test_the_entry_page_has_no_token() -> None:
    page = Rig().ask("GET", "/enter", HOST)
    assert page.status == 200 and SECOND.encode() not in page.body


def test_an_action_is_done_once_for_each_key() -> None:
    rig = Rig()
    key = ("idempotency-key", "a")
    answers = [rig.ask("POST", "/act/note", *ACT, key, body=b'{"x": 1}').body for _ in range(2)]
    assert answers == [b'{"done":1}'] * 2 and rig.acts == [{"x": 1}]
    rig.ask("POST", "/act/note", *ACT, ("idempotency-key", "b"), body=b"{}")
    assert rig.acts == [{"x": 1}, {}]
    assert rig.ask("POST", "/act/note", *ACT, body=b"{}").status == 400


def test_an_action_that_is_sent_twice_at_once_is_done_once() -> None:
    rig = Rig()
    head = RequestHead("POST", "/act/note", (*ACT, ("idempotency-key", "a")))

    async def twice() -> list[Response]:
        return list(await asyncio.gather(*(rig.app.answer(head, "", b"{}") for _ in range(2))))

    assert [each.body for each in asyncio.run(twice())] == [b'{"done":1}'] * 2
    assert rig.acts == [{}]


def test_the_error_of_an_action_is_its_answer_for_that_key() -> None:
    asked: list[str] = []

    def fail(query: PageQuery) -> Html:
        asked.append(query.path)
        raise ConfigError("job.toml", ["-p lr=a: give a number.", "-p n=b: give a number."])

    app = Dashboard(KNOWN, [route("/act/fail", fail)], no_events)
    for key, times in (("a", 1), ("a", 1), ("b", 2)):
        head = RequestHead("POST", "/act/fail", (*ACT, ("idempotency-key", key)))
        answer = asyncio.run(app.answer(head, "", b"{}"))
        assert answer.status == 400 and b"-p n=b: give a number." in answer.body
        assert len(asked) == times


def test_bodies_that_are_no_object_are_refused() -> None:
    rig = Rig()
    for body in (b"[", b"[]", b"1", b"\xff", b"[" * 100_000):
        answer = rig.ask("POST", "/act/note", *ACT, ("idempotency-key", "a"), body=body)
        assert answer.status == 400, body[:10]
    assert rig.ask("POST", "/act/note", *ACT, ("idempotency-key", "a"), body=None).status == 413
    assert not rig.acts


def test_a_static_file_has_its_digest_in_its_name_and_no_other_is_served() -> None:
    from batchml.dashboard.layout import static_name

    rig = Rig()
    found = rig.ask("GET", static_name("app.js"), HOST)
    assert found.status == 200 and "immutable" in found.headers["cache-control"]
    for path in (
        "/static/app.js",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
    ):
        assert rig.ask("GET", path, HOST).status == 404, path


def test_usage_errors_say_what_to_do() -> None:
    def wrong(query: PageQuery) -> Html:
        raise UsageError("--queue x: no such queue.")

    app = Dashboard(KNOWN, [route("/", wrong)], no_events)
    found = asyncio.run(app.answer(RequestHead("GET", "/", (HOST, COOKIE))))
    assert found.status == 400 and b"no such queue" in found.body


def test_answers_for_other_machines_are_compressed() -> None:
    import gzip

    from batchml.dashboard.app import compressed

    page, takes = Response(b"x" * 5000), ("accept-encoding", "br, gzip;q=0.8")
    small = compressed(page, RequestHead("GET", "/", (takes,)))
    assert len(small.body) < 100 and gzip.decompress(small.body) == page.body
    assert small.headers["content-encoding"] == "gzip"
    assert compressed(page, RequestHead("GET", "/")) == page
    saved = Response(b"x" * 5000, "application/octet-stream")
    assert compressed(saved, RequestHead("GET", "/", (takes,))) == saved


def test_a_page_has_all_its_parts_for_a_browser_without_scripts() -> None:
    async def go() -> tuple[str, str]:
        panels = (tag("div", data_panel="/run/a%20b?x=1&y=2", data_live=True),
                  tag("div", data_panel="/part/1"))  # fmt: skip
        routes = [
            route("/", lambda query: page("P", *panels)),
            route("/part/*", lambda query: tag("p", f"part {query.parts[0]} <b>")),
            route("/run/*", fails),
        ]
        app = Dashboard(KNOWN, routes, no_events)
        head = RequestHead("GET", "/", (HOST, COOKIE))
        first, whole = await app.answer(head, "q=1"), await app.answer(head, "q=1&wait=1")
        return first.body.decode(), whole.body.decode()

    first, whole = asyncio.run(go())
    assert '<noscript><p><a href="/?q=1&amp;wait=1">Show all parts' in first
    assert "part 1" not in first and "<p>part 1 &lt;b&gt;</p></div>" in whole
    assert "a b" in whole and "does not exist" in whole, "why a part is not there"
    assert "Show all parts" not in whole


# --- Answers that take long, faults, limits -------------------------------------------------------


def test_a_panel_that_takes_long_is_asked_for_again_and_is_made_once() -> None:
    go, asked = threading.Event(), list[str]()

    def slow(query: PageQuery) -> Html:
        asked.append(query.params["n"])
        go.wait(30)
        return tag("p", "at last")

    async def ask() -> list[Response]:
        app = Dashboard(KNOWN, [route("/slow", slow), route("/", hello)], no_events, patience=0.0)
        head = RequestHead("GET", "/slow", (HOST, COOKIE, ("x-batchml-question", "q1")))
        found = [await app.answer(head, "n=1") for _ in range(3)]
        # The shell of a page does not wait for panels.
        found.append(await app.answer(RequestHead("GET", "/", (HOST, COOKIE))))
        go.set()
        while (last := await app.answer(head, "n=1")).status == 202:
            await asyncio.sleep(0.001)
        return [*found, last]

    answers = asyncio.run(ask())
    assert [each.status for each in answers] == [202, 202, 202, 200, 200]
    assert (answers[-1].body, asked) == (b"<p>at last</p>", ["1"])


def hello(query: PageQuery) -> Html:
    return tag("p", "hello")


def test_many_slow_panels_do_not_keep_a_page_from_opening() -> None:
    go = threading.Event()

    def slow(query: PageQuery) -> Html:
        go.wait(30)
        return tag("p", "at last")

    async def ask() -> Response:
        app = Dashboard(KNOWN, [route("/slow", slow), route("/", hello)], no_events, patience=0.0)
        for number in range(100):
            name = ("x-batchml-question", f"q{number}")
            await app.answer(RequestHead("GET", "/slow", (HOST, COOKIE, name)))
        found = await app.answer(RequestHead("GET", "/", (HOST, COOKIE)))
        go.set()
        return found

    assert asyncio.run(ask()).body == b"<p>hello</p>"


def test_many_slow_panels_do_not_keep_an_action_from_being_done() -> None:
    go = threading.Event()

    def slow(query: PageQuery) -> Html:
        go.wait(30)
        return tag("p", "at last")

    def cancel(query: PageQuery) -> dict[str, Any]:
        return {"done": 1}

    async def ask() -> bytes:
        app = Dashboard(KNOWN, [route("/slow", slow), route("/act/cancel", cancel)], no_events,
                        patience=0.0)  # fmt: skip
        for number in range(100):
            name = ("x-batchml-question", f"q{number}")
            await app.answer(RequestHead("GET", "/slow", (HOST, COOKIE, name)))
        head = RequestHead("POST", "/act/cancel", (*ACT, ("idempotency-key", "a")))
        found = await asyncio.wait_for(app.answer(head, "", b"{}"), 20)
        go.set()
        return found.body

    assert asyncio.run(ask()) == b'{"done":1}'


def test_a_stream_ends_when_its_browser_has_left() -> None:
    async def ask() -> list[str]:
        left, told = asyncio.Event(), []

        async def events(query: PageQuery) -> AsyncIterator[bytes]:
            try:
                yield b"event: hello\n\n"
                await asyncio.Event().wait()  # nothing more happens
            finally:
                told.append("the stream has ended")

        async def receive() -> dict[str, Any]:
            if told:
                await left.wait()
                return {"type": "http.disconnect"}
            told.append("asked")
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                told.append("sent")
                left.set()

        headers = [(name.encode(), value.encode()) for name, value in (HOST, COOKIE)]
        scope = {"type": "http", "method": "GET", "path": "/events", "headers": headers}
        await asyncio.wait_for(Dashboard(KNOWN, [], events)(scope, receive, send), 20)
        return told

    assert asyncio.run(ask()) == ["asked", "sent", "the stream has ended"]


def test_a_fault_of_ours_is_a_sentence_and_not_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(query: PageQuery) -> Html:
        raise KeyError("<script>\x1b[31m")

    app = Dashboard(KNOWN, [route("/", broken)], no_events)
    found = asyncio.run(app.answer(RequestHead("GET", "/", (HOST, COOKIE))))
    assert found.status == 500 and b"This is a fault of batchml: KeyError" in found.body
    assert b"<script>" not in found.body.partition(b"<main")[2]
    told = capsys.readouterr().err
    assert "in broken" in told and "\x1b" not in told


def test_a_query_of_too_many_parts_is_refused() -> None:
    found = Rig().ask("GET", "/", HOST, COOKIE, query="&".join(["a=1"] * 1001))
    assert found.status == 400 and b"more than 1000 parts" in found.body


def test_a_tab_that_is_open_says_so_and_learns_whether_it_may_read() -> None:
    touched: list[int] = []
    app = Dashboard(KNOWN, [], no_events, lambda: touched.append(1))
    for headers, status in (((HOST, COOKIE), 200), ((HOST,), 401)):
        assert asyncio.run(app.answer(RequestHead("GET", "/alive", headers))).status == status
    assert touched == [1]


def test_the_head_of_the_stream_has_an_end() -> None:
    assert Rig().ask("HEAD", "/events", HOST, COOKIE).stream is None
    assert Rig().ask("GET", "/events", HOST, COOKIE).stream is not None


def test_a_dashboard_that_ended_is_named_to_its_old_tabs() -> None:
    old = ("host", "batchml-0123456789ab.localhost:8123")
    found = Rig().ask("GET", "/alive", old, COOKIE)
    assert found.status == 421 and b"Open the link that the new" in found.body


def test_a_link_of_another_site_has_a_way_on_that_stays_here() -> None:
    from_there = (HOST, COOKIE, ("sec-fetch-site", "cross-site"))
    link = (*from_there, ("sec-fetch-dest", "document"))
    assert b'href="/run/x"' in Rig().ask("GET", "/run/x", *link).body
    # A browser leaves tabs and newlines of an address out.
    for path in ("/\t/evil.test", "/\n//evil.test", "/a?\t#"):
        assert b'href="/%' in Rig().ask("GET", path, *link).body.replace(b"/a", b"/"), path
    for path in ("//evil.test/", "/\\\\evil.test/", "/\\\\/evil.test"):
        body = Rig().ask("GET", path, *link).body
        assert b'href="/evil.test' in body, path
    for other in (from_there, (*from_there, ("sec-fetch-dest", "image"))):
        assert b"Go on" not in Rig().ask("GET", "/", *other).body
