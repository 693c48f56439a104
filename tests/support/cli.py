"""The command line, run as a user runs it: a process, a folder, a state folder of its own.

A command that is waited for is a fork of a Python that has imported what it needs (`forked.py`),
one that is watched starts from nothing, as a user's does.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from batchml.local.home import Home
from tests.support.forked import BATCHML, Asked, can_share, run_forked


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


def write_job(folder: Path, name: str, text: str, **files: str) -> Path:
    """A job's folder below `folder`/jobs."""
    job = folder / "jobs" / name
    job.mkdir(parents=True)
    (job / "job.toml").write_text(text)
    for file, content in files.items():
        (job / file.replace("__", ".")).write_text(content)
    return job
