"""Jobs that call the server that runs them. docs/behaviours.md B240-B246."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import AccessKeys, Home
from tests.e2e.test_secrets import printed
from tests.support.local_server import client_for, define, wait_for, wait_for_job

# As any program that knows nothing of batchml.
PROGRAM = """
import json, os, boto3, botocore.exceptions
batch, logs, sts = (boto3.client(name) for name in ("batch", "logs", "sts"))
queues = batch.describe_job_queues()["jobQueues"]
made = batch.submit_job(jobName="child", jobQueue="default", jobDefinition="d")
batch.describe_jobs(jobs=[made["jobId"]])
batch.terminate_job(jobId=made["jobId"], reason="not needed")
logs.describe_log_groups()
try:
    batch.delete_job_queue(jobQueue="default")
    refused = ""
except botocore.exceptions.ClientError as error:
    refused = error.response["Error"]["Code"]
print(json.dumps({
    "queue": queues[0]["jobQueueName"], "who": sts.get_caller_identity(), "refused": refused,
    "s3": boto3.client("s3").meta.endpoint_url, "region": batch.meta.region_name,
}, default=str))
"""

ENVIRON = "import json, os; print(json.dumps(dict(os.environ)))"
ALWAYS = {"BATCHML_ENDPOINT_URL", "BATCHML_ACCESS_KEY_ID", "BATCHML_SECRET_ACCESS_KEY"}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user who has no credentials of AWS, and whose shell has odd ones."""
    folder = tmp_path / "user"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUSERSOWN")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the user's own")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the user's token")
    return folder


def run(home: Home, program: str, **container: Any) -> Any:
    endpoint = control.ensure_server(home, SystemClock())
    batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
    definition = define(batch, [sys.executable, "-c", program], container=container)
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)
    job = wait_for_job(batch, made["jobId"], limit=60)
    lines = printed(logs, job)
    assert job["status"] == "SUCCEEDED", lines
    return json.loads(lines[-1])


def test_a_job_calls_batch_with_a_plain_sdk(home: Home, user: Path) -> None:
    """(B240, B242, B243)"""
    found = run(home, PROGRAM)
    assert found["queue"] == "default"
    assert found["refused"] == "AccessDeniedException"
    assert ":assumed-role/batchml-job/" in found["who"]["Arn"]
    assert found["region"] == "us-east-1"
    assert "127.0.0.1" not in found["s3"]


def test_neither_the_server_s_secrets_nor_the_users_are_in_a_job(home: Home, user: Path) -> None:
    """(B241)"""
    environ = run(home, ENVIRON)
    keys = home.keys()
    values = "\n".join(environ.values())
    for secret in (keys.access_key_id, keys.secret_access_key, "the user's own", "AKIAUSERSOWN"):
        assert secret not in values
    assert "AWS_SESSION_TOKEN" not in environ
    assert "AWS_ENDPOINT_URL" not in environ


def test_the_credentials_end_with_the_attempt(home: Home, user: Path) -> None:
    """(B244)"""
    environ = run(home, ENVIRON)
    endpoint = home.endpoint()
    assert endpoint is not None
    keys = AccessKeys(environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"])

    class Ended(Home):
        def keys(self) -> AccessKeys:
            return keys

    batch = client_for(Ended(home.root), endpoint, "batch")
    with pytest.raises(ClientError) as refused:
        batch.describe_job_queues()
    assert refused.value.response["Error"]["Code"] == "InvalidSignatureException"


def test_a_job_without_a_role_keeps_the_users_own_credentials(home: Home, user: Path) -> None:
    """As it has the instance's on AWS; ours are there by other names. (B245)"""
    (user / ".aws").mkdir()
    (user / ".aws" / "credentials").write_text("[default]\naws_access_key_id = x\n")
    environ = run(home, ENVIRON)
    assert {name for name in environ if name.startswith("AWS_") and "BATCH" not in name} == {
        "AWS_EXECUTION_ENV"
    }
    assert {*environ} >= ALWAYS
    role = "arn:aws:iam::123456789012:role/trainer"
    assert "AWS_ACCESS_KEY_ID" in run(home, ENVIRON, jobRoleArn=role)


def test_what_a_job_sets_itself_wins(home: Home, user: Path) -> None:
    """(B246)"""
    environ = run(home, ENVIRON, environment=[{"name": "AWS_PROFILE", "value": "research"}])
    assert not [name for name in environ if name.startswith(("AWS_ENDPOINT", "AWS_ACCESS"))]
    environ = run(home, ENVIRON, environment=[
        {"name": "AWS_ENDPOINT_URL_STS", "value": "https://mine"},
        {"name": "AWS_DEFAULT_REGION", "value": "eu-west-1"},
    ])  # fmt: skip
    assert environ["AWS_ENDPOINT_URL_STS"] == "https://mine"
    assert environ["AWS_ENDPOINT_URL_BATCH"].startswith("http://127.0.0.1:")
    assert environ["AWS_DEFAULT_REGION"] == "eu-west-1" and "AWS_REGION" not in environ


def test_a_server_that_was_started_from_a_shell_that_points_at_one_forgets_that(
    home: Home, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own keys are no credentials for AWS. (B222)"""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "BMLLOCAL0123")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
    endpoint = control.ensure_server(home, SystemClock())
    (home.root / "secrets.toml").write_text("")
    (home.root / "secrets.toml").chmod(0o600)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    batch = client_for(home, endpoint, "batch")
    definition = define(
        batch, ["true"], container={"secrets": [{"name": "S", "valueFrom": "unknown"}]}
    )
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)

    def look() -> Any:
        return batch.describe_jobs(jobs=[made["jobId"]])["jobs"][0]["container"].get("reason")

    assert "Unable to locate credentials" in wait_for(look, "it fails", 30)
