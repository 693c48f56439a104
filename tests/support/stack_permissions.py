"""Generate batchml/aws/stack_permissions.py: what CloudFormation may call for the stacks of `cfn/`.

`python -m tests.support.stack_permissions` writes the file; a test demands that it is up to date.
`handlers.json` has what CloudFormation's own handlers declare to call for a type of resources, from
the `handlers.*.permissions` of the schemas in the CloudFormation registry (August 2026). Their
`list` handlers are left out, since no operation on a stack calls them. These lists are upper
bounds: LEFT_OUT has what our templates do not use, ADDED what the schemas do not tell.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from batchml.aws.iam import ANY
from tests.security.cloudformation import FILES, ROOT, Template, load, resources

HANDLERS: Mapping[str, Mapping[str, list[str]]] = json.loads(
    Path(__file__).with_name("handlers.json").read_text("utf-8")
)
TARGET = ROOT / "batchml" / "aws" / "stack_permissions.py"

# `setup` deletes, too: what a failed creation has made, and what a change removes. `teardown`
# changes the stacks with data, whose tags go to every resource, before it deletes them.
ALL = ("create", "read", "update", "delete")
_TEARDOWN = {
    "network": ("read", "delete"),
    "storage": ("read", "update", "delete"),
    "observability": ("read", "update", "delete"),
}


class LeftOut(Struct, frozen=True):
    """Actions that a handler declares and that our templates do not need, with the reason.

    `types`: the types without `AWS::`; empty for all. `properties`: without these, the handlers
    do not call the actions; a test demands that no resource of the types has them.
    """

    reason: str
    actions: str
    types: str = ""
    properties: str = ""

    def applies(self, kind: str, action: str) -> bool:
        types = self.types.split()
        return action in self.actions.split() and (not types or kind[5:] in types)


LEFT_OUT = (
    LeftOut("An address comes from AWS's pool and belongs to the NAT gateway.",
            "ec2:AcceptAddressTransfer ec2:AssociateAddress",
            "EC2::EIP", "TransferAddress InstanceId"),
    LeftOut("Flow logs go to CloudWatch Logs, not to S3 or Firehose.",
            "iam:CreateServiceLinkedRole logs:CreateLogDelivery logs:DeleteLogDelivery "
            "s3:GetBucketPolicy s3:PutBucketPolicy",
            "EC2::FlowLog", "LogDestination"),
    LeftOut("No flow log is of an Auto Scaling group.", "autoscaling:DescribeTags", "EC2::FlowLog"),
    LeftOut("The NAT gateway has one address.",
            "ec2:AssignPrivateNatGatewayAddress ec2:AssociateNatGatewayAddress "
            "ec2:DisassociateNatGatewayAddress ec2:UnassignPrivateNatGatewayAddress",
            "EC2::NatGateway",
            "SecondaryAllocationIds SecondaryPrivateIpAddresses SecondaryPrivateIpAddressCount"),
    LeftOut("Subnets have IPv4 addresses alone.",
            "ec2:AssociateSubnetCidrBlock ec2:DisassociateSubnetCidrBlock",
            "EC2::Subnet", "Ipv6CidrBlock Ipv6CidrBlocks"),
    LeftOut("The VPC has the default tenancy.", "ec2:ModifyVpcTenancy", "EC2::VPC",
            "InstanceTenancy"),
    LeftOut("The VPC has no encryption control.", "ec2:CreateVpcEncryptionControl", "EC2::VPC",
            "VpcEncryptionControl"),
    LeftOut("Endpoints are of services of this region, not of service networks.",
            "vpc-lattice:CreateServiceNetworkVpcEndpointAssociation "
            "vpc-lattice:DescribeServiceNetworkVpcEndpointAssociation vpce:AllowMultiRegion",
            "EC2::VPCEndpoint", "ServiceNetworkArn ServiceRegion"),
    LeftOut("The VPC has no VPN gateway.",
            "ec2:AttachVpnGateway ec2:DetachVpnGateway", "EC2::VPCGatewayAttachment",
            "VpnGatewayId"),
    LeftOut("The file system is not replicated.",
            "elasticfilesystem:CreateReplicationConfiguration "
            "elasticfilesystem:DeleteReplicationConfiguration iam:PassRole",
            "EFS::FileSystem", "ReplicationConfiguration"),
    LeftOut("The file system has no replication overwrite protection to change.",
            "elasticfilesystem:UpdateFileSystemProtection", "EFS::FileSystem",
            "FileSystemProtection"),
    LeftOut("The file system keeps its policy.", "elasticfilesystem:DeleteFileSystemPolicy",
            "EFS::FileSystem"),
    LeftOut("The rule's target is a log group, which needs a resource policy and no role.",
            "iam:PassRole", "Events::Rule", "RoleArn"),
    LeftOut("The policy names no users, groups or roles.",
            "iam:AttachGroupPolicy iam:AttachRolePolicy iam:AttachUserPolicy "
            "iam:DetachGroupPolicy iam:DetachRolePolicy iam:DetachUserPolicy",
            "IAM::ManagedPolicy", "Users Groups Roles"),
    LeftOut("Roles have no permissions boundary.",
            "iam:DeleteRolePermissionsBoundary iam:PutRolePermissionsBoundary",
            "IAM::Role", "PermissionsBoundary"),
    LeftOut("Components are in the template, not in S3, and setup gives no key for them.",
            "kms:Decrypt kms:Encrypt kms:GenerateDataKey kms:GenerateDataKeyPair "
            "kms:GenerateDataKeyPairWithoutPlaintext kms:GenerateDataKeyWithoutPlaintext "
            "s3:GetBucketLocation s3:GetObject s3:HeadBucket",
            "ImageBuilder::Component", "Uri"),
    LeftOut("The AMI is not put into launch templates or parameters by Image Builder.",
            "ec2:CreateLaunchTemplateVersion ec2:DescribeLaunchTemplates "
            "ec2:ModifyLaunchTemplate ssm:GetParameter",
            "ImageBuilder::DistributionConfiguration",
            "LaunchTemplateConfigurations SsmParameterConfigurations"),
    LeftOut("The image is an AMI, made without a pipeline, workflows or scans.",
            "ecr:BatchGetRepositoryScanningConfiguration imagebuilder:GetContainerRecipe "
            "imagebuilder:GetWorkflow imagebuilder:StartImagePipelineExecution "
            "inspector2:BatchGetAccountStatus",
            "ImageBuilder::Image",
            "ContainerRecipeArn Workflows ImageScanningConfiguration "
            "ImagePipelineExecutionSettings"),
    LeftOut("The build tells no topic.", "sns:Publish",
            "ImageBuilder::InfrastructureConfiguration", "SnsTopicArn"),
    LeftOut("Keys are never disabled, and always rotated.",
            "kms:DisableKey kms:DisableKeyRotation kms:EnableKey", "KMS::Key", "Enabled"),
    LeftOut("Log groups have no data protection policy and no delivery.",
            "firehose:TagDeliveryStream logs:CreateLogDelivery "
            "logs:DeleteDataProtectionPolicy logs:PutDataProtectionPolicy "
            "logs:PutResourcePolicy logs:DescribeResourcePolicies s3:REST.PUT.OBJECT",
            "Logs::LogGroup", "DataProtectionPolicy ResourcePolicyDocument"),
    LeftOut("Log groups keep a retention and their key.",
            "logs:DeleteRetentionPolicy logs:DisassociateKmsKey", "Logs::LogGroup"),
    LeftOut("Buckets are not replicated.",
            "iam:PassRole s3:DeleteBucketReplication s3:PutBucketReplication "
            "s3:PutReplicationConfiguration",
            "S3::Bucket", "ReplicationConfiguration"),
    LeftOut("Buckets have no metadata table.",
            "s3:CreateBucketMetadataTableConfiguration s3:DeleteBucketMetadataTableConfiguration "
            "s3tables:CreateNamespace s3tables:CreateTable s3tables:GetTable "
            "s3tables:GetTableMetadataLocation s3tables:PutTablePolicy "
            "s3tables:UpdateTableMetadataLocation",
            "S3::Bucket", "MetadataTableConfiguration MetadataConfiguration"),
    LeftOut("CloudFormation writes and deletes no objects of a bucket without these.",
            "s3:DeleteObject s3:PutObjectAcl", "S3::Bucket",
            "MetadataTableConfiguration ReplicationConfiguration"),
    LeftOut("Buckets have no ACL.", "s3:GetBucketAcl s3:PutBucketAcl", "S3::Bucket",
            "AccessControl"),
    LeftOut("Buckets have no analytics, inventories, metrics or tiers.",
            "s3:DeleteBucketAnalyticsConfiguration s3:DeleteBucketMetricsConfiguration "
            "s3:PutAnalyticsConfiguration s3:PutIntelligentTieringConfiguration "
            "s3:PutInventoryConfiguration s3:PutMetricsConfiguration",
            "S3::Bucket",
            "AnalyticsConfigurations InventoryConfigurations MetricsConfigurations "
            "IntelligentTieringConfigurations"),
    LeftOut("Buckets have no acceleration, website, CORS rules, notifications or object lock.",
            "s3:DeleteBucketCors s3:DeleteBucketWebsite s3:PutAccelerateConfiguration "
            "s3:PutBucketCORS s3:PutBucketNotification s3:PutBucketObjectLockConfiguration "
            "s3:PutBucketWebsite s3:PutObjectLockConfiguration",
            "S3::Bucket",
            "AccelerateConfiguration WebsiteConfiguration CorsConfiguration "
            "NotificationConfiguration ObjectLockEnabled ObjectLockConfiguration"),
    LeftOut("IAM has no such actions: it allows these calls by s3:PutEncryptionConfiguration and "
            "s3:PutLifecycleConfiguration.",
            "s3:DeleteBucketEncryption s3:DeleteBucketLifecycle", "S3::Bucket"),
)  # fmt: skip


class Added(Struct, frozen=True):
    """Actions that the schemas do not name. `types`: as in LeftOut."""

    source: str
    actions: Mapping[str, str]  # handler -> actions
    types: str


ADDED = (
    # The registry has no handlers of this type.
    Added("FSx API Reference, CreateFileSystem; FSx for Lustre User Guide, 'Data encryption', "
          "'Using service-linked roles'; Service Authorization Reference, dependent actions",
          {"create": "fsx:CreateFileSystem fsx:TagResource ec2:GetSecurityGroupsForVpc "
                     "iam:CreateServiceLinkedRole kms:CreateGrant kms:Decrypt kms:DescribeKey "
                     "kms:GenerateDataKeyWithoutPlaintext",
           "read": "fsx:DescribeFileSystems fsx:ListTagsForResource",
           "update": "fsx:TagResource fsx:UntagResource fsx:UpdateFileSystem",
           "delete": "fsx:DeleteFileSystem"},
          "FSx::FileSystem"),
    # Nor of this one. One action allows to create, change and delete.
    Added("Service Authorization Reference, AWS Budgets",
          {"create": "budgets:ModifyBudget", "read": "budgets:ViewBudget",
           "update": "budgets:ModifyBudget", "delete": "budgets:ModifyBudget"},
          "Budgets::Budget"),
    Added("FSx for Lustre User Guide, 'Adding permissions to use data repositories'",
          {"create": "iam:AttachRolePolicy"}, "FSx::DataRepositoryAssociation"),
    Added("EFS API Reference, CreateMountTarget and DeleteMountTarget",
          {"create": "ec2:CreateNetworkInterface ec2:DescribeNetworkInterfaces "
                     "ec2:DescribeSubnets",
           "delete": "ec2:DeleteNetworkInterface"},
          "EFS::MountTarget"),
    Added("Service Authorization Reference, dependent actions of ec2:CreateVpcEndpoint",
          {"create": "route53:AssociateVPCWithHostedZone"}, "EC2::VPCEndpoint"),
    Added("Image Builder User Guide, 'Specify the base image': Parameter Store",
          {"create": "ssm:GetParameter"}, "ImageBuilder::ImageRecipe"),
    Added("CloudFormation Template Reference, DeletionSettings of AWS::ImageBuilder::Image; "
          "Image Builder API Reference, StartResourceStateUpdate",
          {"delete": "iam:PassRole imagebuilder:GetLifecycleExecution "
                     "imagebuilder:StartResourceStateUpdate"},
          "ImageBuilder::Image"),
)  # fmt: skip

# The kinds of resources (batchml/aws/iam.py) of an action, where its resource has a name that we
# know; ANY for other actions. A type of our templates before the action: only for this type.
SCOPES = {
    "role": "iam:AttachRolePolicy iam:CreateRole iam:DeleteRole iam:DeleteRolePolicy "
    "iam:DetachRolePolicy iam:GetRole iam:GetRolePolicy iam:ListAttachedRolePolicies "
    "iam:ListRolePolicies iam:PutRolePolicy iam:TagRole iam:UntagRole iam:UpdateAssumeRolePolicy "
    "iam:UpdateRole iam:UpdateRoleDescription",
    "passed role": "iam:PassRole",
    "service role": "iam:CreateServiceLinkedRole",
    "profile": "iam:AddRoleToInstanceProfile iam:CreateInstanceProfile iam:DeleteInstanceProfile "
    "iam:GetInstanceProfile iam:RemoveRoleFromInstanceProfile",
    "policy": "iam:CreatePolicy iam:CreatePolicyVersion iam:DeletePolicy iam:DeletePolicyVersion "
    "iam:GetPolicy iam:GetPolicyVersion iam:ListEntitiesForPolicy iam:ListPolicyVersions",
    "log group": "logs:AssociateKmsKey logs:CreateLogGroup logs:DeleteLogGroup "
    "logs:GetDataProtectionPolicy logs:ListTagsForResource logs:PutRetentionPolicy "
    "logs:TagResource logs:UntagResource",
    "rule": "events:DeleteRule events:DescribeRule events:ListTagsForResource "
    "events:ListTargetsByRule events:PutRule events:PutTargets events:RemoveTargets "
    "events:TagResource events:UntagResource",
    "alias": "kms:CreateAlias kms:DeleteAlias kms:UpdateAlias",
    "key": "kms:CreateAlias kms:Decrypt kms:DeleteAlias kms:DescribeKey kms:EnableKeyRotation "
    "kms:GenerateDataKeyWithoutPlaintext kms:GetKeyPolicy kms:GetKeyRotationStatus "
    "kms:ListResourceTags kms:PutKeyPolicy kms:ScheduleKeyDeletion kms:TagResource "
    "kms:UntagResource kms:UpdateAlias kms:UpdateKeyDescription",
    "key of a service": "kms:CreateGrant",
    "budget": "budgets:ModifyBudget budgets:ViewBudget",
    "component": "imagebuilder:CreateComponent imagebuilder:DeleteComponent "
    "imagebuilder:GetComponent",
    "recipe": "imagebuilder:CreateImageRecipe imagebuilder:DeleteImageRecipe "
    "imagebuilder:GetImageRecipe",
    "infrastructure": "imagebuilder:CreateInfrastructureConfiguration "
    "imagebuilder:DeleteInfrastructureConfiguration imagebuilder:GetInfrastructureConfiguration "
    "imagebuilder:UpdateInfrastructureConfiguration",
    "distribution": "imagebuilder:CreateDistributionConfiguration "
    "imagebuilder:DeleteDistributionConfiguration imagebuilder:GetDistributionConfiguration "
    "imagebuilder:UpdateDistributionConfiguration",
    "image": "imagebuilder:CancelImageCreation imagebuilder:CreateImage imagebuilder:DeleteImage "
    "imagebuilder:GetImage imagebuilder:StartResourceStateUpdate",
    "image lifecycle": "imagebuilder:CreateLifecyclePolicy imagebuilder:DeleteLifecyclePolicy "
    "imagebuilder:GetLifecyclePolicy imagebuilder:UpdateLifecyclePolicy",
    "parameter": "ssm:GetParameter",
}
_TYPE_SCOPES = {
    ("AWS::FSx::DataRepositoryAssociation", "iam:PutRolePolicy"): "lustre role",
    ("AWS::FSx::DataRepositoryAssociation", "iam:AttachRolePolicy"): "lustre role",
    # Image Builder looks for its service-linked role.
    **{
        (f"AWS::ImageBuilder::{kind}", "iam:GetRole"): "service role"
        for kind in ("Component", "DistributionConfiguration", "Image", "ImageRecipe",
                     "InfrastructureConfiguration")
    },
    **{
        (f"AWS::ImageBuilder::{kind}", f"imagebuilder:{verb}Resource"): scope
        for kind, scope in {
            "Component": "component", "DistributionConfiguration": "distribution",
            "Image": "image", "ImageRecipe": "recipe",
            "InfrastructureConfiguration": "infrastructure", "LifecyclePolicy": "image lifecycle",
        }.items()
        for verb in ("Tag", "Untag")
    },
}  # fmt: skip


def declared(kind: str, handler: str) -> set[str]:
    """The actions of a handler of a type, spelled as IAM spells them."""
    found = HANDLERS.get(kind, {}).get(handler, [])
    return {action[0].lower() + action[1:] for action in found}


def needed(kind: str, handler: str) -> set[str]:
    """The actions of a handler that our templates need."""
    kept = {
        action
        for action in declared(kind, handler)
        if not any(each.applies(kind, action) for each in LEFT_OUT)
    }
    return kept | {
        action
        for each in ADDED
        if kind[5:] in each.types.split()
        for action in each.actions.get(handler, "").split()
    }


def kinds_of(kind: str, action: str) -> list[str]:
    """The kinds of resources on which a handler of a type calls an action."""
    if (kind, action) in _TYPE_SCOPES:
        return [_TYPE_SCOPES[kind, action]]
    if action.startswith("s3:"):
        return ["bucket"]
    return [scope for scope, actions in SCOPES.items() if action in actions.split()] or [ANY]


Rows = dict[str, dict[str, dict[str, set[str]]]]  # row -> command -> kind -> actions


def rows(templates: Mapping[str, Template]) -> Rows:
    """The permissions for each stack ("network"), and for each condition ("network IsNat").

    A condition adds only what the stack does not need without it.
    """
    found: Rows = defaultdict(lambda: defaultdict(lambda: defaultdict(set)))
    for stack, template in templates.items():
        for condition, kind in _types(template):
            for command, handlers in (("setup", ALL), ("teardown", _handlers(stack))):
                for action in {each for name in handlers for each in needed(kind, name)}:
                    for scope in kinds_of(kind, action):
                        found[f"{stack} {condition}".strip()][command][scope].add(action)
    for row, commands in found.items():
        if " " in row:
            for command, scopes in commands.items():
                for scope in scopes:
                    scopes[scope] -= found[row.split()[0]][command][scope]
    return found


def _handlers(stack: str) -> tuple[str, ...]:
    return _TEARDOWN.get(stack, ("delete",))


def _types(template: Template) -> Iterator[tuple[str, str]]:
    for _, resource, _ in resources(template):
        yield resource.get("Condition", ""), resource["Type"]


def property_names(value: Any) -> Iterator[str]:
    """Every key anywhere in the properties of a resource."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from property_names(each)


