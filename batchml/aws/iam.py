"""The IAM permissions that each command needs, and the policies that allow them.

One table for `doctor`, its policies, and the tests of SubmitterPolicy in cfn/roles.yaml. What
CloudFormation calls for our stacks is generated (`stack_permissions`); what commands call
themselves is here, and tests hold it against the calls in the code and against recorded calls.
Sources: Service Authorization Reference (actions and their resources).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.session import CallerIdentity, partition_of
from batchml.aws.stack_permissions import STACK_PERMISSIONS
from batchml.model.environment import Environment

Command = Literal[
    "setup",
    "submit",
    "ls",
    "sweep",
    "logs",
    "explain",
    "cost",
    "top",
    "workspace",
    "shell",
    "compute score",
    "compute",
    "jobdef",
    "image list",
    "image push",
    "doctor",
    "prove",
    "teardown",
]

# Kinds of resources and their ARNs, with `*` for the free part of a name. Actions without a
# resource, and actions on resources that get their names later, are allowed on ANY.
ANY = "*"
_ARNS = {
    "stack": "cloudformation:{region}:{account}:stack/batchml-{env}-*/*",
    "role": "iam::{account}:role/batchml-{env}-*",
    "passed role": "iam::{account}:role/batchml-{env}-*",
    "passed job role": "iam::{account}:role/batchml-{env}-*",
    "service role": "iam::{account}:role/aws-service-role/*",
    "lustre role": "iam::{account}:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/*",
    "user with the policy": "iam::{account}:user/*",
    "group with the policy": "iam::{account}:group/*",
    "role with the policy": "iam::{account}:role/*",
    "profile": "iam::{account}:instance-profile/batchml-{env}-*",
    "policy": "iam::{account}:policy/batchml-{env}-*",
    "bucket": "s3:::batchml-{env}-{account}-{region}*",
    "buckets' objects": "s3:::batchml-{env}-{account}-{region}*/*",
    "object": "s3:::batchml-{env}-{account}-{region}/code/*",
    "bucket itself": "s3:::batchml-{env}-{account}-{region}",
    "results": "s3:::batchml-{env}-{account}-{region}/runs/*",
    "archive": "s3:::batchml-{env}-{account}-{region}/workspace/*",
    "upload": "s3:::batchml-{env}-{account}-{region}/workspace/.batchml/archive/uploads/*",
    "alias": "kms:{region}:{account}:alias/batchml-{env}-*",
    "key": "kms:{region}:{account}:key/*",
    "data key": "kms:{region}:{account}:key/*",
    "key of a service": "kms:{region}:{account}:key/*",
    # /aws/batch/batchml-dev, /aws/events/batchml/dev, /batchml/dev/flow: all begin with a slash.
    "log group": "logs:{region}:{account}:log-group:/*batchml?{env}*",
    "rule": "events:{region}:{account}:rule/batchml-{env}-*",
    "budget": "budgets::{account}:budget/batchml-{env}",
    "component": "imagebuilder:{region}:{account}:component/batchml-{env}-*",
    "recipe": "imagebuilder:{region}:{account}:image-recipe/batchml-{env}/*",
    "infrastructure": "imagebuilder:{region}:{account}:infrastructure-configuration/batchml-{env}",
    "distribution": "imagebuilder:{region}:{account}:distribution-configuration/batchml-{env}",
    "image": "imagebuilder:{region}:{account}:image/batchml-{env}/*",
    "image lifecycle": "imagebuilder:{region}:{account}:lifecycle-policy/batchml-{env}",
    "parameter": "ssm:{region}::parameter/aws/service/ecs/*",
    "file system": "fsx:{region}:{account}:file-system/*",
    "association": "fsx:{region}:{account}:association/*",
    "task": "fsx:{region}:{account}:task/*",
    "consumable": "batch:{region}:{account}:consumable-resource/batchml-*",
    "compute": "batch:{region}:{account}:compute-environment/batchml-{env}-*",
    "queue": "batch:{region}:{account}:job-queue/batchml-{env}-*",
    "scheduling policy": "batch:{region}:{account}:scheduling-policy/batchml-{env}-*",
    "definition": "batch:{region}:{account}:job-definition/*",
    "job": "batch:{region}:{account}:job/*",
    "own job": "batch:{region}:{account}:job/*",
    "tagged job": "batch:{region}:{account}:job/*",
    "tagged definition": "batch:{region}:{account}:job-definition/*",
    "repository": "ecr:{region}:{account}:repository/batchml/*",
    "own repository": "ecr:{region}:{account}:repository/batchml/*",
    "any repository": "ecr:{region}:{account}:repository/*",
    # AWS Batch names the cluster after the compute environment, in one of two ways.
    "cluster": "ecs:{region}:{account}:cluster/AWSBatch-batchml-{env}-* "
    "ecs:{region}:{account}:cluster/batchml-{env}-*",
    "ecs task": "ecs:{region}:{account}:task/AWSBatch-batchml-{env}-* "
    "ecs:{region}:{account}:task/batchml-{env}-*",
    "host": "ecs:{region}:{account}:container-instance/AWSBatch-batchml-{env}-* "
    "ecs:{region}:{account}:container-instance/batchml-{env}-*",
    "own instance": "ec2:{region}:{account}:instance/*",
    # AWS's own document: its ARN names no account.
    "forwarding": "ssm:{region}::document/AWS-StartPortForwardingSession",
    # One's own sessions: Session Manager, "Quickstart default IAM policies".
    "session": "ssm:{region}:{account}:session/${{aws:userid}}-*",
    "stream": "logs:{region}:{account}:log-group:/aws/batch/batchml-{env}:log-stream:*",
    "job log": "logs:{region}:{account}:log-group:/aws/batch/batchml-{env}",
}

_OF_ENVIRONMENT = {"StringEquals": {"aws:ResourceTag/batchml:env": "{env}"}}
_OF_NO_OTHER = {"StringEqualsIfExists": {"aws:ResourceTag/batchml:env": "{env}"}}
_SUBMITTERS_ONLY = {"ArnLike": {"iam:PolicyARN": "arn:*:iam::*:policy/batchml-{env}-submitter-*"}}

# Conditions of the statements of some kinds.
_CONDITIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    **dict.fromkeys(
        ("user with the policy", "group with the policy", "role with the policy"), _SUBMITTERS_ONLY
    ),
    # AWS does not document this key for every service.
    "passed role": {
        "StringEqualsIfExists": {
            "iam:PassedToService": [
                "batch.amazonaws.com", "ec2.{suffix}", "ecs-tasks.amazonaws.com",
                "imagebuilder.{suffix}", "vpc-flow-logs.amazonaws.com",
            ]
        }
    },
    "passed job role": {"StringEquals": {"iam:PassedToService": "ecs-tasks.amazonaws.com"}},
    **dict.fromkeys(
        ("own job", "own instance", "own repository", "file system", "association"),
        _OF_ENVIRONMENT,
    ),
    # Not resources with another environment's tag, because `own job` depends on that tag.
    **dict.fromkeys(("tagged job", "tagged definition", "consumable"), _OF_NO_OTHER),
    # The bucket's key. It is named by its alias, since its id is known only after setup.
    "data key": {
        "StringEquals": {"kms:ViaService": "s3.{region}.{suffix}"},
        "ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/batchml-{env}-data"},
    },
    "key of a service": {"Bool": {"kms:GrantIsForAWSResource": "true"}},
}  # fmt: skip

_READ_BATCH = "batch:DescribeJobs batch:ListJobs batch:DescribeJobQueues"

# What `setup`, `teardown`, `compute` and `queue` call beside the stacks: to read and to delete.
_RESOURCES: Mapping[str, str] = {
    ANY: "batch:DescribeComputeEnvironments batch:DescribeJobDefinitions batch:DescribeJobQueues "
    "batch:DescribeSchedulingPolicies batch:ListJobs batch:ListSchedulingPolicies "
    # The stacks of all environments, which may share a workspace.
    "cloudformation:DescribeStacks cloudformation:ListStacks "
    "ec2:DeleteLaunchTemplate ec2:DeletePlacementGroup ec2:DescribeLaunchTemplateVersions "
    "ec2:DescribeLaunchTemplates ec2:DescribePlacementGroups",
    "stack": "GetTemplate",
    "compute": "DeleteComputeEnvironment UpdateComputeEnvironment",
    "queue": "DeleteJobQueue UpdateJobQueue",
    "scheduling policy": "DeleteSchedulingPolicy",
}

# To create and change these, and to show what they will cost.
_CREATION: Mapping[str, str] = {
    ANY: "ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion ec2:CreatePlacementGroup "
    "ec2:CreateTags ec2:DescribeAvailabilityZones ec2:DescribeInstanceTypeOfferings "
    "ec2:DescribeInstanceTypes ec2:DescribeSpotPriceHistory ec2:RunInstances "
    "pricing:GetProducts servicequotas:ListServiceQuotas",
    "passed role": "iam:PassRole",
    "service role": "iam:CreateServiceLinkedRole",
    "compute": "CreateComputeEnvironment CreateJobQueue TagResource UpdateJobQueue",
    "queue": "CreateJobQueue TagResource",
    "scheduling policy": "CreateJobQueue CreateSchedulingPolicy TagResource UpdateJobQueue "
    "UpdateSchedulingPolicy",
}

# What `setup` and `teardown` call for the stacks themselves. DetectStackDrift needs the two actions
# that no code calls: CloudFormation User Guide, "Considerations when detecting drift".
_STACKS: Mapping[str, str] = {
    ANY: "cloudformation:BatchDescribeTypeConfigurations "
    "cloudformation:DescribeStackDriftDetectionStatus",
    "stack": "ContinueUpdateRollback CreateChangeSet DeleteChangeSet DeleteStack "
    "DescribeChangeSet DescribeStackEvents DescribeStackResourceDrifts DetectStackDrift "
    "DetectStackResourceDrift ExecuteChangeSet SetStackPolicy TagResource UntagResource "
    "UpdateTerminationProtection",
}

_COMMON: Mapping[Command, Mapping[str, str]] = {
    "setup": {
        "stack": "CreateStack",
        "definition": "RegisterJobDefinition TagResource",
        # The images that the definitions name, and the one to push next.
        "repository": "DescribeImages DescribeRepositories",
    },
    "submit": {
        # ListJobs finds a run after a lost answer; a second run of the same key is terminated.
        # DescribeComputeEnvironments tells whether a queue that is not in batchml.toml has spot
        # instances, on which multi-node jobs cannot run.
        ANY: f"{_READ_BATCH} batch:DescribeJobDefinitions batch:DescribeComputeEnvironments",
        "stack": "DescribeStacks",
        "queue": "SubmitJob",
        "definition": "RegisterJobDefinition SubmitJob",
        # The Service Authorization Reference requires `job` for SubmitJob; AWS's examples do not.
        "job": "SubmitJob",
        "tagged job": "TagResource",
        "tagged definition": "TagResource",
        "own job": "CancelJob TerminateJob",
        "passed job role": "iam:PassRole",
        "any repository": "DescribeImages DescribeRepositories",
        "object": "s3:GetObject s3:PutObject",
        # Without it, S3 answers 403 instead of 404 for code that is not there yet.
        "bucket itself": "s3:ListBucket",
        "data key": "kms:Decrypt kms:GenerateDataKey",
    },
    # Also for `show`, `wait`, `get`, `compare` and other commands that only look at runs.
    "ls": {
        ANY: _READ_BATCH,
        "stack": "DescribeStacks",
        "stream": "logs:GetLogEvents",
        "job log": "logs:FilterLogEvents",
        "object": "s3:GetObject",
        "results": "s3:GetObject",
        "bucket itself": "s3:ListBucket",
        "data key": "kms:Decrypt",
    },
    # In addition to `submit` and `ls`: a limit for the children of an array that run at the same
    # time, and the messages of trials.
    "sweep": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "consumable": "CreateConsumableResource UpdateConsumableResource "
        "DeleteConsumableResource TagResource",
        "results": "s3:GetObject s3:PutObject s3:DeleteObject",
        "bucket itself": "s3:ListBucket",
        "data key": "kms:Decrypt kms:GenerateDataKey",
    },
    "logs": {
        ANY: _READ_BATCH,
        "stream": "logs:GetLogEvents",
        "job log": "logs:FilterLogEvents",
    },
    # Without some of these permissions an explanation is less certain, or a cost is unknown.
    "explain": {
        ANY: f"{_READ_BATCH} "
        "batch:DescribeComputeEnvironments batch:GetJobQueueSnapshot "
        "batch:DescribeConsumableResource autoscaling:DescribeScalingActivities "
        "ec2:DescribeInstanceTypes ec2:DescribeImages ec2:DescribeInstances",
        "stack": "DescribeStacks",
        "cluster": "ecs:ListContainerInstances",
        "own instance": "ec2:GetConsoleOutput",
        "stream": "logs:GetLogEvents",
        "job log": "logs:FilterLogEvents",
        "results": "s3:GetObject",
        "data key": "kms:Decrypt",
    },
    "cost": {
        ANY: f"{_READ_BATCH} "
        "batch:DescribeComputeEnvironments ec2:DescribeInstanceTypes ec2:DescribeInstances "
        "ec2:DescribeSpotPriceHistory pricing:GetProducts",
        "host": "ecs:DescribeContainerInstances",
    },
    # Also for `compute hosts` and `queue list`. They leave out facts that they may not read, and
    # say so.
    "top": {
        ANY: f"{_READ_BATCH} "
        "batch:DescribeComputeEnvironments batch:GetJobQueueSnapshot ec2:DescribeInstances",
        "cluster": "ecs:ListContainerInstances",
        "host": "ecs:DescribeContainerInstances",
        "job log": "logs:FilterLogEvents",
    },
    # In addition to `submit`: transfers of files to and from a file system, and the archive.
    "workspace": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "results": "s3:GetObject s3:PutObject s3:DeleteObject",
        "archive": "s3:GetObject s3:PutObject",
        "bucket itself": "s3:ListBucket",
        "data key": "kms:Decrypt kms:GenerateDataKey",
    },
    # Also for `forward`; `notebook` and `alloc` submit, too.
    "shell": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "cluster": "ecs:ExecuteCommand",
        "ecs task": "ecs:DescribeTasks ecs:ExecuteCommand ssm:StartSession",
        "forwarding": "ssm:StartSession",
        "session": "ssm:TerminateSession",
    },
    # Also for `compute list`: spot placement scores, and instances that always run.
    "compute score": {
        ANY: "ec2:GetSpotPlacementScores ec2:DescribeInstanceTypes ec2:DescribeSpotPriceHistory "
        "batch:DescribeComputeEnvironments batch:DescribeJobQueues pricing:GetProducts "
        "servicequotas:ListServiceQuotas ec2:DescribeCapacityReservations",
    },
    # To create, change and delete compute environments and queues by commands.
    "compute": {},
    "jobdef": {
        ANY: f"{_READ_BATCH} batch:DescribeJobDefinitions",
        "stack": "DescribeStacks",
        "definition": "DeregisterJobDefinition RegisterJobDefinition",
        "tagged definition": "TagResource",
        "passed job role": "iam:PassRole",
        "any repository": "DescribeImages DescribeRepositories",
    },
    "image list": {
        "any repository": "DescribeImages DescribeRepositories",
    },
    "image push": {
        ANY: "ecr:GetAuthorizationToken",
        "stack": "DescribeStacks",
        "any repository": "DescribeRepositories",
        "repository": "CreateRepository DescribeRepositories DescribeImages BatchGetImage "
        "GetDownloadUrlForLayer BatchCheckLayerAvailability InitiateLayerUpload UploadLayerPart "
        "CompleteLayerUpload PutImage GetLifecyclePolicy PutLifecyclePolicy PutImageTagMutability "
        "PutImageScanningConfiguration TagResource",
    },
    # doctor examines the account with these, and reports what it may not read.
    "doctor": {
        ANY: "iam:SimulatePrincipalPolicy iam:GetRole ec2:DescribeRegions ec2:DescribeVpcs "
        "ec2:DescribeAddresses ec2:DescribeCapacityReservations ec2:DescribeImages "
        "servicequotas:ListServiceQuotas "
        "batch:DescribeComputeEnvironments batch:DescribeJobQueues cloudformation:ListStacks "
        "logs:DescribeLogGroups",
        "any repository": "DescribeRepositories",
    },
    # In addition to the commands that it runs.
    "prove": {
        ANY: "ec2:DescribeInstances ec2:DescribeNatGateways iam:ListRoles "
        "batch:DescribeJobDefinitions batch:DescribeJobs tag:GetResources",
        "host": "ecs:DescribeContainerInstances",
        "key": "kms:DescribeKey",
        "own instance": "ec2:TerminateInstances",
        "repository": "ListTagsForResource",
        "own repository": "ecr:DeleteRepository",
        "role": "iam:AttachRolePolicy iam:CreateRole iam:DeleteRole iam:DeleteRolePolicy "
        "iam:DetachRolePolicy iam:ListAttachedRolePolicies iam:ListRolePolicies iam:PutRolePolicy "
        "iam:TagRole sts:AssumeRole",
    },
    "teardown": {
        "definition": "DeregisterJobDefinition",
        "policy": "iam:ListEntitiesForPolicy",
        # With --detach-policy.
        "user with the policy": "iam:DetachUserPolicy",
        "group with the policy": "iam:DetachGroupPolicy",
        "role with the policy": "iam:DetachRolePolicy",
        # To tell what is left. Without these permissions it says that there may be more.
        ANY: "backup:ListRecoveryPointsByResource",
        "any repository": "DescribeRepositories",
        # With --delete-data.
        "bucket": "s3:ListBucketVersions",
        "buckets' objects": "s3:DeleteObject s3:DeleteObjectVersion",
    },
}  # fmt: skip

# For the archive of a file system with a data repository association.
_ASSOCIATED = {
    ANY: "fsx:DescribeDataRepositoryAssociations fsx:DescribeDataRepositoryTasks",
    "file system": "fsx:CreateDataRepositoryTask",
    "association": "fsx:UpdateDataRepositoryAssociation",
    "task": "fsx:CreateDataRepositoryTask fsx:TagResource",
    "upload": "s3:DeleteObject",
}
# AMIs that the current one has replaced are deleted with their stack.
_OLD_IMAGES = {ANY: "ec2:DescribeImages ec2:DeregisterImage ec2:DeleteSnapshot"}
# The id of AWS's AMI for Neuron chips.
_NEURON_IMAGE = {"parameter": "ssm:GetParameter"}
# To check hosts with EFA, and a network of the user's own.
_FABRIC = {
    ANY: "ec2:DescribeInstanceTypes ec2:DescribeRouteTables ec2:DescribeSecurityGroups",
}
_RESERVED = {ANY: "ec2:DescribeCapacityReservations"}

# Condition of a template -> whether `setup` gives it the parameters for which it is true.
_SWITCHES: Mapping[str, Callable[[Environment], bool]] = {
    "network": lambda environment: not environment.network.is_given,
    "ami": lambda environment: environment.builds_image,
    "IsNat": lambda environment: environment.network.egress == "nat",
    "IsEndpoints": lambda environment: environment.network.egress == "endpoints",
    "IsUsed": lambda environment: True,
    # A network has up to six subnets, and a file system a mount target in each.
    **{f"HasZone{number}": lambda environment: True for number in range(2, 7)},
    "IsEfs": lambda environment: environment.storage.workspace == "efs",
    **{
        f"HasEfs{number}": lambda environment: environment.storage.workspace == "efs"
        for number in range(2, 7)
    },
    "IsLustre": lambda environment: environment.storage.workspace == "fsx-lustre",
    "Quarantine": lambda environment: environment.quarantine,
    "HasSecrets": lambda environment: bool(environment.secrets),
    "HasData": lambda environment: bool(environment.data),
    "HasBudget": lambda environment: environment.budget is not None,
}

# The service of actions above that are written without it; `batch` for all other kinds.
_SERVICES = {"stack": "cloudformation", "repository": "ecr", "any repository": "ecr"}

# The rows of the table for each command that is typed. Without a row it makes no calls to AWS.
COMMANDS: Mapping[str, tuple[Command, ...]] = {
    "adopt": (), "alloc": ("submit", "ls", "shell"), "cancel": ("submit",), "compare": ("ls",),
    "completion": (), "compute create": ("compute",), "compute delete": ("compute",),
    "compute hosts": ("top",), "compute list": ("top", "compute score"),
    "compute score": ("compute score",), "compute update": ("compute",),
    "cost": ("ls", "cost", "compute score"),
    "dashboard": ("submit", "ls", "sweep", "logs", "explain", "cost", "top"),
    "diff": ("ls",), "doctor": ("doctor",),
    "env list": (), "env show": ("top", "ls"), "env use": (), "explain": ("ls", "explain"),
    "forward": ("shell",), "get": ("ls",), "image build": (), "image list": ("image list",),
    "image push": ("image push",), "init": (), "jobdef delete": ("jobdef",),
    "jobdef gc": ("jobdef",), "jobdef list": ("jobdef",), "jobdef register": ("jobdef",),
    "logs": ("logs",), "ls": ("ls",), "notebook": ("submit", "ls", "shell"),
    # It runs most commands.
    "prove": (
        "doctor", "setup", "image push", "submit", "ls", "sweep", "logs", "explain", "cost", "top",
        "shell", "workspace", "teardown", "prove",
    ),
    "queue create": ("compute",), "queue delete": ("compute",), "queue list": ("top",),
    "queue show": ("top",), "queue update": ("compute",), "reconcile": ("submit", "ls"),
    "rerun": ("submit", "ls"), "setup": ("setup", "image push"),
    "shell": ("shell",), "show": ("ls", "cost"),
    "submit": ("submit", "ls", "cost"), "sweep": ("submit", "ls", "cost", "sweep"),
    "sweeps best": ("ls", "sweep"), "sweeps confirm": ("submit", "ls", "cost", "sweep"),
    "sweeps ls": ("ls", "sweep"), "sweeps report": ("ls", "cost", "sweep"),
    "sweeps rerun": ("submit", "ls", "cost", "sweep"),
    "sweeps resume": ("submit", "ls", "cost", "sweep"), "sweeps show": ("ls", "cost", "sweep"),
    "sweeps stop": ("submit", "ls", "sweep"), "sweeps top-up": ("submit", "ls", "cost", "sweep"),
    "teardown": ("teardown", "submit", "workspace"), "tensorboard": ("ls",), "top": ("top", "cost"),
    "wait": ("ls",), "workspace archive": ("submit", "workspace"),
    "workspace ls": ("submit", "workspace"), "workspace pull": ("submit", "workspace"),
    "workspace push": ("submit", "workspace"), "workspace restore": ("submit", "workspace"),
    "workspace rm": ("submit", "workspace"),
}  # fmt: skip

# The rows that the stack's SubmitterPolicy allows.
SUBMITTER: tuple[Command, ...] = (
    "submit", "ls", "sweep", "logs", "explain", "cost", "top", "workspace", "shell",
    "image list",
)  # fmt: skip


class Permission(Struct, frozen=True, order=True):
    """An action on a kind of resource."""

    action: str
    kind: str  # of _ARNS, or "*"


class PolicyScope(Struct, frozen=True):
    """The values in the ARNs of a policy. `account` is "*" where it is not known.

    `env` may be a pattern: `prove-*`.
    """

    env: str
    region: str
    account: str = "*"
    partition: str = "aws"

    @property
    def suffix(self) -> str:
        """The end of the host names of services."""
        return "amazonaws.com.cn" if self.partition == "aws-cn" else "amazonaws.com"


# The environments that `prove --region` makes, each with a name of its own.
PROOFS = "prove-*"


def scope_of(identity: CallerIdentity, region: str, env: str) -> PolicyScope:
    """The scope of a caller's policies."""
    return PolicyScope(env, region, identity.account, identity.partition)


