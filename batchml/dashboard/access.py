"""Decide whether a request may be answered: host, origin, cookie and secrets. Pure.

The server listens on the loopback interface, but any page that the user's browser shows can send
requests there, and a name that an attacker owns can point there (DNS rebinding). So the Host header
is checked first, on every path. The cookie reads; to act, a request also needs a second secret,
which the page keeps in `sessionStorage`: browsers send the cookie of 127.0.0.1 to every port, but a
page of another port cannot read our `sessionStorage`.

Sources: Fetch Metadata Request Headers (W3C), RFC 6265 section 8.5 (cookies do not separate ports),
RFC 6761 section 6.3 (names below `.localhost` are loopback addresses).
"""

import hmac
import secrets as random
from collections.abc import Iterable

from msgspec import Struct

ENTER = "/enter"  # the page that exchanges the token of the first URL for the cookie
STATIC = "/static/"  # scripts and styles, which hold no data
ACT = "/act/"  # paths below it change something
ACT_HEADER = "x-batchml-act"
_FROM_HERE = ("", "same-origin", "none")  # of Sec-Fetch-Site; old and terminal browsers send none


class RequestHead(Struct, frozen=True):
    """The parts of a request that decide. `headers` are as they were sent, names in lower case."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()

    def header(self, name: str) -> str:
        """The value of a header; "" if it is absent or was sent more than once."""
        found = [value for each, value in self.headers if each == name]
        return found[0] if len(found) == 1 else ""

    def cookie(self, name: str) -> str:
        """The value of a cookie; "" if it is absent or was sent more than once."""
        pairs = (each.partition("=") for each in self.header("cookie").split(";"))
        found = [value.strip() for each, _, value in pairs if each.strip() == name]
        return found[0] if len(found) == 1 else ""


class RequestRefusal(Struct, frozen=True):
    """A request that is not answered: the HTTP status, and a sentence for people."""

    status: int
    text: str


class AccessSecrets(Struct, frozen=True):
    """The names and secrets of one running dashboard.

    `name` is a random name below `.localhost`, which has cookies of its own. `token` is in the
    first URL, and is exchanged for the others. `allowed` are further names, given with --host.
    """

    port: int
    name: str
    token: str
    cookie: str
    act: str
    allowed: tuple[str, ...] = ()
    read_only: bool = False

    @property
    def cookie_name(self) -> str:
        return f"batchml-{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the Host header that are answered."""
        names = (self.name, "127.0.0.1", "localhost", "[::1]", *self.allowed)
        return frozenset(f"{name}:{self.port}" for name in names)


def make_secrets(
    port: int, allowed: Iterable[str] = (), *, read_only: bool = False
) -> AccessSecrets:
    """New secrets of 256 bits each, for a server on this port."""
    return AccessSecrets(
        port, f"batchml-{random.token_hex(6)}.localhost", random.token_urlsafe(32),
        random.token_urlsafe(32), random.token_urlsafe(32), tuple(allowed), read_only,
    )  # fmt: skip


def check(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    """The reason why a request is refused, or None."""
    refusal = _check_host(head, known) or _check_method(head, known)
    if refusal or head.path == ENTER or head.path.startswith(STATIC):
        return refusal
    if head.header("sec-fetch-site") not in _FROM_HERE:
        return RequestRefusal(403, "Another site asked for this page.")
    if not _same(head.cookie(known.cookie_name), known.cookie):
        return RequestRefusal(401, "Open the link that `batchml dashboard` has printed.")
    return _check_act(head, known) if head.path.startswith(ACT) else None


def check_token(given: str, known: AccessSecrets) -> bool:
    """Whether this is the token of the first URL."""
    return _same(given, known.token)


def _check_host(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    if head.header("host") in known.hosts:
        return None
    return RequestRefusal(
        421,
        f"This is not the address of the dashboard. Open http://127.0.0.1:{known.port}/ instead.",
    )


def _check_method(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    is_act = head.path.startswith(ACT)
    allowed = ["GET", "HEAD"]
    if is_act or head.path == ENTER:
        allowed = ["POST"] if is_act else [*allowed, "POST"]
    if head.method not in allowed:
        return RequestRefusal(405, f"{head.path} takes {' and '.join(allowed)} only.")
    if head.method == "POST" and not _is_from_our_page(head):
        return RequestRefusal(403, "Another site sent this request.")
    return None


def _is_from_our_page(head: RequestHead) -> bool:
    """Whether a page of this server sent a POST request, as JSON."""
    is_json = head.header("content-type").partition(";")[0].strip().lower() == "application/json"
    origin = head.header("origin") == f"http://{head.header('host')}"
    return is_json and origin and head.header("sec-fetch-site") in ("", "same-origin")


def _check_act(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    if known.read_only:
        return RequestRefusal(403, "This dashboard was started with --read-only.")
    if not _same(head.header(ACT_HEADER), known.act):
        return RequestRefusal(
            403, "This tab may only read. Act in the tab that the terminal's link opened."
        )
    return None


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
