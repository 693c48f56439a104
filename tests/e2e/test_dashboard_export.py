"""The dashboard as files, opened without a server."""

import signal
from pathlib import Path

import pytest

from tests.e2e.test_dashboard_curves import train
from tests.support.browser import Page, browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import wait_for
from tests.support.many_runs import copy_run

pytestmark = pytest.mark.full
NASTY = "</script><img src=x onerror=alert(1)> \u202e\x1b[31m'\\"


def check_quiet(page: Page) -> None:
    """Nothing failed, and nothing but files was asked for."""
    assert page.complaints == []
    assert [each for each in page.requests if not each.startswith(("file:", "data:"))] == []


def test_a_person_reads_an_export(cli: Cli, tmp_path: Path) -> None:
    first, second = train(cli, "0.1", "0.2")
    script = f"echo '{NASTY.replace(chr(39), '')}'; echo 'ValueError: boom'; exit 3"
    bad = cli("submit", "--json", "--name", "bad", "-p", f"word={NASTY}", "--", "sh", "-c", script)
    assert cli("wait", bad.json["jobId"]).code == 3
    made = cli("dashboard", "--export", "site")
    assert (made.code, made.out) == (0, "site/index.html\n"), made.err
    assert "Runs: 3, with a page: 3." in made.err
    with browser(tmp_path) as chromium:
        page = chromium.open(cli.folder / "site/index.html")
        wait_for(page, "document.querySelectorAll('#runs tbody tr').length === 3")
        page.click("#search")
        page.type("failed")
        wait_for(page, "document.querySelector('#count').textContent === '1 of 3 runs'")
        page.click("#runs tbody a")
        wait_for(page, "document.body.innerText.includes('The program raised ValueError: boom')")
        wait_for(page, "document.querySelector('#log').textContent.includes('ValueError: boom')")
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.querySelectorAll('form[data-act], .act').length") == 0
        page.evaluate("document.querySelector('nav a[href$=\"compare.html\"]').click()")
        wait_for(
            page,
            "location.pathname.endsWith('/compare.html') && document.readyState === 'complete'",
        )
        page.click("main table a")
        wait_for(page, "document.querySelectorAll('.curve canvas').length === 2")
        wait_for(page, "document.querySelector('#values tbody a')")
        # From a point of the plot to the page of its run, whose curves are there.
        page.evaluate("document.querySelector('#scatter .frame').focus()")
        page.key("End")
        page.key("Enter")
        wait_for(page, f"location.pathname.endsWith('/run/{second}.html')")
        wait_for(page, "document.querySelectorAll('.curve canvas').length === 2")
        check_quiet(page)
    assert (cli.folder / f"site/run/{first}.html").exists()


def test_an_export_says_what_it_does_not_take(cli: Cli) -> None:
    (cli.folder / "mine").mkdir()
    (cli.folder / "mine/thesis.tex").write_text("years")
    for words, text in (
        (("--export", "mine"), "neither empty nor an export"),
        (("--export", "out", "--port", "8000"), "--export starts no server"),
        (("--limit", "3"), "--limit is of --export DIR only"),
        (("--export", "out", "--limit", "-1"), "-1"),
        (("--export", ""), "--export is empty"),
    ):
        refused = cli("dashboard", *words)
        assert (refused.code, text in refused.err) == (2, True), refused.err
    assert [each.name for each in cli.folder.iterdir()] == ["mine"]


def test_without_runs_an_export_says_how_to_begin(cli: Cli) -> None:
    assert cli("dashboard", "--export", "out").code == 0
    assert "batchml submit lenet" in (cli.folder / "out/index.html").read_text()
    assert "No job has several runs." in (cli.folder / "out/compare.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_stopped_leaves_nothing(cli: Cli, number: signal.Signals) -> None:
    assert cli("submit", "--wait", "--name", "one", "--", "true").code == 0
    copy_run(cli.home.root / "history.jsonl", 2000)
    process = cli.watch("dashboard", "--export", "out", "--limit", "2000")
    while not (cli.folder / ".out.part/run").exists():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert list(cli.folder.iterdir()) == []


def test_runs_that_the_environment_has_forgotten_are_exported(cli: Cli) -> None:
    assert cli("submit", "--wait", "--name", "one", "--", "true").code == 0
    copy_run(cli.home.root / "history.jsonl", 300)
    made = cli("dashboard", "--export", "out", "--limit", "40")
    assert made.code == 0 and "Runs: 301, with a page: 40." in made.err, made.err
    assert len(list((cli.folder / "out/run").iterdir())) == 40
    text = (cli.folder / "out/index.html").read_text()
    assert "the newest 40 of 301 runs have a page" in text
    assert 'href="run/00000000-0000-0000-0000-000000000001.html"' in text
