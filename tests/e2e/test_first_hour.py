"""docs/first-hour.md, typed as it is written: its files, and every command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.e2e.test_docs import DOCS, matches, sessions

PAGE = "first-hour.md"
REPOSITORY = DOCS.parent
LIMIT = 600  # seconds


def files() -> dict[str, str]:
    """The files of the page, by name."""
    text = (DOCS / PAGE).read_text("utf-8")
    return {
        name: body for name, body in re.findall(r"```\w+ title=(\S+)\n(.*?)```", text, re.DOTALL)
    }


class Shell:
    """A shell in which variables and the current folder stay from command to command."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder, self.environ = folder, environ

    def type(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", command], cwd=self.folder, env=self.environ, text=True, timeout=LIMIT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.mark.slow
def test_the_first_hour_as_it_is_written(home: Home, tmp_path: Path) -> None:
    project = tmp_path / "spirals"
    project.mkdir()
    for name, text in files().items():
        (project / name).write_text(text)
    user = tmp_path / "user"
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))},
        "HOME": str(user), "BATCHML_HOME": str(home.root), "COLUMNS": "120",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }  # fmt: skip
    user.mkdir()
    shell = Shell(REPOSITORY, environ)
    played: list[str] = []
    try:
        for command, expected in sessions(PAGE):
            if command.startswith("export PATH="):
                environ["PATH"] = f"{user}/batchml/bin:{environ['PATH']}"
                shell.folder = project
                continue
            if "RUN RUN" in command:
                ids = shell.type("batchml ls --columns id --limit 2").stdout.split()[1:3]
                command = command.replace("RUN RUN", " ".join(ids))
            done = shell.type(command)
            assert done.returncode == 0, f"$ {command}\n{done.stdout}"
            assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}"
            played.append(command)
    finally:
        shell.folder = project
        shell.type("batchml local stop")
    assert len(played) >= 12, played
    job = (project / "job.toml").read_text()
    (shown,) = [
        text for text in re.findall(r"```toml\n(.*?)```", (DOCS / PAGE).read_text(), re.DOTALL)
    ]
    assert shown.strip() in job
    best = subprocess.run(
        [f"{user}/batchml/bin/batchml", "sweeps", "best", "@last", "--json"], cwd=project,
        env=environ, text=True, stdout=subprocess.PIPE, check=True,
    ).stdout  # fmt: skip
    assert '"val_accuracy":0.9' in best.replace(" ", "") or '"val_accuracy":1' in best.replace(
        " ", ""
    )
