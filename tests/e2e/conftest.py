"""The command line, run as a user runs it: a process, a folder, a state folder of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from batchml.local.home import Home


class Shown(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """`cli("submit", "lenet")` runs batchml in `folder` with the state folder `home`."""

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
        done = subprocess.run(
            self.command(*arguments), cwd=self.folder, env={**self.environ, **environ},
            capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
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


@pytest.fixture
def cli(tmp_path: Path, home: Home) -> Iterator[Cli]:
    folder = tmp_path / "work"
    folder.mkdir()
    yield Cli(folder, home)


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environments of jobs, for tests that may share them: each is made once in a session.

    A state folder of a test has them as its own by a link: `home.envs.symlink_to(environments)`.
    """
    return tmp_path_factory.mktemp("envs")


def write_job(folder: Path, name: str, text: str, **files: str) -> Path:
    """A job's folder below `folder`/jobs."""
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    (job / "job.toml").write_text(text)
    for file, content in files.items():
        (job / file.replace("__", ".")).write_text(content)
    return job
