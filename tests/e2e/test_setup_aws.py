"""An environment in AWS, by the real commands over HTTP: CloudFormation, EC2 and the rest by the
script of `aws_world.py`, AWS Batch and its logs by the embedded server.

What a command says and does in a person's terminal is seen here; `tests/setup/test_setup_plan.py`
has every failure and interruption.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from tests.support.aws_http import served
from tests.support.aws_world import Account, Trouble
from tests.support.cli import Cli
from tests.support.fakes import FastClock
from tests.support.local_server import client_for

CONFIG = """
default = "dev"
[env.dev]
region = "us-east-1"
jobs = ["train"]
[env.dev.storage]
workspace = "none"
[env.dev.compute.gpu]
instance_types = ["g5.xlarge"]
max_vcpus = 8
[env.dev.queues.default]
priority = 10
compute = ["gpu"]
"""
IMAGE = "public.example/train@sha256:" + 64 * "0"
JOB = f"""
image = "{IMAGE}"
command = ["sh", "-c", "echo trained {{epochs}}"]
code = false
[params]
epochs = 3
"""


class Aws:
    """A command line whose AWS is here."""

    def __init__(self, cli: Cli, account: Account, url: str, batch: ServerEndpoint) -> None:
        keys = cli.home.keys()
        self.account = account
        self.batch = client_for(cli.home, batch, "batch")
        self.cli = cli
        self.environ = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_BATCH": batch.url,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": batch.url,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(cli.folder),
            # The client's own state: the run history, the prices.
            "BATCHML_HOME": str(cli.folder / "client"),
        }

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        shown = self.cli(*arguments, timeout=120, **self.environ)
        return shown.code, shown.out, shown.err


@pytest.fixture
def aws(cli: Cli, home: Home, server: ServerEndpoint, tmp_path: Path) -> Iterator[Aws]:
    (tmp_path / "account").mkdir()
    account = Account(tmp_path / "account", FastClock())
    (cli.folder / "batchml.toml").write_text(CONFIG)
    (cli.folder / "jobs" / "train").mkdir(parents=True)
    (cli.folder / "jobs" / "train" / "job.toml").write_text(JOB)
    with served(account) as url:
        yield Aws(cli, account, url, server)
    account.close()


def test_from_a_file_to_a_run_in_aws_and_back(aws: Aws) -> None:
    code, out, err = aws("setup", "--plan")
    assert (code, "create   stack batchml-dev-network" in out) == (2, True), out + err
    assert not aws.account.stacks, "a plan makes nothing"

    code, out, err = aws("setup")
    assert (code, "add --yes" in err) == (2, True)
    assert not aws.account.stacks

    code, out, err = aws("setup", "--yes")
    assert code == 0, out + err
    assert "create stack batchml-dev-roles" in err
    assert "Environment dev is ready. Next:\n  batchml submit --env dev --wait train\n" in out
    queues = {q["jobQueueName"] for q in aws.batch.describe_job_queues()["jobQueues"]}
    assert "batchml-dev-default" in queues

    code, out, err = aws("setup", "--plan")
    assert (code, "Nothing to do." in out) == (0, True), out + err

    code, out, err = aws("submit", "--wait", "train", "-p", "epochs=7")
    assert code == 0, out + err
    assert "to the job queue [batchml-dev-default]" in out
    assert "trained 7" in out
    definitions = aws.batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert len(definitions) == 1, "submit uses what setup registered"
    container = definitions[0]["containerProperties"]
    assert container["jobRoleArn"] == aws.account.outputs["roles.JobRoleArn"]

    code, out, err = aws("teardown", "--yes")
    assert code == 0, out + err
    left = [stack.name for stack in aws.account.stacks if stack.status != "DELETE_COMPLETE"]
    assert left == ["batchml-dev-storage", "batchml-dev-observability"], "what holds data stays"


def test_a_type_that_the_region_lacks_is_refused_before_anything_is_made(aws: Aws) -> None:
    file = aws.cli.folder / "batchml.toml"
    file.write_text(CONFIG.replace('["g5.xlarge"]', '["g5.xlarge", "g6e.xlarge"]'))
    code, out, err = aws("setup", "--yes")
    assert code == 2 and not aws.account.stacks, out + err
    assert "no zone of us-east-1 offers g6e.xlarge. Did you mean 'g6.xlarge'?" in err
    code, _, err = aws(
        "compute", "create", "more", "--instance-type", "g6e.xlarge", "--max-vcpus", "4"
    )
    assert code == 2 and "First: batchml setup" in err


def test_a_stack_that_fails_is_explained_and_made_anew(aws: Aws) -> None:
    reason = "The maximum number of addresses has been reached. (Service: Ec2, Status Code: 400)"
    aws.account.troubles["batchml-dev-network"] = [Trouble("NatAddress", reason)]
    code, out, err = aws("setup", "--yes")
    assert code == 1
    assert f"First cause: NatAddress (AWS::EC2::EIP): {reason}" in err
    assert 'network.egress = "endpoints"' in err
    code, out, err = aws("setup", "--plan")
    assert (code, "replace  stack batchml-dev-network" in out) == (2, True), out + err
    code, out, err = aws("setup", "--yes")
    assert code == 0, out + err


def test_credentials_that_are_missing_are_told_with_the_way_out(aws: Aws) -> None:
    del aws.environ["AWS_ACCESS_KEY_ID"]
    code, out, err = aws("setup", "--yes")
    assert (code, "aws configure" in err) == (77, True), out + err


def test_quotas_of_0_are_told_with_the_queues_that_work(aws: Aws) -> None:
    path = aws.cli.folder / "batchml.toml"
    more = '[env.dev.compute.cpu]\ninstance_types = ["m7i.large"]\nmax_vcpus = 4\n'
    path.write_text(f'{CONFIG}{more}[env.dev.queues.cpu]\ncompute = ["cpu"]\n')
    code, out, err = aws("setup", "--plan")
    assert "Quotas were not checked: " in out, "the account does not answer about quotas"
    assert "<" not in out.partition("Quotas were not checked")[2].splitlines()[0]

    values = {
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances": 5.0,
        "Running On-Demand G and VT instances": 0.0,
    }
    quotas = [
        {"QuotaName": name, "QuotaCode": "L-1", "Value": each} for name, each in values.items()
    ]
    vars(aws.account)["list_service_quotas"] = lambda params: {"Quotas": quotas}
    code, out, err = aws("setup", "--plan")
    assert code == 2, err
    assert "is 0 vCPUs: compute.gpu cannot start" in out
    (request,) = [line for line in out.splitlines() if "request-service-quota-increase" in line]
    assert " --region us-east-1" in request, "the AWS CLI may have another default"
    assert "The queue cpu can start hosts; the queue default cannot, until" in out


def test_the_embedded_server_of_the_client_is_left_alone(aws: Aws) -> None:
    aws("setup", "--plan")
    assert control.find_server(Home(aws.cli.folder / "client")) is None


def test_the_images_of_hosts_are_refreshed_when_it_is_asked_and_agreed(aws: Aws) -> None:
    assert aws("setup", "--yes")[0] == 0
    refresh = ("compute", "update", "gpu", "--refresh")
    code, out, err = aws(*refresh)
    assert (code, "add --yes" in err, "no hosts now" in err) == (2, True, True), out + err
    assert "updatePolicy" not in environment_of(aws)

    code, out, err = aws(*refresh, "--job-time", "2h", "--yes")
    assert code == 0, out + err
    found = environment_of(aws)
    assert found["updatePolicy"] == {
        "terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": 120,
    }  # fmt: skip
    assert "updateToLatestImageVersion" not in found["computeResources"], "AWS does not return it"
    code, out, err = aws("setup", "--plan")
    assert (code, "Nothing to do." in out) == (0, True), out + err

    code, out, err = aws("env", "show", "dev")
    line = next(line for line in out.splitlines() if line.startswith("compute.gpu.image"))
    words = ["ECS_AL2023_NVIDIA: unknown until a host has started", "AWS"]
    assert re.split(" {2,}", line)[1:] == words

    for wrong, said in (
        (("--refresh", "--job-time", "6d"), "1m to 5d"),
        (("--refresh", "--job-time", "soon"), "write a duration"),
        (("--job-time", "1h"), "only for --refresh"),
    ):
        code, out, err = aws("compute", "update", "gpu", *wrong)
        assert (code, said in err) == (2, True), (wrong, code, out + err)


def environment_of(aws: Aws) -> dict[str, Any]:
    found = aws.batch.describe_compute_environments(computeEnvironments=["batchml-dev-gpu"])
    return dict(found["computeEnvironments"][0])


def test_env_show_without_credentials_shows_the_file_and_says_what_is_missing(aws: Aws) -> None:
    del aws.environ["AWS_ACCESS_KEY_ID"]
    code, out, err = aws("env", "show", "dev")
    assert (code, "compute.gpu.max_vcpus" in out) == (0, True), out + err
    assert "AMIs of its hosts are unknown" in err


def with_bootstrap(aws: Aws, name: str) -> None:
    (aws.cli.folder / "batchml.toml").write_text(
        CONFIG.replace("max_vcpus = 8\n", f'max_vcpus = 8\nbootstrap = "{name}"\n', 1)
    )


def test_a_bootstrap_script_and_its_changes_are_in_the_plan(aws: Aws) -> None:
    script = aws.cli.folder / "on_create.sh"
    with_bootstrap(aws, script.name)
    script.write_text("#!/bin/bash\ndnf install -y htop\n")
    code, out, err = aws("setup", "--yes")
    assert code == 0, out + err
    code, out, err = aws("setup", "--plan")
    assert (code, "Nothing to do." in out) == (0, True), out + err

    script.write_text("#!/bin/bash\ndnf install -y htop jq\n")
    code, out, err = aws("setup", "--plan")
    assert code == 2, out + err
    assert "update   launch template batchml-dev-gpu" in out
    assert "version 2" in out and "its instances are replaced" in out

    code, out, err = aws("setup", "--env", "local", "--plan")
    assert "bootstrap of gpu does nothing on local." in out + err

    script.unlink()
    code, out, err = aws("setup", "--yes")
    assert (code, "on_create.sh does not exist" in err) == (78, True), out + err
    code, out, err = aws("teardown", "--plan")
    assert code == 2, "a lost script prevents no teardown: " + out + err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x00\x00\xff", "is not a text file"),
        (b"#!/bin/sh\r\necho\r\n", "Windows line endings"),
        (b"echo hello\n", "does not name its interpreter"),
        (b"\xef\xbb\xbf#!/bin/sh\n", "byte order mark"),
        (b"#!/bin/sh\n" + os.urandom(9000).hex().encode(), "when it is compressed; at most 8192"),
        (b"#!/bin/sh\n" + b"#" * 300_000, "at most 262144"),
        (b"#!/bin/bash\nif true; then\n", "on_create.sh: bash cannot read it: line 3: syntax"),
    ],
    ids=[
        "empty",
        "binary",
        "CRLF",
        "no interpreter",
        "BOM",
        "too large",
        "much too large",
        "syntax",
    ],
)
def test_a_script_that_no_host_could_run_is_refused_before_aws_is_asked(
    aws: Aws, content: bytes, words: str
) -> None:
    (aws.cli.folder / "on_create.sh").write_bytes(content)
    with_bootstrap(aws, "on_create.sh")
    code, out, err = aws("setup", "--plan")
    assert (code, words in err) == (78, True), out + err
    assert "env.dev.compute.gpu.bootstrap" in err
    assert not aws.account.calls
