"""Whether policies allow a call: the actions and resources of operations, and IAM's evaluation.

Pure. A call is judged with what IAM asks for it beside its own action: PassRole for the roles that
it names, TagResource for its tags, the key of an encrypted bucket. Sources: Service Authorization
Reference (actions, resource types, condition keys); IAM User Guide, "Policy evaluation logic" and
"IAM JSON policy elements: Condition operators"; Amazon S3 User Guide, "Required permissions for
Amazon S3 API operations".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tests.support.iam_actions import action_of

Json = Mapping[str, Any]
ACCOUNT = "123456789012"


class Need(NamedTuple):
    """An action on a resource, "" if the request does not tell. `context`: its condition keys."""

    action: str
    resource: str
    context: Mapping[str, tuple[str, ...]] = {}

    def __str__(self) -> str:
        return f"{self.action} on {self.resource}"


def needs_of(service: str, operation: str, request: Json, region: str = "us-east-1") -> list[Need]:
    """What the caller must be allowed for a call; empty for a call that needs no permission."""
    action = action_of(service, operation)
    if not action:
        return []
    if service == "s3":
        return list(_needs_of_s3(operation, request, region))
    find = _RESOURCES.get(f"{service}:{operation}")
    resources = find(request, _Arns(service, region)) if find else ["*"]
    tags = {"aws:ResourceTag/batchml:env": (_env_of(resources),)}
    return [
        *(Need(action, each, {**_keys(request), **tags}) for each in resources),
        *_needs_beside(service, operation, request, resources),
    ]


def _env_of(resources: Sequence[str]) -> str:
    found = re.search(r"batchml-([a-z0-9]+)", " ".join(resources))
    return found[1] if found else "dev"


def _keys(request: Json) -> dict[str, tuple[str, ...]]:
    """AWS Batch's condition keys of RegisterJobDefinition: the values that a definition sets."""
    container = request.get("containerProperties") or {}
    members = {"image": "batch:Image", "user": "batch:User", "privileged": "batch:Privileged"}
    return {
        key: (str(container[member]).lower() if member == "privileged" else container[member],)
        for member, key in members.items() if member in container
    }  # fmt: skip


def _needs_beside(
    service: str, operation: str, request: Json, resources: Sequence[str]
) -> Iterator[Need]:
    if service == "batch" and operation != "TagResource" and request.get("tags"):
        own = resources[-1:] if operation == "SubmitJob" else resources[:1]
        env = request["tags"].get("batchml:env", "")
        yield from (Need("batch:TagResource", each, {"aws:RequestTag/batchml:env": (env,)})
                    for each in own)  # fmt: skip
    if service == "ec2" and request.get("TagSpecifications"):
        yield Need("ec2:CreateTags", "*")
    container = request.get("containerProperties") or {}
    for role in (container.get("jobRoleArn"), container.get("executionRoleArn")):
        if role:
            passed = {"iam:PassedToService": ("ecs-tasks.amazonaws.com",)}
            yield Need("iam:PassRole", role, passed)


class _Arns(NamedTuple):
    service: str
    region: str

    def __call__(self, resource: str) -> str:
        if resource.startswith("arn:"):
            return resource
        prefix = {"iam": "iam:"}.get(self.service, f"{self.service}:{self.region}")
        return f"arn:aws:{prefix}:{ACCOUNT}:{resource}"

    def named(self, kind: str, name: str) -> str:
        return self(name if name.startswith("arn:") else f"{kind}/{name}")


Find = Callable[[Json, _Arns], list[str]]


def _member(kind: str, key: str) -> Find:
    return lambda request, arns: [arns.named(kind, request[key])]


def _stack(request: Json, arns: _Arns) -> list[str]:
    name = request.get("StackName", "")
    if name.startswith("arn:"):
        return [name]
    return [arns(f"stack/{name}/id")] if name else ["*"]


def _repositories(request: Json, arns: _Arns) -> list[str]:
    names = request.get("repositoryNames") or [request.get("repositoryName", "*")]
    return [arns(f"repository/{name}") for name in names]


def _queue_parts(request: Json, arns: _Arns) -> list[str]:
    used = [each["computeEnvironment"] for each in request.get("computeEnvironmentOrder", ())]
    queue = request.get("jobQueueName") or request["jobQueue"]
    policy = request.get("schedulingPolicyArn")
    return [
        arns.named("job-queue", queue), *(arns.named("compute-environment", each) for each in used),
        *([policy] if policy else []),
    ]  # fmt: skip


def _submission(request: Json, arns: _Arns) -> list[str]:
    return [
        arns.named("job-queue", request["jobQueue"]),
        arns.named("job-definition", request["jobDefinition"]),
        arns("job/new"),
    ]


