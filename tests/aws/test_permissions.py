"""What commands may have to ask, and what IAM's simulation says of it."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import botocore.session
import pytest

import batchml.aws
from batchml.aws.iam import (
    PROBES,
    Command,
    Permission,
    arn_of,
    example_of,
    needed_permissions,
    probe,
    simulate,
    simulation_requests,
)
from batchml.aws.session import (
    CallerIdentity,
    get_caller_identity,
    has_service_role,
    home_region,
    principal_arn,
    region_status,
)
from batchml.errors import AccessError, ServiceError
from batchml.model.environment import Budget, Environment, Network, Storage
from batchml.resources import shipped_folder
from tests.security.cloudformation import load, statements, texts
from tests.support.aws_world import parsed
from tests.support.models import faults
from tests.support.wire import Refusal, Wire
from tests.support.wire import keys as keys

ACCOUNT = "123456789012"
ROLE = f"arn:aws:sts::{ACCOUNT}:assumed-role/AWSReservedSSO_Dev_0123/me@example.com"
ME = CallerIdentity(ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/team/me")
EVERYTHING = Environment(
    region="us-east-1", ami="build", storage=Storage(workspace="fsx-lustre"),
    budget=Budget(usd=1, email="a@b.c"),
)  # fmt: skip

# IAM's prefix -> botocore's service, where they differ.
SERVICES = {"elasticfilesystem": "efs"}
# Actions that are no operations: Service Authorization Reference.
NO_OPERATION = {
    "iam:PassRole",
    "s3:ListBucket",
    "s3:PutEncryptionConfiguration",
    "s3:PutBucketPublicAccessBlock",
    "budgets:ModifyBudget",
}


def every_permission() -> set[Permission]:
    environments = (EVERYTHING, Environment(region="us-east-1"))
    return {
        each
        for environment in environments
        for group in needed_permissions(environment).values()
        for each in group
    }


def test_every_action_is_one_that_there_is() -> None:
    session = botocore.session.get_session()
    for permission in every_permission():
        prefix, name = permission.action.split(":")
        if permission.action not in NO_OPERATION:
            model = session.get_service_model(SERVICES.get(prefix, prefix))
            assert name in model.operation_names, permission.action


def test_an_environment_asks_for_what_it_has_and_no_more() -> None:
    def actions(environment: Environment) -> set[str]:
        return {each.action for each in needed_permissions(environment)["setup"]}

    plain = actions(Environment(region="us-east-1"))
    assert "ec2:CreateVpc" in plain and "ec2:CreateNatGateway" in plain
    assert "elasticfilesystem:CreateFileSystem" in plain
    assert not {each.split(":")[0] for each in plain} & {"imagebuilder", "fsx", "budgets"}
    assert {"imagebuilder", "fsx", "budgets"} <= {
        each.split(":")[0] for each in actions(EVERYTHING)
    }
    closed = actions(Environment(network=Network(egress="endpoints")))
    assert "ec2:CreateVpc" in closed and "ec2:CreateNatGateway" not in closed
    given = actions(Environment(network=Network(subnets=("s",), security_groups=("g",))))
    assert "ec2:CreateVpc" not in given


def test_resources_are_those_of_the_environment_alone() -> None:
    for permission in every_permission():
        arn = arn_of(permission.kind, ME, "eu-west-1", "dev")
        if arn != "*":
            assert arn.startswith("arn:aws:")
            assert "{" not in arn
    assert arn_of("queue", ME, "eu-west-1", "dev") == (
        f"arn:aws:batch:eu-west-1:{ACCOUNT}:job-queue/batchml-dev-*"
    )


def test_every_simulation_is_what_iam_asks_for_and_they_are_few() -> None:
    calls = simulation_requests(ME.arn, every_permission(), ME, "us-east-1", "dev")
    arns = {arn_of(each.kind, ME, "us-east-1", "dev") for each in every_permission()}
    assert len(calls) == len({arn.split(":")[2] for arn in arns - {"*"}}) + 1 <= 9
    covered = set()
    for permissions, request in calls:
        assert faults("iam", "SimulatePrincipalPolicy", request) == []
        assert len({arn.split(":")[2] for arn in request["ResourceArns"] if arn != "*"}) <= 1
        assert not any("*" in arn for arn in request["ResourceArns"] if arn != "*")
        covered |= set(permissions.values())
    assert covered == every_permission()


# --- verdicts ------------------------------------------------------------------------------------

SUBMIT = [
    Permission("batch:SubmitJob", "queue"),
    Permission("batch:SubmitJob", "definition"),
    Permission("batch:DescribeJobs", "*"),
]


def deciding(decide: Any) -> Any:
    """IAM's answer to one SimulatePrincipalPolicy, a result for each action and resource."""

    def answer(params: dict[str, Any]) -> dict[str, Any]:
        results = [
            {"EvalActionName": action, "EvalResourceName": arn, **decide(action, arn)}
            for action in params["ActionNames"]
            for arn in params["ResourceArns"]
        ]
        return {"EvaluationResults": results, "IsTruncated": False}

    return answer


