"""The IAM permissions that each command needs, and a simulation of the caller's policies.

Sources: Service Authorization Reference (actions and their resources); IAM API Reference,
SimulatePrincipalPolicy.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import call, read_entries
from batchml.aws.session import CallerIdentity, Session
from batchml.model.environment import Environment

Command = Literal[
    "setup",
    "submit",
    "sweep",
    "logs",
    "explain",
    "cost",
    "top",
    "workspace",
    "shell",
    "compute",
    "image push",
    "teardown",
]
PermissionResult = Literal[
    "allowed", "missing", "denied", "organization", "boundary", "conditional"
]

# Kinds of resources and their ARNs, with `*` for the free part of a name. Actions without a
# resource, and actions on resources that get their names later, are simulated on ANY.
ANY = "*"
_ARNS = {
    "stack": "cloudformation:{region}:{account}:stack/batchml-{env}-*/*",
    "role": "iam::{account}:role/batchml-{env}-*",
    "service role": "iam::{account}:role/aws-service-role/*",
    "profile": "iam::{account}:instance-profile/batchml-{env}-*",
    "policy": "iam::{account}:policy/batchml-{env}-*",
    "bucket": "s3:::batchml-{env}-{account}-{region}*",
    "object": "s3:::batchml-{env}-{account}-{region}/code/*",
    "bucket itself": "s3:::batchml-{env}-{account}-{region}",
    "results": "s3:::batchml-{env}-{account}-{region}/runs/*",
    "archive": "s3:::batchml-{env}-{account}-{region}/workspace/*",
    "upload": "s3:::batchml-{env}-{account}-{region}/workspace/.batchml/archive/uploads/*",
    "file system": "fsx:{region}:{account}:file-system/*",
    "association": "fsx:{region}:{account}:association/*",
    "task": "fsx:{region}:{account}:task/*",
    "consumable": "batch:{region}:{account}:consumable-resource/batchml-*",
    "compute": "batch:{region}:{account}:compute-environment/batchml-{env}-*",
    "queue": "batch:{region}:{account}:job-queue/batchml-{env}-*",
    "definition": "batch:{region}:{account}:job-definition/*",
    "job": "batch:{region}:{account}:job/*",
    "repository": "ecr:{region}:{account}:repository/batchml/*",
    # AWS Batch names the cluster after the compute environment.
    "cluster": "ecs:{region}:{account}:cluster/AWSBatch-batchml-{env}-*",
    "ecs task": "ecs:{region}:{account}:task/AWSBatch-batchml-{env}-*",
    "host": "ecs:{region}:{account}:container-instance/AWSBatch-batchml-{env}-*",
    "stream": "logs:{region}:{account}:log-group:/aws/batch/batchml-{env}:log-stream:*",
}

_COMMON: Mapping[Command, Mapping[str, str]] = {
    "setup": {
        ANY: "cloudformation:ValidateTemplate ec2:CreateLaunchTemplate "
        "ec2:CreateLaunchTemplateVersion ec2:CreateTags ec2:DescribeLaunchTemplates "
        "ec2:RunInstances kms:CreateKey kms:CreateAlias kms:TagResource logs:CreateLogGroup "
        "ec2:DescribeLaunchTemplateVersions ec2:DescribePlacementGroups ec2:CreatePlacementGroup "
        "logs:PutResourcePolicy logs:AssociateKmsKey logs:TagResource kms:PutKeyPolicy "
        "batch:ListSchedulingPolicies batch:DescribeSchedulingPolicies "
        "batch:CreateSchedulingPolicy batch:UpdateSchedulingPolicy batch:ListJobs "
        "batch:DescribeJobDefinitions "
        "logs:PutRetentionPolicy events:PutRule events:PutTargets ssm:GetParameter "
        "ssm:GetParameters batch:DescribeComputeEnvironments batch:DescribeJobQueues",
        "stack": "CreateStack CreateChangeSet DescribeChangeSet ExecuteChangeSet DescribeStacks "
        "DescribeStackEvents DescribeStackResources SetStackPolicy UpdateTerminationProtection "
        "DetectStackDrift DescribeStackDriftDetectionStatus DescribeStackResourceDrifts "
        "DeleteChangeSet GetTemplate ContinueUpdateRollback DeleteStack",
        "role": "iam:CreateRole iam:GetRole iam:PutRolePolicy iam:AttachRolePolicy iam:TagRole "
        "iam:PassRole",
        "service role": "iam:CreateServiceLinkedRole",
        "profile": "iam:CreateInstanceProfile iam:AddRoleToInstanceProfile",
        "policy": "iam:CreatePolicy",
        "bucket": "s3:CreateBucket s3:PutBucketPolicy s3:PutEncryptionConfiguration "
        "s3:PutBucketPublicAccessBlock s3:PutBucketVersioning",
        "compute": "CreateComputeEnvironment UpdateComputeEnvironment TagResource",
        "queue": "CreateJobQueue UpdateJobQueue TagResource",
        "definition": "RegisterJobDefinition TagResource",
    },
    "submit": {
        # ListJobs finds a run after a lost answer; a second run of the same key is terminated.
        # DescribeComputeEnvironments tells whether a queue that is not in batchml.toml has spot
        # instances, on which multi-node jobs cannot run.
        ANY: "batch:DescribeJobDefinitions batch:DescribeJobQueues batch:ListJobs "
        "batch:DescribeComputeEnvironments",
        "queue": "SubmitJob",
        "definition": "RegisterJobDefinition SubmitJob TagResource",
        "job": "TagResource TerminateJob",
        "role": "iam:PassRole",
        "object": "s3:GetObject s3:PutObject",
    },
    # In addition to `submit`: a limit for the children of an array that run at the same time, and
    # the messages of trials.
    "sweep": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "consumable": "CreateConsumableResource UpdateConsumableResource "
        "DeleteConsumableResource TagResource",
        "job": "TerminateJob",
        "results": "s3:GetObject s3:PutObject s3:DeleteObject",
        "bucket itself": "s3:ListBucket",
    },
    "logs": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "stream": "logs:GetLogEvents",
    },
    # Without some of these permissions an explanation is less certain, or a cost is unknown.
    "explain": {
        ANY: "batch:DescribeJobs batch:ListJobs batch:DescribeJobQueues "
        "batch:DescribeComputeEnvironments batch:GetJobQueueSnapshot "
        "batch:DescribeConsumableResource autoscaling:DescribeScalingActivities "
        "ec2:DescribeInstanceTypes ec2:DescribeImages ec2:DescribeInstances",
        "cluster": "ecs:ListContainerInstances",
        "stream": "logs:GetLogEvents",
    },
    "cost": {
        ANY: "batch:DescribeJobs batch:ListJobs batch:DescribeJobQueues "
        "batch:DescribeComputeEnvironments ec2:DescribeInstanceTypes ec2:DescribeInstances "
        "ec2:DescribeSpotPriceHistory pricing:GetProducts",
        "host": "ecs:DescribeContainerInstances",
    },
    # Also for `compute hosts` and `queue`. They leave out facts that they may not read, and say so.
    "top": {
        ANY: "batch:DescribeJobs batch:ListJobs batch:DescribeJobQueues "
        "batch:DescribeComputeEnvironments batch:GetJobQueueSnapshot ec2:DescribeInstances",
        "cluster": "ecs:ListContainerInstances",
        "host": "ecs:DescribeContainerInstances",
    },
    # In addition to `submit`: transfers of files to and from a file system, and the archive.
    "workspace": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "results": "s3:GetObject s3:PutObject s3:DeleteObject",
        "archive": "s3:GetObject s3:PutObject",
        "bucket itself": "s3:ListBucket",
    },
    # Also for `forward`, `notebook` and `alloc`.
    "shell": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "cluster": "ecs:ExecuteCommand",
        "ecs task": "ecs:DescribeTasks ecs:ExecuteCommand ssm:StartSession",
    },
    # `compute score` and `compute list`: spot placement scores, and instances that always run.
    "compute": {
        ANY: "ec2:GetSpotPlacementScores ec2:DescribeInstanceTypes ec2:DescribeSpotPriceHistory "
        "batch:DescribeComputeEnvironments",
    },
    "image push": {
        ANY: "ecr:GetAuthorizationToken",
        "repository": "CreateRepository DescribeRepositories DescribeImages BatchGetImage "
        "GetDownloadUrlForLayer BatchCheckLayerAvailability InitiateLayerUpload UploadLayerPart "
        "CompleteLayerUpload PutImage GetLifecyclePolicy PutLifecyclePolicy PutImageTagMutability "
        "PutImageScanningConfiguration TagResource",
    },
    "teardown": {
        ANY: "ec2:DeleteLaunchTemplate ec2:DeletePlacementGroup batch:DeleteSchedulingPolicy "
        "logs:DeleteLogGroup events:RemoveTargets events:DeleteRule "
        "kms:ScheduleKeyDeletion",
        "stack": "DeleteStack",
        "role": "iam:DeleteRole iam:DeleteRolePolicy iam:DetachRolePolicy",
        "profile": "iam:RemoveRoleFromInstanceProfile iam:DeleteInstanceProfile",
        "compute": "UpdateComputeEnvironment DeleteComputeEnvironment",
        "queue": "UpdateJobQueue DeleteJobQueue",
        "definition": "DeregisterJobDefinition",
    },
}  # fmt: skip

# Permissions that only some environments need, on any resource.
_NETWORK = {
    "setup": "ec2:CreateVpc ec2:ModifyVpcAttribute ec2:CreateSubnet ec2:CreateSecurityGroup "
    "ec2:AuthorizeSecurityGroupIngress ec2:AuthorizeSecurityGroupEgress ec2:CreateRouteTable "
    "ec2:AssociateRouteTable ec2:CreateRoute ec2:CreateVpcEndpoint ec2:CreateFlowLogs",
    "teardown": "ec2:DeleteVpc ec2:DeleteSubnet ec2:DeleteSecurityGroup ec2:DeleteRouteTable "
    "ec2:DeleteRoute ec2:DeleteVpcEndpoints ec2:DeleteFlowLogs",
}
_NAT = {
    "setup": "ec2:CreateInternetGateway ec2:AttachInternetGateway ec2:AllocateAddress "
    "ec2:CreateNatGateway",
    "teardown": "ec2:DeleteInternetGateway ec2:DetachInternetGateway ec2:ReleaseAddress "
    "ec2:DeleteNatGateway",
}
_EFS = {
    "setup": "elasticfilesystem:CreateFileSystem elasticfilesystem:CreateMountTarget "
    "elasticfilesystem:CreateAccessPoint",
    "teardown": "elasticfilesystem:DeleteMountTarget elasticfilesystem:DeleteAccessPoint "
    "elasticfilesystem:DeleteFileSystem",
}
_FSX = {
    "setup": "fsx:CreateFileSystem fsx:CreateDataRepositoryAssociation",
    "workspace": "fsx:DescribeDataRepositoryAssociations fsx:DescribeDataRepositoryTasks",
    "teardown": "fsx:DeleteFileSystem fsx:DeleteDataRepositoryAssociation",
}
# For the archive of a file system with a data repository association.
_ASSOCIATED = {
    "file system": "fsx:CreateDataRepositoryTask",
    "association": "fsx:UpdateDataRepositoryAssociation",
    "task": "fsx:CreateDataRepositoryTask fsx:TagResource",
    "upload": "s3:DeleteObject",
}
_AMI = {
    "setup": "imagebuilder:CreateComponent imagebuilder:CreateImageRecipe "
    "imagebuilder:CreateInfrastructureConfiguration imagebuilder:CreateDistributionConfiguration "
    "imagebuilder:CreateImage imagebuilder:GetImage imagebuilder:CreateLifecyclePolicy "
    "ec2:DescribeImages ec2:DeregisterImage ec2:DeleteSnapshot",
    "teardown": "imagebuilder:DeleteImage imagebuilder:DeleteImageRecipe "
    "imagebuilder:DeleteComponent",
}
_RESERVED = {"compute": "ec2:DescribeCapacityReservations"}
_BUDGET = {"setup": "budgets:ModifyBudget", "teardown": "budgets:ModifyBudget"}

# The service of the actions above that name none; `batch` for all other kinds.
_SERVICES = {"stack": "cloudformation", "repository": "ecr"}


class Permission(Struct, frozen=True, order=True):
    """An action on a kind of resource."""

    action: str
    kind: str  # of _ARNS, or "*"


class PermissionCheck(Struct, frozen=True):
    """The result of the simulation for an action on an ARN.

    `missing`: a statement in the caller's own policies would help. `denied` (explicitly),
    `organization` and `boundary`: only the owner of the policy can help. `conditional`: the result
    depends on the request.
    """

    permission: Permission
    arn: str
    result: PermissionResult


def needed_permissions(environment: Environment) -> dict[Command, tuple[Permission, ...]]:
    """The permissions that each command needs for this environment, sorted."""
    found = {
        command: {
            *_to_permissions(kinds),
            *_to_permissions({ANY: _conditional_actions(environment, command)}),
        }
        for command, kinds in _COMMON.items()
    }
    if environment.storage.workspace == "fsx-lustre":
        found["workspace"] |= {*_to_permissions(_ASSOCIATED)}
    return {command: tuple(sorted(each)) for command, each in found.items()}


def _to_permissions(kinds: Mapping[str, str]) -> Iterable[Permission]:
    for kind, words in kinds.items():
        for word in words.split():
            action = word if ":" in word else f"{_SERVICES.get(kind, 'batch')}:{word}"
            yield Permission(action, kind)


def _conditional_actions(environment: Environment, command: Command) -> str:
    """The actions that a command needs because of the settings of this environment."""
    network, workspace = environment.network, environment.storage.workspace
    amis = {environment.ami, *(compute.ami for compute in environment.compute.values())}
    parts = [
        (_NETWORK, not network.is_given),
        (_NAT, not network.is_given and (network.egress == "nat" or "build" in amis)),
        (_EFS, workspace == "efs"),
        (_FSX, workspace == "fsx-lustre"),
        (_AMI, "build" in amis),
        (_RESERVED, any(compute.reservation for compute in environment.compute.values())),
        (_BUDGET, environment.budget is not None),
    ]
    return " ".join(part.get(command, "") for part, is_needed in parts if is_needed)


def arn_of(kind: str, identity: CallerIdentity, region: str, env: str) -> str:
    """The ARN pattern of a kind of resource; "*" for the kind ANY."""
    if kind == ANY:
        return ANY
    words = {"region": region, "account": identity.account, "env": env}
    return f"arn:{identity.partition}:{_ARNS[kind].format(**words)}"


def example_of(arn: str) -> str:
    """An ARN that matches the pattern."""
    return arn if arn == ANY else arn.replace("*", "x")


def simulation_requests(
    principal: str, wanted: Iterable[Permission], identity: CallerIdentity, region: str, env: str
) -> list[tuple[dict[str, Permission], dict[str, Any]]]:
    """The SimulatePrincipalPolicy requests, each with its permissions by "action ARN".

    There is a request for each service with resources, and a request for all other actions.
    """
    groups: dict[str, list[Permission]] = {}
    for permission in sorted(set(wanted)):
        arn = arn_of(permission.kind, identity, region, env)
        groups.setdefault(ANY if arn == ANY else arn.split(":")[2], []).append(permission)
    calls = []
    for group in groups.values():
        arns = {each: example_of(arn_of(each.kind, identity, region, env)) for each in group}
        request = {
            "PolicySourceArn": principal,
            "ActionNames": sorted({each.action for each in group}),
            "ResourceArns": sorted(set(arns.values())),
            "ContextEntries": _context(env),
            "MaxItems": 1000,
        }
        calls.append(({f"{each.action} {arn}": each for each, arn in arns.items()}, request))
    return calls


def _context(env: str) -> list[dict[str, Any]]:
    """The condition keys that requests of batchml have."""
    entries = {
        "iam:PassedToService": ["ecs-tasks.amazonaws.com"],
        "aws:ResourceTag/batchml:env": [env],
        "aws:RequestTag/batchml:env": [env],
    }
    return [
        {"ContextKeyName": key, "ContextKeyValues": values, "ContextKeyType": "string"}
        for key, values in entries.items()
    ]


def simulate(
    session: Session,
    principal: str,
    wanted: Iterable[Permission],
    identity: CallerIdentity,
    region: str,
    env: str,
) -> tuple[PermissionCheck, ...]:
    """Simulate each permission. No policy of the account is changed.

    Service control policies count if the organization lets the account see them; session policies
    do not count. Raises AccessError, ServiceError, ServiceUnreachable.
    """
    found: list[PermissionCheck] = []
    for permissions, request in simulation_requests(principal, wanted, identity, region, env):
        results = read_entries(
            session.client("iam"), "SimulatePrincipalPolicy", "EvaluationResults", **request
        )
        found += _to_checks(results, permissions, identity, region, env)
    return tuple(found)


def _to_checks(
    results: Iterable[Mapping[str, Any]],
    permissions: Mapping[str, Permission],
    identity: CallerIdentity,
    region: str,
    env: str,
) -> Iterable[PermissionCheck]:
    for action, arn, result in _results(results):
        permission = permissions.get(f"{action} {arn}")
        if permission is not None:  # AWS also answers for other pairs of action and ARN
            own_arn = arn_of(permission.kind, identity, region, env)
            yield PermissionCheck(permission, own_arn, result)


def _results(results: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str, PermissionResult]]:
    """The (action, ARN, result) of each evaluation, or of its resources if it lists them."""
    for result in results:
        action = result["EvalActionName"]
        parts = result.get("ResourceSpecificResults") or ()
        for part in parts:
            decision = part["EvalResourceDecision"]
            yield action, part["EvalResourceName"], _to_result(decision, {**result, **part})
        if not parts:
            yield (
                action,
                result.get("EvalResourceName", ANY),
                _to_result(result["EvalDecision"], result),
            )


def _to_result(decision: str, result: Mapping[str, Any]) -> PermissionResult:
    if decision == "allowed":
        return "allowed"
    if result.get("MissingContextValues"):
        return "conditional"
    if not result.get("OrganizationsDecisionDetail", {}).get("AllowedByOrganizations", True):
        return "organization"
    boundary = result.get("PermissionsBoundaryDecisionDetail", {})
    if not boundary.get("AllowedByPermissionsBoundary", True):
        return "boundary"
    return "denied" if decision == "explicitDeny" else "missing"


# Read-only calls to try if the simulation is not allowed, with their arguments.
PROBES: Mapping[str, Mapping[str, Any]] = {
    "cloudformation:ListStacks": {},
    "ecr:DescribeRepositories": {"maxResults": 1},
    "logs:DescribeLogGroups": {"limit": 1},
}


def probe(session: Session, action: str) -> None:
    """Try a read-only action. Raises AccessError if it is denied."""
    service, _, operation = action.partition(":")
    call(session.client(service), operation, **PROBES[action])
