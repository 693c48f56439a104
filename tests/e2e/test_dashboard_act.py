"""Acting from the dashboard's pages, in a real browser."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, Page, browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

OPEN = "document.querySelector('dialog[open]')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def press(page: Page, label: str, within: str = "main") -> None:
    """Click on the button with this label, once it can be seen."""
    found = (
        f"[...document.querySelectorAll('{within} button')].find(each => "
        f"each.textContent === {label!r} && each.checkVisibility() && !each.disabled)"
    )
    wait_for(page, found + " !== undefined")
    page.evaluate(f"{found}.setAttribute('data-press', '')")
    page.click("[data-press]")
    page.evaluate("document.querySelector('[data-press]')?.removeAttribute('data-press')")


def open_run(page: Page, job: str) -> None:
    page.evaluate(f"location.assign('/run/{job}')")
    wait_for(page, f"location.pathname === '/run/{job}' && document.querySelector('.open-action')")


def test_a_run_is_cancelled_after_a_confirmation_that_names_it_and_its_cost(
    cli: Cli, chromium: Browser
) -> None:
    job = cli("submit", "--json", "--name", "long", "--", "sleep", "600").json["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        open_run(page, job)
        press(page, "Cancel")
        wait_for(page, f"{OPEN}.innerText.includes('so far')")
        text = page.evaluate(f"{OPEN}.innerText")
        assert f"Cancel long {job[:8]}?" in text and f"batchml cancel {job[:8]}" in text
        assert page.evaluate("document.activeElement.textContent") == "Leave it"
        press(page, "Leave it")
        assert page.evaluate(OPEN) is None and cli("ls", "--json").json[0]["status"] != "FAILED"
        press(page, "Cancel")
        press(page, "Cancel the run")
        wait_for(page, "document.querySelector('#done').textContent.includes('is stopping')")
        wait_for(page, "document.querySelector('main').innerText.includes('cancelled')")
        wait_for(page, "![...document.querySelectorAll('.open-action')].some(each => "
                       "each.textContent === 'Cancel')")  # fmt: skip
        assert page.evaluate("violations") == [] and page.complaints == []


def test_read_only_shows_the_command_line_and_refuses(cli: Cli, chromium: Browser) -> None:
    job = cli("submit", "--json", "--name", "kept", "--", "sleep", "600").json["jobId"]
    with running(cli, "--read-only") as dashboard:
        page = dashboard.enter(chromium)
        open_run(page, job)
        press(page, "Cancel")
        wait_for(page, f"{OPEN}.innerText.includes('batchml cancel')")
        assert "--read-only" in page.evaluate(f"{OPEN}.innerText")
        assert page.evaluate(f"{OPEN}.querySelector('[type=submit]').disabled")
        refusal = page.evaluate(
            f"batchml.act('/act/cancel', {{run: {job!r}}}).catch(error => error.message)"
        )
        assert "--read-only" in refusal
    assert cli("show", job, "--json").json["status"] != "FAILED"
    assert cli("cancel", job).code == 0
