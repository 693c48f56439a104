"""Requests to the application, without a connection."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from batchml.dashboard.access import RequestHead, make_secrets
from batchml.dashboard.app import Dashboard, PageQuery, Response, route
from batchml.dashboard.html import Html, tag
from batchml.dashboard.layout import page
from batchml.errors import ConfigError, NotFound, UsageError

KNOWN = make_secrets(8123)
HOST = ("host", "127.0.0.1:8123")
COOKIE = ("cookie", f"{KNOWN.cookie_name}={KNOWN.cookie}")
POST = (HOST, ("origin", "http://127.0.0.1:8123"), ("content-type", "application/json"))
ACT = (*POST, COOKIE, ("x-batchml-act", KNOWN.act))


async def no_events(query: PageQuery) -> AsyncIterator[bytes]:
    yield b""


def fails(query: PageQuery) -> Html:
    raise NotFound("Run", query.parts[0], [], "")


class Rig:
    def __init__(self, exchanges: int = 1) -> None:
        self.acts: list[Any] = []
        routes = [
            route("/", lambda query: tag("p", "hello")),
            route("/run/*", fails),
            route("/number", lambda query: {"n": query.number("n", 7, 100)}),
            route("/act/note", self.note),
        ]
        self.app = Dashboard(KNOWN, routes, no_events, exchanges=exchanges)

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
    assert rig.ask("GET", "/nothing", HOST, COOKIE).status == 404
    wrong = rig.ask("GET", "/number", HOST, COOKIE, query="n=-1")
    assert wrong.status == 400 and b"write a whole number" in wrong.body


def test_a_number_has_bounds() -> None:
    rig = Rig()
    for given, found in (("", 7), ("n=5", 5), ("n=999", 100), ("n=", 7)):
        assert json.loads(rig.ask("GET", "/number", HOST, COOKIE, query=given).body)["n"] == found


def test_the_token_is_taken_once_and_gives_cookie_and_secret() -> None:
    rig = Rig()
    body = json.dumps({"token": KNOWN.token}).encode()
    wrong = rig.ask("POST", "/enter", *POST, body=b'{"token": "x"}')
    assert (wrong.status, "set-cookie" in wrong.headers) == (401, False)
    first = rig.ask("POST", "/enter", *POST, body=body)
    assert json.loads(first.body) == {"act": KNOWN.act}
    assert first.headers["set-cookie"] == (
        f"{KNOWN.cookie_name}={KNOWN.cookie}; HttpOnly; SameSite=Strict; Path=/"
    )
    assert rig.ask("POST", "/enter", *POST, body=body).status == 401
    assert rig.ask("GET", "/enter", HOST, query=f"token={KNOWN.token}").status == 401


def test_a_browser_without_scripts_enters_by_a_link_and_gets_no_secret() -> None:
    entered = Rig().ask("GET", "/enter", HOST, query=f"token={KNOWN.token}")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    assert KNOWN.act.encode() not in entered.body


def test_the_entry_page_has_no_token() -> None:
    page = Rig().ask("GET", "/enter", HOST)
    assert page.status == 200 and KNOWN.token.encode() not in page.body


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
