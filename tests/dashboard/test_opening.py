"""Addresses of `--host`, and the way by which the browser gets the link."""

import os
import socket
import stat
import threading
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from batchml.dashboard.access import RequestHead, check, make_secrets
from batchml.dashboard.server.opening import (
    LOOPBACK,
    BrowserOpening,
    ListenAddress,
    listen,
    read_address,
)
from batchml.errors import UsageError

URL = "http://batchml-0a1b2c3d4e5f.localhost:8123/enter#secret-token"


def test_an_address_of_this_machine_is_read() -> None:
    assert read_address("127.0.0.2") == ListenAddress("127.0.0.2", "127.0.0.2", ("127.0.0.2",))
    assert not read_address("127.0.0.2").is_open
    named = read_address(" LOCALHOST ")
    assert named.name == "localhost" and named.allowed[0] == "localhost"
    everywhere = read_address("0.0.0.0")
    assert everywhere.is_any and everywhere.is_open and everywhere.name not in ("", "0.0.0.0")


@pytest.mark.parametrize("given", ["", " ", "no-such-host.invalid", "1.2.3.4.5", "a b", "x" * 300])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match=r"--host .*: this is no address of this machine"):
        read_address(given)


def test_the_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--host 192.0.2.7: this is no address of this machine"):
        listen(0, read_address("192.0.2.7"))


def test_it_listens_on_the_address_and_on_the_loopback_address_at_one_port() -> None:
    listeners = listen(0, read_address("127.0.0.2"))
    ports = {each.getsockname() for each in listeners}
    port = listeners[0].getsockname()[1]
    assert ports == {(LOOPBACK, port), ("127.0.0.2", port)}
    for each in listeners:
        each.close()


def test_by_default_only_the_loopback_address_listens() -> None:
    (listener,) = listen(0, ListenAddress())
    assert listener.getsockname()[0] == LOOPBACK
    listener.close()


def test_a_port_that_is_taken_on_either_address_is_refused() -> None:
    for taken in (LOOPBACK, "127.0.0.2"):
        with socket.create_server((taken, 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(UsageError, match=f"--port {port}: Address already in use"):
                listen(port, read_address("127.0.0.2"))


def test_all_addresses_answer_to_each_address_but_to_no_other_name() -> None:
    """A name can be turned to this machine by its owner; an address cannot."""
    known = make_secrets(8123, ("box",), any_address=True)
    cookie = ("cookie", f"{known.cookie_name}={known.cookie}")

    def answers(host: str) -> bool:
        refusal = check(RequestHead("GET", "/", (("host", host), cookie)), known)
        assert refusal is None or refusal.status == 421
        return refusal is None

    for host in ("10.0.0.5:8123", "203.0.113.9:8123", "[2001:db8::1]:8123", "box:8123"):
        assert answers(host), host
    for host in (
        "evil.test:8123", "10.0.0.5", "10.0.0.5:8124", "10.0.0.5.evil.test:8123", "010.0.0.5:8123",
        "[2001:0db8::1]:8123", "2001:db8::1:8123", "0x0a000005:8123", "167772165:8123",
        "10.0.0.5:8123:8123", "[10.0.0.5]:8123", "a@10.0.0.5:8123", "10.0.0.5:08123", ":8123",
    ):  # fmt: skip
        assert not answers(host), host
    assert not check(RequestHead("GET", "/static/x", (("host", "box:8123"),)), known)


def test_browsers_leave_the_port_of_http_out() -> None:
    for known in (make_secrets(80), make_secrets(80, any_address=True)):
        assert check(RequestHead("GET", "/static/x", (("host", "127.0.0.1"),)), known) is None
    assert check(RequestHead("GET", "/static/x", (("host", "10.0.0.5"),)), known) is None
    refusal = check(RequestHead("GET", "/static/x", (("host", "127.0.0.1"),)), make_secrets(81))
    assert refusal is not None and refusal.status == 421


# --- The browser ----------------------------------------------------------------------------------


class OpenedAddress:
    """A browser that keeps the address it was given, until somebody looks."""

    def __init__(self, answer: str = "") -> None:
        self.url, self.answer, self.is_open = "", answer, threading.Event()

    def __call__(self, url: str) -> str:
        self.url = url
        self.is_open.set()
        return self.answer


def open_in(browser: OpenedAddress, told: list[str], *, by_file: bool = True) -> BrowserOpening:
    opening = BrowserOpening(URL, told.append, by_file=by_file, open_url=browser)
    opening.start()
    assert browser.is_open.wait(30)
    return opening


def test_the_browser_gets_a_private_file_and_no_token() -> None:
    browser, told = OpenedAddress(), list[str]()
    opening = open_in(browser, told)
    assert "token" not in browser.url and browser.url.startswith("file:///")
    file = Path(unquote(urlparse(browser.url).path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert file.stat().st_uid == os.getuid()
    assert URL in file.read_text()
    opening.close()  # when the token was exchanged, and when the dashboard ends
    assert not file.parent.exists() and told == []


def test_the_link_itself_is_given_if_the_browser_cannot_read_files() -> None:
    browser = OpenedAddress()
    open_in(browser, [], by_file=False).close()
    assert browser.url == URL


def test_without_a_browser_the_user_is_told() -> None:
    told: list[str] = []
    is_told = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        is_told.set()

    BrowserOpening(URL, tell, open_url=OpenedAddress("No browser was found.")).start()
    assert is_told.wait(30)
    assert told == ["No browser was found. Open a link yourself."]


def test_a_browser_that_does_not_enter_is_noticed() -> None:
    told: list[str] = []
    is_told = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        is_told.set()

    opening = BrowserOpening(URL, tell, open_url=OpenedAddress(), patience=0.0)
    opening.start()
    assert is_told.wait(30)
    assert "--open-link" in told[0]
    opening.close()
