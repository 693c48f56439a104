"""`batchml prove` as people type it: on `local`, interrupted, killed, with wrong options."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from batchml.local.home import Home
from batchml.prove.claims import CLAIMS, why_not_asked
from batchml.prove.folder import FOLDER, find_leftovers
from batchml.prove.recording import read_recording
from tests.support.cli import Cli, read_rest, read_until
from tests.support.leftovers import find_leftovers as find_processes

LIMIT = 240.0  # seconds for a whole proof, on a busy machine


@pytest.fixture
def temporary(cli: Cli, tmp_path: Path) -> Path:
    """The folder for temporary files of the commands."""
    folder = tmp_path / "t"
    folder.mkdir()
    cli.environ["TMPDIR"] = str(folder)
    return folder


def is_clean(temporary: Path, home: Home) -> bool:
    """Whether a proof has left neither a folder nor a process, nor something to take away."""
    return not (
        list(temporary.glob("batchml-prove-*"))
        or find_processes(str(temporary))
        or find_leftovers(home.root)
    )


def page_of(home: Home) -> dict[str, object]:
    """The newest proof's document."""
    newest = max((home.root / FOLDER).glob("*/proof.json"), key=lambda path: path.stat().st_mtime)
    document: dict[str, object] = json.loads(newest.read_text())
    return document


def test_the_embedded_server_holds_every_claim_that_can_be_asked_there(
    cli: Cli, home: Home, temporary: Path
) -> None:
    shown = cli("prove", "--json", timeout=LIMIT)
    claims = {each["id"]: each for each in shown.json["claims"]}
    wrong = [each for each in claims.values() if each["result"] == "did not"]
    assert not wrong and shown.code == 0, (wrong, shown.err)
    for claim in CLAIMS:
        expected = "not asked" if why_not_asked(claim, "local", ()) else "held"
        assert claims[claim.id]["result"] == expected, claims[claim.id]
    assert shown.json["usd"] == 0 and shown.json["left"] is None
    page = Path(shown.json["page"]).read_text()
    assert "a run that loses its host resumes from its checkpoint" in page
    recording = Path(shown.json["recording"])
    commands = {call.command for call in read_recording(recording).calls}
    assert {"batchml setup", "batchml submit", "batchml explain", "batchml cancel"} <= commands
    assert shown.json["proof"] not in recording.read_text(), "names are replaced"
    assert not recording.with_name("calls.jsonl").exists()
    replayed = cli("prove", "--replay", str(recording))
    assert replayed.code == 0, replayed.out
    assert is_clean(temporary, home)
    assert not (home.root / "local").is_dir() or not home.is_held(), "the user's server stays down"


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.journey), signal.SIGTERM]
)
def test_interrupted_in_the_middle_it_takes_everything_away(
    cli: Cli, home: Home, temporary: Path, number: int
) -> None:
    watching = cli.watch("prove")
    read_until(watching, "second ")
    watching.send_signal(number)
    out, err = read_rest(watching)
    assert watching.returncode == 130, (out, err)
    assert "Interrupted" in err and "Traceback" not in err
    assert re.search(r"not tested   .*\bhost: interrupted", out), out
    assert "teardown     1 of 1 held" in out
    assert page_of(home)["interrupted"] is True
    assert is_clean(temporary, home)


def test_a_second_interruption_says_what_is_left_and_the_command_removes_it(
    cli: Cli, home: Home, temporary: Path
) -> None:
    watching = cli.watch("prove")
    read_until(watching, "plan ")
    watching.send_signal(signal.SIGINT)
    assert watching.stderr is not None
    assert "Interrupted" in watching.stderr.readline()
    watching.send_signal(signal.SIGINT)
    out, err = read_rest(watching)
    assert watching.returncode == 130, (out, err)
    command = str(page_of(home)["left"])
    assert f"Something is left. To remove it: {command}" in out
    done = subprocess.run(
        ["sh", "-c", command.replace("batchml local", " ".join(cli.command("local")))],
        env=cli.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = cli.watch("prove")
    read_until(again, "doctor ")
    again.send_signal(signal.SIGINT)
    out, err = read_rest(again)
    assert err.startswith("Interrupted"), "the next proof finds nothing to take away"
    assert is_clean(temporary, home)


def test_what_a_killed_proof_has_left_the_next_one_takes_away(
    cli: Cli, home: Home, temporary: Path
) -> None:
    watching = cli.watch("prove")
    read_until(watching, "plan ")
    watching.kill()
    read_rest(watching)
    [record] = find_leftovers(home.root)
    assert os.path.isdir(record.work)
    again = cli.watch("prove")
    assert again.stderr is not None
    assert record.id in again.stderr.readline()
    read_until(again, "doctor ")
    again.send_signal(signal.SIGINT)
    read_rest(again)
    assert is_clean(temporary, home)


def test_all_wrong_options_are_named_at_once_and_nothing_is_made(cli: Cli, home: Home) -> None:
    shown = cli("prove", "--env", "local", "--region", "x", "--max-cost", "nan", "--endpoint", "x")
    assert shown.code == 2
    for word in ("--env and --region", "--max-cost nan", "--endpoint x", "--env local"):
        assert word in shown.err
    assert cli("prove", "--region", "no such place").code == 2
    moon = cli("prove", "--region", "us-moon-1", "--yes")
    assert (moon.code, "AWS Batch is in no such region" in moon.err) == (2, True), moon.err
    assert cli("prove", "--env", "nothing").code == 1
    assert not (home.root / FOLDER).exists()


def test_in_aws_it_asks_before_it_makes_anything(cli: Cli, home: Home) -> None:
    shown = cli("prove", "--region", "eu-west-1")
    assert shown.code == 2 and "add --yes" in shown.err
    assert not (home.root / FOLDER).exists()


def test_a_limit_below_the_estimate_is_refused(cli: Cli) -> None:
    shown = cli("prove", "--region", "us-east-1", "--yes", "--max-cost", "0")
    assert (shown.code, shown.out) == (2, "")
    assert "--max-cost 0: this proof is estimated to cost $0." in shown.err
