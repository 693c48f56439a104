"""The dashboard of an environment in AWS, which denies at first: moto is AWS."""

import signal
import socket
from collections.abc import Iterator

import pytest

from tests.support.browser import Browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for
from tests.support.moto_aws import MotoAws, moto_aws

CONFIG = """
[env.dev]
region = "us-east-1"
"""
PAGES = ("/", "/sweeps", "/compare", "/cluster", "/cost", "/submit")


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


def test_pages_open_and_ctrl_c_ends_while_aws_does_not_answer(cli: Cli, chromium: Browser) -> None:
    """Connections are taken, and nothing is ever answered."""
    (cli.folder / "batchml.toml").write_text(CONFIG)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cli.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "AKIAMOTOMOTOMOTOMOTO", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        with running(cli, "--env", "dev") as dashboard:
            page = chromium.visit(dashboard.link)
            for path in ("/cluster", "/submit", "/cost"):
                wait_for(page, "location.pathname !== '/enter'")
                page.go(f"{dashboard.base}{path}")
                wait_for(page, f"location.pathname === '{path}' && document.querySelector('main')")
            wait_for(page, "document.querySelector('[aria-busy] .panel-note')")
            dashboard.process.send_signal(signal.SIGINT)
            assert dashboard.process.wait(20) == 0
            assert dashboard.process.stderr is not None
            assert "Traceback" not in dashboard.process.stderr.read()
