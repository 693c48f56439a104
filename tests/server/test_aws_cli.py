"""The AWS CLI alone, which environment variables point at the server: it has no part of batchml."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home, ServerEndpoint
from tests.support.forked import AWS_CLI, Asked, run_forked
from tests.support.local_server import wait_for
from tests.support.models import ec2

# The development extras bring one into the environment of the tests.
SEARCH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
pytestmark = pytest.mark.skipif(shutil.which("aws", path=SEARCH) is None, reason="no `aws` here")

GROUP = "/aws/batch/job"
Aws = Callable[..., Any]


class Refused(Exception):
    """What the CLI printed when it failed."""


@pytest.fixture
def aws(home: Home, server: ServerEndpoint, tmp_path: Path) -> Aws:
    """Run `aws ...`; its JSON answer (its text, when that is no JSON)."""
    keys = home.keys()
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    environ = {
        **kept,
        "PATH": SEARCH,
        "AWS_ENDPOINT_URL_BATCH": server.url,
        "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": server.url,
        "AWS_ENDPOINT_URL_STS": server.url,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_PAGER": "",
    }

    def run(*words: str | dict[str, Any], **changed: str) -> Any:
        given = [word if isinstance(word, str) else json.dumps(word) for word in words]
        done = run_forked(AWS_CLI, Asked("awscli", given, tmp_path, {**environ, **changed}))
        if done.returncode:
            raise Refused(done.stderr)
        try:
            return json.loads(done.stdout)
        except ValueError:
            return done.stdout

    return run


def container(command: list[str]) -> dict[str, Any]:
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
    return {"image": "any", "command": command, "resourceRequirements": needs}


def submit(aws: Aws, queue: str, definition: str, *more: str | dict[str, Any]) -> str:
    words = ["--job-name", "j", "--job-queue", queue, "--job-definition", definition]
    return str(aws("batch", "submit-job", *words, *more)["jobId"])


def ended(aws: Aws, job_id: str) -> dict[str, Any]:
    def look() -> Any:
        (job,) = aws("batch", "describe-jobs", "--jobs", job_id)["jobs"]
        return job if job["status"] in ("SUCCEEDED", "FAILED") else None

    return dict(wait_for(look, f"the end of {job_id}", 60))


def register(aws: Aws, name: str, command: list[str]) -> None:
    words = ["--job-definition-name", name, "--type", "container"]
    aws("batch", "register-job-definition", *words, "--container-properties", container(command))


def test_the_aws_cli_makes_a_queue_runs_a_job_and_reads_its_log(aws: Aws) -> None:
    """B100."""
    assert aws("sts", "get-caller-identity")["Account"] == "000000000000"
    aws(
        "batch", "create-compute-environment", "--compute-environment-name", "ce", "--type",
        "MANAGED", "--compute-resources", ec2(1),
    )  # fmt: skip
    order = "order=1,computeEnvironment=ce"
    words = ["--job-queue-name", "q", "--priority", "1", "--compute-environment-order", order]
    aws("batch", "create-job-queue", *words)
    register(aws, "d", ["sh", "-c", "echo hello $WHO; echo bye"])
    who = {"environment": [{"name": "WHO", "value": "world"}]}
    job_id = submit(aws, "q", "d", "--container-overrides", who)
    job = ended(aws, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("SUCCEEDED", 0)
    listed = aws("batch", "list-jobs", "--job-queue", "q", "--job-status", "SUCCEEDED")
    assert [found["jobId"] for found in listed["jobSummaryList"]] == [job_id]
    stream = job["container"]["logStreamName"]
    words = ["--log-group-name", GROUP, "--log-stream-name", stream, "--start-from-head"]
    events = aws("logs", "get-log-events", *words)["events"]
    assert [event["message"] for event in events][-2:] == ["hello world", "bye"]
    words = ["--log-group-name", GROUP, "--filter-pattern", "hello"]
    events = aws("logs", "filter-log-events", *words)["events"]
    assert [event["message"] for event in events] == ["hello world"]


def test_the_aws_cli_stops_jobs_and_takes_everything_down(aws: Aws) -> None:
    register(aws, "d", ["sleep", "60"])
    running = submit(aws, "default", "d")
    waiting = submit(aws, "default", "d", "--depends-on", f"jobId={running}")
    aws("batch", "cancel-job", "--job-id", waiting, "--reason", "not needed")
    aws("batch", "terminate-job", "--job-id", running, "--reason", "long enough")
    for stopped, reason in ((running, "long enough"), (waiting, "not needed")):
        job = ended(aws, stopped)
        assert (job["status"], job["statusReason"]) == ("FAILED", reason)
    aws("batch", "deregister-job-definition", "--job-definition", "d:1")
    with pytest.raises(Refused, match=r"\(ClientException\).*not ACTIVE"):
        submit(aws, "default", "d")
    aws("batch", "update-job-queue", "--job-queue", "default", "--state", "DISABLED")
    aws("batch", "delete-job-queue", "--job-queue", "default")
    name = ["--compute-environment", "this-machine"]
    aws("batch", "update-compute-environment", *name, "--state", "DISABLED")
    aws("batch", "delete-compute-environment", *name)
    assert aws("batch", "describe-job-queues")["jobQueues"] == []


def test_the_aws_cli_names_a_wrong_key(aws: Aws) -> None:
    for words in (("sts", "get-caller-identity"), ("batch", "describe-job-queues")):
        with pytest.raises(Refused, match=r"InvalidSignatureException.*batchml local env"):
            aws(*words, AWS_SECRET_ACCESS_KEY="wrong")


def test_the_commands_of_the_documentation_work_as_they_are_written(
    tmp_path: Path, home: Home
) -> None:
    """`eval "$(batchml local env)"`, then the AWS CLI: docs/local.md, as a user would paste it."""
    text = (Path(__file__).parents[2] / "docs" / "local.md").read_text("utf-8")
    (script,) = re.findall(r"```sh\n(eval .*?)```", text, re.DOTALL)
    environ = {
        "PATH": SEARCH, "HOME": str(tmp_path), "BATCHML_HOME": str(home.root), "AWS_PAGER": "",
    }  # fmt: skip

    def shell(commands: str) -> str:
        return subprocess.run(
            ["sh", "-ec", commands], env=environ, cwd=tmp_path, check=True, text=True,
            stdout=subprocess.PIPE, timeout=120,
        ).stdout  # fmt: skip

    assert '"jobName": "hello"' in shell(script)
    point, *_, read_log = script.strip().splitlines()
    wait_for(
        lambda: '"message": "hello"' in shell(f"{point}\n{read_log}"), "the line in the log", 60
    )
