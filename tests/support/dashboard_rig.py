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
document.addEventListener("securitypolicyviolation", (event) => {
    const text = `${event.violatedDirective} ${event.blockedURI} ${event.sample}`;
    violations.push(text);
    report(text);
});
"""
_OWN = ("data:", "blob:", "about:", "chrome-error:")  # requests that leave no browser


class RunningDashboard:
    """The process of `batchml dashboard --no-open`, and its two links."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdout is not None
        self.link, self.plain_link = (process.stdout.readline().strip() for _ in range(2))
        found = re.match(r"(http://[^/]+)/enter#(.+)", self.link)
        assert found, self.link
        self.base, self.token = found.groups()
        self._pages: list[Page] = []
        self._bases = [self.base]
        self._expected: list[str] = []

    def expect(self, *texts: str) -> None:
        """Errors of the console that a test causes: each has one of these texts in it."""
        self._expected += texts

    def check_pages(self) -> None:
        """Raise if a page broke the policy, complained, or asked another server for something."""
        for page in self._pages:
            assert page.reports == [], f"content security policy: {page.reports}"
            complaints = [each for each in page.complaints
                          if not any(text in each for text in self._expected)]  # fmt: skip
            assert complaints == [], f"errors of the console: {complaints}"
            own = (*(f"{base}/" for base in self._bases), *_OWN)
            foreign = [each for each in page.requests if not each.startswith(own)]
            assert foreign == [], f"requests to other servers: {foreign}"

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def enter(
        self, browser: Browser, width: int = 1400, port: int = 0, first: str = "", link: str = ""
    ) -> Page:
        """The page of the runs, after the exchange of the token.

        `port`: of a tunnel. `first`: a script that runs in each document, before its own. `link`:
        not the first one; each works once.
        """
        page = browser.visit("about:blank", width)
        self._pages.append(page)
        page.report_by(_WATCH)
        if first:
            page.run_first(first)
        link = (link or self.link).replace(f":{self.port}/", f":{port or self.port}/")
        self._bases.append(link.partition("/enter")[0])
        page.go(link)
        wait_for(page, "location.pathname === '/' && document.documentElement.dataset.ready > 0")
        return page


# Whether a page has drawn all that it asks for by itself.
_SETTLED = """document.readyState === "complete"
    && (!document.body.dataset.view || document.documentElement.dataset.ready > 0
        || !document.querySelector(`script[src*="/${document.body.dataset.view}."]`))
    && [...document.querySelectorAll("[data-panel]")].every(
        each => each.childElementCount || each.textContent.trim())
    && ![...document.querySelectorAll("#log, .curves > [role=status], #count, [data-panel]")].some(
        each => /^(Loading|Asking|Drawing)/.test(each.textContent))
    && (!document.querySelector("#plots") || document.querySelector("#plots svg"))"""


def settle(page: Page, path: str) -> None:
    """Wait until the page of a path has drawn all that it asks for by itself."""
    wait_for(page, f"location.pathname + location.search === {path!r} && {_SETTLED}")


def wait_for(page: Page, condition: str) -> Any:
    """Wait until a JavaScript expression is true, also if the page goes elsewhere meanwhile."""
    text = "document.body.innerText.slice(0, 2000)"
    question = (
        "new Promise((done, fail) => { const began = performance.now(); const look = () => {"
        f" let found; try {{ found = ({condition}); }} catch {{ found = null; }}"
        " if (found) done(found); else if (performance.now() - began > 30000)"
        f" fail(new Error('never: ' + {condition!r} + ' in ' + {text}));"
        " else setTimeout(look, Math.min(200, 20 + (performance.now() - began) / 20)); };"
        " look(); })"
    )
    for _ in range(5):
        try:
            return page.evaluate(question)
        except Navigated:
            continue
    raise AssertionError(f"the page went elsewhere again and again: {condition}")


@contextmanager
def running(cli: Cli, *options: str) -> Iterator[RunningDashboard]:
    """A dashboard until the end of the test, which fails if a page has caused what none should:
    see `RunningDashboard.check_pages`."""
    process = subprocess.Popen(
        cli.command("dashboard", "--no-open", *options), cwd=cli.folder, env=cli.environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        dashboard = RunningDashboard(process)
        yield dashboard
        dashboard.check_pages()
    finally:
        process.kill()
        process.communicate()
