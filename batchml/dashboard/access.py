"""Decide whether a request may be answered: host, origin, cookie and secrets. Pure.

The server listens on the loopback interface, but any page that the user's browser shows can send
requests there, and a name that an attacker owns can point there (DNS rebinding). So the Host header
is checked first, on every path. The cookie reads; to act, a request also needs a second secret,
which the page keeps in `localStorage`: browsers send the cookie of 127.0.0.1 to every port, but a
page of another port cannot read our `localStorage`. Both secrets end with the process.

Sources: Fetch Metadata Request Headers (W3C), RFC 6265 section 8.5 (cookies do not separate ports),
RFC 6761 section 6.3 (names below `.localhost` are loopback addresses).
"""

import hmac
import ipaddress
import re
import secrets as random
from collections.abc import Iterable
from urllib.parse import quote

from msgspec import Struct

ENTER = "/enter"  # the page that exchanges the token of a link for the cookie
STATIC = "/static/"  # scripts and styles, which hold no data
ACT = "/act/"  # paths below it change something
ACT_HEADER = "x-batchml-act"
ENDED = "This page is of a dashboard that has ended."
NEW_LINK = "Open the link that the new `batchml dashboard` has printed."
_OWN_NAME = re.compile(r"batchml-[0-9a-f]{12}\.localhost:\d{1,5}")  # of any dashboard
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
    """A request that is not answered: the HTTP status, and a sentence for people.

    `go`: the path of a link with which the user goes there all the same.
    """

    status: int
    text: str
    go: str = ""


class AccessSecrets(Struct, frozen=True):
    """The names and secrets of one running dashboard.

    `name` is a random name below `.localhost`, which has cookies of its own. Each of `tokens` is
    in one link of the terminal, and is exchanged for the others. `allowed` are further names, given
    with --host; `any_address`: every IP address is one, as rebinding needs a name.
    """

    port: int
    name: str
    tokens: tuple[str, ...]
    cookie: str
    act: str
    allowed: tuple[str, ...] = ()
    any_address: bool = False
    read_only: bool = False

    @property
    def cookie_name(self) -> str:
        return f"batchml-{self.port}"

    @property
    def is_remote(self) -> bool:
        """Whether other machines may ask."""
        return self.any_address or bool(self.allowed)

    @property
    def hosts(self) -> frozenset[str]:
        """The values of the Host header that are answered."""
        names = (self.name, "127.0.0.1", "localhost", "[::1]", *self.allowed)
        bare = names if self.port == 80 else ()  # browsers leave the port of HTTP out
        return frozenset((*bare, *(f"{name}:{self.port}" for name in names)))


def make_secrets(
    port: int,
    allowed: Iterable[str] = (),
    *,
    links: int = 1,
    any_address: bool = False,
    read_only: bool = False,
) -> AccessSecrets:
    """New secrets of 256 bits each, for a server on this port, with a token for each link."""
    return AccessSecrets(
        port, f"batchml-{random.token_hex(6)}.localhost",
        tuple(random.token_urlsafe(32) for _ in range(links)), random.token_urlsafe(32),
        random.token_urlsafe(32), tuple(allowed), any_address,
        read_only,
    )  # fmt: skip


def check(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    """The reason why a request is refused, or None."""
    refusal = _check_host(head, known) or _check_method(head, known)
    if refusal or head.path == ENTER or head.path.startswith(STATIC):
        return refusal
    if head.header("sec-fetch-site") not in _FROM_HERE:
        is_link = head.header("sec-fetch-dest") == "document" and head.method == "GET"
        go = "/" + quote(head.path.lstrip("/\\")) if is_link else ""
        return RequestRefusal(403, "Another site asked for this page.", go)
    if not _same(head.cookie(known.cookie_name), known.cookie):
        return RequestRefusal(401, "Open the link that `batchml dashboard` has printed.")
    return _check_act(head, known) if head.path.startswith(ACT) else None


def take_token(given: str, tokens: Iterable[str]) -> tuple[str, ...] | None:
    """The tokens that are left when this one is used; None if it is none of them."""
    known = tuple(tokens)
    left = tuple(each for each in known if not _same(given, each))
    return left if len(left) < len(known) else None


def _check_host(head: RequestHead, known: AccessSecrets) -> RequestRefusal | None:
    host = head.header("host")
    if host in known.hosts or (known.any_address and _is_address(host, known.port)):
        return None
    if _OWN_NAME.fullmatch(host):
        return RequestRefusal(421, f"{ENDED} {NEW_LINK}")
    return RequestRefusal(
        421,
        f"This is not the address of the dashboard. Open http://127.0.0.1:{known.port}/ instead.",
    )


def _is_address(host: str, port: int) -> bool:
    """Whether the Host header is an IP address, as it is written normally, and the port."""
    name, colon, number = host.rpartition(":")
    if port == 80 and not re.search(r":\d+$", host.rpartition("]")[2]):
        name, colon, number = host, ":", "80"
    inner = name[1:-1] if name[:1] == "[" and name[-1:] == "]" else name
    try:
        found = ipaddress.ip_address(inner)
    except ValueError:
        return False
    written = f"[{found}]" if found.version == 6 else str(found)
    return bool(colon) and number == str(port) and written == name


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
            403,
            "This browser may only read. The first link of the terminal opens one that may act.",
        )
    return None


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())
