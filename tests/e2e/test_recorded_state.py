"""A state folder of an earlier batchml opens: it is shown in the same words, and runs go on in it.

Stored values are decoded by names of fields and tags of types: this test sees a renamed one.
"""

import json
import os
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.support.cli import Cli

RECORDED = Path(__file__).parent.parent / "recorded"
SHOWN = {
    "ls": ["ls", "--all"],  # runs of that version have no project
    "show-run": ["show", "greeting"],
    "show-array": ["show", "children"],
    "show-nodes": ["show", "twins"],
    "logs-run": ["logs", "greeting"],
    "logs-array": ["logs", "children"],
    "logs-nodes": ["logs", "twins"],
    "explain": ["explain", "broken"],
    "wait": ["wait", "children"],
    "compare": ["compare", "greeting", "broken", "children"],
    "diff": ["diff", "greeting", "broken"],
    "cost": ["cost", "--all", "--since", "36500d"],
    "cost-run": ["cost", "children"],
    "sweeps-ls": ["sweeps", "ls", "--all"],
    "sweeps-show": ["sweeps", "show", "search"],
    "sweeps-best": ["sweeps", "best", "search"],
    "workspace-ls": ["workspace", "ls"],
    "jobdef-list": ["jobdef", "list"],
    "env-list": ["env", "list"],
}


@pytest.fixture
def cli(cli: Cli, tmp_path: Path) -> Iterator[Cli]:
    """Commands on the recorded folder, which is a copy here."""
    with tarfile.open(RECORDED / "state.tar.gz") as archive:
        archive.extractall(tmp_path / "recorded")
    home = Home(tmp_path / "recorded" / "home")
    home.root.chmod(0o700)
    yield Cli(cli.folder, home)
    control.stop_server(home, SystemClock())


@pytest.mark.journey
def test_a_recorded_folder_is_shown_in_the_same_words(cli: Cli) -> None:
    differ = []
    for name, words in SHOWN.items():
        shown = cli(*words, "--json").out.replace(str(cli.home.root), "HOME")
        text = "".join(line for line in shown.splitlines(True) if '"since"' not in line)
        path = RECORDED / f"{name}.json"
        if os.environ.get("BATCHML_RECORD"):
            path.write_text(text)
        if path.read_text() != text:
            differ.append(f"batchml {' '.join(words)} --json printed:\n{text}")
    assert not differ, "\n".join(differ)


def test_times_in_json_are_texts() -> None:
    """ISO 8601 in UTC: no number is seconds, or milliseconds, since 1970."""
    for path in RECORDED.glob("*.json"):
        numbers = list(find_numbers(json.loads(path.read_text())))
        assert [each for each in numbers if each > 1e9] == [], path.name


def find_numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from find_numbers(each)


def fields(value: Any, at: str = "") -> set[str]:
    """The names of all fields of a JSON value, as paths; lists are one element."""
    if isinstance(value, dict):
        found = {f"{at}.{name}" for name in value}
        return found.union(*(fields(each, f"{at}.{name}") for name, each in value.items()))
    if isinstance(value, list):
        return set().union(*(fields(each, f"{at}[]") for each in value))
    return set()


def rows(cli: Cli, name: str) -> dict[str, set[str]]:
    """The fields of what is stored of the newest run of a name: in the journal and the history."""
    with closing(sqlite3.connect(cli.home.journal)) as db:
        job, spec, task = db.execute(
            "SELECT jobs.body, specs.body, streams.task_id FROM jobs JOIN specs ON specs.id = spec "
            "JOIN streams ON instr(CAST(jobs.body AS TEXT), streams.task_id) "
            "WHERE jobs.name LIKE ? ORDER BY sequence DESC",
            (f"{name}-%",),
        ).fetchone()
        (end,) = db.execute("SELECT body FROM log_ends WHERE task_id = ?", (task,)).fetchone()
    lines = (cli.home.root / "history.jsonl").read_text().splitlines()
    history = [line for line in map(json.loads, lines) if line.get("name") == name]
    return {
        "job": fields(json.loads(job)),
        "spec": fields(json.loads(spec)),
        "log end": fields(json.loads(end)),
        "history": fields(history[-1]),
    }


def test_runs_go_on_in_a_recorded_folder_and_are_written_as_before(cli: Cli) -> None:
    before = rows(cli, "broken")
    assert cli("local", "adopt", "--yes").code == 0
    command = ("sh", "-c", "echo before; exit 3")
    assert cli("submit", "--wait", "--name", "broken", "--", *command).code == 3
    now = rows(cli, "broken")
    assert now["history"] >= before["history"]  # later versions write more
    job = before["job"] | {".tags.batchml:project"}
    # A later version sizes /dev/shm by the memory of a job.
    spec = before["spec"] | {
        f".container.linuxParameters{each}" for each in ("", ".sharedMemorySize")
    }
    assert now == {**before, "history": now["history"], "job": job, "spec": spec}
    assert [run["name"] for run in cli("ls", "--all", "--json").json][:2] == ["broken", "twins"]
    again = cli("sweeps", "rerun", "search", "--trial", "0", "--json")
    assert again.code == 0, again.err


@pytest.mark.journey
def test_a_recorded_archive_is_restored(cli: Cli) -> None:
    assert cli("local", "adopt", "--yes").code == 0
    assert cli("workspace", "rm", "notes.txt", "--yes").code == 0
    archive = cli.home.root.parent / "archive"
    shown = cli("workspace", "restore", "--from", str(archive))
    assert shown.code == 0, shown.err
    assert (cli.home.root / "workspace" / "notes.txt").read_text() == "some data\n"
