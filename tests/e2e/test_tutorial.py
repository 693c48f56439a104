"""The README's page about a day's work, as it is written: on a terminal and in a browser."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from batchml.local.home import Home
from tests.e2e.test_docs import DOCS, matches
from tests.support.browser import Browser, Page, browser
from tests.support.jupyter import LIMIT, run_cell, shown_until, until

FILES = "document.querySelector('.jp-DirListing-content')?.innerText || ''"
_ADDRESS = r"(http://127\.0\.0\.1:\d+/\S*)\s"
PLAYED = ("mkdir", "python3", "batchml")


class Block(NamedTuple):
    language: str
    text: str


def chapter() -> list[Block]:
    """The blocks of the README's page, in their order."""
    text = (DOCS / "tutorial.md").read_text("utf-8")
    page = text.partition("\n## A place to work\n")[2].partition("\n## ")[0]
    return [Block(*found) for found in re.findall(r"```(\w*)\n(.*?)```", page, re.DOTALL)]


class Reader:
    """Who follows the page: types what stands behind a `$`, and looks where it says so."""

    def __init__(self, folder: Path, home: Home, chromium: Browser) -> None:
        self.folder, self.chromium = folder, chromium
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))},
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "BATCHML_HOME": str(home.root),
            "COLUMNS": "80",
            "TERM": "xterm",
        }

    def type(self, command: str, expected: str) -> None:
        assert command.partition(" ")[0] in PLAYED, command
        done = subprocess.run(
            ["sh", "-c", command], cwd=self.folder, env=self.environ, text=True, timeout=2 * LIMIT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}"

    @contextmanager
    def staying(self, command: str) -> Iterator[str]:
        """A command that goes on until Ctrl-C; the address that it shows."""
        leader, follower = pty.openpty()
        process = subprocess.Popen(
            shlex.split(command), cwd=self.folder, env=self.environ, start_new_session=True,
            stdin=follower, stdout=follower, stderr=follower,
        )  # fmt: skip
        os.close(follower)
        try:
            seen = shown_until(leader, _ADDRESS)
            found = re.search(_ADDRESS, seen)
            assert found is not None, seen
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            shown_until(leader, "")
            assert process.wait(LIMIT) == 0
            os.close(leader)

    def looks_at_the_curve(self, url: str) -> None:
        page = self.chromium.visit(url)
        # The row below the curve: run, smoothed value, value, the last step.
        row = re.compile(r"/line\s+\S+\s+\S+\s+299\s")
        until(page, "document.body.innerText", lambda text: bool(row.search(text)))


def commands(block: Block) -> Iterator[tuple[str, str]]:
    for each in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = each.partition("\n")
        yield command, output


@pytest.mark.slow
def test_a_day_as_the_readme_tells_it(home: Home, environments: Path, tmp_path: Path) -> None:
    home.prepare()
    home.envs.symlink_to(environments)
    folder = tmp_path / "work"
    folder.mkdir()
    played = 0
    with browser(tmp_path / "browser") as chromium, ExitStack() as open_commands:
        reader = Reader(folder, home, chromium)
        # A notebook outlives a server that is killed, as when this fails.
        open_commands.callback(reader.type, "batchml local reset --yes", "...\n")
        stays = open_commands.enter_context(ExitStack())
        page: Page | None = None
        token = said = ""
        for block in chapter():
            if block.language == "python":
                assert page is not None
                until(page, FILES, lambda text: "data" in text)
                said = run_cell(page, token, block.text)
                stays.close()  # Ctrl-C leaves the notebook running
            elif block.language == "":
                assert said == block.text
            for command, expected in commands(block):
                played += 1
                if command == "batchml notebook":
                    url = stays.enter_context(reader.staying(command))
                    token = url.partition("token=")[2]
                    page = chromium.visit(url)
                elif command.startswith("batchml tensorboard"):
                    with reader.staying(command) as url:
                        reader.looks_at_the_curve(url)
                else:
                    reader.type(command, expected)
    assert played >= 11, "the page was not found"
    assert (folder / "line.pt").stat().st_size > 0
    assert json.dumps(token) not in (home.root / "history.jsonl").read_text()
