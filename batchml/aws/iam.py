"""What each command may have to ask of AWS, and whether the caller is allowed to.

Sources: Service Authorization Reference (actions and the resources they take); IAM API Reference,
SimulatePrincipalPolicy.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.session import Identity, Session
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
Word = Literal["allowed", "missing", "denied", "organization", "boundary", "conditional"]

# Resource of an action -> its ARN, `*` where the rest of a name is free. An action that takes no
# resource, or one whose resource has no name before it is made, is simulated on anything.
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
    "board": "s3:::batchml-{env}-{account}-{region}/runs/*",
    "archive": "s3:::batchml-{env}-{account}-{region}/workspace/*",
    "half sent": "s3:::batchml-{env}-{account}-{region}/workspace/.batchml/archive/uploads/*",
    "file system": "fsx:{region}:{account}:file-system/*",
    "link": "fsx:{region}:{account}:association/*",
    "task": "fsx:{region}:{account}:task/*",
    "consumable": "batch:{region}:{account}:consumable-resource/batchml-*",
    "compute": "batch:{region}:{account}:compute-environment/batchml-{env}-*",
    "queue": "batch:{region}:{account}:job-queue/batchml-{env}-*",
    "definition": "batch:{region}:{account}:job-definition/*",
    "job": "batch:{region}:{account}:job/*",
    "repository": "ecr:{region}:{account}:repository/batchml/*",
    # AWS Batch names a cluster after its compute environment.
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
        # ListJobs finds a run whose answer was lost; a second one of the same key is terminated.
        # Whether a queue that batchml.toml does not describe has spot instances, where nodes cannot
        # be, DescribeComputeEnvironments says.
        ANY: "batch:DescribeJobDefinitions batch:DescribeJobQueues batch:ListJobs "
        "batch:DescribeComputeEnvironments",
        "queue": "SubmitJob",
        "definition": "RegisterJobDefinition SubmitJob TagResource",
        "job": "TagResource TerminateJob",
        "role": "iam:PassRole",
        "object": "s3:GetObject s3:PutObject",
    },
    # What `sweep` needs beside `submit`: the width of an array, and the messages of its trials.
    "sweep": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "consumable": "CreateConsumableResource UpdateConsumableResource "
        "DeleteConsumableResource TagResource",
        "job": "TerminateJob",
        "board": "s3:GetObject s3:PutObject s3:DeleteObject",
        "bucket itself": "s3:ListBucket",
    },
    "logs": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "stream": "logs:GetLogEvents",
    },
    # What of these two is missing leaves a verdict with less to rest on, and a cost unknown.
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
    # `compute hosts` and `queue` too. What may not be asked is left out of the view, and named.
    "top": {
        ANY: "batch:DescribeJobs batch:ListJobs batch:DescribeJobQueues "
        "batch:DescribeComputeEnvironments batch:GetJobQueueSnapshot ec2:DescribeInstances",
        "cluster": "ecs:ListContainerInstances",
        "host": "ecs:DescribeContainerInstances",
    },
    # Beside `submit`: what is on its way to and from a file system, and the archive.
    "workspace": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "board": "s3:GetObject s3:PutObject s3:DeleteObject",
        "archive": "s3:GetObject s3:PutObject",
        "bucket itself": "s3:ListBucket",
    },
    # `forward`, `notebook` and `alloc` too.
    "shell": {
        ANY: "batch:DescribeJobs batch:ListJobs",
        "cluster": "ecs:ExecuteCommand",
        "ecs task": "ecs:DescribeTasks ecs:ExecuteCommand ssm:StartSession",
    },
    # `compute score` and `compute list`: where spot is to be had, and what is kept warm.
    "compute": {
        ANY: "ec2:GetSpotPlacementScores ec2:DescribeInstanceTypes ec2:DescribeSpotPriceHistory "
        "batch:DescribeComputeEnvironments",
    },
    "image push": {
        ANY: "ecr:GetAuthorizationToken",
        "repository": "CreateRepository DescribeRepositories DescribeImages BatchGetImage "
        "BatchCheckLayerAvailability InitiateLayerUpload UploadLayerPart CompleteLayerUpload "
        "PutImage GetLifecyclePolicy PutLifecyclePolicy PutImageTagMutability "
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

# What only some environments need: all of it on any resource.
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
# What an archive asks of a file system that is linked to the bucket.
_LINKED = {
    "file system": "fsx:CreateDataRepositoryTask",
    "link": "fsx:UpdateDataRepositoryAssociation",
    "task": "fsx:CreateDataRepositoryTask fsx:TagResource",
    "half sent": "s3:DeleteObject",
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

_SERVICES = {"stack": "cloudformation", "repository": "ecr"}  # `batch` for the rest


class Permission(Struct, frozen=True, order=True):
    """One action on one kind of resource, as a command needs it."""

    action: str
    kind: str  # of _ARNS, or "*"


class Verdict(Struct, frozen=True):
    """What the simulation says of an action on an ARN.

    `missing` is mended by a statement of the caller's; `denied` (explicitly), `organization` and
    `boundary` only by whoever owns what decided. `conditional` depends on what a real request says.
    """

    permission: Permission
    arn: str
    word: Word


def needed_permissions(environment: Environment) -> dict[Command, tuple[Permission, ...]]:
    """What each command needs for this environment, sorted."""
    found = {
        command: {*_read(kinds), *_read({ANY: _only_here(environment, command)})}
        for command, kinds in _COMMON.items()
    }
    if environment.storage.workspace == "fsx-lustre":
        found["workspace"] |= {*_read(_LINKED)}
    return {command: tuple(sorted(each)) for command, each in found.items()}


def _read(kinds: Mapping[str, str]) -> Iterable[Permission]:
    for kind, words in kinds.items():
        for word in words.split():
            action = word if ":" in word else f"{_SERVICES.get(kind, 'batch')}:{word}"
            yield Permission(action, kind)


def _only_here(environment: Environment, command: Command) -> str:
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
    return " ".join(part.get(command, "") for part, is_here in parts if is_here)


def arn_of(kind: str, identity: Identity, region: str, env: str) -> str:
    """The ARN of a kind of resource, with `*` for what is free; "*" for no resource."""
    if kind == ANY:
        return ANY
    words = {"region": region, "account": identity.account, "env": env}
    return f"arn:{identity.partition}:{_ARNS[kind].format(**words)}"


def example_of(arn: str) -> str:
    """One ARN that the pattern stands for."""
    return arn if arn == ANY else arn.replace("*", "x")


def simulations(
    principal: str, wanted: Iterable[Permission], identity: Identity, region: str, env: str
) -> list[tuple[dict[str, Permission], dict[str, Any]]]:
    """SimulatePrincipalPolicy arguments, one call for each service that has resources and one for
    all that has none; each with the permissions that it answers for, by "action ARN"."""
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
    """What our requests say of themselves, for policies that ask."""
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
    identity: Identity,
    region: str,
    env: str,
) -> tuple[Verdict, ...]:
    """One verdict for each permission; no policy of the account is changed.

    Service control policies count where the organization lets them be seen; session policies
    do not. Raises AccessError, ServiceError, ServiceUnreachable.
    """
    found: list[Verdict] = []
    for permissions, request in simulations(principal, wanted, identity, region, env):
        with translated("SimulatePrincipalPolicy"):
            pages = session.client("iam").get_paginator("simulate_principal_policy")
            asked = {key: value for key, value in request.items() if key != "MaxItems"}
            limits = {"PageSize": request["MaxItems"]}
            results = [
                result
                for page in pages.paginate(**asked, PaginationConfig=limits)
                for result in page["EvaluationResults"]
            ]
        found += _verdicts(results, permissions, identity, region, env)
    return tuple(found)


def _verdicts(
    results: Sequence[Mapping[str, Any]],
    permissions: Mapping[str, Permission],
    identity: Identity,
    region: str,
    env: str,
) -> Iterable[Verdict]:
    for action, arn, word in _words(results):
        permission = permissions.get(f"{action} {arn}")
        if permission is not None:  # else a pair that nobody asked about
            yield Verdict(permission, arn_of(permission.kind, identity, region, env), word)


def _words(results: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str, Word]]:
    """(action, ARN, word) of each result, or of its parts where it has them."""
    for result in results:
        action = result["EvalActionName"]
        parts = result.get("ResourceSpecificResults") or ()
        for part in parts:
            decision = part["EvalResourceDecision"]
            yield action, part["EvalResourceName"], _word(decision, {**result, **part})
        if not parts:
            yield action, result.get("EvalResourceName", ANY), _word(result["EvalDecision"], result)


def _word(decision: str, result: Mapping[str, Any]) -> Word:
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


# Read-only calls that tell something where policies may not be simulated: service, operation.
PROBES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "cloudformation:ListStacks": ("cloudformation", "list_stacks", {}),
    "ecr:DescribeRepositories": ("ecr", "describe_repositories", {"maxResults": 1}),
    "logs:DescribeLogGroups": ("logs", "describe_log_groups", {"limit": 1}),
}


def probe(session: Session, action: str) -> None:
    """Try a read-only action. Raises AccessError where it is denied."""
    service, method, arguments = PROBES[action]
    with translated(action.partition(":")[2]):
        getattr(session.client(service), method)(**arguments)


# --- quotas ---------------------------------------------------------------------------------------
# EC2's vCPU quotas: what an environment needs of them, and what the account has.
#
# New accounts have 0 for GPU instances, and Batch then waits without a word. Quotas are looked up
# by name; their codes come with the answer. Sources: EC2 User Guide, "Amazon EC2 service quotas";
# Service Quotas API Reference, ListServiceQuotas.


# The class of a family -> the quota's name on demand, and on spot. Classes are whole words, so
# that "Running On-Demand P instances" is found and "... G and VT instances" told from it.
_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_CLASSES = {
    "P": r"p\d",
    "G and VT": r"(g|gr|vt)\d",
    "DL": r"dl\d",
    "Trn": r"trn\d",
    "Inf": r"inf\d",
    "F": r"f\d",
    "X": r"x\d",
    "High Memory": r"u(-|\d)",
    "HPC": r"hpc\d",
}
# On spot P's have two quotas; they have been one.
_SPOT_P = ("All P5 Spot Instance Requests", "All P4, P3 and P2 Spot Instance Requests")
_SPOT_ANY_P = "All P Spot Instance Requests"

# The smallest of families that do not begin at `large`.
_SMALLEST = {
    "p2": "xlarge", "p3": "2xlarge", "p3dn": "24xlarge", "p4d": "24xlarge", "p4de": "24xlarge",
    "p5": "4xlarge", "p5e": "48xlarge", "p5en": "48xlarge", "p6-b200": "48xlarge",
    "p6-b300": "48xlarge", "p6e-gb200": "36xlarge", "g3": "4xlarge", "g3s": "xlarge",
    "g4dn": "xlarge", "g4ad": "xlarge", "g5": "xlarge", "g5g": "xlarge", "g6": "xlarge",
    "g6e": "xlarge", "g7e": "2xlarge", "gr6": "4xlarge", "gr6f": "4xlarge", "dl1": "24xlarge",
    "trn1": "2xlarge", "trn2": "48xlarge", "inf1": "xlarge", "inf2": "xlarge", "vt1": "3xlarge",
}  # fmt: skip
_SIZE = re.compile(r"(\d*)xlarge")
_METAL = 96  # vCPUs; most have that or more


class Quota(Struct, frozen=True):
    """A quota as the account has it. `value` is in vCPUs for the EC2 ones."""

    name: str
    code: str
    value: float


class Need(Struct, frozen=True):
    """What one quota has to give. All numbers are vCPUs.

    `smallest` starts one instance; `least` is what stands by (`min_vcpus`); `most` is reached when
    every compute section is at its `max_vcpus`.
    """

    quota: str  # a name of Service Quotas
    names: tuple[str, ...]  # those that it has had, the one in use first
    compute: tuple[str, ...]
    smallest: int
    least: int
    most: int


def quota_class(instance_type: str) -> str:
    """The class of an instance type or family: P, or G and VT; Standard for what is not special."""
    for name, pattern in _CLASSES.items():
        if re.match(pattern, instance_type):
            return name
    return _STANDARD


def quota_names(instance_type: str, *, spot: bool) -> tuple[str, ...]:
    """The names that a type's quota has or had, the present one first."""
    instance_class = quota_class(instance_type)
    if not spot:
        return (f"Running On-Demand {instance_class} instances",)
    if instance_class == "P":
        return (_SPOT_P[instance_type[1] in "234"], _SPOT_ANY_P)
    return (f"All {instance_class} Spot Instance Requests",)


