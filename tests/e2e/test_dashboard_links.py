"""How a person gets into the dashboard, and stays there: links, names, tabs, a lost connection."""

import os
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.support.browser import Browser, Page
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for
from tests.support.tunnel import tunnel

READY = "location.pathname === '/' && document.documentElement.dataset.ready > 0"


def browser_that_writes(folder: Path) -> tuple[Path, Path]:
    """A program for $BROWSER, and the pipe into which it writes the address that it is given."""
    pipe, program = folder / "opened", folder / "browser"
    os.mkfifo(pipe)
    program.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {pipe}\n')
    program.chmod(0o700)
    return program, pipe


@pytest.mark.journey
def test_the_browser_is_opened_by_a_private_file(
    cli: Cli, chromium: Browser, tmp_path: Path
) -> None:
    """Other users of the machine see the arguments of a browser, but not the token in this file."""
    program, pipe = browser_that_writes(tmp_path)
    process = subprocess.Popen(
        cli.command("dashboard"), cwd=cli.folder, env={**cli.environ, "BROWSER": f"{program} %s"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        opened = pipe.read_text()
        assert process.stdout is not None
        link = process.stdout.readline().strip()
        assert link.partition("#")[2] not in opened
        file = Path(unquote(urlparse(opened).path))
        page = chromium.visit(opened)
        wait_for(page, READY)
        assert page.evaluate("location.href").startswith(link.partition("/enter")[0])
        assert page.evaluate("Boolean(localStorage.getItem('act'))"), "it may act"
        assert page.complaints == []
        assert not file.parent.exists(), "it was used"
        process.terminate()
        _, told = process.communicate(timeout=30)
        assert (process.returncode, "Traceback" in told) == (0, False), told
    finally:
        process.kill()


def test_the_second_link_opens_a_page_that_may_act_and_hides_its_token(
    cli: Cli, chromium: Browser
) -> None:
    """For browsers with scripts that do not find names below .localhost."""
    with running(cli) as dashboard:
        assert dashboard.plain_link.startswith("http://127.0.0.1:")
        page = chromium.visit(dashboard.plain_link)
        wait_for(page, READY)
        assert page.evaluate("Boolean(localStorage.getItem('act'))")
        assert page.evaluate("location.href") == f"http://127.0.0.1:{dashboard.port}/"
        assert page.complaints == []


def test_another_address_is_announced_with_a_warning_and_answers(
    cli: Cli, chromium: Browser
) -> None:
    """Names outside of the loopback interface are no secure context: less is there for scripts."""
    assert cli("submit", "--wait", "--name", "good", "--", "true").code == 0
    with running(cli, "--host", "0.0.0.0") as dashboard:
        assert dashboard.process.stdout is not None and dashboard.process.stderr is not None
        link = dashboard.process.stdout.readline().strip()
        warning = dashboard.process.stderr.readline()
        base = link.partition("/enter")[0]
        assert warning.startswith(f"Warning: other machines reach this page at {base}/.")
        page = chromium.visit(link)
        wait_for(page, READY)
        assert page.evaluate("[window.isSecureContext, Boolean(navigator.locks)]") == [False, False]
        page.click("#runs tbody a")
        wait_for(page, "document.querySelector('.open-action:not([hidden])')")
        # Copying and acting work there, too.
        page.evaluate("""document.addEventListener('copy', event => setTimeout(() => {
            window.copied = event.defaultPrevented; }), {capture: true})""")
        page.click(".open-action:not([hidden])")
        # The dialog grows with its preview, and would move under the pointer.
        wait_for(page, "document.querySelector('dialog[open] [data-preview]').textContent")
        page.click("dialog[open] .copy")
        wait_for(page, "window.copied")
        page.click("dialog[open] [type=submit]")
        wait_for(page, "!document.querySelector('dialog[open]')")
        wait_for(page, "document.body.innerText.includes('SUCCEEDED')")
        assert len(cli("ls", "--json").json) == 2
        assert [each for each in page.complaints if "Opener-Policy" not in each] == []


def test_nonsense_is_refused(cli: Cli) -> None:
    for options in (("--host", ""), ("--host", "no such host"), ("--host", "192.0.2.7")):
        found = cli("dashboard", "--no-open", *options)
        assert found.code == 2 and "--host" in found.err, found.err
        assert "Traceback" not in found.err


# --- Several tabs ---------------------------------------------------------------------------------

# Pretends that a tab is hidden, or in view again; a minute is short.
HIDE = """
(() => {
  let hidden = false;
  Object.defineProperty(document, "hidden", {get: () => hidden});
  const slow = window.setTimeout;
  window.setTimeout = (work, ms, ...more) => slow(work, ms === 60000 ? 50 : ms, ...more);
  window.hide = (value) => {
    hidden = value; document.dispatchEvent(new Event("visibilitychange"));
  };
})();
"""
SHOWN = "document.querySelector('#runs')?.innerText"


def streams(pages: list[Page]) -> list[int]:
    """How many streams each page has opened."""
    return [sum(each.endswith("/events") for each in page.requests) for page in pages]


def test_eight_tabs_share_one_stream_and_each_is_live(cli: Cli, chromium: Browser) -> None:
    """A browser has six connections for a server: a stream for each tab would lock it."""
    assert cli("submit", "--wait", "--name", "old", "--", "true").code == 0
    with running(cli) as dashboard:
        pages = [dashboard.enter(chromium, first=HIDE)]
        for columns in ("", *(f"?cols=name,status,{each}" for each in ("age", "queue", "id") * 2)):
            page = chromium.visit("about:blank")
            page.run_first(HIDE)
            page.go(f"{dashboard.base}/{columns}")
            wait_for(page, READY)
            pages.append(page)
        assert cli("submit", "--wait", "--name", "young", "--", "true").code == 0
        for page in pages:
            wait_for(page, f"{SHOWN}.includes('young')")
        assert sum(streams(pages)) == 1
        # The tab with the stream is closed, and another one takes it; then it is hidden.
        first = streams(pages).index(1)
        pages.pop(first).close()
        wait_for_streams(pages, 1)
        assert cli("submit", "--wait", "--name", "third", "--", "true").code == 0
        for page in pages:
            wait_for(page, f"{SHOWN}.includes('third')")
        leader = pages[streams(pages).index(1)]
        leader.evaluate("hide(true)")
        wait_for_streams(pages, 2)
        # All are hidden: no stream. What happens meanwhile is there when one is in view again.
        for page in pages:
            page.evaluate("hide(true)")
        assert cli("submit", "--wait", "--name", "fourth", "--", "true").code == 0
        leader.evaluate("hide(false)")
        wait_for(leader, f"{SHOWN}.includes('fourth')")
        assert [each.complaints for each in pages] == [[]] * 7


def wait_for_streams(pages: list[Page], count: int) -> None:
    while sum(streams(pages)) < count:
        for page in pages:
            page.evaluate("new Promise(done => setTimeout(done, 20))")  # notes what was asked for
    assert sum(streams(pages)) == count


# --- A lost connection ----------------------------------------------------------------------------

WORDS = "document.querySelector('#connection').textContent"


def test_a_connection_that_is_lost_comes_back_with_what_was_missed(
    cli: Cli, chromium: Browser
) -> None:
    assert cli("submit", "--wait", "--name", "old", "--", "true").code == 0
    with running(cli) as dashboard, tunnel(dashboard.port) as way:
        dashboard.expect("Failed to load resource")
        page = dashboard.enter(chromium, port=way.port)
        wait_for(page, f"{WORDS} === ''")
        way.cut()
        wait_for(page, f"{WORDS} === 'Connection lost, retrying'")
        assert cli("submit", "--wait", "--name", "missed", "--", "true").code == 0
        assert not page.evaluate(f"{SHOWN}.includes('missed')")
        way.mend()
        wait_for(page, f"{WORDS} === '' && {SHOWN}.includes('missed')")
        # The page of a run, too.
        page.click("#runs tbody a")
        wait_for(page, "document.querySelectorAll('[data-panel] > :not(.panel-note)').length > 8")
        way.cut()
        wait_for(page, f"{WORDS} === 'Connection lost, retrying'")
        way.mend()
        wait_for(page, f"{WORDS} === ''")
        assert page.evaluate("violations") == []


def test_requests_that_break_off_are_sent_again(cli: Cli, chromium: Browser) -> None:
    """As when a cable is pulled: ERR_NETWORK_CHANGED breaks off each request, once."""
    job = cli("submit", "--json", "--name", "long", "--", "sleep", "600").json["jobId"]
    with running(cli) as dashboard, tunnel(dashboard.port) as way:
        dashboard.expect("Failed to load resource")
        page = dashboard.enter(chromium, port=way.port)
        for part in ("/state", "/actions", "/cost", "/series", "/log?", "POST /act/cancel"):
            way.break_off(part, 2)
        page.click("#runs tbody a")
        wait_for(page, "document.querySelectorAll('[data-panel] > :not(.panel-note)').length > 8")
        wait_for(page, "document.querySelector('.danger')")
        page.evaluate("[...document.querySelectorAll('.open-action')].at(-1).click()")
        wait_for(page, "document.querySelector('dialog[open]')")
        page.evaluate("document.querySelector('dialog[open] [type=submit]').click()")
        wait_for(page, "!document.querySelector('dialog[open]')")
        wait_for(page, "document.querySelector('.panel-note') === null")
        assert sum("POST /act/cancel" in line for line in way.requests) == 3
        assert cli("wait", job).code != 0


@pytest.mark.parametrize("is_named", [True, False])
def test_a_tab_of_a_dashboard_that_was_killed_asks_for_the_new_link(
    cli: Cli, chromium: Browser, is_named: bool
) -> None:
    with running(cli) as dashboard:
        dashboard.expect("Failed to load resource")
        if is_named:
            page = dashboard.enter(chromium)
        else:
            page = chromium.visit(dashboard.plain_link)
            wait_for(page, READY)
        port = dashboard.port
        dashboard.process.kill()
        wait_for(page, f"{WORDS} === 'Connection lost, retrying'")
    with running(cli, "--port", str(port)) as again:
        wait_for(page, f"{WORDS}.includes('Open the link that')")
        # With 127.0.0.1 the old tab has the new cookie once the link was opened.
        if not is_named:
            wait_for(chromium.visit(again.plain_link), READY)
            wait_for(page, f"{WORDS} === ''")


def test_a_browser_of_another_dashboard_is_not_let_in(cli: Cli, chromium: Browser) -> None:
    with running(cli) as one, running(cli) as other:
        page = chromium.visit(one.plain_link)
        wait_for(page, READY)
        page.go(f"http://127.0.0.1:{other.port}/")
        wait_for(page, f"location.port === '{other.port}' && document.body.innerText.includes("
                       "'Open the link that')")  # fmt: skip
        page.go(f"http://127.0.0.1:{one.port}/")
        wait_for(page, READY)


def test_a_link_on_another_site_leads_to_a_page_with_a_way_on(
    cli: Cli, chromium: Browser, tmp_path: Path
) -> None:
    with running(cli) as dashboard:
        dashboard.enter(chromium)
        elsewhere = tmp_path / "chat.html"
        elsewhere.write_text(f'<a href="{dashboard.base}/cluster">look</a>')
        page = chromium.open(elsewhere)
        page.click("a")
        wait_for(page, "document.body.innerText.includes('Open the link that') || "
                       "document.body.innerText.includes('Go on')")  # fmt: skip
        page.evaluate("[...document.links].at(-1).click()")
        wait_for(page, "location.pathname === '/cluster' && document.body.dataset.view")
