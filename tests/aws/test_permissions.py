"""What commands may call: the table, what is generated of it, and the policies."""

import ast
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import botocore.session
import pytest

import batchml
from batchml.aws import iam
from batchml.aws.ecr import PUSH_ACTIONS
from batchml.aws.iam import (
    COMMANDS,
    MAX_POLICY,
    SUBMITTER,
    Command,
    Permission,
    arns_of,
    needed_permissions,
    permissions_of,
    policy_documents,
    unknown_account,
)
from batchml.aws.naming import Platform
from batchml.aws.session import CallerIdentity
from batchml.aws.simulation import example_of
from batchml.cli.app import full_command
from batchml.model.environment import Budget, Compute, Environment, Network, Storage
from batchml.setup.desired import SetupSpec, wanted_state
from batchml.setup.sharing import CurrentState
from tests.security.cloudformation import FILES, load, resources, statements, texts
from tests.security.test_templates import made
from tests.support import stack_permissions
from tests.support.iam_actions import action_of
from tests.support.stack_permissions import ADDED, HANDLERS, LEFT_OUT, declared, needed

ACCOUNT = "123456789012"
ME = CallerIdentity(ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/team/me")
SCOPE = iam.scope_of(ME, "us-east-1", "dev")
PLAIN = Environment(region="us-east-1")
EVERYTHING = Environment(
    region="us-east-1", ami="build", storage=Storage(workspace="fsx-lustre"),
    budget=Budget(usd=1, email="a@b.c"), quarantine=True, secrets=("arn:aws:ssm:x",),
    compute={"gpu": Compute(instance_types=("g6.xlarge",), max_vcpus=4, efa="auto",
                            capacity_reservation="cr-0123456789abcdef0")},
)  # fmt: skip
GIVEN = Network(vpc="vpc-1", subnets=("subnet-1",), security_groups=("sg-1",))
TEMPLATES = {path.stem: load(path) for path in FILES}

# Operations that have another name in IAM, and actions that are no operations.
NO_OPERATION = {
    "iam:PassRole", "s3:ListBucket", "s3:ListBucketVersions", "s3:DeleteObjectVersion",
    "s3:PutEncryptionConfiguration", "s3:GetEncryptionConfiguration",
    "s3:PutBucketPublicAccessBlock", "s3:GetBucketPublicAccessBlock",
    "s3:PutLifecycleConfiguration", "s3:GetLifecycleConfiguration",
    "s3:GetAccelerateConfiguration", "s3:GetAnalyticsConfiguration", "s3:GetBucketNotification",
    "s3:GetBucketObjectLockConfiguration", "s3:GetIntelligentTieringConfiguration",
    "s3:GetInventoryConfiguration", "s3:GetMetricsConfiguration", "s3:GetReplicationConfiguration",
    "s3:GetBucketCORS", "kms:ReEncryptFrom", "budgets:ModifyBudget", "budgets:ViewBudget",
    "cloudformation:TagResource", "cloudformation:UntagResource",
}  # fmt: skip
SERVICES = {
    "elasticfilesystem": "efs", "servicequotas": "service-quotas",
    "tag": "resourcegroupstaggingapi",
}  # fmt: skip


def actions_in(environment: Environment, command: Command) -> set[str]:
    return {each.action for each in needed_permissions(environment)[command]}


def every_permission() -> set[Permission]:
    return {
        each
        for environment in (PLAIN, EVERYTHING)
        for group in needed_permissions(environment).values()
        for each in group
    }


# --- the table ------------------------------------------------------------------------------------


def test_every_action_is_one_that_there_is() -> None:
    session = botocore.session.get_session()
    for permission in every_permission():
        prefix, name = permission.action.split(":")
        if permission.action not in NO_OPERATION:
            model = session.get_service_model(SERVICES.get(prefix, prefix))
            assert name in model.operation_names, permission.action


def test_an_environment_asks_for_what_it_has_and_no_more() -> None:
    plain = actions_in(PLAIN, "setup")
    assert "ec2:CreateVpc" in plain and "ec2:CreateNatGateway" in plain
    assert "elasticfilesystem:CreateFileSystem" in plain
    assert not {each.split(":")[0] for each in plain} & {"imagebuilder", "fsx", "budgets"}
    everything = {each.split(":")[0] for each in actions_in(EVERYTHING, "setup")}
    assert {"imagebuilder", "fsx", "budgets"} <= everything
    closed = actions_in(Environment(network=Network(egress="endpoints")), "setup")
    assert "ec2:CreateVpc" in closed and "ec2:CreateNatGateway" not in closed
    assert "ec2:CreateVpc" not in actions_in(Environment(network=GIVEN), "setup")


def test_what_was_missing_in_the_lists_by_hand_is_there() -> None:
    """A sample of the 37 actions for setup, 15 for teardown and 6 for submit."""
    setup = "ec2:DescribeVpcs ec2:RevokeSecurityGroupEgress kms:CreateGrant s3:PutBucketLogging "
    setup += "ec2:DescribeAvailabilityZones elasticfilesystem:PutBackupPolicy events:DescribeRule"
    teardown = "iam:DeletePolicy ec2:DisassociateRouteTable kms:DeleteAlias s3:DeleteBucket "
    teardown += "logs:DeleteResourcePolicy events:ListTargetsByRule s3:DeleteObjectVersion"
    submit = "cloudformation:DescribeStacks ecr:DescribeImages ecr:DescribeRepositories "
    submit += "kms:GenerateDataKey kms:Decrypt s3:ListBucket"
    for command, words in (("setup", setup), ("teardown", teardown), ("submit", submit)):
        assert {*words.split()} - {
            each.action for each in permissions_of(PLAIN, [command])
        } == set(), command


def test_resources_are_those_of_the_environment_alone() -> None:
    for permission in every_permission():
        for arn in arns_of(permission.kind, SCOPE):
            assert arn == "*" or arn.startswith("arn:aws:")
            assert not re.search(r"(?<!\$)\{", arn)
    assert arns_of("queue", SCOPE) == (
        f"arn:aws:batch:us-east-1:{ACCOUNT}:job-queue/batchml-dev-*",
    )


def test_a_proof_may_end_hosts_and_repositories_of_its_environment_alone() -> None:
    found = iam.statements(permissions_of(PLAIN, ["prove"]), SCOPE)
    mine = {"StringEquals": {"aws:ResourceTag/batchml:env": "dev"}}
    for action in ("ec2:TerminateInstances", "ecr:DeleteRepository"):
        [statement] = [each for each in found if action in each["Action"]]
        assert statement["Condition"] == mine and "*" not in statement["Resource"], action


def test_a_policy_for_environments_of_a_pattern_compares_their_tags_as_patterns() -> None:
    scope = unknown_account("us-east-1", iam.PROOFS)
    found = iam.statements(permissions_of(PLAIN, ["prove"]), scope)
    [statement] = [each for each in found if "ec2:TerminateInstances" in each["Action"]]
    assert statement["Condition"] == {"StringLike": {"aws:ResourceTag/batchml:env": "prove-*"}}
    assert "StringEquals" not in json.dumps(found)
    assert "arn:aws:batch:us-east-1:*:job-queue/batchml-prove-*-*" in json.dumps(found)


def test_the_statement_for_a_denied_push_is_of_the_table() -> None:
    assert {*PUSH_ACTIONS} <= actions_in(PLAIN, "image push")


def test_every_command_that_is_typed_has_its_permissions() -> None:
    def names(command: Any, path: str = "") -> Iterator[str]:
        for name, each in command.commands.items():
            if hasattr(each, "commands"):
                yield from names(each, f"{path}{name} ")
            elif not each.hidden:
                yield f"{path}{name}"

    typed = {name for name in names(full_command()) if not name.startswith("local ")}
    assert typed == set(COMMANDS)
    rows = {row for rows in COMMANDS.values() for row in rows}
    assert rows == set(needed_permissions(PLAIN))


# --- calls in the code ----------------------------------------------------------------------------

# botocore's services that the client calls.
CALLED = (
    "autoscaling", "batch", "cloudformation", "ec2", "ecr", "ecs", "fsx", "iam", "kms",
    "logs", "pricing", "resourcegroupstaggingapi", "s3", "service-quotas", "ssm", "sts", "backup",
)  # fmt: skip
# Operations of other programs, whose names occur in our texts.
OTHERS = {"Decrypt", "GenerateDataKey"}


def operations_in_code() -> Iterator[tuple[str, str, Path]]:
    """(service, operation, file) of every text in the client that names an operation.

    `"DescribeImages"` alone is of ECR in aws/ecr.py, and of EC2 elsewhere.
    """
    session = botocore.session.get_session()
    models = {name: {*session.get_service_model(name).operation_names} for name in CALLED}
    folder = Path(batchml.__path__[0])
    for path in sorted(folder.rglob("*.py")):
        where = path.relative_to(folder)
        if where.parts[0] in ("local", "runtime") or where.name in (
            "iam.py",
            "stack_permissions.py",
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            service, _, name = node.value.rpartition(":")
            found = [each for each in CALLED if name in models[each] and service in ("", each)]
            if where.stem in found:
                found = [where.stem]
            if found and name not in OTHERS:
                yield found[0], name, where


def test_every_call_in_the_code_is_in_the_table() -> None:
    listed = {each.action for each in every_permission()}
    found = list(operations_in_code())
    assert len({name for _, name, _ in found}) > 60
    missing = {
        (action, str(where))
        for service, name, where in found
        if (action := action_of(service, name)) and action not in listed
    }
    # `batchml setup` calls AWS's TagResource of Batch alone; the names are the same.
    assert missing == set()


# --- what is generated ----------------------------------------------------------------------------


def test_the_generated_permissions_are_up_to_date() -> None:
    made_now = stack_permissions.render(stack_permissions.rows(stack_permissions.templates()))
    assert made_now == stack_permissions.TARGET.read_text("utf-8"), "make permissions"


def used_types() -> set[str]:
    return {each["Type"] for template in TEMPLATES.values() for _, each, _ in resources(template)}


def test_every_type_of_the_templates_has_its_handlers_or_is_listed_by_hand() -> None:
    by_hand = {f"AWS::{kind}" for each in ADDED for kind in each.types.split()}
    assert used_types() - set(HANDLERS) - by_hand == set()
    assert (set(HANDLERS) | by_hand) - used_types() == set()


def test_the_lists_differ_from_the_handlers_by_what_is_explained() -> None:
    """For each type, as `setup` asks with all that an environment can have."""
    asked = actions_in(EVERYTHING, "setup") | actions_in(PLAIN, "setup")
    closed = Environment(region="us-east-1", network=Network(egress="endpoints"))
    asked |= actions_in(closed, "setup")
    for kind, handlers in HANDLERS.items():
        for handler in handlers:
            explained = {a for a in declared(kind, handler) for e in LEFT_OUT if e.applies(kind, a)}
            assert declared(kind, handler) - asked <= explained, (kind, handler)


def test_every_explanation_leaves_something_out() -> None:
    for each in LEFT_OUT:
        for action, kind in product(each.actions.split(), each.types.split()):
            names = {
                a for handler in HANDLERS[f"AWS::{kind}"] for a in declared(f"AWS::{kind}", handler)
            }
            assert action in names, (each.reason, action)
    for added in ADDED:
        for kind, (handler, actions) in product(added.types.split(), added.actions.items()):
            known = declared(f"AWS::{kind}", handler)
            assert not {*actions.split()} & known, (added.source, "is in the schema")


def test_what_is_left_out_belongs_to_properties_that_no_template_has() -> None:
    for each in LEFT_OUT:
        types = [f"AWS::{kind}" for kind in each.types.split()]
        for stack, template in TEMPLATES.items():
            for name, _, properties in resources(template, *types):
                used = {*stack_permissions.property_names(properties)}
                assert not used & {*each.properties.split()}, (each.reason, stack, name)


ENVIRONMENTS = [
    PLAIN,
    EVERYTHING,
    Environment(region="us-east-1", network=Network(zones=3, egress="endpoints")),
    Environment(region="us-east-1", network=Network(zones=1), storage=Storage(workspace="none")),
    Environment(region="us-east-1", network=GIVEN, quarantine=True),
    Environment(region="us-east-1", storage=Storage(workspace="none", shared_with="other")),
    Environment(region="us-east-1", secrets=("arn:aws:ssm:x",), ami="ami-0123456789abcdef0"),
]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_environment_asks_for_the_resources_that_its_stacks_have(
    environment: Environment,
) -> None:
    """The conditions in Python are those of the templates, with the parameters of `setup`."""
    files = {path.stem: path.read_text("utf-8") for path in FILES}

    def no_definitions(_: Platform) -> dict[str, dict[str, Any]]:
        return {}

    state = wanted_state(SetupSpec("dev", environment, files, no_definitions), CurrentState())
    expected = set()
    for blueprint in state.stacks:
        stack = blueprint.name.rpartition("-")[2]
        for kind in {*made(stack, **blueprint.parameters).values()}:
            for action in {a for h in stack_permissions.ALL for a in needed(f"AWS::{kind}", h)}:
                kinds = stack_permissions.kinds_of(f"AWS::{kind}", action)
                expected |= {Permission(action, each) for each in kinds}
    assert iam.stack_permissions(environment, "setup") == expected


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", [PLAIN, EVERYTHING])
@pytest.mark.parametrize(
    "region", ["us-east-1", "ap-southeast-1", "us-gov-west-1", "cn-northwest-1"]
)
def test_policies_are_short_enough_and_allow_everything(
    environment: Environment, region: str
) -> None:
    scope = unknown_account(region, "a" * 20)
    for command in COMMANDS:
        wanted = permissions_of(environment, [command])
        documents = policy_documents(wanted, scope)
        assert len(documents) <= (3 if command == "prove" else 2)
        for document in documents:
            assert len(json.dumps(document, separators=(",", ":"))) <= MAX_POLICY
        allowed = {
            (action, arn)
            for document in documents
            for each in document["Statement"]
            for action, arn in product(each["Action"], each["Resource"])
        }
        assert allowed == {
            (each.action, arn) for each in wanted for arn in arns_of(each.kind, scope)
        }


def test_roles_are_passed_to_the_services_that_need_them_alone() -> None:
    for command in ("setup", "submit"):
        for document in policy_documents(permissions_of(EVERYTHING, [command]), SCOPE):
            for each in document["Statement"]:
                if "iam:PassRole" in each["Action"]:
                    assert "iam:PassedToService" in str(each["Condition"])
                    assert each["Resource"] == [f"arn:aws:iam::{ACCOUNT}:role/batchml-dev-*"]


def test_a_group_of_commands_needs_what_its_commands_need() -> None:
    both = {*permissions_of(PLAIN, ["image list"]), *permissions_of(PLAIN, ["image push"])}
    assert {*permissions_of(PLAIN, ["image"])} >= both
    assert permissions_of(PLAIN, ["env use"]) == ()


# --- who only submits ----------------------------------------------------------------------------

SUBMITTER_POLICY = TEMPLATES["roles"]["Resources"]["SubmitterPolicy"]["Properties"]
# What controllers of sweeps may do, and so their owners (rule T13 of the templates).
FOR_CONTROLLERS = {"s3:AbortMultipartUpload"}


def in_dev(said: str) -> str:
    """What CloudFormation makes of a text of the stack `roles` of the environment dev."""
    said = re.sub(r"\$\{\w+\.Arn\}", f"arn:aws:iam::{ACCOUNT}:role/batchml-dev-x", said)
    for name, value in {
        "AWS::Partition": "aws", "AWS::Region": "us-east-1", "AWS::AccountId": ACCOUNT,
        "AWS::URLSuffix": "amazonaws.com", "EnvironmentName": "dev",
        "LogGroupName": "/aws/batch/batchml-dev", "!aws:userid": "${aws:userid}",
    }.items():  # fmt: skip
        said = said.replace(f"${{{name}}}", value)
    return said


def allowed_to_submitters() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (action, in_dev(target), each.get("Condition", {}))
        for each in statements(SUBMITTER_POLICY["PolicyDocument"])
        if each["Effect"] == "Allow"
        for action in texts(each["Action"])
        for target in texts(each["Resource"])
    ]


@pytest.mark.parametrize("command", SUBMITTER)
def test_the_policy_for_submitters_allows_what_their_commands_ask(command: Command) -> None:
    allowed = allowed_to_submitters()
    lustre = Environment(storage=Storage(workspace="fsx-lustre"))
    for permission in needed_permissions(lustre)[command]:
        for arn in map(example_of, arns_of(permission.kind, SCOPE)):
            assert any(
                permission.action == action and fnmatchcase(arn, target.replace("[", "[[]"))
                for action, target, _ in allowed
            ), (permission, arn)


def test_the_policy_for_submitters_allows_nothing_else() -> None:
    lustre = Environment(storage=Storage(workspace="fsx-lustre"))
    asked = {each.action for row in SUBMITTER for each in needed_permissions(lustre)[row]}
    assert {action for action, _, _ in allowed_to_submitters()} == asked | FOR_CONTROLLERS


def test_the_policy_for_submitters_has_the_conditions_of_the_table() -> None:
    lustre = Environment(region="us-east-1", storage=Storage(workspace="fsx-lustre"))
    wanted = [each for row in SUBMITTER for each in needed_permissions(lustre)[row]]
    ours = {
        (action, operator, key)
        for each in iam.statements(wanted, SCOPE)
        for action in each["Action"]
        for operator, keys in each.get("Condition", {}).items()
        for key in keys
    }
    theirs = {
        (action, operator, key)
        for action, _, condition in allowed_to_submitters()
        for operator, keys in condition.items()
        for key in keys
    }
    assert ours == theirs


def test_the_name_of_the_policy_for_submitters_stays() -> None:
    """Permission sets of IAM Identity Center refer to a policy by its name."""
    assert in_dev(texts(SUBMITTER_POLICY["ManagedPolicyName"])[0]) == (
        "batchml-dev-submitter-us-east-1"
    )
