"""Two IAM databases, and IAM's limits, over every policy: the stacks' and those for commands.

With the longest names: an environment of 20 letters, a long region, all that an environment has.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from batchml.aws.iam import (
    COMMANDS,
    MAX_POLICY,
    PolicyScope,
    permissions_of,
    policy_documents,
)
from batchml.aws.session import partition_of
from batchml.model.environment import Environment, Network
from tests.aws.test_permissions import EVERYTHING, PLAIN
from tests.security.cloudformation import FILES, Template, load, policies, resources
from tests.security.scan import SCANNERS, need_scanners

ENV, ACCOUNT, REGION = "a" * 20, "123456789012", "ap-southeast-1"
CLOSED = Environment(region=REGION, network=Network(egress="endpoints"))
MAX_INLINE = 10_240  # characters of all inline policies of a role; IAM User Guide, "IAM quotas"

GIVEN: Mapping[str, Any] = {
    "AWS::Partition": "aws", "AWS::Region": REGION, "AWS::AccountId": ACCOUNT,
    "AWS::URLSuffix": "amazonaws.com", "EnvironmentName": ENV,
    "LogGroupName": f"/aws/batch/batchml-{ENV}", "LogBucket": "b" * 63,
    "JobSecrets": [f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:{'s' * 40}",
                   f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/{'p' * 40}"],
    "JobData": ["arn:aws:s3:::team-sets/imagenet", "arn:aws:s3:::team-sets/imagenet/*"],
    "JobDataBuckets": ["arn:aws:s3:::team-sets"],
    "JobSecretKeys": [f"arn:aws:kms:{REGION}:{ACCOUNT}:key/{'k' * 36}"],
    # The image patterns of a team: five repositories in another account, pinned by digest.
    "AllowedImages": [f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team-{n}/*@sha256:*"
                      for n in range(5)],
    "FlowLogs.Arn": f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/batchml/{ENV}/flow:*",
    "JobRole": f"batchml-{ENV}-roles-JobRole-0123456789AB",
}  # fmt: skip
PARTITIONS = {
    "aws": {},
    "aws-us-gov": {"AWS::Region": "us-gov-west-1"},
    "aws-cn": {"AWS::Region": "cn-northwest-1", "AWS::URLSuffix": "amazonaws.com.cn"},
}
_NOTHING = object()

Given = Mapping[str, Any]


def rendered(node: Any, given: Given) -> Any:
    """What CloudFormation makes of a value, with the first side of every Fn::If."""
    if isinstance(node, list):
        return [each for part in node if (each := rendered(part, given)) is not _NOTHING]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((name, inner),) = node.items()
        if name == "Ref":
            return _NOTHING if inner == "AWS::NoValue" else given[inner]
        if name == "Fn::GetAtt":
            return value_of(".".join(inner), given)
        if name == "Fn::If":
            return rendered(inner[1], given)
        if name == "Fn::Sub":
            text = re.sub(r"\$\{([^!}]+)\}", lambda each: str(value_of(each[1], given)), inner)
            return text.replace("${!", "${")
    made = {key: rendered(each, given) for key, each in node.items()}
    return {key: value for key, value in made.items() if value is not _NOTHING}


def value_of(name: str, given: Given) -> Any:
    """A parameter, or the ARN of a role of the stack."""
    if name in given:
        return given[name]
    assert name.endswith("Role.Arn"), name
    role = f"role/batchml-{ENV}-roles-{name[:-4]}-0123456789AB"
    return f"arn:{given['AWS::Partition']}:iam::{ACCOUNT}:{role}"


def stack_policies(partition: str = "aws") -> dict[str, list[dict[str, Any]]]:
    """The identity policies of each role and managed policy of the templates, by its name."""
    given = {**GIVEN, "AWS::Partition": partition, **PARTITIONS[partition]}
    found = {}
    for path in FILES:
        template: Template = load(path)
        for name, resource, properties in resources(template):
            own = {"Policies": rendered(properties.get("Policies", []), given)}
            whole = {**resource, "Properties": {**properties, **own}}
            documents = [rendered(each, given) for each in policies(whole)]
            if documents:
                found[f"{path.stem} {name}"] = documents
    return found


def command_policies() -> dict[str, list[dict[str, Any]]]:
    scope = PolicyScope(ENV, REGION, ACCOUNT, partition_of(REGION))
    return {
        f"{title} {command}": policy_documents(permissions_of(environment, [command]), scope)
        for title, environment in (("plain", PLAIN), ("all", EVERYTHING), ("closed", CLOSED))
        for command in COMMANDS
        if permissions_of(environment, [command])
    }


# Finding -> why it is none. A finding that does not come any more fails the test.
EXCUSED = {
    r"(unknown action|UNKNOWN_ACTION.*) batch:\w+ConsumableResource":
        "added to AWS Batch in 2025",
    r"no action fits arn:aws:batch:.*:consumable-resource/batchml-\*":
        "added to AWS Batch in 2025",
    r"(unknown action|UNKNOWN_ACTION.*) ec2:DescribeVpcEncryptionControls": "added in 2025",
    r"unknown action s3:GetBucketMetadataTableConfiguration": "added in 2024",
    r"UNKNOWN_CONDITION_FOR_ACTION: Unknown condition kms:ResourceAliases .*":
        "KMS Developer Guide: for all operations on a key",
    r"RESOURCE_STAR: \['batch:GetJobQueueSnapshot'\]": "queues of other environments are shown",
    r"RESOURCE_STAR: \['ec2:CreateLaunchTemplate', .*": "EC2's resources have ids as names",
    r"RESOURCE_STAR: \['iam:GetRole'\]": "doctor looks for the caller's own role",
    r"cloudformation:DescribeStacks needs cloudformation:ListStacks":
        "only without the name of a stack, in setup and teardown, which are allowed both",
    r"ec2:CreateFlowLogs needs ecs:.*": "only for the flow logs of ECS services",
    r"ec2:\w+ needs ssm:GetParameters": "no launch template takes its AMI from a parameter",
    r"fsx:DeleteFileSystem needs fsx:CreateBackup":
        "file systems that are linked to a bucket have no backups",
    r"imagebuilder:CreateComponent needs kms:.*": "setup gives components no key",
    r"imagebuilder:CreateImage needs imagebuilder:Get(ContainerRecipe|Workflow)":
        "an AMI, by AWS's own workflow",
    r"imagebuilder:\w+InfrastructureConfiguration needs sns:Publish": "the build tells no topic",
    r"servicequotas:ListServiceQuotas needs .*": "only EC2's quotas are read",
}  # fmt: skip


def judged(policies: Mapping[str, list[dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """(judge, name, finding) of both databases."""
    script = SCANNERS.parent / "tests" / "security" / "iam_judges.py"
    done = subprocess.run(
        [SCANNERS / "bin" / "python", script],
        input=json.dumps(policies), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(judge, name, finding) for judge, name, finding in json.loads(done.stdout)]


@pytest.mark.full
def test_two_databases_find_nothing_in_the_policies_but_what_is_wrong() -> None:
    """One run: the databases take seconds to load."""
    need_scanners()
    faults: dict[str, dict[str, Any]] = {
        "a typo": {"Action": "batch:SubmitJobs", "Resource": "*"},
        "a wrong resource": {
            "Action": "s3:PutBucketPolicy", "Resource": "arn:aws:iam::123456789012:role/x",
        },
        "half a submission": {
            "Action": "batch:SubmitJob", "Resource": "arn:aws:batch:*:*:job-queue/x",
        },
        "no condition": {
            "Action": "batch:SubmitJob", "Resource": "*",
            "Condition": {"StringLikes": {"aws:PrincipalOrgID": "o"}},
        },
    }  # fmt: skip
    wrong = {
        name: [{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **fault}]}]
        for name, fault in faults.items()
    }
    found = judged({**stack_policies(), **command_policies(), **wrong})
    assert {name for _, name, _ in found if name in wrong} == set(wrong)
    others = [each for each in found if each[1] not in wrong]
    unexcused = {
        each for each in others if not any(re.fullmatch(reason, each[2]) for reason in EXCUSED)
    }
    assert unexcused == set()
    unused = {r for r in EXCUSED if not any(re.fullmatch(r, each[2]) for each in others)}
    assert unused == set()


def size(document: Any) -> int:
    return len(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_policies_of_the_stacks_keep_to_the_limits_of_iam(partition: str) -> None:
    """Those for commands: tests/aws/test_permissions.py."""
    for name, documents in stack_policies(partition).items():
        if name.endswith("Role"):
            assert sum(map(size, documents)) <= MAX_INLINE, name
        else:
            assert max(map(size, documents)) <= MAX_POLICY, name


@pytest.mark.parametrize(
    "name", ["roles SubmitterPolicy", "roles ControllerRole", "network FlowRole"]
)
def test_the_policies_of_the_stacks_are_among_them(name: str) -> None:
    assert name in stack_policies()
