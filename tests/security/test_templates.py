"""The templates: what Python relies on by name, and what is there under which parameters."""

from typing import Any

import pytest

from batchml.cost.estimate import ENDPOINTS
from batchml.model.group import GANG_TAG
from tests.security.cloudformation import (
    FILES,
    Template,
    branches,
    load,
    policies,
    resources,
    statements,
    text,
    texts,
)

TEMPLATES = {path.stem: load(path) for path in FILES}

OUTPUTS = {
    "network": {"VpcId", "SubnetIds", "SecurityGroupId", "BuildSubnetId", "AvailabilityZones"},
    "roles": {
        "InstanceProfileArn", "JobRoleArn", "ExecutionRoleArn", "ControllerRoleArn",
        "SubmitterPolicyArn",
    },
    "storage": {
        "BucketName", "KeyArn", "FileSystemId", "FileSystemDns", "LustreMountName", "AccessPointId",
        "WorkspaceId", "SharedFileSystemId",
    },
    "observability": {"LogGroupName"},
    "ami": {"ImageId"},
}  # fmt: skip


def value(template: Template, given: dict[str, str], node: Any) -> Any:
    """What an intrinsic function gives, of those that conditions use."""
    if isinstance(node, list):
        return [value(template, given, each) for each in node]
    if not isinstance(node, dict):
        return str(node)
    ((name, inner),) = node.items()
    if name == "Ref":
        return given.get(inner, str(template["Parameters"][inner].get("Default")))
    if name == "Condition":
        return value(template, given, template["Conditions"][inner])
    args = value(template, given, inner)
    if name == "Fn::Select":
        return args[1][int(args[0])]
    if name == "Fn::Split":
        return args[1].split(args[0])
    if name == "Fn::Join":
        return args[0].join(args[1])
    if name == "Fn::Equals":
        return args[0] == args[1]
    if name == "Fn::Not":
        return not args[0]
    assert name == "Fn::And", name
    return all(args)


def made(stem: str, **given: str) -> dict[str, str]:
    """Logical id -> type of what a stack has with these parameters."""
    template = TEMPLATES[stem]
    return {
        name: resource["Type"].removeprefix("AWS::")
        for name, resource, _ in resources(template)
        if "Condition" not in resource
        or value(template, given, {"Condition": resource["Condition"]})
    }


@pytest.mark.parametrize("stem", TEMPLATES)
def test_template_is_whole(stem: str) -> None:
    template = TEMPLATES[stem]
    assert set(template["Outputs"]) >= OUTPUTS[stem]
    assert "EnvironmentName" in template["Parameters"]
    # An export ties stacks together, which only a workspace that is shared is to do.
    exported = {name for name, output in template["Outputs"].items() if "Export" in output}
    assert exported == ({"WorkspaceId"} if stem == "storage" else set())
    # What CloudFormation takes without a bucket to put it in.
    assert next(path for path in FILES if path.stem == stem).stat().st_size <= 51_200


@pytest.mark.parametrize("stem", ["network", "roles", "storage", "observability"])
def test_only_the_name_must_be_given(stem: str) -> None:
    parameters = TEMPLATES[stem]["Parameters"]
    needed = {name for name, each in parameters.items() if "Default" not in each}
    # The zones depend on the instance types.
    assert needed == {"EnvironmentName"} | ({"Zones"} if stem == "network" else set())


@pytest.mark.parametrize("count", range(1, 7))
def test_without_a_way_out_nothing_costs_and_subnets_stay(count: int) -> None:
    """What teardown leaves around a file system: its subnets, and what is free."""
    zones = ",".join(f"us-east-1{letter}" for letter in "abcdef"[:count])
    kinds = made("network", Egress="none", Zones=zones)
    assert sorted(kinds.values()).count("EC2::Subnet") == count
    assert set(kinds.values()) == {
        "EC2::VPC", "EC2::Subnet", "EC2::RouteTable", "EC2::SubnetRouteTableAssociation",
        "EC2::SecurityGroup", "EC2::SecurityGroupIngress", "EC2::SecurityGroupEgress",
        "EC2::VPCEndpoint",
    }  # fmt: skip
    assert [name for name, kind in kinds.items() if kind == "EC2::VPCEndpoint"] == ["S3Endpoint"]
    for egress in ("nat", "endpoints"):
        # An update to `none` takes things away and touches nothing that stays.
        assert kinds.items() <= made("network", Egress=egress, Zones=zones).items()


