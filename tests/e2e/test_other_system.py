"""Commands against AWS on macOS: Python there lacks what only Linux has."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_setup_aws import Aws
from tests.e2e.test_setup_aws import aws as aws
from tests.support.cli import Shown
from tests.support.counting import Counted
from tests.support.other_system import environment
from tests.support.sweep_account import account as account

SWEEP = """
name = "tiny"
job = "hello"
goal = { min = "loss" }
space = { x = { float = [0.0, 1.0] } }
limits = { trials = 2, parallel = 2 }
"""


class Mac:
    """The command line with a Python as on macOS, in the project of an account."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.environ = {**os.environ, **environment(str(folder))}

    def __call__(self, *words: str) -> Shown:
        ran = subprocess.run(
            [sys.executable, "-m", "batchml", *words], env=self.environ, text=True,
            capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "Traceback" not in ran.stderr, ran.stderr
        return Shown(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def mac(account: Counted, tmp_path: Path) -> Iterator[Mac]:
    yield Mac(tmp_path / "mac")


def test_a_run_in_aws_is_submitted_followed_and_explained_on_macos(mac: Mac) -> None:
    assert mac("--help").code == 0
    assert mac("submit", "--help").code == 0
    dry = mac("submit", "hello", "--dry-run")
    assert dry.code == 0, dry.err
    ran = mac("submit", "hello", "--wait", "--json")
    assert ran.code == 0, ran.err
    job = str(ran.json["jobId"])
    assert "loss=0" in mac("logs", job).out
    for words in (("show", job), ("explain", job), ("queue", "list"), ("cancel", job)):
        shown = mac(*words)
        assert shown.code in (0, 1), (words, shown.out, shown.err)
    assert [row["jobId"] for row in mac("ls", "--json").json] == [job]
    again = mac("rerun", job, "--wait")
    assert again.code == 0, again.err


def test_a_sweep_in_aws_is_started_and_shown_on_macos(mac: Mac) -> None:
    Path("s.toml").write_text(SWEEP)
    checked = mac("sweep", "s.toml", "--dry-run")
    assert checked.code == 0, checked.err
    checked = mac("sweep", "check", "s.toml")
    assert checked.code == 0, checked.err
    listed = mac("sweeps", "ls")
    assert listed.code == 0, listed.err


def test_an_environment_is_set_up_on_macos(aws: Aws, tmp_path: Path) -> None:
    (tmp_path / "mac").mkdir()
    aws.environ |= environment(str(tmp_path / "mac"))
    code, out, err = aws("setup", "--plan")
    assert (code, "create   stack batchml-dev-network" in out) == (2, True), out + err
    for words in (("doctor",), ("queue", "list"), ("compute", "list"), ("teardown", "--plan")):
        _, out, err = aws(*words)
        assert "Traceback" not in out + err


def test_local_on_macos_says_at_once_what_it_needs(mac: Mac) -> None:
    Path("s.toml").write_text(SWEEP)
    mac.environ["BATCHML_ENV"] = "local"
    for words in (("submit", "hello"), ("local", "start"), ("ls",), ("sweep", "s.toml")):
        shown = mac(*words)
        assert shown.code == 1, (words, shown.err)
        assert "The environment `local` needs Linux, and this system is macOS." in shown.err
        assert "docker run -it" in shown.err
    doctor = mac("doctor", "--env", "local", "--json")
    assert doctor.code == 1
    (system,) = (each for each in doctor.json["findings"] if each["check"] == "system")
    assert "needs Linux" in json.dumps(system)
