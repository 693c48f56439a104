"""A real browser without a window, spoken to in its own protocol over two pipes.

Protocol: chromedevtools.github.io/devtools-protocol, with `--remote-debugging-pipe`: JSON messages,
each ended by a zero byte, read by the browser from descriptor 3 and written to 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

# First those without windows at all: a page costs them half of the time. Debian's command for its
# one is a shell that would stay in front of it.
_NAMES = (
    "/usr/lib/chromium/chromium-headless-shell", "chrome-headless-shell",
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
)  # fmt: skip
_PATIENCE = 60.0  # seconds for an answer on a machine that is busy

# Of keys that the browser itself obeys: it moves the focus, presses a button, closes a dialog.
_KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "PageUp": 33, "PageDown": 34,
              "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
              "ArrowDown": 40}  # fmt: skip

# Nothing that it would ask the network for by itself.
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip


# Other tests make and remove network interfaces. Chromium learns of that by a netlink socket, and
# then breaks off every request (ERR_NETWORK_CHANGED). Without such sockets it learns of nothing.
# Sources: seccomp(2), "struct seccomp_data"; Chromium, net/base/address_tracker_linux.cc.
_WITHOUT_NETLINK = """
import ctypes, os, struct, sys
number = {"x86_64": 41, "aarch64": 198}.get(os.uname().machine)  # of socket(2)
if number is not None:
    rows = [
        (0x20, 0, 0, 0), (0x15, 0, 3, number),  # load the number of the call; is it socket?
        (0x20, 0, 0, 16), (0x15, 0, 1, 16),  # load its first argument; is it AF_NETLINK?
        (0x06, 0, 0, 0x00050000 | 97), (0x06, 0, 0, 0x7FFF0000),  # EAFNOSUPPORT; allow
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rows))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
os.execv(sys.argv[1], sys.argv[1:])
"""


def unavailable(what: str) -> NoReturn:
    """Skip the test, visibly; fail it in CI, where BATCHML_REQUIRE_BROWSER=1."""
    if os.environ.get("BATCHML_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


class Navigated(Exception):
    """The page went to another address before it had answered."""


class Page:
    """What a page did since it was opened, and questions to it."""

    def __init__(self, browser: "Browser", target: str, session: str) -> None:
        self._browser, self._target, self.session = browser, target, session
        self.requests: list[str] = []  # addresses that were asked for
        self.complaints: list[str] = []  # errors and warnings of the console
        self.reports: list[str] = []  # what a script of `report_by` has said

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._browser.ask(
            "Runtime.evaluate", self.session, expression=expression, returnByValue=True,
            awaitPromise=True,
        )  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def run_first(self, script: str) -> None:
        """Run a script in every document from now on, before the document's own."""
        self._browser.ask("Page.addScriptToEvaluateOnNewDocument", self.session, source=script)

    def report_by(self, script: str) -> None:
        """Run a script in every document from now on; what it gives `report()` is in `reports`."""
        self._browser.ask("Runtime.addBinding", self.session, name="report")
        self.run_first(script)

    def go(self, url: str) -> None:
        """Another address, in the same tab; its document may still load."""
        self._browser.ask("Page.navigate", self.session, url=url)

    def back(self) -> None:
        """The address before this one, which may still load."""
        self.evaluate("setTimeout(() => history.back()) && null")

    def close(self) -> None:
        """Close the tab, if it is still open."""
        self._browser.close_page(self._target, self.session)

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, as a person would."""
        x, y = self.evaluate(
            f"(() => {{ const found = document.querySelector({selector!r});"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.press(x, y)

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self._browser.ask("Input.insertText", self.session, text=text)

    def resize(self, width: int, height: int = 1000) -> None:
        self._browser.ask(
            "Emulation.setDeviceMetricsOverride", self.session, width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def wait_for_frame(self) -> None:
        """Wait until the page has drawn what changed: its observers of sizes have run by then."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )

    def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        self.media(prefers_color_scheme=name)

    def media(self, kind: str = "", **features: str) -> None:
        """A medium such as `print`, and features: `forced_colors="active"`."""
        named = [{"name": name.replace("_", "-"), "value": value}
                 for name, value in features.items()]  # fmt: skip
        self._browser.ask("Emulation.setEmulatedMedia", self.session, media=kind, features=named)

    def press(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self._browser.ask(
                "Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, button="left",
                clickCount=1,
            )  # fmt: skip

    def move(self, x: float, y: float) -> None:
        self._browser.ask(
            "Input.dispatchMouseEvent", self.session, type="mouseMoved", x=x, y=y, button="none"
        )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        steps = (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end))
        for kind, (x, y) in steps:
            self._browser.ask(
                "Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, button="left",
                buttons=1, clickCount=1,
            )  # fmt: skip

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press a key such as `ArrowLeft` or `Enter` on the element that has the focus."""
        text = {"Enter": "\r", "Space": " "}.get(name, name if len(name) == 1 else "")
        code = ord(text.upper()) if text.isalnum() else 0
        pressed: dict[str, Any] = {
            "key": " " if name == "Space" else name, "modifiers": 8 if shift else 0,
            "windowsVirtualKeyCode": _KEY_CODES.get(name, code),
        }  # fmt: skip
        self._browser.ask("Input.dispatchKeyEvent", self.session, type="keyDown", text=text,
                          **pressed)  # fmt: skip
        self._browser.ask("Input.dispatchKeyEvent", self.session, type="keyUp", **pressed)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page, or of its part in the window: PNG, or WebP by its name."""
        kind = path.suffix[1:]
        quality = {} if kind == "png" else {"quality": 85}
        found = self._browser.ask(
            "Page.captureScreenshot", self.session, captureBeyondViewport=whole, format=kind,
            **quality,
        )  # fmt: skip
        path.write_bytes(base64.b64decode(found["data"]))


