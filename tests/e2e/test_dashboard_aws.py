"""The dashboard of an environment in AWS, which denies at first: moto is AWS."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for
from tests.support.moto_aws import MotoAws, moto_aws

CONFIG = """
[env.dev]
region = "us-east-1"
"""
PAGES = ("/", "/sweeps", "/compare", "/cluster", "/cost", "/submit")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def aws(cli: Cli) -> Iterator[MotoAws]:
    (cli.folder / "batchml.toml").write_text(CONFIG)
    with moto_aws() as found:
        cli.environ |= found.environ(HOME=str(cli.folder))
        yield found


def test_a_denial_names_the_action_and_goes_once_it_is_allowed(
    cli: Cli, chromium: Browser, aws: MotoAws
) -> None:
    aws.set(denied=["batch:ListJobs", "batch:DescribeJobQueues"])
    with running(cli, "--env", "dev") as dashboard:
        dashboard.expect("Failed to load resource")
        page = dashboard.enter(chromium)
        wait_for(page, "document.querySelector('#trouble').innerText.includes('batch:')")
        page.click("nav a[href='/cluster']")
        wait_for(page, "location.pathname === '/cluster' && "
                       "document.querySelector('main').innerText.includes('batch:')")  # fmt: skip
        aws.set(denied=[])
        wait_for(page, "document.querySelector('#trouble').hidden")
        for path in PAGES:
            page.go(f"{dashboard.base}{path}")
            # Without a bucket, sweeps have a sentence in place of a table.
            ready = "(document.documentElement.dataset.ready > 0 || !document.body.dataset.view)"
            there = f"location.pathname === '{path}' && document.querySelector('main')"
            wait_for(page, f"{there} && {ready}")
            assert "fault of batchml" not in page.evaluate("document.body.innerText")
        dashboard.process.terminate()
        assert dashboard.process.stderr is not None
        assert "Traceback" not in dashboard.process.stderr.read()
