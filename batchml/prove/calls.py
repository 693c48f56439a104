"""The AWS calls that a proof makes itself, as a program: `python -m batchml.prove.calls VERB ...`.

It is a process like the commands, so an interruption ends it, and its calls are recorded. It prints
a JSON document, and errors as commands do.

Sources: IAM API Reference (CreateRole to DeleteRole); STS API Reference, AssumeRole; IAM User
Guide, "Changes that I make are not always immediately visible"; Resource Groups Tagging API
Reference, GetResources, and "Services that support the API": it lists no IAM role; VPC User Guide,
"NAT gateways": a deleted one is listed for an hour; KMS API Reference, KeyMetadata.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchml.aws.cloudformation import Stacks
from batchml.aws.ecr import Ecr, ImageEngine, repository_name
from batchml.aws.errors import call, read_entries
from batchml.aws.naming import stack_name
from batchml.aws.session import Session, get_caller_identity, principal_arn
from batchml.cli.output import say, say_error
from batchml.clock import Clock, SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import AccessError, BatchmlError, NotFound, ServiceError

_VISIBLE = 60.0  # seconds after which a new role is visible everywhere
_PAUSE = 3.0
ROLE_PREFIX = "-prove-"  # batchml-ENV-prove-NAME


def role_name(env: str, name: str) -> str:
    """The name of a role of a proof, within the names that `setup` and doctor's policies use."""
    return f"batchml-{env}{ROLE_PREFIX}{name}"


# --- images ---------------------------------------------------------------------------------------


def read_processors(session: Session, reference: str) -> list[str]:
    """The processors for which an image in ECR is made."""
    login = Ecr(session).login()
    return sorted(ImageEngine().processors_in_registry(reference, login))


def remove_images(session: Session, env: str, names: Iterable[str]) -> list[str]:
    """Delete the repositories of images that the environment has made; return their names."""
    ecr, removed = session.client("ecr"), []
    for name in names:
        repository = Ecr(session).repository(name)
        if repository is None:
            continue
        answer = call(ecr, "ecr:ListTagsForResource", resourceArn=repository.arn)
        if {"Key": "batchml:env", "Value": env} in answer.get("tags", ()):
            call(ecr, "ecr:DeleteRepository", repositoryName=repository_name(name), force=True)
            removed.append(repository.name)
            if name == env:  # the proof's own; others may be the user's, too
                ImageEngine().remove(name)
    return removed


# --- roles ----------------------------------------------------------------------------------------


def make_role(
    session: Session, clock: Clock, full: str, env: str, policies: Sequence[Mapping[str, Any]],
    attached: Sequence[str],
) -> tuple[str, Mapping[str, str]]:  # fmt: skip
    """Make a role that only the caller may assume, and assume it. Returns its ARN and Credentials.

    Raises AccessError if the caller may not do that; the root user may not.
    """
    identity = get_caller_identity(session)
    principal = principal_arn(session, identity)
    if not principal:
        raise AccessError("the root user and federated users cannot assume a role", code="Root")
    iam = session.client("iam")
    trust = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"AWS": principal}, "Action": "sts:AssumeRole"}
        ],
    }
    remove_role(session, full)  # of a proof that was killed
    tags = [{"Key": "batchml:env", "Value": env}]
    made = call(iam, "CreateRole", RoleName=full, AssumeRolePolicyDocument=json.dumps(trust),
                Description="batchml prove", MaxSessionDuration=3600, Tags=tags)  # fmt: skip
    for number, document in enumerate(policies, 1):
        call(iam, "PutRolePolicy", RoleName=full, PolicyName=f"part-{number}",
             PolicyDocument=json.dumps(document))  # fmt: skip
    for arn in attached:
        call(iam, "AttachRolePolicy", RoleName=full, PolicyArn=arn)
    arn = str(made["Role"]["Arn"])
    return arn, _assume(session, clock, arn)


def _assume(session: Session, clock: Clock, arn: str) -> Mapping[str, str]:
    """Assume a new role, which is not visible everywhere at once."""
    until = clock.monotonic() + _VISIBLE
    while True:
        try:
            request = {"RoleArn": arn, "RoleSessionName": "batchml-prove", "DurationSeconds": 900}
            found: Mapping[str, str] = call(session.client("sts"), "AssumeRole", **request)[
                "Credentials"
            ]
            return found
        except (AccessError, ServiceError):
            if clock.monotonic() > until:
                raise
            clock.sleep(_PAUSE)


def write_keys(path: Path, profile: str, keys: Mapping[str, str]) -> None:
    """Write a file of credentials that the AWS SDKs read, for the user's eyes alone."""
    lines = [
        f"[{profile}]", f"aws_access_key_id = {keys['AccessKeyId']}",
        f"aws_secret_access_key = {keys['SecretAccessKey']}",
        f"aws_session_token = {keys['SessionToken']}",
    ]  # fmt: skip
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def remove_role(session: Session, full: str) -> bool:
    """Delete a role with its policies. Returns whether it was there."""
    iam = session.client("iam")
    try:
        attached = call(iam, "ListAttachedRolePolicies", RoleName=full)["AttachedPolicies"]
        for each in attached:
            call(iam, "DetachRolePolicy", RoleName=full, PolicyArn=each["PolicyArn"])
        for name in call(iam, "ListRolePolicies", RoleName=full)["PolicyNames"]:
            call(iam, "DeleteRolePolicy", RoleName=full, PolicyName=name)
        call(iam, "DeleteRole", RoleName=full)
    except ServiceError as error:
        if error.code == "NoSuchEntity":
            return False
        raise
    return True


