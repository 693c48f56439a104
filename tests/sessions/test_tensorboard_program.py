"""The token of TensorBoard, by real requests to a small application behind it."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.sessions.tensorboard.token_server import TokenGuard, cookie_name

TOKEN = "the-token"


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def curves(environ: dict[str, Any], start: Any) -> list[bytes]:
    start("200 OK", [("Content-Type", "text/plain")])
    return [f"curves of {environ['PATH_INFO']}".encode()]


@contextmanager
def serving() -> Iterator[WSGIServer]:
    with make_server("127.0.0.1", 0, curves, handler_class=Quiet) as server:
        server.set_app(TokenGuard(curves, TOKEN, server.server_port))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as server:
        yield server.server_port


class Answer:
    def __init__(self, port: int, path: str, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", path, headers=headers)
        found = connection.getresponse()
        self.status, self.body = found.status, found.read().decode()
        self.cookie = found.headers["Set-Cookie"]
        self.headers = found.headers
        connection.close()


@pytest.mark.parametrize("path", ["/", "/data/runs", "/?token=", "/?token=the-toke", "/?token=%ff"])
@pytest.mark.parametrize("cookie", ["", "{name}=wrong", "other=the-token", "{name}=", "\x00;=="])
def test_whoever_lacks_the_token_gets_nothing(port: int, path: str, cookie: str) -> None:
    answer = Answer(port, path, Cookie=cookie.format(name=cookie_name(port)))
    assert (answer.status, answer.cookie) == (403, None)
    assert "curves" not in answer.body


@given(st.text(st.characters(codec="latin-1", exclude_characters="\r\n")))
def test_no_other_words_are_the_token(words: str) -> None:
    seen: list[str] = []
    environ = {"HTTP_AUTHORIZATION": words, "HTTP_COOKIE": words, "QUERY_STRING": words}
    TokenGuard(curves, TOKEN, 1)(
        {**environ, "PATH_INFO": "/"}, lambda status, _: seen.append(status)
    )
    assert seen == ["403 Forbidden"]


def test_the_token_becomes_a_cookie_that_no_page_can_read_and_no_other_site_sends(
    port: int,
) -> None:
    first = Answer(port, "/?token=the-token&smoothing=0.5&x=%3C/script%3E")
    assert first.status == 200
    kept, *about = first.cookie.split("; ")
    assert kept == f"{cookie_name(port)}={TOKEN}"
    assert set(about) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert 'location.replace("/?smoothing=0.5&x=%3C%2Fscript%3E")' in first.body
    assert TOKEN not in first.body
    assert first.headers["Referrer-Policy"] == "no-referrer"
    assert Answer(port, "/data/runs", Cookie=f"a=b; {kept}").body == "curves of /data/runs"


def test_a_program_sends_the_token_as_a_header(port: int) -> None:
    answer = Answer(port, "/data/runs", Authorization=f"Bearer {TOKEN}")
    assert (answer.status, answer.body) == (200, "curves of /data/runs")


def test_the_page_leads_nowhere_else(port: int) -> None:
    assert 'replace("/evil.example/")' in Answer(port, "//evil.example/?token=the-token").body
