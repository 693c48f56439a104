"""TensorBoard's server behind a token: a program that runs in TensorBoard's own environment.

`python token_server.py TOKEN_FILE ARGUMENT...`, with TensorBoard's arguments.

Other users of this machine can reach the port, so the server answers only requests with the token,
and then sets the token as a cookie. The token is in a file that only its user can read, because
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

StartResponse = Callable[..., Any]  # of WSGI

_PR_SET_PDEATHSIG = 1  # prctl(2)
_REFUSED = b"TensorBoard needs the token of the URL that batchml tensorboard printed.\n"
_HEADERS = [("Cache-Control", "no-store"), ("Referrer-Policy", "no-referrer")]


def cookie_name(port: int) -> str:
    """Name the cookie after the port: browsers send the cookies of a host to all of its ports."""
    return f"batchml-tensorboard-{port}"


class TokenGuard:
    """A WSGI application that answers only requests with the token."""

    def __init__(self, application: Any, token: str, port: int) -> None:
        self._application, self._token, self._port = application, token, port

    def __call__(self, environ: Mapping[str, Any], start: StartResponse) -> Iterable[bytes]:
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

    def _let_in(self, environ: Mapping[str, Any], others: str, start: StartResponse) -> list[bytes]:
        """Set the cookie on a page that loads the real one.

        After a redirect from another site, a browser would not send a cookie that is
        SameSite=Strict.
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
    """Return the token of a query, and the query without it."""
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
    try:  # end with the command, even if that is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (AttributeError, OSError):
        pass
    token = Path(token_file).read_text("ascii")
    program = importlib.import_module("tensorboard.program")
    app = importlib.import_module("absl.app")
    importlib.import_module("tensorboard.main_lib").global_init()

    def serve(application: Any, flags: Any) -> Any:
        guarded = TokenGuard(application, token, flags.port)
        return program.create_port_scanning_werkzeug_server(guarded, flags)

    board = program.TensorBoard(server_class=serve)
    app.run(board.main, argv=["tensorboard", *arguments], flags_parser=board.configure)


if __name__ == "__main__":
    main(*sys.argv[1:])