def unknown_account(region: str, env: str) -> PolicyScope:
    """The scope of policies for an account whose number is not known."""
    return PolicyScope(env, region, partition=partition_of(region))


def needed_permissions(environment: Environment) -> dict[Command, tuple[Permission, ...]]:
    """The permissions that each row of the table needs for this environment, sorted."""
    found = {}
    for command in _COMMON:
        own = {each for kinds in _parts(command, environment) for each in _read(kinds)}
        found[command] = tuple(sorted(own | stack_permissions(environment, command)))
    return found


def stack_permissions(environment: Environment, command: Command) -> set[Permission]:
    """What CloudFormation calls for the stacks of this environment, with the caller's rights."""
    return {
        permission
        for row, commands in STACK_PERMISSIONS.items()
        if all(_SWITCHES[word](environment) for word in row.split() if word in _SWITCHES)
        for permission in _read(commands.get(command, {}))
    }


def _parts(command: Command, environment: Environment) -> Iterable[Mapping[str, str]]:
    yield _COMMON[command]
    if command in ("setup", "compute", "teardown"):
        yield _RESOURCES
    if command in ("setup", "compute"):
        yield _CREATION
        if any(each.has_neurons for each in environment.compute.values()):
            yield _NEURON_IMAGE
    if command in ("setup", "teardown"):
        yield _STACKS
        if environment.builds_image:
            yield _OLD_IMAGES
    if command == "setup" and any(each.reservation for each in environment.compute.values()):
        yield _RESERVED
    has_efa = any(each.efa for each in environment.compute.values())
    if has_efa and command in ("doctor", "setup", "compute"):
        yield _FABRIC
    if command == "workspace" and environment.storage.workspace == "fsx-lustre":
        yield _ASSOCIATED