def test_one_way_out_at_a_time() -> None:
    nat, endpoints = (
        made("network", Egress=egress, Zones="us-east-1a") for egress in ("nat", "endpoints")
    )
    assert "Nat" in nat and "EcsEndpoint" not in nat
    assert "Nat" not in endpoints and "Internet" not in endpoints
    services = {name for name in endpoints if name.endswith("Endpoint")}
    assert len(services) == len(ENDPOINTS) + 1  # with the gateway of S3


def test_endpoints_have_their_names_in_china_too() -> None:
    """Source: AWS CDK, InterfaceVpcEndpointAwsService; AWS Batch User Guide of aws-cn."""
    in_china = {
        text(branch).removeprefix("cn.com.amazonaws.${AWS::Region}.")
        for _, _, each in resources(TEMPLATES["network"], "AWS::EC2::VPCEndpoint")
        for branch in branches(each["ServiceName"])
        if text(branch).startswith("cn.")
    }
    assert in_china == {"batch", "ecr.api", "ecr.dkr", "sts"}


@pytest.mark.parametrize("count", range(1, 8))
def test_efs_is_reached_in_up_to_six_subnets(count: int) -> None:
    subnets = ",".join(f"subnet-{number}" for number in range(count))
    kinds = made("storage", Workspace="efs", SubnetIds=subnets)
    assert list(kinds.values()).count("EFS::MountTarget") == min(count, 6)
    assert not any(kind.startswith("FSx") for kind in kinds.values())


def test_lustre_has_its_link_and_no_efs() -> None:
    kinds = set(made("storage", Workspace="fsx-lustre", SubnetIds="subnet-1,subnet-2").values())
    assert {"FSx::FileSystem", "FSx::DataRepositoryAssociation"} <= kinds
    assert not any(kind.startswith("EFS") for kind in kinds)


def test_the_bucket_is_there_without_a_file_system() -> None:
    kinds = set(made("storage", Workspace="none").values())
    assert kinds == {"S3::Bucket", "S3::BucketPolicy", "KMS::Key", "KMS::Alias"}


def test_an_environment_that_shares_a_workspace_has_a_bucket_and_no_file_system() -> None:
    kinds = set(made("storage", Workspace="none", SharedWith="dev").values())
    assert kinds == {"S3::Bucket", "S3::BucketPolicy", "KMS::Key", "KMS::Alias"}
    outputs = TEMPLATES["storage"]["Outputs"]
    shared, lent = outputs["SharedFileSystemId"], outputs["WorkspaceId"]
    # What the one imports is what the other exports: so AWS keeps it while it is in use.
    assert shared["Value"] == {"Fn::ImportValue": {"Fn::Sub": "batchml-${SharedWith}-workspace"}}
    assert lent["Export"] == {"Name": {"Fn::Sub": "batchml-${EnvironmentName}-workspace"}}
    assert (shared["Condition"], lent["Condition"]) == ("IsShared", "HasFileSystem")


def test_a_budget_needs_a_limit_and_an_address() -> None:
    assert "MonthlyBudget" not in made("observability", BudgetUsd="100")
    assert "MonthlyBudget" not in made("observability", BudgetEmail="a@b.c")
    assert "MonthlyBudget" in made("observability", BudgetUsd="100", BudgetEmail="a@b.c")


def test_secrets_are_read_only_where_some_are_named() -> None:
    assert "SecretsPolicy" not in made("roles")
    assert "SecretsPolicy" in made("roles", JobSecrets="arn:aws:ssm:us-east-1:1:parameter/a")


def test_jobs_read_data_sets_of_others_only_where_some_are_named() -> None:
    assert "DataPolicy" not in made("roles")
    assert "DataPolicy" in made("roles", JobData="arn:aws:s3:::b/a/*", JobDataBuckets="arn:b")


def test_hosts_are_taken_out_of_service_only_where_that_is_allowed() -> None:
    assert "QuarantinePolicy" not in made("roles")
    assert "QuarantinePolicy" in made("roles", AllowQuarantine="true")


def test_programs_end_only_jobs_of_gangs_in_their_environment() -> None:
    (role,) = (each for name, each, _ in resources(TEMPLATES["roles"]) if name == "JobRole")
    may = [each for policy in policies(role) for each in statements(policy)]
    (end,) = (each for each in may if "batch:TerminateJob" in texts(each["Action"]))
    condition = end["Condition"]
    assert condition["StringEquals"] == {"aws:ResourceTag/batchml:env": {"Ref": "EnvironmentName"}}
    assert condition["Null"] == {f"aws:ResourceTag/{GANG_TAG}": "false"}
