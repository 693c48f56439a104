"""The job of `batchml prove` with an S3 that neither side of ours wrote; an interrupted command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import batchml.prove.folder
from batchml.prove.children import CommandInterrupted, CommandOverdue, Commands
from tests.support.fakes import FakeClock
from tests.support.s3 import BUCKET, KEYS, moto_s3

PROBE = Path(batchml.prove.folder.__file__).with_name("probe") / "probe.py"


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """The program beside its token, as it is sent."""
    program = tmp_path / "probe.py"
    program.write_bytes(PROBE.read_bytes())
    (tmp_path / "token").write_text("prove-123456")
    return program


def look(probe: Path, mode: str, **environ: str) -> dict[str, dict[str, Any]]:
    """The facts by their names."""
    folders = {
        name: str(probe.parent / name)
        for name in ("BATCHML_OUTPUT_DIR", "BATCHML_CHECKPOINT_DIR", "BATCHML_WORKSPACE")
    }
    for folder in folders.values():
        os.makedirs(folder, exist_ok=True)
    root = str(Path(batchml.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(probe), mode, "0.5"], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": root, **folders, **environ}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("PROOF ")]
    return {row["fact"]: row for row in rows}


def test_it_finds_what_s3_answers_for_a_missing_key(probe: Path) -> None:
    with moto_s3() as address:
        facts = look(
            probe, "inside", AWS_ENDPOINT_URL_S3=address, AWS_REGION="eu-west-1",
            AWS_ENDPOINT_URL_BATCH=address, BATCHML_STORE=f"s3://{BUCKET}/runs/x", **KEYS,
        )  # fmt: skip
    missing = facts["missing-key"]
    assert (missing["answer"], missing["status"]) == ("missing", 404)
    assert missing["namesListBucket"] is False
    assert facts["batch"]["answer"] > 0
    assert facts["code"]["token"] == "prove-123456"
    assert facts["user"]["uid"] == os.getuid()
    assert facts["role"]["role"] == ""
    assert (probe.parent / "BATCHML_OUTPUT_DIR" / "proof.txt").read_text() == "prove-123456"


def test_a_service_that_does_not_answer_is_a_fact_and_no_failure(probe: Path) -> None:
    facts = look(probe, "inside", AWS_ENDPOINT_URL_BATCH="http://127.0.0.1:9", BATCHML_STORE="x")
    assert facts["batch"]["answer"] == 0 and facts["batch"]["error"]
    assert facts["missing-key"]["answer"] == ""


def test_the_second_run_reads_what_the_first_has_written(probe: Path) -> None:
    assert look(probe, "again")["workspace"]["seen"] == ""
    look(probe, "inside", BATCHML_ENDPOINT_URL="x", AWS_ENDPOINT_URL_BATCH="http://127.0.0.1:9")
    assert look(probe, "again")["workspace"]["seen"] == "prove-123456"


def test_without_a_gpu_it_says_so(probe: Path) -> None:
    facts = look(probe, "gpu")
    assert facts["step"]["device"] == "" and facts["step"]["error"]


def test_ctrl_c_while_a_command_is_being_started_ends_the_command(tmp_path: Path) -> None:
    class InterruptedClock(FakeClock):
        """It interrupts when it is read, which is just before the process is made."""

        def monotonic(self) -> float:
            commands.interrupt()
            return super().monotonic()

    commands = Commands(os.environ, tmp_path, InterruptedClock(0.0))
    with pytest.raises(CommandInterrupted):  # without the interruption it would serve until `limit`
        commands.run("0", "--bind", "127.0.0.1", module="http.server", limit=60)
    [code] = commands.codes
    assert code != -signal.SIGKILL


def test_a_command_is_killed_when_the_cap_is_reached(tmp_path: Path) -> None:
    commands = Commands(os.environ, tmp_path, FakeClock(0.0))
    commands.limit_to(0.05)
    with pytest.raises(CommandOverdue):  # it would serve until it is killed
        commands.run("0", "--bind", "127.0.0.1", module="http.server", limit=60)
    assert commands.codes == [-signal.SIGKILL]
    commands.limit_to(60)
    assert commands.run("--help", module="http.server").code == 0