def vcpus_of(instance_type: str, known: Mapping[str, int] | None = None) -> int:
    """The vCPUs of a type, or of a family's smallest; `known` (DescribeInstanceTypes) goes first.

    By EC2's naming an xlarge has 4, an Nxlarge 4 N, and what is smaller 2.
    """
    if known and instance_type in known:
        return known[instance_type]
    family, _, size = instance_type.partition(".")
    size = size or _SMALLEST.get(family, "large")
    match = _SIZE.match(size.removeprefix("metal-"))
    if match:
        return 4 * int(match[1] or 1)
    return _METAL if size.startswith("metal") else 2


def needed_quotas(
    environment: Environment, vcpus: Mapping[str, int] | None = None
) -> tuple[Need, ...]:
    """What the compute sections need, a Need for each quota, by name.

    A section that lists types of several classes may take all of its vCPUs from any one of them.
    `vcpus` gives those of instance types where they are known better than by name.
    """
    found: dict[str, Need] = {}
    for name, compute in environment.compute.items():
        by_quota: dict[tuple[str, ...], list[str]] = {}
        for each in compute.instance_types:
            by_quota.setdefault(quota_names(each, spot=compute.spot), []).append(each)
        for names, types in by_quota.items():
            need = Need(
                quota=names[0],
                names=names,
                compute=(name,),
                smallest=min(vcpus_of(each, vcpus) for each in types),
                # What stands by may be of another quota, where there are several.
                least=compute.min_vcpus if len(by_quota) == 1 else 0,
                most=compute.max_vcpus,
            )
            found[need.quota] = _sum(found[need.quota], need) if need.quota in found else need
    return tuple(found[name] for name in sorted(found))


