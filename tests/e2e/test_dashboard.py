"""The dashboard as a person uses it, in a real browser."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.browser import Browser, Page
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

RUN = ("submit", "--wait", "--name")
# Elements that reach out of the window, if it can be scrolled sideways.
TOO_WIDE = """document.documentElement.scrollWidth <= innerWidth ? [] :
    [...document.querySelectorAll('main *')].filter(
        each => each.getBoundingClientRect().right > innerWidth
            && !each.parentElement.closest('.within, .scroll, .log, pre')).map(
        each => each.tagName + '.' + each.className + ' ' + each.getBoundingClientRect().right)"""
FILLED = """location.pathname.startsWith('/run/') && document.querySelector('[data-panel]') &&
    [...document.querySelectorAll('[data-panel]')].every(each => each.children.length)"""
NASTY = "</script><img src=x onerror=alert(1)> \u202e\x1b[31m"


@pytest.mark.journey
def test_a_person_finds_out_why_a_run_failed(cli: Cli, chromium: Browser) -> None:
    for name in ("good", "better"):
        assert cli(*RUN, name, "-p", "lr=0.1", "--", "true").code == 0
    script = f"echo '{NASTY}'; echo 'ValueError: boom'; exit 3"
    assert cli(*RUN, "bad", "-p", f"word={NASTY}", "--", "sh", "-c", script).code == 3
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        assert wait_for(page, "document.querySelectorAll('#runs tbody tr').length") == 3
        page.click("#search")
        page.type("failed")
        assert wait_for(page, "document.querySelector('#count').textContent === '1 of 3 runs'")
        assert page.evaluate("location.search") == "?q=failed"
        page.click("#runs tbody a")
        wait_for(page, "document.body.innerText.includes('The program raised ValueError: boom')")
        wait_for(page, "document.querySelector('#log').textContent.includes('ValueError: boom')")
        page.click("#log-error")
        wait_for(page, "document.querySelector('#log mark').textContent.includes('ValueError')")
        assert "<img src=x onerror=alert(1)>" in page.evaluate("document.body.innerText")
        assert page.evaluate("document.images.length") == 0


def test_runs_appear_and_change_without_a_reload(cli: Cli, chromium: Browser) -> None:
    assert cli(*RUN, "old", "--", "true").code == 0
    with running(cli) as dashboard:
        first = dashboard.enter(chromium)
        wait_for(first, "document.querySelectorAll('#runs tbody tr').length === 1")
        job = cli("submit", "--json", "--name", "young", "--", "sleep", "600").json["jobId"]
        for state in ("RUNNING", "CANCELLED"):
            wait_for(
                first,
                f"[...document.querySelectorAll('#runs tr')].some(row => "
                f"row.innerText.includes('young') && row.innerText.includes('{state}'))",
            )
            if state == "RUNNING":
                _times_grow(first)
                assert cli("cancel", job).code == 0


def _times_grow(page: Page) -> None:
    """On the page of a running run, though nothing happens to it. Goes back to the list."""
    row = "[...document.querySelectorAll('#runs tr a')].find(a => a.textContent === 'young')"
    page.evaluate(f"{row}.click()")
    for panel, words in (("state", "Ran"), ("timeline", "so far")):
        shown = f"document.querySelector('[data-panel$={panel}]')?.innerText"
        before = wait_for(page, f"{shown}?.includes('{words}') && {shown}")
        wait_for(page, f"{shown} !== {json.dumps(before)}")
    page.back()


def test_the_server_ends_with_ctrl_c_and_tells_its_tabs(cli: Cli, chromium: Browser) -> None:
    with running(cli) as dashboard:
        dashboard.expect("net::ERR_")
        page = dashboard.enter(chromium)
        assert "No runs yet" in page.evaluate("document.body.innerText")
        wait_for(page, "document.querySelector('#connection').textContent === ''")
        dashboard.process.send_signal(signal.SIGINT)
        assert dashboard.process.wait(20) == 0
        wait_for(page, "document.querySelector('#connection').textContent !== ''")


def test_a_narrow_window_has_no_sideways_scrolling(
    cli: Cli, chromium: Browser, tmp_path: Path
) -> None:
    assert cli(*RUN, "a-run-with-a-long-name" + "-n" * 53, "-p", "lr=0.1", "--", "true").code == 0
    with running(cli) as dashboard:
        page = dashboard.enter(chromium, 400)
        assert page.evaluate(TOO_WIDE) == []
        state = "document.querySelector('#runs tbody .state').getBoundingClientRect().right"
        assert page.evaluate(state) < 400, "beside the name, which is cut"
        page.click("#runs tbody a")
        wait_for(page, FILLED)
        assert page.evaluate(TOO_WIDE) == []


def test_a_taken_port_is_refused(cli: Cli) -> None:
    with running(cli) as dashboard:
        port = dashboard.base.rpartition(":")[2]
        again = cli("dashboard", "--no-open", "--port", port)
        assert (again.code, f"--port {port}: " in again.err) == (2, True)
