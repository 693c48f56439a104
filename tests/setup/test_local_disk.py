"""`local clean` and `local reset` say what they leave, what they would delete, and why."""

import os
import time
from pathlib import Path

import pytest

from batchml.cli import app
from batchml.history import History
from batchml.local.disk import DiskUse, describe_remaining
from batchml.local.environments import COMPLETE
from batchml.local.home import Home
from batchml.model.run import Record

DAY = 86_400


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("BATCHML_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = Home(tmp_path / "home")
    made.prepare()
    return made


def environment(home: Home, name: str, age: float) -> Path:
    """An environment that was last used `age` seconds ago."""
    folder = home.envs / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_bytes(b"x" * 5000)
    (folder / COMPLETE).touch()
    os.utime(folder / COMPLETE, (time.time() - age, time.time() - age))
    return folder


def test_clean_says_why_young_environments_and_code_stay(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    environment(home, "young", DAY)
    home.code.mkdir(exist_ok=True)
    (home.code / "package.tar.gz").write_bytes(b"x" * 70_000)
    assert app.run(["local", "clean"]) == 0
    freed, left, why, runs = capsys.readouterr().out.splitlines()
    assert freed == "Freed 0 B."
    assert "environments 8.0 KiB" in left and "code 72 KiB" in left
    assert "used in the last 30d stay" in why and "--older-than" in why and "--all" in why
    assert "code, which rerun and diff need: batchml local reset" in runs


@pytest.mark.parametrize(
    ("age", "text"),
    [(16 * 60 + 31, "16 min ago"), (5 * 3600 + 61, "5 h 1 min ago"), (40 * DAY, "40 days ago")],
)
def test_clean_says_when_an_environment_was_last_used(
    home: Home, capsys: pytest.CaptureFixture[str], age: float, text: str
) -> None:
    environment(home, "old", age)
    assert app.run(["local", "clean", "--all", "--dry-run"]) == 0
    assert f"old  last used {text}  " in capsys.readouterr().out


def test_a_dry_run_does_not_count_as_left_what_it_would_free(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    old = environment(home, "old", 40 * DAY)
    assert app.run(["local", "clean", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "Would free 8.0 KiB." in out and "environments 0 B" in out and "stay" not in out
    assert old.exists()


def test_environments_that_all_leaves_are_in_use() -> None:
    lines = describe_remaining(DiskUse(5, 0, 0, 0, 0), "")
    assert lines[1:] == ["A process uses these environments, for example one that waits for runs."]


def test_reset_counts_the_runs_of_all_projects_before_it_asks(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(home.root / "history.jsonl")
    for number, project in enumerate(("digits.1a2b3c4d", "vision.5e6f7a8b", "digits.1a2b3c4d")):
        history.add(Record(key=f"k{number}", job_id=f"j{number}", env="local", project=project))
    assert app.run(["local", "reset"]) == 2
    said = capsys.readouterr().err
    assert "of all projects: 3 runs of 2 projects (digits, vision). To confirm: --yes." in said
    assert len(list(history.names("local"))) == 3
