"""How the dashboard feels: long logs, many runs, several tabs, a server that comes back."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

RUN = ("submit", "--wait", "--name")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_a_log_of_a_hundred_thousand_lines_is_searched_at_once(cli: Cli, chromium: Browser) -> None:
    script = "seq -f 'step %.0f' 99999; echo 'RuntimeError: the needle'"
    assert cli(*RUN, "long", "--", "sh", "-c", script).code == 0
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.click("#runs tbody a")
        wait_for(page, "document.querySelector('#log-count')?.textContent === '100,000 lines'")
        wait_for(page, "document.querySelector('#log').innerText.includes('the needle')")
        assert page.evaluate("document.querySelectorAll('#log .line').length") < 300
        page.click("#log-search")
        page.type("step 4711")
        wait_for(page, "document.querySelector('#log-count').textContent === '1 of 11 lines match'")
        assert page.evaluate("document.querySelector('#log mark').textContent") == "step 4711"
        page.click("#log-error")
        wait_for(page, "document.querySelector('#log mark').textContent.includes('the needle')")
        assert page.complaints == []


def test_the_children_of_a_running_array_are_followed(cli: Cli, chromium: Browser) -> None:
    script = 'echo "child $AWS_BATCH_JOB_ARRAY_INDEX begins"; sleep 600'
    words = ("submit", "--json", "--name", "many", "--array", "2", "--", "sh", "-c", script)
    job = cli(*words).json["jobId"]
    try:
        with running(cli) as dashboard:
            page = dashboard.enter(chromium)
            page.go(f"{dashboard.base}/run/{job}")
            for number in (0, 1):
                text = f"{number} | child {number} begins"
                wait_for(page, f"document.querySelector('#log')?.innerText.includes('{text}')")
            page.evaluate("""(() => { const part = document.querySelector('#log-part');
                part.value = '1'; part.dispatchEvent(new Event('change')); })()""")
            shown = "[...document.querySelectorAll('#log .line')].map(line => line.innerText)"
            assert page.evaluate(shown) == ["1 | child 1 begins"]
    finally:
        cli("cancel", job)
