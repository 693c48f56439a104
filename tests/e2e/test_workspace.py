"""The workspace's commands: pushed, used by a run, archived, reset, restored; and interrupted."""

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.e2e.test_everyday import Inside
from tests.support.cli import Cli, read_rest
from tests.support.local_server import wait_for
from tests.support.trees import file, make, seen

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def cli(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    made = Inside(tmp_path / "work", home, capsys)
    make(made.folder, {b"data/a.txt": file("hello"), b"data/in/b.txt": file("b")})
    monkeypatch.chdir(made.folder)
    for name in [name for name in os.environ if name.startswith(("AWS_", "BATCHML_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATCHML_HOME", str(home.root))
    return made


def commands() -> list[list[str]]:
    """What docs/workspace.md has people type."""
    lines = re.findall(
        r"^\$ batchml (.*)$", (DOCS / "workspace.md").read_text("utf-8"), re.MULTILINE
    )
    return [shlex.split(line) for line in lines]


@pytest.mark.journey
def test_the_page_as_it_is_written(cli: Cli, home: Home) -> None:
    push, listing, submit, pull, archive, restore, *over = commands()
    assert over == [archive, ["local", "reset", "--delete-data"], restore]
    workspace = home.root / "workspace"
    pushed = cli(*push)
    assert (pushed.code, pushed.out) == (0, f"2 files, 6 B, in {workspace}.\n")
    again = cli(*push, "--json").json
    assert (again["files"], again["unchanged"], again["complete"]) == (0, 2, True)
    assert cli(*listing).out.splitlines()[-1].endswith("sets/mnist/")
    ran = cli(*submit)
    assert ran.code == 0, ran
    assert cli(*pull).out == f"1 file, 9 B, in {cli.folder}/seen.txt.\n"
    assert (cli.folder / "seen.txt").read_text() == "a.txt\nin\n"
    (deep,) = (
        each for each in cli("workspace", "ls", "-R", "--json").json if each["path"] == "seen.txt"
    )
    assert (deep["kind"], deep["size"]) == ("file", 9)
    before = seen(workspace)

    refused = cli(*over[1])
    assert (refused.code, "batchml workspace archive" in refused.err) == (1, True)
    assert "seen.txt: it is not in the archive" in refused.err
    assert cli(*over[1], "--allow-loss", "all").code == 2
    assert cli(*archive).out.splitlines()[-1] == "The archive is complete."
    assert cli(*over[1]).code == 2, "nobody to ask"
    assert len(cli("ls", "--json").json) == 1 and seen(workspace) == before
    reset = cli(*over[1], "--yes")
    assert reset.code == 0 and "batchml workspace restore" in reset.out
    assert cli("ls", "--json").json == []
    assert cli("workspace", "ls").out == ""
    assert cli(*restore).code == 0
    assert seen(workspace) == before
    pulled = cli("workspace", "pull", "sets", "back/")
    assert pulled.out == f"2 files, 6 B, in {cli.folder}/back/sets.\n"


def test_on_a_terminal_data_is_deleted_by_a_word(home: Home, tmp_path: Path) -> None:
    cli = Cli(make(tmp_path / "work", {b"f": file("f")}), home)
    workspace = make(home.root / "workspace", {b"x": file()})
    ours, theirs = os.openpty()
    for word, code in (("yes", 2), ("delete", 0)):
        asked = subprocess.Popen(
            cli.command("local", "reset", "--delete-data", "--allow-loss", "workspace"),
            cwd=cli.folder, env={**cli.environ, "TERM": "xterm"}, stdin=theirs, stdout=theirs,
            stderr=theirs,
        )  # fmt: skip
        os.write(ours, f"{word}\n".encode())
        assert asked.wait(60) == code
        assert os.listdir(workspace) == (["x"] if code else [])
    said = os.read(ours, 10_000).decode()
    assert "Type delete to confirm" in said and "Nothing was done" in said
    for stream in (ours, theirs):
        os.close(stream)


def test_what_is_wrong_is_said_with_the_way_on(cli: Cli, home: Home) -> None:
    assert "does not exist" in cli("workspace", "push", "nothing").err
    (cli.folder / "f").write_text("f")
    asked = cli("workspace", "push", "data", "f")
    assert asked.code == 2 and "push data f ." in asked.err and "--to f" in asked.err
    assert cli("workspace", "push", "data", "f", ".").code == 0
    assert cli("workspace", "pull", "../x").code == 2
    broken = cli("workspace", "restore")
    assert broken.code == 1 and "there is no archive. Nothing was written" in broken.err
    (home.root / "workspace/out").symlink_to("/etc")
    left = cli("workspace", "archive", "--json")
    assert left.json["leftOut"] == ["out: a link that leads out, to /etc"]
    assert left.code == 0 and "Left out: out" in left.err
    (home.root / "archive/f").write_text("broken")
    refused = cli("workspace", "restore")
    assert refused.code == 1 and "it lacks 'f'" in refused.err and "--partial" in refused.err
    assert cli("workspace", "restore", "--partial").code == 1
    assert "add --yes" in cli("workspace", "rm", "data").err
    assert cli("workspace", "rm", ".", "--yes").code == 2
    gone = cli("workspace", "rm", "data", "nothing", "--yes", "--json")
    assert (gone.code, gone.json["removed"], len(gone.json["missing"])) == (1, 2, 1)
    assert sorted(os.listdir(home.root / "workspace")) == ["f", "out"]


def test_ctrl_c_loses_nothing_and_the_same_command_goes_on(home: Home, tmp_path: Path) -> None:
    cli = Cli(tmp_path / "work", home)
    make(cli.folder, {b"many/%04d" % number: file("x" * 100) for number in range(1200)})
    make(cli.folder, {b"many/large": file(b"y" * (24 << 20))})
    pushing = cli.watch("workspace", "push", "many")
    there = home.root / "workspace/many"
    wait_for(lambda: there.is_dir() and len(os.listdir(there)) > 100, "some are there")
    pushing.send_signal(signal.SIGINT)
    _, said = read_rest(pushing)
    assert pushing.returncode == 130
    assert "The same command continues" in said and "Traceback" not in said
    arrived = len(os.listdir(there))
    assert 100 < arrived < 1201
    assert all(path.stat().st_size in (100, 24 << 20) for path in there.iterdir())
    done = cli("workspace", "push", "many", "--json").json
    assert (done["files"] + done["unchanged"], done["complete"]) == (1201, True)
    assert done["unchanged"] >= arrived
    assert not (home.root / "workspace/.batchml-parts").exists()
    subprocess.run(["diff", "-r", str(there), str(cli.folder / "many")], check=True)
