"""The whole cycle of an environment in AWS, where moto is AWS: commands as users type them.

moto was written by people who have never seen batchml. It has CloudFormation, EC2, IAM, S3, EFS,
KMS, AWS Batch and the rest; Debian's docker-registry stands behind ECR. No host ever joins, so runs
wait. Every call is held against the permissions of its command.
"""

import json
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchml.local.home import Home
from batchml.prove.recording import read_call_log
from batchml.prove.replay import check_against_models
from batchml.prove.sanitizing import sanitize
from tests.support.cli import Cli, Shown
from tests.support.executor_rig import docker, need_engine
from tests.support.iam_judge import refusals
from tests.support.moto_aws import ACCOUNT, Call, MotoAws, moto_aws
from tests.support.registry_rig import need_registry

SMALL = (
    "FROM scratch\nCOPY requirements.txt /one\nCOPY batchml /opt/batchml/batchml\n"
    'ENTRYPOINT ["python", "-m", "batchml.runtime.run"]\n'
)
SWEEP = """
job = "hello"
goal = { min = "loss" }
[space]
lr = { log = [0.01, 0.5] }
[early_stop]
max = 3
[limits]
trials = 2
parallel = 2
"""

FAST = """
[env.dev.compute.fast]
instance_types = ["c6in.32xlarge"]
max_vcpus = 128
ami = "ami-0123456789abcdef0"
efa = true
"""


class Cycle:
    """Commands against a fresh account. `calls` has those of each command."""

    def __init__(self, cli: Cli, aws: MotoAws) -> None:
        self.cli, self.aws = cli, aws
        self.calls: dict[str, list[Call]] = {}
        self.log = cli.folder.parent / "calls.jsonl"
        self._seen = 0

    def __call__(self, *arguments: str, expect: int = 0) -> Shown:
        flag = () if arguments[0] == "init" else ("--env", "dev")
        environ = self.aws.environ(HOME=str(self.cli.folder), BATCHML_RECORDING=str(self.log))
        shown = self.cli(*arguments, *flag, timeout=120, **environ)
        assert shown.code == expect, f"{arguments}: {shown.code}\n{shown.out}\n{shown.err}"
        self.note(arguments)
        return shown

    def note(self, arguments: tuple[str, ...]) -> None:
        """Keep the calls since the last command as those of this one."""
        calls = self.aws.calls()
        name = " ".join(arguments[:2]) if arguments[0] == "image" else arguments[0]
        self.calls.setdefault(name, []).extend(calls[self._seen :])
        self._seen = len(calls)

    def of(self, *commands: str) -> list[tuple[str, str, Any]]:
        return [
            (each.service, each.operation, each.request)
            for name, calls in self.calls.items() for each in calls
            if name in commands
        ]  # fmt: skip

    def wrong(self) -> list[str]:
        """Calls that moto failed to answer: its fault or ours, never AWS's."""
        return [f"{c.service}:{c.operation}" for each in self.calls.values() for c in each
                if c.status >= 500]  # fmt: skip


@pytest.fixture
def cycle(tmp_path: Path) -> Iterator[Cycle]:
    need_engine()
    need_registry()
    (tmp_path / "registry").mkdir()
    (tmp_path / "work").mkdir()
    cli = Cli(tmp_path / "work", Home(tmp_path / "home"))
    before = set(_images())
    with moto_aws(tmp_path / "registry") as aws:
        yield Cycle(cli, aws)
    for image in set(_images()) - before:
        docker("image", "rm", "-f", image)


def _images() -> list[str]:
    return docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()


def write_images(folder: Path) -> None:
    """Small images of our own, in place of those that download packages."""
    for name in ("python", "controller"):
        images = folder / "images" / name
        images.mkdir(parents=True)
        (images / "requirements.txt").write_text(f"# {uuid.uuid4().hex}\n")
        (images / "Dockerfile").write_text(SMALL)
    (folder / "sweep.toml").write_text(SWEEP)


@pytest.mark.journey
def test_a_whole_life_of_an_environment(cycle: Cycle) -> None:
    cycle("init")
    write_images(cycle.cli.folder)
    with (cycle.cli.folder / "batchml.toml").open("a") as file:
        file.write(FAST)
    shown = cycle("doctor").out
    assert "problem" not in shown
    line = "each host of compute fast has 2 EFA interfaces, 200 Gbps; all hosts are in one zone"
    assert line in shown
    planned = cycle("setup", "--plan", expect=2).out
    assert "Plan: " in planned and line[1:] in planned
    cycle("setup", "--yes")
    assert "Nothing to do." in cycle("setup", "--plan").out, "AWS has all that was asked for"
    check_interfaces(cycle.aws)
    submitter = submitter_policy(cycle.aws)
    cycle.note(("the test",))

    cycle("image", "push", "python")
    cycle("image", "push", "controller")
    cycle("submit", "--detach", "hello")
    (run,) = cycle("ls", "--json").json
    assert run["status"] == "RUNNABLE"
    assert "waiting" in cycle("explain", "hello").out
    assert "Its controller is the run" in cycle("sweep", "sweep.toml", "--detach").err
    cycle("cancel", "hello")
    (run,) = cycle("ls", "--json").json
    assert run["status"] == "FAILED"

    assert "--allow-loss" in cycle("teardown", "--yes", expect=2).err, "the controller is a run"
    cycle("teardown", "--yes", "--allow-loss", "batchml-dev-default")
    cycle("teardown", "--delete-data", "--yes")
    assert cycle.wrong() == []
    check_recording(cycle)
    assert left_over(cycle.aws) == []
    used = cycle.of("submit", "ls", "explain", "sweep", "cancel")
    lacking = {"SubmitterPolicy": refusals(submitter, used)}
    for command in cycle.calls:
        if command not in ("init", "doctor", "the test"):
            lacking[command] = refusals(doctors_statements(cycle, command), cycle.of(command))
    assert {name: found for name, found in lacking.items() if found} == {}