def templates() -> dict[str, Template]:
    return {path.stem: load(path) for path in FILES}


_HEAD = '''"""What CloudFormation may call for the stacks of an environment.

Generated by `make permissions` from `cfn/` and AWS's own lists; do not edit. A key is a stack, or a
stack and a condition of its template; below it are a command, a kind of resources, and actions.
"""

STACK_PERMISSIONS: dict[str, dict[str, dict[str, str]]] = {
'''


def render(found: Rows) -> str:
    lines = []
    for row in sorted(found):
        commands = {
            command: {scope: actions for scope, actions in sorted(scopes.items()) if actions}
            for command, scopes in sorted(found[row].items())
            if any(scopes.values())
        }
        if not commands:
            continue
        lines.append(f'    "{row}": {{')
        for command, scopes in commands.items():
            lines.append(f'        "{command}": {{')
            for scope, actions in scopes.items():
                lines += _entry(scope, sorted(actions))
            lines.append("        },")
        lines.append("    },")
    return _HEAD + "\n".join(lines) + "\n}\n"


def _entry(scope: str, actions: Iterable[str]) -> list[str]:
    text = " ".join(actions)
    width = 82 if len(text) <= 82 else 81  # a line that is not the last ends with a blank
    wrapped = textwrap.wrap(text, width, break_on_hyphens=False)
    first, *rest = [f"{line} " for line in wrapped[:-1]] + wrapped[-1:]
    entry = f'            "{scope}": "{first}"'
    if not rest and len(entry) < 100:
        return [f"{entry},"]
    body = [f'            "{line}"' for line in (first, *rest)]
    return [f'            "{scope}": (', *(f"    {line}" for line in body), "            ),"]


if __name__ == "__main__":
    TARGET.write_text(render(rows(templates())), "utf-8")
