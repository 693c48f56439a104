"""The pages of the cluster and of costs, in a real browser."""

import pytest

from tests.e2e.test_dashboard import TOO_WIDE
from tests.support.browser import Browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

SECTIONS = "document.querySelectorAll('main section').length"

BLOCKED = """[...document.querySelectorAll('tr')].some(
    row => row.innerText.includes('blocked') && row.innerText.includes('after '))"""


@pytest.mark.journey
def test_a_person_sees_what_runs_what_waits_and_what_it_costs(cli: Cli, chromium: Browser) -> None:
    small = ("--vcpus", "1", "--memory", "256 MiB")
    (cli.folder / "batchml.toml").write_text("[env.local]\nusd_per_hour = 360\n")
    over = ("submit", "--wait", "--name", "over", "--tag", "owner=anna", *small)
    assert cli(*over, "--", "sleep", "1").code == 0
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.click("nav a[href='/cluster']")
        wait_for(page, f"location.pathname === '/cluster' && {SECTIONS} === 6")
        wait_for(page, "document.querySelector('.bar-of.succeeded')?.textContent.includes('over')")
        assert page.evaluate("document.body.innerText.includes('Nothing runs.')")
        page.evaluate("document.querySelector('#bars-name').click()")
        page.evaluate("document.querySelector('#bars-name').focus()")

        job = cli("submit", "--json", "--name", "busy", *small, "--", "sleep", "600").json["jobId"]
        wait_for(page, "document.querySelector('.bar-of.running')?.textContent.includes('busy')")
        assert cli("submit", "--name", "blocked", "--after", job, *small, "--", "true").code == 0
        wait_for(page, BLOCKED)
        assert page.evaluate("document.querySelector('#bars').open"), "it was open, and stays so"
        assert page.evaluate("document.activeElement.id") == "bars-name"
        page.resize(400)
        assert page.evaluate(TOO_WIDE) == []
        page.resize(1400)
        assert cli("cancel", job).code == 0
        wait_for(page, "!document.querySelector('.bar-of.running')")

        page.click("nav a[href='/cost']")
        wait_for(page, f"location.pathname === '/cost' && {SECTIONS} === 6")
        assert page.evaluate("document.querySelector('.tiles strong').textContent.startsWith('$')")
        page.click("a[href='/cost?since=7d&owner=anna']")
        wait_for(page, "document.querySelector('main .chip')?.textContent.includes('owner: anna') "
                 "&& document.body.innerText.includes('over') "
                 "&& !document.body.innerText.includes('busy')")  # fmt: skip
        page.resize(400)
        assert page.evaluate(TOO_WIDE) == []
