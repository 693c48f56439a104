"""The dashboard in a browser without scripts, in a terminal."""

import json
import shutil
import subprocess
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.browser import unavailable
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import RunningDashboard, running
from tests.support.local_server import wait_for

JOB = """
image = "python"
command = ["sh", "-c", "echo loss=0.25; echo 'ValueError: boom'; exit {code}"]
[params]
code = 0
[metrics]
loss = 'loss=(\\S+)'
"""


PROGRAMS = {
    "w3m": ["w3m", "-cookie", "-cols", "160", "-T", "text/html", "-dump"],
    "lynx": ["lynx", "-accept_all_cookies", "-width=160", "-assume_charset=utf-8",
             "-display_charset=utf-8", "-dump"],
}  # fmt: skip


class TerminalBrowser:
    """A program that prints pages, and the cookie that it would keep from one to the next."""

    def __init__(self, name: str, folder: Path) -> None:
        if shutil.which(name) is None:
            unavailable(f"no {name} on the search path; on Debian: apt-get install {name}")
        self._words = PROGRAMS[name]
        self._environ = {"HOME": str(folder), "TERM": "dumb", "LANG": "C.UTF-8"}
        self._base = self._cookie = ""

    def enter(self, dashboard: RunningDashboard) -> str:
        """The first page, by the program itself; the first link is for the cookie."""
        page = self._print([dashboard.plain_link])
        self._base = dashboard.plain_link.partition("/enter")[0]
        asked = Request(
            f"{self._base}/enter", json.dumps({"token": dashboard.token}).encode(),
            {"Content-Type": "application/json", "Origin": self._base},
        )  # fmt: skip
        with urlopen(asked) as answer:
            self._cookie = answer.headers["set-cookie"].partition(";")[0]
        return page

    def show(self, path: str) -> str:
        """A page as a text."""
        with urlopen(Request(self._base + path, headers={"Cookie": self._cookie})) as answer:
            html = answer.read().decode()
        return self._print(["-stdin"] if self._words[0] == "lynx" else [], html)

    def _print(self, more: list[str], html: str | None = None) -> str:
        done = subprocess.run([*self._words, *more], env=self._environ, capture_output=True,
                              input=html, text=True, timeout=60, check=True)  # fmt: skip
        return done.stdout


@pytest.mark.parametrize("name", ["w3m", "lynx"])
def test_a_terminal_browser_shows_the_tables(cli: Cli, tmp_path: Path, name: str) -> None:
    terminal = TerminalBrowser(name, tmp_path)
    write_job(cli.folder, "small", JOB)
    assert cli("submit", "--wait", "small").code == 0
    assert cli("submit", "--wait", "small", "-p", "code=3").code == 3
    bad, good = (each["jobId"] for each in cli("ls", "--json").json)
    with running(cli) as dashboard:
        runs = terminal.enter(dashboard)
        assert "SUCCEEDED" in runs and "code=0" in runs and "code=3" in runs
        found = terminal.show("/?q=failed")
        assert "code=3" in found and "code=0" not in found

        page = terminal.show(f"/run/{bad}")
        assert "Show all parts of this page" in page
        page = terminal.show(f"/run/{bad}?wait=1")
        for text in ("The program raised ValueError: boom", "FAILED", "Exit code", "loss", "0.25",
                     "ended with code 3", f"batchml rerun {bad[:8]}", "job.toml"):  # fmt: skip
            assert text in page, text
        assert "loss=0.25\n" in page.replace("   ", "") and "Loading" not in page

        page = terminal.show(f"/compare?runs={bad},{good}&wait=1")
        assert "code" in page and "Results" in page and "loss" in page
        # Until the dashboard has asked for the first time, the page has a link to look again.
        wait_for(lambda: "this-machine" in terminal.show("/cluster"), "the cluster is shown")
        page = terminal.show("/cost?wait=1")
        assert "By project" in page and "small" in page
        assert "No sweeps yet" in terminal.show("/sweeps")
        page = terminal.show("/submit")
        assert "small" in page and "lenet" in page
        page = terminal.show("/submit/small")
        assert "batchml submit small" in page
