"""TensorBoard behind a token: a program of its own, run by the Python of TensorBoard's environment.

`python tensorboard_program.py TOKEN_FILE ARGUMENT...`, where the arguments are TensorBoard's.

Whoever shows the token gets it as a cookie, and nobody else gets an answer of TensorBoard: other
users of this machine can reach its port. The token comes in a file that only its user may read, for
every user can read the arguments of a process.
"""

import ctypes
import hmac
import html
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

Answer = Callable[..., Any]  # WSGI's start_response

_PR_SET_PDEATHSIG = 1  # prctl(2)
_REFUSED = b"TensorBoard wants the token of the URL that batchml tensorboard printed.\n"
_HEADERS = [("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")]


def cookie_name(port: int) -> str:
    """Browsers give cookies to each port of an address: each TensorBoard has a name of its own."""
    return f"batchml-tensorboard-{port}"


class Guarded:
    """A WSGI application that answers those who have the token."""

    def __init__(self, application: Any, token: str, port: int) -> None:
        self._application, self._token, self._port = application, token, port

    def __call__(self, environ: Mapping[str, Any], start: Answer) -> Iterable[bytes]:
        given, others = _token_of(environ.get("QUERY_STRING", ""))
        if given is not None and self._is_token(given):
            return self._let_in(environ, others, start)
        if self._is_token(_cookie(environ, cookie_name(self._port))) or self._is_token(
            environ.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ")
        ):
            return self._application(environ, start)  # type: ignore[no-any-return]
        start("403 Forbidden", [*_HEADERS, ("Content-Type", "text/plain; charset=utf-8")])
        return [_REFUSED]

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _let_in(self, environ: Mapping[str, Any], others: str, start: Answer) -> list[bytes]:
        """A page that goes on by itself: after a redirect a browser that came from elsewhere
        would not show a cookie that is SameSite=Strict.
        """
        cookie = f"{cookie_name(self._port)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        kind = ("Content-Type", "text/html; charset=utf-8")
        start("200 OK", [*_HEADERS, kind, ("Set-Cookie", cookie)])
        path = "/" + environ.get("PATH_INFO", "/").lstrip("/")
        return [_page(f"{path}?{others}" if others else path)]


def _page(path: str) -> bytes:
    script = json.dumps(path).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html><meta charset="utf-8"><title>TensorBoard</title>'
        f"<script>location.replace({script})</script>"
        f'<a href="{html.escape(path)}">TensorBoard</a>\n'
    ).encode("utf-8", "replace")


def _token_of(query: str) -> tuple[str | None, str]:
    """The token of a query, and the query without it."""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = next((value for name, value in pairs if name == "token"), None)
    return given, urlencode([pair for pair in pairs if pair[0] != "token"])


def _cookie(environ: Mapping[str, Any], name: str) -> str:
    try:
        found = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def main(token_file: str, *arguments: str) -> None:
    try:  # it ends with the command, also with one that is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (AttributeError, OSError):
        pass
    token = Path(token_file).read_text("ascii")
    program = importlib.import_module("tensorboard.program")
    app = importlib.import_module("absl.app")
    importlib.import_module("tensorboard.main_lib").global_init()

    def serve(application: Any, flags: Any) -> Any:
        guarded = Guarded(application, token, flags.port)
        return program.create_port_scanning_werkzeug_server(guarded, flags)

    board = program.TensorBoard(server_class=serve)
    app.run(board.main, argv=["tensorboard", *arguments], flags_parser=board.configure)


if __name__ == "__main__":
    main(*sys.argv[1:])
