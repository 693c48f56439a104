"""A running dashboard, and a browser that has entered it."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.browser import Browser, Navigated, Page
from tests.support.cli import Cli

# What a page should never cause; collected from its first script on.
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
    (event) => violations.push(event.violatedDirective + " " + event.blockedURI));
"""


class RunningDashboard:
    """The process of `batchml dashboard --no-open`, and its two links."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.link, self.plain_link = (process.stdout.readline().strip() for _ in range(2))
        found = re.match(r"(http://[^/]+)/enter#(.+)", self.link)
        assert found, self.link
        self.base, self.token = found.groups()

    def enter(self, browser: Browser, width: int = 1400) -> Page:
        """The page of the runs, after the exchange of the token."""
        page = browser.visit("about:blank", width)
        page.run_first(_WATCH)
        page.go(self.link)
        wait_for(page, "location.pathname === '/' && document.documentElement.dataset.ready > 0")
        return page


def wait_for(page: Page, condition: str) -> Any:
    """Wait until a JavaScript expression is true, also if the page goes elsewhere meanwhile."""
    text = "document.body.innerText.slice(0, 2000)"
    question = (
        "new Promise((done, fail) => { const began = performance.now(); const look = () => {"
        f" let found; try {{ found = ({condition}); }} catch {{ found = null; }}"
        " if (found) done(found); else if (performance.now() - began > 30000)"
        f" fail(new Error('never: ' + {condition!r} + ' in ' + {text}));"
        " else setTimeout(look, 20); }; look(); })"
    )
    for _ in range(5):
        try:
            return page.evaluate(question)
        except Navigated:
            continue
    raise AssertionError(f"the page went elsewhere again and again: {condition}")


@contextmanager
def running(cli: Cli, *options: str) -> Iterator[RunningDashboard]:
    process = subprocess.Popen(
        cli.command("dashboard", "--no-open", *options), cwd=cli.folder, env=cli.environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield RunningDashboard(process)
    finally:
        process.kill()
        process.communicate()
