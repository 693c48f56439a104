"""Recordings of AWS conversations as people make and replay them."""

import getpass
import json
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from batchml.local.home import Home
from batchml.prove.recording import calls_by_command, read_call_log
from batchml.prove.sanitizing import sanitize
from tests.support.cli import Cli

RECORDED = Path(__file__).parents[1] / "recorded" / "embedded-server.jsonl"


@pytest.mark.journey
def test_commands_record_their_calls_and_sanitizing_leaves_nothing_of_their_owner(
    cli: Cli, home: Home, tmp_path: Path
) -> None:
    log = tmp_path / "calls"
    cli.environ["BATCHML_RECORDING"] = str(log)
    mine = ("--set-env", "API=zq-secret-7f", "--tag", "team=zq-team", "--name", "zq-run")
    done = cli("submit", "--wait", *mine, "--", "sh", "-c", "echo zq-printed $API")
    assert done.code == 0, done.err
    assert cli("submit", "--queue", "zq-missing", "--", "true").code == 78
    assert cli("ls", "--json").code == 0
    assert log.stat().st_mode & 0o777 == 0o600
    calls, damaged = read_call_log(log)
    assert damaged == 0
    by_command = calls_by_command(calls)
    assert {"batchml submit", "batchml ls"} == {*by_command}
    assert {"batch:SubmitJob", "batch:DescribeJobs", "logs:GetLogEvents"} <= {
        *by_command["batchml submit"]
    }
    originals = {
        "zq-secret-7f", "zq-team", "zq-run", "zq-printed", "zq-missing", str(home.root),
        home.root.name, str(cli.folder), home.keys().access_key_id,
        *(call.answer["jobId"] for call in calls
          if call.operation == "SubmitJob" and call.error is None),
    }  # fmt: skip
    originals |= {socket.gethostname(), getpass.getuser()} - {"root", "localhost"}
    before = log.read_text()
    assert {"zq-secret-7f", "zq-team", "zq-run", "zq-printed"} <= {
        each for each in originals if each in before
    }
    after = json.dumps(msgspec.to_builtins(sanitize(calls)), ensure_ascii=False)
    assert [each for each in originals if each in after] == []


def test_a_recording_is_replayed_and_differences_are_the_exit_code(
    cli: Cli, tmp_path: Path
) -> None:
    same = cli("prove", "--replay", str(RECORDED))
    assert (same.code, same.out.splitlines()[-1]) == (0, "No differences."), same.out
    changed = tmp_path / "changed.jsonl"
    changed.write_text(RECORDED.read_text().replace('"VALID"', '"SOUND"'))
    other = cli("prove", "--replay", str(changed))
    assert other.code == 1
    assert "answer.jobQueues[].status: recorded SOUND; found VALID" in other.out
    as_json = cli("prove", "--json", "--replay", str(changed))
    assert as_json.code == 1
    assert as_json.json["recording"]["made_by"] == "embedded server"
    assert {each["recorded"] for each in as_json.json["differences"]} == {"SOUND"}
    assert not (cli.home.root / "proofs").exists()


def test_what_is_no_recording_is_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    shutil.copy(RECORDED, cut)
    with open(cut, "r+b") as file:
        file.truncate(100_000)
    later = tmp_path / "later.jsonl"
    later.write_text(RECORDED.read_text().replace('"version":1', '"version":2', 1))
    empty = tmp_path / "empty"
    empty.touch()
    for path, words in (
        (cut, "is cut off: it has"),
        (later, "is of version 2 of the format"),
        (empty, "is empty"),
        (tmp_path, "cannot be read"),
        (tmp_path / "missing", "No such file"),
        (Path(__file__), "is not a recording"),
    ):
        shown = cli("prove", "--replay", str(path))
        assert (shown.code, shown.out) == (78, "")
        assert words in shown.err
        assert len(shown.err.splitlines()) == 1, shown.err
    assert cli("prove", "--replay", "").code == 2
    assert cli("prove", "--replay", str(RECORDED), "--env", "local").code == 2


def test_a_recording_file_that_cannot_be_used_is_refused_before_any_call(
    cli: Cli, tmp_path: Path
) -> None:
    shown = cli("ls", BATCHML_RECORDING=str(tmp_path / "no" / "folder"))
    assert shown.code == 2
    assert shown.err.startswith("batchml: BATCHML_RECORDING=")