def _read(kinds: Mapping[str, str]) -> Iterable[Permission]:
    for kind, words in kinds.items():
        for word in words.split():
            action = word if ":" in word else f"{_SERVICES.get(kind, 'batch')}:{word}"
            yield Permission(action, kind)


def permissions_of(environment: Environment, commands: Iterable[str]) -> tuple[Permission, ...]:
    """The permissions for commands as they are typed, such as "image push".

    `image` stands for all commands that begin with it.
    """
    needed = needed_permissions(environment)
    rows = {
        row
        for command in commands
        for name, rows in COMMANDS.items()
        if f"{name} ".startswith(f"{command} ")
        for row in rows
    }
    return tuple(sorted({each for row in rows for each in needed[row]}))


def arns_of(kind: str, scope: PolicyScope) -> tuple[str, ...]:
    """The ARN patterns of a kind of resource; "*" for the kind ANY."""
    if kind == ANY:
        return (ANY,)
    words = {"region": scope.region, "account": scope.account, "env": scope.env}
    return tuple(
        f"arn:{scope.partition}:{pattern.format(**words)}" for pattern in _ARNS[kind].split()
    )


def _condition_of(kind: str, scope: PolicyScope) -> dict[str, Any]:
    """The condition of the statements of a kind of resource; empty for most.

    Only `StringLike` reads a pattern, which the name of an environment may be: IAM User Guide,
    "IAM JSON policy elements: Condition operators".
    """
    words = {"region": scope.region, "env": scope.env, "suffix": scope.suffix}

    def fill(value: Any) -> Any:
        if isinstance(value, Mapping):
            filled = {key: fill(each) for key, each in value.items()}
            if "*" not in scope.env:
                return filled
            return {key.replace("StringEquals", "StringLike"): filled[key] for key in filled}
        if isinstance(value, list):
            return [fill(each) for each in value]
        return str(value).format(**words)

    return dict(fill(_CONDITIONS.get(kind, {})))