def _sum(one: Need, other: Need) -> Need:
    return Need(
        quota=one.quota,
        names=one.names,
        compute=(*one.compute, *other.compute),
        # Each section has to be able to start one.
        smallest=max(one.smallest, other.smallest),
        least=one.least + other.least,
        most=one.most + other.most,
    )


def find_quota(need: Need, quotas: Mapping[str, Quota]) -> Quota | None:
    """The quota of a need among those of the account, by name: case and spaces do not count."""
    by_name = {_plain(name): quota for name, quota in quotas.items()}
    return next((by_name[_plain(name)] for name in need.names if _plain(name) in by_name), None)


def _plain(name: str) -> str:
    return " ".join(name.lower().split())


def read_quotas(session: Session, service: str = "ec2") -> dict[str, Quota]:
    """Every quota of a service that the account has applied values of, by name.

    Raises AccessError, ServiceError, ServiceUnreachable.
    """
    found: dict[str, Quota] = {}
    with translated("ListServiceQuotas"):
        pages = session.client("service-quotas").get_paginator("list_service_quotas")
        for page in pages.paginate(ServiceCode=service, PaginationConfig={"PageSize": 100}):
            for quota in page["Quotas"]:
                found[quota["QuotaName"]] = _quota(quota)
    return found


def _quota(raw: Mapping[str, Any]) -> Quota:
    return Quota(raw["QuotaName"], raw["QuotaCode"], float(raw["Value"]))