# Operations on resources; every other operation is on `*`.
_RESOURCES: dict[str, Find] = {
    "iam:ListEntitiesForPolicy": lambda request, arns: [request["PolicyArn"]],
    "batch:SubmitJob": _submission,
    "batch:RegisterJobDefinition": _member("job-definition", "jobDefinitionName"),
    "batch:DeregisterJobDefinition": _member("job-definition", "jobDefinition"),
    "batch:CancelJob": _member("job", "jobId"),
    "batch:TerminateJob": _member("job", "jobId"),
    "batch:TagResource": lambda request, arns: [request["resourceArn"]],
    "batch:CreateComputeEnvironment": _member("compute-environment", "computeEnvironmentName"),
    "batch:UpdateComputeEnvironment": _member("compute-environment", "computeEnvironment"),
    "batch:DeleteComputeEnvironment": _member("compute-environment", "computeEnvironment"),
    "batch:CreateJobQueue": _queue_parts,
    "batch:UpdateJobQueue": _queue_parts,
    "batch:DeleteJobQueue": _member("job-queue", "jobQueue"),
    "batch:CreateConsumableResource": _member("consumable-resource", "consumableResourceName"),
    "batch:UpdateConsumableResource": _member("consumable-resource", "consumableResource"),
    "batch:DeleteConsumableResource": _member("consumable-resource", "consumableResource"),
    **{
        f"cloudformation:{operation}": _stack
        for operation in (
            "ContinueUpdateRollback", "CreateChangeSet", "CreateStack", "DeleteChangeSet",
            "DeleteStack", "DescribeChangeSet", "DescribeStackEvents", "ExecuteChangeSet",
            "DescribeStackResourceDrifts", "DescribeStacks",
            "DetectStackDrift", "GetTemplate", "SetStackPolicy", "UpdateTerminationProtection",
        )
    },
    **{
        f"ecr:{operation}": _repositories
        for operation in (
            "CreateRepository", "DescribeImages", "DescribeRepositories", "GetLifecyclePolicy",
            "PutImageScanningConfiguration", "PutImageTagMutability", "PutLifecyclePolicy",
        )
    },
    "ecs:ListContainerInstances": _member("cluster", "cluster"),
    "iam:GetRole": lambda request, arns: [arns.named("role", request["RoleName"])],
    "logs:FilterLogEvents": lambda request, arns: [arns(f"log-group:{request['logGroupName']}")],
    "logs:GetLogEvents": lambda request, arns: [
        arns(f"log-group:{request['logGroupName']}:log-stream:{request['logStreamName']}")
    ],
}  # fmt: skip


def _needs_of_s3(operation: str, request: Json, region: str) -> Iterator[Need]:
    if "Bucket" not in request:
        yield Need("s3:ListAllMyBuckets", "*")
        return
    bucket, key = f"arn:aws:s3:::{request['Bucket']}", request.get("Key", "")
    versions = False
    if operation == "DeleteObjects":
        objects = request["Delete"]["Objects"]
        versions = any("VersionId" in each for each in objects)
        key = objects[0]["Key"] if objects else "x"
    where = f"{bucket}/{key}" if key else bucket
    prefix = {} if key else {"s3:prefix": (request.get("Prefix", ""),)}
    yield Need(action_of("s3", operation), where, prefix)
    if versions:
        yield Need("s3:DeleteObjectVersion", f"{bucket}/{key}")
    env = re.search(r"batchml-(.+)-\d{12}-", bucket)
    uses = {"PutObject": "GenerateDataKey", "GetObject": "Decrypt"}
    if env and operation in uses:
        yield Need(
            f"kms:{uses[operation]}", f"arn:aws:kms:{region}:{ACCOUNT}:key/x",
            {
                "kms:ViaService": (f"s3.{region}.amazonaws.com",),
                "kms:ResourceAliases": (f"alias/batchml-{env[1]}-data",),
            },
        )  # fmt: skip


# --- evaluation -----------------------------------------------------------------------------------


def is_allowed(statements: Iterable[Json], need: Need) -> bool:
    """Whether a statement allows it and none denies it."""
    found = [each["Effect"] for each in statements if _applies(each, need)]
    return "Allow" in found and "Deny" not in found


def refusals(
    statements: Sequence[Json], calls: Iterable[tuple[str, str, Json]], region: str = "us-east-1"
) -> list[str]:
    """The needs of calls (service, operation, request) that the statements do not allow."""
    needs = {
        str(need)
        for service, operation, request in calls
        for need in needs_of(service, operation, request, region)
        if not is_allowed(statements, need)
    }
    return sorted(needs)


def _applies(statement: Json, need: Need) -> bool:
    actions, resources = _list(statement["Action"]), _list(statement["Resource"])
    return (
        any(fnmatchcase(need.action.lower(), each.lower()) for each in actions)
        and (not need.resource or any(fnmatchcase(need.resource, each) for each in resources))
        and all(
            _holds(operator, key, [*map(str, _list(values))], need.context)
            for operator, pairs in statement.get("Condition", {}).items()
            for key, values in pairs.items()
        )
    )


def _holds(
    operator: str, key: str, values: Sequence[str], context: Mapping[str, tuple[str, ...]]
) -> bool:
    there = context.get(key)
    if operator == "Null":
        return (there is None) == (values[0] == "true")
    name = operator.rpartition(":")[2]
    plain = name.removesuffix("IfExists")
    if there is None:
        return name != plain or plain.startswith("StringNot")
    found = any(fnmatchcase(each, value) for each in there for value in values)
    return not found if plain.startswith("StringNot") else found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
