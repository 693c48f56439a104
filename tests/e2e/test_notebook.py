"""A notebook as its user has it: JupyterLab, TensorBoard and a browser, all of them real."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.support.browser import Browser
from tests.support.cli import Cli
from tests.support.jupyter import LIMIT, run_cell, shown_until, until

WHERE = ("python", "-m", "batchml.runtime.sessions.notebook", "where")

WRITES = """
import os
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(os.path.join(os.environ["BATCHML_OUTPUT_DIR"], "tb")) as writer:
    for step in range(3):
        writer.add_scalar("fitted/loss", 1 / (step + 1), step)
print(os.environ["BATCHML_RUN"])
"""


@contextmanager
def watching(cli: Cli, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A command that goes on, and the one document that it has printed."""
    command = cli.watch(*arguments, "--json")
    try:
        yield command, document(command)
    finally:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=LIMIT)


@contextmanager
def notebook(cli: Cli, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """One that is not left behind, whatever becomes of the test."""
    with watching(cli, "notebook", *arguments) as (command, told):
        try:
            yield command, told
        finally:
            cli("cancel", told["jobId"])


def document(command: "subprocess.Popen[str]") -> Any:
    assert command.stdout is not None
    text = ""
    for line in command.stdout:
        text += line
        if line == "}\n":
            return json.loads(text)
    assert command.stderr is not None
    raise AssertionError(f"no document: {text}{command.stderr.read()}")


def check_coming_back(cli: Cli, job_id: str, token: str) -> None:
    """A second `notebook` goes back to the first, by another port if one is named. On a terminal
    the URL has its token; Ctrl-C leaves."""
    leader, follower = pty.openpty()
    again = subprocess.Popen(
        cli.command("notebook", "--port", str(free_port())), cwd=cli.folder,
        env={**cli.environ, "TERM": "xterm"}, stdin=follower, stdout=follower, stderr=follower,
        start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    text = shown_until(leader, "--end")
    again.send_signal(signal.SIGINT)
    text += shown_until(leader, "")
    assert again.wait(LIMIT) == 0
    os.close(leader)
    assert re.search(rf"http://127\.0\.0\.1:\d+/lab\?token={re.escape(token)}\s", text), text
    assert f"Your notebook {job_id} is RUNNING: returning to it." in text
    assert "The notebook continues" in text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.slow
def test_the_token_is_nowhere_and_event_files_of_the_run_are_shown(
    cli: Cli, chromium: Browser
) -> None:
    """What the README's page shows of a notebook is in test_tutorial.py."""
    with notebook(cli, "--idle", "1h") as (command, told):
        job_id, url = told["jobId"], told["url"]
        token = cli("shell", job_id, "--", *WHERE).json["token"]
        page = chromium.visit(f"{url}?token={token}")
        assert run_cell(page, token, WRITES) == f"{job_id}\n"
        assert "Jupyter news" not in page.evaluate("document.body.innerText")
        outside = [each for each in page.requests if each.startswith("http")]
        assert all(each.startswith("http://127.0.0.1:") for each in outside)
        check_coming_back(cli, job_id, token)
        with watching(cli, "tensorboard", job_id) as (_, board):
            (name,) = [each["name"] for each in board["runs"]]
            secret = Path(board["tokenFile"]).read_text()
            assert get(f"{board['url']}data/runs", secret) == [f"{name}/tb"]
            with pytest.raises(HTTPError, match="403"):
                get(f"{board['url']}data/runs", token)
            page = chromium.visit(f"{board['url']}?token={secret}")
            until(page, "document.title", lambda title: title == "TensorBoard")
            assert "token" not in page.evaluate("location.href")
            assert secret not in command_lines() + json.dumps(board)
        assert list((cli.home.root / "tensorboard").iterdir()) == []
        assert token not in command_lines()

        ended = cli("notebook", "--end")
        assert command.wait(LIMIT) == 0
        log = cli("logs", job_id).out
    assert "JupyterLab answers on port" in log
    assert token not in log + ended.err + ended.out + json.dumps(told)
    for path in cli.home.root.rglob("*"):
        if path.is_file() and not path.is_relative_to(cli.home.envs):
            assert token.encode() not in path.read_bytes(), path


def get(url: str, token: str) -> Any:
    asked = Request(url, headers={"Authorization": f"Bearer {token}"})
    with urlopen(asked, timeout=LIMIT) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_notebook_that_was_forgotten_ends_itself_although_its_tab_is_open(
    cli: Cli, chromium: Browser
) -> None:
    """What JupyterLab's page asks for by itself, every few seconds, is no use."""
    with notebook(cli, "--idle", "6s", "--set-env", "BATCHML_RATE=3600") as one:
        command, told = one
        token = cli("shell", told["jobId"], "--", *WHERE).json["token"]
        page = chromium.visit(f"{told['url']}?token={token}")
        until(page, "document.querySelector('.jp-DirListing') !== null", bool)
        assert command.wait(LIMIT) == 0
        assert command.stderr is not None
        words = command.stderr.read()
    assert "this notebook was idle for 6 s and is ended. It ran" in words
    assert "USD at 3600 USD an hour" in words
    shown = cli("show", told["jobId"]).out
    assert "was idle for 6 s" in shown
    again = cli("notebook", told["jobId"])
    assert again.code == 1
    assert "was idle for 6 s" in again.err


def test_what_cannot_be_is_told_at_once(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = cli("notebook", "--port", str(taken.getsockname()[1]))
    assert refused.code == 2
    assert "is taken" in refused.err and "Submitted" not in refused.err
    failed = cli("notebook", "--image", "python", "--json")
    assert failed.code == 78
    assert failed.json["exitCode"] == 78
    assert "this image has no JupyterLab. Add the lines" in failed.err