def verdicts(decide: Any) -> dict[tuple[str, str], str]:
    wire = Wire({"SimulatePrincipalPolicy": deciding(decide)})
    found = simulate(wire.session(), ME.arn, SUBMIT, ME, "us-east-1", "dev")
    assert wire.wrong == []
    return {(each.permission.action, each.permission.kind): each.result for each in found}


@pytest.mark.usefixtures("keys")
def test_each_resource_of_an_action_has_its_own_verdict() -> None:
    def decide(action: str, arn: str) -> dict[str, Any]:
        return {"EvalDecision": "implicitDeny" if "job-queue" in arn else "allowed"}

    assert verdicts(decide) == {
        ("batch:SubmitJob", "queue"): "missing",
        ("batch:SubmitJob", "definition"): "allowed",
        ("batch:DescribeJobs", "*"): "allowed",
    }


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("result", "word"),
    [
        ({"EvalDecision": "implicitDeny"}, "missing"),
        ({"EvalDecision": "explicitDeny"}, "denied"),
        ({"EvalDecision": "implicitDeny", "MissingContextValues": ["aws:MultiFactorAuthPresent"]},
         "conditional"),
        ({"EvalDecision": "implicitDeny",
          "OrganizationsDecisionDetail": {"AllowedByOrganizations": False}}, "organization"),
        ({"EvalDecision": "implicitDeny",
          "OrganizationsDecisionDetail": {"AllowedByOrganizations": True}}, "missing"),
        ({"EvalDecision": "implicitDeny",
          "PermissionsBoundaryDecisionDetail": {"AllowedByPermissionsBoundary": False}},
         "boundary"),
        ({"EvalDecision": "allowed"}, "allowed"),
    ],
)  # fmt: skip
def test_who_decided_is_told_apart(result: dict[str, Any], word: str) -> None:
    assert set(verdicts(lambda action, arn: result).values()) == {word}


@pytest.mark.usefixtures("keys")
def test_results_by_resource_and_further_pages_are_read() -> None:
    def answer(params: dict[str, Any]) -> dict[str, Any]:
        first, *rest = params["ActionNames"]
        names = rest if "Marker" in params else [first]
        return {
            "EvaluationResults": [
                {
                    "EvalActionName": name,
                    "EvalDecision": "explicitDeny",
                    "ResourceSpecificResults": [
                        {"EvalResourceName": arn, "EvalResourceDecision": "allowed"}
                        for arn in params["ResourceArns"]
                    ],
                }
                for name in names
            ],
            "IsTruncated": bool(rest) and "Marker" not in params,
            "Marker": "next",
        }

    wanted = [*SUBMIT, Permission("batch:RegisterJobDefinition", "definition")]
    wire = Wire({"SimulatePrincipalPolicy": answer})
    found = simulate(wire.session(), ME.arn, wanted, ME, "us-east-1", "dev")
    assert {each.permission for each in found} == set(wanted)
    assert {each.result for each in found} == {"allowed"}
    assert len(wire.calls) == 3
    assert wire.wrong == []


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("action", sorted(PROBES))
def test_probes_read_and_say_what_is_denied(action: str) -> None:
    name = action.split(":")[1]
    wire = Wire({name: {}})
    probe(wire.session(), action)
    assert (wire.operations, wire.wrong) == ([name], [])
    with pytest.raises(AccessError):
        probe(Wire({name: Refusal("AccessDenied")}).session(), action)


