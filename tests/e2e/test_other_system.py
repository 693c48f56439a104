"""Commands against AWS on macOS: Python there lacks what only Linux has."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

WAITING = """
image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/python:1"
command = ["sleep", "120"]
code = false
"""
DIGEST = {"imageDigest": "sha256:" + 64 * "5", "imageSizeInBytes": 1, "imagePushedAt": 1}
FAKE = Path(__file__).parents[1] / "support" / "plugin_fake.py"


def describe_images(asked: dict[str, Any]) -> dict[str, Any]:
    tags = [each["imageTag"] for each in asked["imageIds"]]
    name = asked["repositoryName"]
    return {"imageDetails": [{**DIGEST, "repositoryName": name, "imageTags": tags}]}


def describe_ecr(asked: dict[str, Any]) -> dict[str, Any]:
    (name,) = asked["repositoryNames"]
    found = {
        "repositoryName": name,
        "repositoryArn": f"arn:aws:ecr:us-east-1:123456789012:repository/{name}",
        "repositoryUri": f"123456789012.dkr.ecr.us-east-1.amazonaws.com/{name}",
    }  # fmt: skip
    return {"repositories": [found]}


def describe_tasks(asked: dict[str, Any]) -> dict[str, Any]:
    agent = {"name": "ExecuteCommandAgent", "lastStatus": "RUNNING"}
    container = {"name": "default", "runtimeId": "0123-456", "managedAgents": [agent]}
    (task,) = asked["tasks"]
    return {"tasks": [{"taskArn": task, "enableExecuteCommand": True, "containers": [container]}]}


def execute(asked: dict[str, Any]) -> dict[str, Any]:
    """The session's URL has the command, for the plugin of `plugin_fake.py`."""
    url = "wss://ssm.example/" + base64.urlsafe_b64encode(asked["command"].encode()).decode()
    return {"session": {"sessionId": "s-1", "streamUrl": url, "tokenValue": "secret"}}


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
    for words, code, text in (
        (("show", job), 0, "SUCCEEDED"),
        (("explain", job), 0, "succeeded"),
        (("queue", "list"), 0, "default"),
        (("cancel", job), 0, "had ended already: SUCCEEDED"),
    ):
        shown = mac(*words)
        assert (shown.code, text in shown.out + shown.err) == (code, True), (words, shown)
    assert [row["jobId"] for row in mac("ls", "--json").json] == [job]
    again = mac("rerun", job, "--wait")
    assert again.code == 0, again.err


def test_a_sweep_in_aws_runs_and_its_results_are_read_on_macos(mac: Mac) -> None:
    Path("s.toml").write_text(SWEEP)
    checked = mac("sweep", "s.toml", "--dry-run")
    assert checked.code == 0, checked.err
    checked = mac("sweep", "check", "s.toml")
    assert checked.code == 0, checked.err
    ran = mac("sweep", "s.toml", "--json")
    assert ran.code == 0, ran.err
    assert "2 of 2 trials: 2 DONE" in ran.err
    best = ran.json["best"]
    assert best["metrics"]["loss"] == best["params"]["x"]
    (listed,) = mac("sweeps", "ls", "--json").json
    assert (listed["status"], listed["counts"], listed["best"]) == ("ended", {"DONE": 2}, best)
    for verb, text in (("show", "2 of 2 trials: 2 done"), ("best", f"loss {best['params']['x']}")):
        shown = mac("sweeps", verb, "@last")
        assert (shown.code, text in shown.out) == (0, True), shown.out + shown.err
    trial = mac("logs", str(best["jobId"]))
    assert f"loss={best['params']['x']}" in trial.out, trial.err