def check_interfaces(aws: MotoAws) -> None:
    """The hosts with EFA have all its interfaces, one subnet, and the group of these."""
    ec2, batch = aws.client("ec2"), aws.client("batch")
    (version,) = ec2.describe_launch_template_versions(
        LaunchTemplateName="batchml-dev-fast", Versions=["$Latest"]
    )["LaunchTemplateVersions"]
    found = version["LaunchTemplateData"]["NetworkInterfaces"]
    assert [each["InterfaceType"] for each in found] == ["efa", "efa-only"]
    (compute,) = [
        each["computeResources"]
        for each in batch.describe_compute_environments()["computeEnvironments"]
        if each["computeEnvironmentName"] == "batchml-dev-fast"
    ]
    assert {tuple(each["Groups"]) for each in found} == {tuple(compute["securityGroupIds"])}
    assert len(compute["subnets"]) == 1
    (group,) = ec2.describe_placement_groups()["PlacementGroups"]
    assert (group["GroupName"], group["Strategy"]) == ("batchml-dev-fast", "cluster")


def doctors_statements(cycle: Cycle, command: str) -> list[Any]:
    """The statements that `doctor --policy` prints for a command, for people without an account."""
    shown = cycle.cli("doctor", "--env", "dev", "--policy", command)
    assert shown.code == 0, shown.err
    return [each for line in shown.out.splitlines() for each in json.loads(line)["Statement"]]


def check_recording(cycle: Cycle) -> None:
    """The commands' own record has all calls; they satisfy the models, and names go out of it."""
    calls, damaged = read_call_log(cycle.log)
    recorded = Counter(f"{each.service}:{each.operation}" for each in calls)
    arrived = Counter(
        f"{each.service}:{each.operation}" for of in cycle.calls.values() for each in of
    )
    for operation in ("cloudformation:CreateStack", "batch:SubmitJob", "ecr:DescribeImages"):
        assert recorded[operation] == arrived[operation] > 0, operation
    assert damaged == 0
    clean = sanitize(calls)
    text = json.dumps(msgspec.to_builtins(clean))
    originals = (ACCOUNT, "batchml-dev", "AKIAMOTO", str(cycle.cli.folder))
    assert [each for each in originals if each in text] == []
    wrong = check_against_models(clean)
    assert [each for each in wrong if each.path.startswith("request")] == []


def submitter_policy(aws: MotoAws) -> list[Any]:
    """The statements of the policy that stack `roles` made, with the values of this account."""
    iam = aws.client("iam")
    (policy,) = [
        each for each in iam.list_policies(Scope="Local")["Policies"]
        if each["PolicyName"].startswith("batchml-dev-submitter")
    ]  # fmt: skip
    version = iam.get_policy_version(PolicyArn=policy["Arn"], VersionId="v1")["PolicyVersion"]
    document = version["Document"]
    return list((json.loads(document) if isinstance(document, str) else document)["Statement"])


def left_over(aws: MotoAws) -> list[str]:
    """What bears the environment's tag, but keys that wait for their deletion and deleted gateways.

    Of a deleted NAT gateway AWS tells for an hour: VPC User Guide, "NAT gateways".
    """
    tagging, ec2, kms = (aws.client(each) for each in ("resourcegroupstaggingapi", "ec2", "kms"))
    deleted = {
        each["NatGatewayId"] for each in ec2.describe_nat_gateways()["NatGateways"]
        if each["State"] == "deleted"
    }  # fmt: skip
    filters = [{"Key": "batchml:env", "Values": ["dev"]}]
    arns = [
        each["ResourceARN"]
        for each in tagging.get_resources(TagFilters=filters)["ResourceTagMappingList"]
    ]
    return [
        arn for arn in arns
        if arn.rpartition("/")[2] not in deleted
        and not (":key/" in arn
                 and kms.describe_key(KeyId=arn)["KeyMetadata"]["KeyState"] == "PendingDeletion")
    ]  # fmt: skip
