"""The command line, run as a user runs it: a process, a folder, a state folder of its own.

A command that is waited for is a fork of a Python that has imported what it needs (`forked.py`),
one that is watched starts from nothing, as a user's does.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchml.local.home import Home
from tests.contract.executor_rig import Rig, need_engine
from tests.e2e.worlds import Worlds, make_pytorch, open_worlds
from tests.forked import BATCHML, Asked, can_share, run_forked


class Shown(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """`cli("submit", "lenet")` runs batchml in `folder` with the state folder `home`."""

    is_installed = False  # as a wheel elsewhere, and so by a command of its own

    def __init__(self, folder: Path, home: Home) -> None:
        self.folder = folder
        self.home = home
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))},
            "BATCHML_HOME": str(home.root),
            "COLUMNS": "80",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "batchml", *arguments]

    def __call__(self, *arguments: str, timeout: float = 120, **environ: str) -> Shown:
        asked = Asked("batchml", arguments, self.folder, {**self.environ, **environ})
        if can_share(asked.environ) and not self.is_installed:
            done = run_forked(BATCHML, asked, timeout)
        else:
            done = subprocess.run(
                self.command(*arguments), cwd=self.folder, env=asked.environ, text=True,
                capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False,
            )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return Shown(done.returncode, done.stdout, done.stderr)

    def watch(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command and leave it running."""
        return subprocess.Popen(
            self.command(*arguments), cwd=self.folder, env=self.environ, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


def read_until(watching: subprocess.Popen[str], text: str) -> str:
    """Read what a command prints, up to the line that holds `text`."""
    assert watching.stdout is not None
    seen = ""
    for line in watching.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}: {seen}")


def read_rest(watching: subprocess.Popen[str], limit: float = 240) -> tuple[str, str]:
    """What a command prints after `read_until`, and all that it told, once it has ended.

    `communicate` would miss what was read ahead. The command is killed after `limit` seconds.
    """
    assert watching.stdout is not None and watching.stderr is not None
    timer = threading.Timer(limit, watching.kill)
    timer.start()
    with watching:
        rest = watching.stdout.read(), watching.stderr.read()
    timer.cancel()
    return rest


@pytest.fixture
def cli(tmp_path: Path, home: Home) -> Iterator[Cli]:
    folder = tmp_path / "work"
    folder.mkdir()
    yield Cli(folder, home)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a newcomer types goes first, where nothing is made yet; others share what it makes."""
    items.sort(key=lambda item: "test_the_readmes_two_commands" not in item.name)


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environments of jobs, for tests that may share them: each is made once in a session.

    Or once for all sessions, in the folder that BATCHML_TEST_ENVS names. A state folder of a test
    has them as its own by a link: `home.envs.symlink_to(environments)`.
    """
    kept = os.environ.get("BATCHML_TEST_ENVS")
    return Path(kept) if kept else tmp_path_factory.mktemp("envs")


@pytest.fixture(scope="session")
def pytorch(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has PyTorch, as jobs have it."""
    home = Home(tmp_path_factory.mktemp("home"))
    home.prepare()
    home.envs.symlink_to(environments)
    return make_pytorch(home)


@pytest.fixture(scope="session")
def worlds(pytorch: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Programs of many ranks, without a launcher: it imports the framework once in a session."""
    with open_worlds(pytorch, tmp_path_factory.mktemp("worlds")) as opened:
        yield opened


def write_job(folder: Path, name: str, text: str, **files: str) -> Path:
    """A job's folder below `folder`/jobs."""
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    (job / "job.toml").write_text(text)
    for file, content in files.items():
        (job / file.replace("__", ".")).write_text(content)
    return job


@pytest.fixture
def rig(home: Home) -> Iterator[Rig]:
    """Attempts in containers of this machine's Docker engine, in which nothing may be left."""
    need_engine()
    made = Rig("docker", home)
    yield made
    made.close()
    assert made.containers() == [], "nothing is left in the engine"
