"""Listen on addresses of this machine, and open a browser on the link without showing the token.

A link in the arguments of a browser can be read by all users of the machine, and its token with it.
So the browser gets a file in a folder that only this user can read, and the file goes to the link
(jupyter/notebook PR 4260). Browsers in WSL, ChromeOS and snaps may not read the file (PR 4999).
"""

import errno
import ipaddress
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from html import escape
from pathlib import Path

from msgspec import Struct

from batchml.errors import UsageError

LOOPBACK = "127.0.0.1"
_PATIENCE = 20.0  # seconds until a browser has entered
_TRIES = 20  # to find a port that is free on two addresses
_FILE = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={url}">
<title>batchml</title>
<p><a href="{url}">Open the dashboard</a></p>
"""


class ListenAddress(Struct, frozen=True):
    """Where the dashboard listens, besides 127.0.0.1, and under which name others reach it.

    `bind`: an address, or "" for 127.0.0.1 alone. `name` is what others write in the address bar.
    `allowed` are all such names. `is_any`: it listens on all addresses of this machine.
    """

    bind: str = ""
    name: str = ""
    allowed: tuple[str, ...] = ()
    is_any: bool = False

    @property
    def is_open(self) -> bool:
        """Whether other machines reach it."""
        return self.is_any or bool(self.bind and not ipaddress.ip_address(self.bind).is_loopback)


def read_address(given: str) -> ListenAddress:
    """The address of `--host`: an IP address of this machine, its name, or 0.0.0.0 or `::` for all.

    Raises UsageError for what is neither.
    """
    word = given.strip().removeprefix("[").removesuffix("]").lower()
    try:
        if not word or word.isspace():
            raise UnicodeError(given)
        family, _, _, _, place = socket.getaddrinfo(word, 0, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        raise UsageError(f"--host {given}: this is no address of this machine.") from error
    bind = str(place[0])
    if ipaddress.ip_address(bind).is_unspecified:
        names = {socket.gethostname().lower(), socket.getfqdn().lower()} - {"localhost"}
        name = _own_address(family) or socket.gethostname()
        return ListenAddress(bind, bracketed(name), tuple(sorted(names)), is_any=True)
    allowed = dict.fromkeys((bracketed(word), bracketed(bind)))
    return ListenAddress(bind, bracketed(word), tuple(allowed))


def bracketed(name: str) -> str:
    """A name or an address as it stands in a URL: IPv6 in brackets."""
    return f"[{name}]" if ":" in name else name


def _own_address(family: int) -> str:
    """The address from which this machine sends to others; "" without a route. Sends nothing."""
    # Addresses of documentation: RFC 5737, RFC 3849
    other = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def listen(port: int, address: ListenAddress) -> list[socket.socket]:
    """Open the port on 127.0.0.1 and on the address; 0 is any free one.

    Raises UsageError if the port is taken, or the address belongs to another machine.
    """
    for left in reversed(range(1 if port else _TRIES)):
        # All addresses of IPv4, or of both, have 127.0.0.1 among them.
        first = _bind(address.bind if address.is_any else LOOPBACK, port, "")
        if address.is_any or address.bind in ("", LOOPBACK):
            return [first]
        try:
            return [first, _bind(address.bind, first.getsockname()[1], address.name)]
        except UsageError as error:
            first.close()
            cause = error.__cause__
            is_taken = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            if not (is_taken and left):
                raise
    raise AssertionError("the last try returns or raises")


def _bind(host: str, port: int, named: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY: without, the content of an answer waits for
    # the acknowledgement of its head, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--host {named}: this is no address of this machine.") from error
        raise UsageError(
            f"--port {port}: {error.strerror}. Choose another, or leave it out."
        ) from error
    listener.listen(128)
    return listener


# --- The browser ----------------------------------------------------------------------------------


class BrowserOpening:
    """Opens the browser once. Its thread waits, as browsers may keep the caller."""

    def __init__(
        self, url: str, tell: Callable[[str], None], *, by_file: bool = True,
        open_url: Callable[[str], str] | None = None, patience: float = _PATIENCE,
    ) -> None:  # fmt: skip
        """`by_file`: give the browser a private file that goes to the URL, not the URL.

        `open_url` opens an address, or returns a sentence that says why it cannot.
        """
        self._url, self._tell, self._by_file, self._patience = url, tell, by_file, patience
        self._open_url = open_url or open_in_window
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._entered = threading.Event()

    def start(self) -> None:
        for work in (self._open, self._watch):
            threading.Thread(target=work, name="browser", daemon=True).start()

    def close(self) -> None:
        """Note that the link was used, or is worthless now: the file goes."""
        self._entered.set()
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _open(self) -> None:
        target = self._url
        if self._by_file:
            with self._lock:
                self._folder = Path(tempfile.mkdtemp(prefix="batchml-"))  # of this user alone
                file = self._folder / "open.html"
                file.touch(0o600)
                file.write_text(_FILE.format(url=escape(self._url)))
            target = file.as_uri()
        why = self._open_url(target)
        if why:
            self._tell(f"{why} Open a link yourself.")
            self.close()

    def _watch(self) -> None:
        if not self._entered.wait(self._patience):
            more = " Or start with --open-link: your browser may not be able to read the file that"
            self._tell("No browser has entered yet. Open a link yourself."
                       + (f"{more} leads there." if self._by_file else ""))  # fmt: skip


def open_in_window(url: str) -> str:
    """Open an address in the user's browser. Returns a sentence if that is not possible.

    A browser for terminals is not started: this terminal belongs to the dashboard.
    """
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return "No browser was found."
    name = getattr(found, "basename", "") or getattr(found, "name", "")
    if name in ("www-browser", "links", "elinks", "lynx", "w3m"):
        return "No browser with windows was found."
    return "" if found.open(url) else "The browser did not start."