class Browser:
    def __init__(self, program: str, folder: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        words = [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        words = [sys.executable, "-c", _WITHOUT_NETLINK, *words]
        # A shell puts the pipes where the browser looks for them.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *words],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._pages: dict[str, Page] = {}
        self._happened: list[tuple[str, str]] = []  # (session, method)

    def open(self, path: Path, width: int = 1400, height: int = 1000) -> Page:
        """A page of a file, once it has loaded and drawn."""
        return self.visit(path.as_uri(), width, height)

    def visit(self, url: str, width: int = 1400, height: int = 1000) -> Page:
        """The page of an address, once it has loaded; what its scripts fetch may come later."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", session)
        page.resize(width, height)
        page.go(url)
        self._wait(session, "Page.loadEventFired")
        return page

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method; its result."""
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            call["sessionId"] = session
        os.write(self._out, json.dumps(call).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                if "navigated" in str(message.get("error")):
                    raise Navigated(method)
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result

    def close_page(self, target: str, session: str) -> None:
        if self._pages.pop(session, None) is not None:
            self.ask("Target.closeTarget", targetId=target)

    def close_pages(self) -> None:
        for page in [*self._pages.values()]:
            page.close()

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()

    def _wait(self, session: str, method: str) -> None:
        while (session, method) not in self._happened:
            self._read()

    def _read(self) -> dict[str, Any]:
        """The next message; what happens on a page is noted on the way."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise AssertionError(f"The browser says nothing; exit code {self._process.poll()}.")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        session, method = message.get("sessionId", ""), message["method"]
        self._happened.append((session, method))
        page, params = self._pages.get(session), message["params"]
        if page is None:
            return
        if method == "Network.requestWillBeSent":
            page.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            page.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            page.complaints.append(params["entry"]["text"])
        elif method == "Runtime.bindingCalled":
            page.reports.append(params["payload"])
        elif method == "Runtime.consoleAPICalled":
            page.complaints.append(json.dumps(params["args"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """One browser for as long as it is needed; its profile lies in `folder`."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        unavailable("no Chromium; on Debian: apt-get install chromium-headless-shell")
    found = Browser(program, folder)
    try:
        yield found
    finally:
        found.close()