def test_a_sweep_is_detached_and_stopped_on_macos(mac: Mac, account: Counted) -> None:
    Path("s.toml").write_text(SWEEP)
    account.answers |= {"DescribeImages": describe_images, "DescribeRepositories": describe_ecr}
    begun = mac("sweep", "s.toml", "--detach", "--json")
    assert begun.code == 0, begun.err
    found = re.search("Its controller is the run ([0-9a-f-]{36}) in", begun.err)
    assert found is not None, begun.err
    controller = mac("show", found[1], "--json").json
    assert controller["image"].endswith(f"/batchml/controller@{DIGEST['imageDigest']}")
    shown = mac("sweeps", "show", "@last", "--json").json
    assert shown["sweepId"] == begun.json["sweepId"]
    assert f"the run {found[1]}" in shown["controller"]
    stopped = mac("sweeps", "stop", "@last")
    assert (stopped.code, "has stopped" in stopped.err) == (0, True), stopped.err
    (listed,) = mac("sweeps", "ls", "--json").json
    assert (listed["status"], listed["trials"]) == ("ended", 0)


def test_a_command_runs_inside_a_run_in_aws_from_macos(
    mac: Mac, account: Counted, tmp_path: Path
) -> None:
    (Path("jobs") / "wait").mkdir()
    (Path("jobs") / "wait" / "job.toml").write_text(WAITING)
    job = str(mac("submit", "wait", "--json").json["jobId"])
    account.answers |= {"DescribeTasks": describe_tasks, "ExecuteCommand": execute}
    (tmp_path / "bin").mkdir()
    mac.environ["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{mac.environ['PATH']}"
    words = ("shell", job, "--wait", "--", "sh", "-c", 'echo "$INNER $PWD"; exit 7')
    lacking = mac(*words)
    assert (lacking.code, "brew install" in lacking.err) == (1, True), lacking.err
    assert "ExecuteCommand" not in account.calls
    # The container is on Linux: the plugin's other end knows nothing of this child's variables.
    plugin = tmp_path / "bin" / "session-manager-plugin"
    plugin.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} {FAKE} "$@"\n')
    plugin.chmod(0o755)
    for name in ("python3", "python"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    container = {**os.environ, "AWS_BATCH_JOB_ID": job, "INNER": "1"}
    with subprocess.Popen(["sleep", "300"], env=container, cwd=tmp_path) as program:
        mac.environ["FAKE_ROOT"] = str(program.pid)
        ran, captured = mac(*words), mac("shell", job, "--json", "--", "echo", "inside")
        program.kill()
    assert (ran.code, ran.out) == (7, f"1 {tmp_path}\n"), ran.err
    assert captured.json == {"jobId": job, "exitCode": 0, "output": "inside\n"}
    assert mac("cancel", job).code == 0
    ended = mac("shell", job, "--", "ls")
    assert (ended.code, "wait has ended: cancelled" in ended.err) == (1, True), ended.err


def test_an_environment_is_set_up_on_macos(aws: Aws, tmp_path: Path) -> None:
    (tmp_path / "mac").mkdir()
    aws.environ |= environment(str(tmp_path / "mac"))
    code, out, err = aws("setup", "--plan")
    assert (code, "create   stack batchml-dev-network" in out) == (2, True), out + err
    vars(aws.account)["get_caller_identity"] = lambda params: {
        "UserId": "AIDA", "Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/ann",
    }  # fmt: skip

    def run(*words: str) -> tuple[str, str]:
        code, out, err = aws(*words)
        assert code == 0, (words, out, err)
        return out, err

    out, err = run("setup", "--yes")
    assert "Environment dev is ready." in out, err
    queues = {each["jobQueueName"]: each for each in json.loads(run("queue", "list", "--json")[0])}
    assert queues["batchml-dev-default"]["status"] == "VALID"
    hosts = json.loads(run("compute", "list", "--json")[0])
    (gpu,) = [each for each in hosts if each["tags"].get("batchml:env") == "dev"]
    assert (gpu["status"], gpu["computeResources"]["maxvCpus"]) == ("VALID", 8)

    code, out, err = aws("doctor", "--json")
    assert code == 77, "this account answers only what setup asks: " + out
    found = {(each["mark"], each["check"]) for each in json.loads(out)["findings"]}
    assert [check for mark, check in found if mark == "problem"] == ["permissions"], out
    assert {("ok", each) for each in ("config", "state", "credentials", "clock")} <= found

    code, out, err = aws("teardown", "--plan")
    assert (code, "delete   job queue batchml-dev-default" in out) == (2, True), out + err
    assert "Plan: 5 to delete" in out
    assert "Environment dev is torn down." in run("teardown", "--yes")[0]


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