# --- Policies -------------------------------------------------------------------------------------

MAX_POLICY = 6_144  # characters of a managed policy, without blanks; IAM User Guide, "IAM quotas"
_MAX_PIECE = 1_500  # characters of a part of a long statement, so that parts fill policies


def statements(wanted: Iterable[Permission], scope: PolicyScope) -> list[dict[str, Any]]:
    """The policy statements that allow permissions, each on its own resources.

    Kinds of resources with the same actions and conditions share a statement.
    """
    actions: dict[str, set[str]] = defaultdict(set)
    for permission in wanted:
        actions[permission.kind].add(permission.action)
    targets: dict[tuple[tuple[str, ...], str], set[str]] = defaultdict(set)
    for kind, names in actions.items():
        condition = json.dumps(_condition_of(kind, scope))
        targets[tuple(sorted(names)), condition] |= {*arns_of(kind, scope)}
    found = []
    for (names_, condition), arns in sorted(targets.items(), key=lambda each: sorted(each[1])):
        extra = {"Condition": json.loads(condition)} if condition != "{}" else {}
        found.append({"Effect": "Allow", "Action": list(names_), "Resource": sorted(arns), **extra})
    return found


def policy_documents(wanted: Iterable[Permission], scope: PolicyScope) -> list[dict[str, Any]]:
    """The policies that together allow permissions, each short enough for a managed policy."""
    documents: list[list[dict[str, Any]]] = []
    pieces = [piece for each in statements(wanted, scope) for piece in _pieces(each)]
    for piece in sorted(pieces, key=_length, reverse=True):
        for document in documents:
            if _length(_document([*document, piece])) <= MAX_POLICY:
                document.append(piece)
                break
        else:
            documents.append([piece])
    return [_document(_joined(each)) for each in documents]


def _pieces(statement: dict[str, Any]) -> list[dict[str, Any]]:
    """A statement in parts that have some of its actions each."""
    names = statement["Action"]
    if _length(statement) <= _MAX_PIECE or len(names) < 2:
        return [statement]
    middle = len(names) // 2
    halves = ({**statement, "Action": names[:middle]}, {**statement, "Action": names[middle:]})
    return [piece for half in halves for piece in _pieces(half)]


def _joined(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Statements with the parts of one statement joined again."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        rest = json.dumps({key: value for key, value in part.items() if key != "Action"})
        before = found.get(rest, {}).get("Action", [])
        found[rest] = {**part, "Action": sorted({*before, *part["Action"]})}
    return list(found.values())


def _document(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": content}


def _length(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))
