"""How a person gets into the dashboard, and stays there: links, names, tabs, a lost connection."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.support.browser import Browser, browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

READY = "location.pathname === '/' && document.documentElement.dataset.ready > 0"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


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