# --- hosts ----------------------------------------------------------------------------------------


def terminate_host(session: Session, job: str) -> str:
    """Terminate the instance on which a run's attempt is; return its id. Raises NotFound."""
    detail = call(session.client("batch"), "DescribeJobs", jobs=[job])["jobs"]
    host = (detail[0].get("container") or {}).get("containerInstanceArn") if detail else None
    if not host:
        raise NotFound("Host", f"of the run {job}", [], "The run has no host.")
    cluster = str(host).split("/")[1]
    answer = call(session.client("ecs"), "ecs:DescribeContainerInstances", cluster=cluster,
                  containerInstances=[host])  # fmt: skip
    instance = str(answer["containerInstances"][0]["ec2InstanceId"])
    call(session.client("ec2"), "ec2:TerminateInstances", InstanceIds=[instance])
    return instance


# --- what is left ---------------------------------------------------------------------------------


def find_left(session: Session, env: str) -> dict[str, list[str]]:
    """What bears the environment's tag or name: `left`, and `going`, which AWS removes by itself.

    `going` are keys that wait for their deletion, deleted gateways, instances that end, and job
    definitions that are inactive, which AWS keeps for 180 days.
    """
    tags = [{"Key": "batchml:env", "Values": [env]}]
    arns = [
        str(each["ResourceARN"])
        for each in read_entries(
            session.client("resourcegroupstaggingapi"), "GetResources",
            "ResourceTagMappingList", TagFilters=tags,
        )
    ]  # fmt: skip
    roles = [
        str(role["Arn"]) for role in read_entries(session.client("iam"), "ListRoles", "Roles")
        if role["RoleName"].startswith(f"batchml-{env}-")
    ]  # fmt: skip
    found = sorted({*arns, *roles})
    going = [arn for arn in found if _is_going(session, arn)]
    return {"left": [arn for arn in found if arn not in going], "going": going}


def _is_going(session: Session, arn: str) -> bool:
    kind, name = arn.split(":", 5)[2], arn.rpartition("/")[2]
    if kind == "kms":
        metadata = call(session.client("kms"), "kms:DescribeKey", KeyId=arn)["KeyMetadata"]
        return bool(metadata["KeyState"] == "PendingDeletion")
    ec2 = session.client("ec2")
    if ":natgateway/" in arn:
        return _has_state(ec2, "ec2:DescribeNatGateways", "NatGateways", "Filter",
                          "nat-gateway-id", name, lambda each: each["State"])  # fmt: skip
    if ":instance/" in arn and kind == "ec2":
        pages = call(ec2, "ec2:DescribeInstances", Filters=_filter("instance-id", name))
        entries = [each for r in pages["Reservations"] for each in r["Instances"]]
        return all(each["State"]["Name"] in _ENDED for each in entries)
    if ":job-definition/" in arn:
        request = {"jobDefinitions": [arn]}
        found = call(session.client("batch"), "DescribeJobDefinitions", **request)
        return all(each["status"] == "INACTIVE" for each in found["jobDefinitions"])
    return ":job/" in arn  # a run that has ended: AWS Batch forgets it


_ENDED = ("deleted", "terminated", "shutting-down")


def _filter(name: str, value: str) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": [value]}]


def _has_state(
    ec2: Any, operation: str, member: str, parameter: str, name: str, value: str,
    state: Callable[[Any], str],
) -> bool:  # fmt: skip
    answer = call(ec2, operation, **{parameter: _filter(name, value)})
    return all(state(each) in _ENDED for each in answer[member])


# --- the program ----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    verb, env, *words = arguments
    try:
        here = Path.cwd()
        context = Context(load_settings(os.environ, here, env), SystemClock(), here, say)
        print(json.dumps(_carry_out(context, verb, words)), flush=True)
    except BatchmlError as error:
        say_error(error)
        return error.exit_code
    return 0


def _carry_out(context: Context, verb: str, words: Sequence[str]) -> dict[str, Any]:
    session, env = context.connect(), context.env
    match verb:
        case "processors":
            hosts = context.settings.environment.processors
            return {"processors": read_processors(session, words[0]), "hosts": hosts}
        case "remove-images":
            return {"removed": remove_images(session, env, words)}
        case "role":
            return _role(context, *words)
        case "remove-roles":
            return {"removed": [n for n in words if remove_role(session, role_name(env, n))]}
        case "terminate":
            return {"instance": terminate_host(session, words[0])}
        case "left":
            return dict(find_left(session, env))
    raise BatchmlError(f"no verb {verb}")


def _role(context: Context, name: str, policies: str, path: str) -> dict[str, Any]:
    """A role with these policies; without any, with the stack's policy for submitters."""
    session, wanted = context.connect(), json.loads(policies)
    attached = []
    if not wanted:
        attached = [Stacks(session).outputs(stack_name(context.env, "roles"))["SubmitterPolicyArn"]]
    full = role_name(context.env, name)
    arn, keys = make_role(session, context.clock, full, context.env, wanted, attached)
    profile = context.settings.environment.profile or "default"
    write_keys(Path(path), profile, keys)
    return {"role": arn, "profile": profile}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