# --- who -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("arn", "user", "role", "is_root"),
    [
        (f"arn:aws:iam::{ACCOUNT}:user/team/me", "me", "", False),
        (ROLE, "", "AWSReservedSSO_Dev_0123", False),
        (f"arn:aws:iam::{ACCOUNT}:root", "", "", True),
        (f"arn:aws:sts::{ACCOUNT}:federated-user/me", "", "", False),
        (f"arn:aws-cn:iam::{ACCOUNT}:user/me", "me", "", False),
    ],
)
def test_identities_are_told_apart(arn: str, user: str, role: str, is_root: bool) -> None:
    answer = {"UserId": "X", "Account": ACCOUNT, "Arn": arn}
    wire = Wire({"GetCallerIdentity": answer})
    found = get_caller_identity(wire.session())
    assert (found.user_name, found.role_name, found.is_root) == (user, role, is_root)
    assert found.partition == arn.split(":")[1]
    assert "GMT" in found.date


@pytest.mark.usefixtures("keys")
def test_a_role_is_simulated_by_its_full_arn() -> None:
    full = f"arn:aws:iam::{ACCOUNT}:role/aws-reserved/sso.amazonaws.com/AWSReservedSSO_Dev_0123"
    role = {
        "Path": "/aws-reserved/sso.amazonaws.com/", "RoleName": "AWSReservedSSO_Dev_0123",
        "RoleId": "AROAEXAMPLE", "Arn": full, "CreateDate": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    wire = Wire({"GetRole": {"Role": role}})
    assert principal_arn(wire.session(), CallerIdentity(ACCOUNT, ROLE)) == full
    assert wire.calls == [("GetRole", {"RoleName": "AWSReservedSSO_Dev_0123"})]
    assert principal_arn(wire.session(), ME) == ME.arn
    assert (
        principal_arn(wire.session(), CallerIdentity(ACCOUNT, f"arn:aws:iam::{ACCOUNT}:root")) == ""
    )


@pytest.mark.usefixtures("keys")
def test_regions_and_the_service_role_are_asked_for() -> None:
    region = {"RegionName": "ap-east-1", "OptInStatus": "not-opted-in", "Endpoint": "e"}
    wire = Wire({"DescribeRegions": {"Regions": [region]}})
    assert region_status(wire.session(), "ap-east-1") == "not-opted-in"
    assert wire.wrong == []
    assert region_status(Wire({"DescribeRegions": {"Regions": []}}).session(), "xx-east-1") == ""
    gone = Wire({"GetRole": Refusal("NoSuchEntity", status=404)})
    assert has_service_role(gone.session()) is False
    with pytest.raises(ServiceError):
        has_service_role(Wire({"GetRole": Refusal("ServiceFailure", status=400)}).session())


def test_who_am_i_is_asked_where_no_region_has_to_be_enabled() -> None:
    assert [home_region(each) for each in ("ap-east-1", "cn-northwest-1", "us-gov-east-1")] == [
        "us-east-1", "cn-north-1", "us-gov-west-1",
    ]  # fmt: skip


# CloudFormation's type -> what making one takes. Source: the `handlers` of its resource schemas,
# and the Service Authorization Reference.
MAKING = {
    "AWS::Budgets::Budget": "budgets:ModifyBudget",
    "AWS::EC2::EIP": "ec2:AllocateAddress",
    "AWS::EC2::FlowLog": "ec2:CreateFlowLogs",
    "AWS::EC2::InternetGateway": "ec2:CreateInternetGateway",
    "AWS::EC2::NatGateway": "ec2:CreateNatGateway",
    "AWS::EC2::Route": "ec2:CreateRoute",
    "AWS::EC2::RouteTable": "ec2:CreateRouteTable",
    "AWS::EC2::SecurityGroup": "ec2:CreateSecurityGroup",
    "AWS::EC2::SecurityGroupEgress": "ec2:AuthorizeSecurityGroupEgress",
    "AWS::EC2::SecurityGroupIngress": "ec2:AuthorizeSecurityGroupIngress",
    "AWS::EC2::Subnet": "ec2:CreateSubnet",
    "AWS::EC2::SubnetRouteTableAssociation": "ec2:AssociateRouteTable",
    "AWS::EC2::VPC": "ec2:CreateVpc",
    "AWS::EC2::VPCEndpoint": "ec2:CreateVpcEndpoint",
    "AWS::EC2::VPCGatewayAttachment": "ec2:AttachInternetGateway",
    "AWS::EFS::AccessPoint": "elasticfilesystem:CreateAccessPoint",
    "AWS::EFS::FileSystem": "elasticfilesystem:CreateFileSystem",
    "AWS::EFS::MountTarget": "elasticfilesystem:CreateMountTarget",
    "AWS::Events::Rule": "events:PutRule",
    "AWS::FSx::DataRepositoryAssociation": "fsx:CreateDataRepositoryAssociation",
    "AWS::FSx::FileSystem": "fsx:CreateFileSystem",
    "AWS::IAM::InstanceProfile": "iam:CreateInstanceProfile",
    "AWS::IAM::ManagedPolicy": "iam:CreatePolicy",
    "AWS::IAM::Role": "iam:CreateRole",
    "AWS::IAM::RolePolicy": "iam:PutRolePolicy",
    "AWS::ImageBuilder::Component": "imagebuilder:CreateComponent",
    "AWS::ImageBuilder::DistributionConfiguration": "imagebuilder:CreateDistributionConfiguration",
    "AWS::ImageBuilder::Image": "imagebuilder:CreateImage",
    "AWS::ImageBuilder::ImageRecipe": "imagebuilder:CreateImageRecipe",
    "AWS::ImageBuilder::InfrastructureConfiguration": (
        "imagebuilder:CreateInfrastructureConfiguration"
    ),
    "AWS::ImageBuilder::LifecyclePolicy": "imagebuilder:CreateLifecyclePolicy",
    "AWS::KMS::Alias": "kms:CreateAlias",
    "AWS::KMS::Key": "kms:CreateKey",
    "AWS::Logs::LogGroup": "logs:CreateLogGroup",
    "AWS::Logs::ResourcePolicy": "logs:PutResourcePolicy",
    "AWS::S3::Bucket": "s3:CreateBucket",
    "AWS::S3::BucketPolicy": "s3:PutBucketPolicy",
}


def test_setup_asks_for_what_makes_every_resource_of_the_templates() -> None:
    types = {
        resource["Type"]
        for path in shipped_folder("cfn").glob("*.yaml")
        for resource in parsed(path.read_text("utf-8"))["Resources"].values()
    }
    efs = Environment(region="us-east-1", storage=Storage(workspace="efs"))
    asked = {
        permission.action
        for environment in (EVERYTHING, efs)
        for permission in needed_permissions(environment)["setup"]
    }
    assert {MAKING[each] for each in types} - asked == set()


def test_setup_asks_for_what_its_own_calls_take() -> None:
    """Those that `Stacks`, `LaunchApi` and `ComputeApi` make themselves."""
    own = {
        "cloudformation:DetectStackDrift", "cloudformation:DescribeStackDriftDetectionStatus",
        "cloudformation:DescribeStackResourceDrifts", "cloudformation:DeleteChangeSet",
        "cloudformation:GetTemplate", "cloudformation:ContinueUpdateRollback",
        "cloudformation:DeleteStack", "ec2:DescribeLaunchTemplateVersions",
        "ec2:DescribePlacementGroups", "ec2:CreatePlacementGroup", "batch:ListSchedulingPolicies",
        "batch:DescribeSchedulingPolicies", "batch:CreateSchedulingPolicy", "batch:ListJobs",
        "batch:UpdateSchedulingPolicy", "batch:DescribeJobDefinitions", "batch:TagResource",
        "batch:RegisterJobDefinition",
    }  # fmt: skip
    asked = {permission.action for permission in needed_permissions(EVERYTHING)["setup"]}
    assert own - asked == set()


# --- who only submits ----------------------------------------------------------------------------

ROLES = load(
    next(path for path in shipped_folder("cfn").glob("*.yaml") if path.name == "roles.yaml")
)
SUBMITTER = ROLES["Resources"]["SubmitterPolicy"]["Properties"]["PolicyDocument"]
MAX_POLICY = 6144  # characters of a managed policy, without blanks; IAM User Guide, "IAM quotas"


def in_dev(said: str) -> str:
    """What CloudFormation makes of a text of the stack `roles` of the environment dev."""
    said = re.sub(r"\$\{\w+\.Arn\}", f"arn:aws:iam::{ACCOUNT}:role/batchml-dev-x", said)
    for name, value in {
        "AWS::Partition": "aws", "AWS::Region": "us-east-1", "AWS::AccountId": ACCOUNT,
        "AWS::URLSuffix": "amazonaws.com", "EnvironmentName": "dev",
        "LogGroupName": "/aws/batch/batchml-dev",
    }.items():  # fmt: skip
        said = said.replace(f"${{{name}}}", value)
    return said


@pytest.mark.parametrize(
    "command", ["submit", "sweep", "logs", "explain", "cost", "workspace", "shell"]
)
def test_the_policy_for_submitters_allows_what_their_commands_ask(command: Command) -> None:
    allowed = [
        (action, in_dev(target))
        for each in statements(SUBMITTER)
        if each["Effect"] == "Allow"
        for action in texts(each["Action"])
        for target in texts(each["Resource"])
    ]
    lustre = Environment(storage=Storage(workspace="fsx-lustre"))
    for permission in needed_permissions(lustre)[command]:
        arn = example_of(arn_of(permission.kind, ME, "us-east-1", "dev"))
        assert any(
            permission.action == action and fnmatchcase(arn, target) for action, target in allowed
        ), (permission, arn)


def test_the_policy_for_submitters_is_no_longer_than_iam_takes() -> None:
    """With an environment's and a log group's longest names."""
    text = in_dev(json.dumps(SUBMITTER, separators=(",", ":"))).replace('{"Fn::Sub":', "")
    names = text.count("batchml-dev")
    assert len(text) + names * (20 - len("dev")) + 2 * 100 < MAX_POLICY


def test_explain_and_cost_ask_for_the_calls_that_they_make() -> None:
    made: dict[Command, tuple[str, ...]] = {
        "explain": ("diagnosis",),
        "cost": (
            "batch/hosts", "pricing/prices", "pricing/price_list", "pricing/spot",
            "batch/resources",
        ),
    }  # fmt: skip
    for command, modules in made.items():
        source = "".join(
            (Path(batchml.aws.__path__[0]) / f"{module}.py").read_text("utf-8")
            for module in modules
        )
        named = set(re.findall(r'"((?:batch|ec2|ecs|autoscaling|pricing|logs):[A-Z]\w+)"', source))
        asked = {permission.action for permission in needed_permissions(Environment())[command]}
        assert named and named - asked == set()
