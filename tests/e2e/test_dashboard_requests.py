"""Requests that other sites and programs send to a running dashboard: every method, every path."""

import http.client
import re
import socket
from collections.abc import Iterator
from json import dumps

import pytest

from batchml.client import Client
from batchml.clock import SystemClock
from batchml.dashboard.access import ACT
from batchml.dashboard.acting.tools import Tools
from batchml.dashboard.hub import Hub
from batchml.dashboard.service import Pages
from tests.support.cli import Cli
from tests.support.dashboard_rig import RunningDashboard, running

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "FOO")
OTHERS = ("/", "/enter", "/events", "/alive", "/no-such-page", "/static/app.js", "/favicon.ico")


def all_paths(cli: Cli) -> list[str]:
    """The path of each route, with `x` for its parts, and those that are no routes."""
    clock, client = SystemClock(), Client("local", cli.folder, environ=cli.environ)
    hub = Hub(client, clock.monotonic, pace=1.0)
    pages = Pages(client, hub, clock, Tools(cli.folder), pace=1.0)
    found = [re.sub(r"\\(.)", r"\1", each.path.pattern.replace("([^/]+)", "x"))
             for each in pages.routes()]  # fmt: skip
    assert len(found) > 40 and any(each.startswith(ACT) for each in found)
    return [*OTHERS, *found]


class Asker:
    """One connection, which is opened again if the server has closed it."""

    def __init__(self, dashboard: RunningDashboard) -> None:
        self.port = dashboard.port
        self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def __call__(
        self, method: str, path: str, *headers: tuple[str, str], body: bytes = b""
    ) -> http.client.HTTPResponse:
        connection = self._connection
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        answer.read()
        for name, _ in answer.getheaders():
            assert not name.lower().startswith("access-control-"), f"{method} {path}: {name}"
        return answer

    def host(self, name: str = "127.0.0.1") -> tuple[str, str]:
        return ("Host", f"{name}:{self.port}")


@pytest.fixture
def dashboard(cli: Cli) -> Iterator[RunningDashboard]:
    with running(cli) as found:
        yield found


def enter(ask: Asker, dashboard: RunningDashboard) -> tuple[str, str]:
    """The cookie of a browser that has entered by the second link."""
    answer = ask("GET", dashboard.plain_link.partition(str(ask.port))[2], ask.host())
    assert answer.status == 303
    return ("Cookie", answer.headers["set-cookie"].partition(";")[0])


def test_no_other_site_gets_anything_by_any_method_at_any_path(
    cli: Cli, dashboard: RunningDashboard
) -> None:
    """Ray forgot DELETE (CVE-2026-27482), MLflow the name of the host (CVE-2025-14279)."""
    ask = Asker(dashboard)
    cookie = enter(ask, dashboard)
    own, json = ask.host(), ("Content-Type", "application/json")
    evil = ("Origin", "http://evil.test")
    cases = {
        "another name (rebinding)": (ask.host("evil.test"), cookie, json),
        "a name that begins like ours": (ask.host("127.0.0.1.evil.test"), cookie, json),
        "two names": (own, ask.host("evil.test"), cookie, json),
        "no name": (cookie, json),
        "another site": (own, cookie, evil, json, ("Sec-Fetch-Site", "cross-site")),
        "another port": (own, cookie, ("Origin", "http://127.0.0.1:1"), json,
                         ("Sec-Fetch-Site", "same-site")),
        "no cookie": (own, json, ("Origin", f"http://127.0.0.1:{ask.port}")),
        "no secret to act": (own, cookie, json, ("Origin", f"http://127.0.0.1:{ask.port}"),
                             ("Idempotency-Key", "k")),
    }  # fmt: skip
    wrong = []
    for case, headers in cases.items():
        for path in all_paths(cli):
            for method in METHODS:
                if case == "no secret to act" and method != "POST":
                    continue
                status = ask(method, path, *headers).status
                # The page that exchanges the token has no data; its name is checked all the same.
                is_entry = path == "/enter" and method in ("GET", "HEAD")
                is_open = is_entry and case in ("another site", "another port", "no cookie")
                if status < 400 and not is_open:
                    wrong.append(f"{case}: {method} {path}: {status}")
    assert wrong == []
    assert ask("GET", "/", own, cookie).status == 200, "the server still answers"


def raw(port: int, request: bytes) -> bytes:
    """The answer to bytes, of which the client of Python would refuse to send some."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_malformed_requests_reach_no_page(dashboard: RunningDashboard) -> None:
    """A malformed Host changed the path in Starlette (CVE-2026-48710)."""
    port = dashboard.port
    cookie = ": ".join(enter(Asker(dashboard), dashboard)).encode()
    own = b"127.0.0.1:%d" % port
    good = b"GET / HTTP/1.1\r\nHost: %s\r\n%s\r\nConnection: close\r\n\r\n"
    assert raw(port, good % (own, cookie)).startswith(b"HTTP/1.1 200")
    hosts = (
        b"127.0.0.1:%d/../x" % port, b"user@127.0.0.1:%d" % port, b"127.0.0.1.:%d" % port,
        b"LOCALHOST:%d" % port, b"127.0.0.1:0%d" % port, b"127.0.0.1", b"\xff\xfe", b"",
        b"localhost.evil.test:%d" % port, b"127.0.0.1:%d, evil.test" % port,
        b"[::1%%25lo]:%d" % port,
    )  # fmt: skip
    for host in hosts:
        answer = raw(port, good % (host, cookie))
        assert not answer.startswith(b"HTTP/1.1 2"), (host, answer[:80])
    targets = (
        b"http://evil.test/", b"http://evil.test/run/x", b"//evil.test/", b"/../../etc/passwd",
        b"/static/../../../etc/passwd", b"/static/%2e%2e/%2e%2e/app.py",
        b"/static//proc/self/environ", b"/submit/%2fetc%2fpasswd",
        b"/run/..%2f..%2fetc%2fpasswd/state", b"/run/%00/state", b"/run/x/outputs/..%2f..%2fpasswd",
        b"/run/%ff%fe/log.txt", b"*", b"/run/x/code?file=/etc/passwd", b"/sweep/..%2f..%2f/live",
        b"/submit/..%2f..%2f..%2fetc", b"/run/C:%5Cwindows%5Cwin.ini/code",
    )  # fmt: skip
    for target in targets:
        answer = raw(port, (good % (own, cookie)).replace(b"GET /", b"GET " + target, 1))
        assert not answer.startswith(b"HTTP/1.1 2"), (target, answer[:300])
        assert not answer.startswith(b"HTTP/1.1 5"), (target, answer[-2000:])
        assert b"root:x:" not in answer
    assert raw(port, good % (own, cookie)).startswith(b"HTTP/1.1 200"), "it still answers"


def test_a_body_has_bounds_and_a_link_is_worth_nothing_later(
    dashboard: RunningDashboard,
) -> None:
    ask = Asker(dashboard)
    own, origin = ask.host(), ("Origin", f"http://127.0.0.1:{ask.port}")
    json = ("Content-Type", "application/json")
    for body, status in ((b"[" * 100_000, 400), (b'{"token": 1}', 401), (b"x" * 2_000_000, 413)):
        assert Asker(dashboard)("POST", "/enter", own, origin, json, body=body).status == status
    enter(ask, dashboard)
    used = ask("GET", dashboard.plain_link.partition(str(ask.port))[2], own)
    assert (used.status, used.headers["set-cookie"]) == (401, None)
    sent = dumps({"token": dashboard.token}).encode()  # of the first link
    for status in (200, 401):
        assert ask("POST", "/enter", own, origin, json, body=sent).status == status
