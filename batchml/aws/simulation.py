"""Simulate the policies of the caller, for each permission that commands need.

Source: IAM API Reference, SimulatePrincipalPolicy.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.errors import call, read_entries
from batchml.aws.iam import ANY, Permission, PolicyScope, arns_of
from batchml.aws.session import Session

PermissionResult = Literal[
    "allowed", "missing", "denied", "organization", "boundary", "conditional"
]


class PermissionCheck(Struct, frozen=True):
    """The result of the simulation for an action on an ARN.

    `missing`: a statement in the caller's own policies would help. `denied` (explicitly),
    `organization` and `boundary`: only the owner of the policy can help. `conditional`: the result
    depends on the request.
    """

    permission: Permission
    arn: str
    result: PermissionResult


def example_of(arn: str) -> str:
    """An ARN that matches the pattern."""
    return arn if arn == ANY else arn.replace("*", "x").replace("?", "-")


def simulation_requests(
    principal: str, wanted: Iterable[Permission], scope: PolicyScope
) -> list[tuple[dict[str, list[PermissionCheck]], dict[str, Any]]]:
    """The SimulatePrincipalPolicy requests, each with its permissions by "action ARN".

    There is a request for each service with resources, and a request for all other actions. The
    checks have no result yet: `missing`. ARNs with a variable are left out: the simulation has no
    value for it. Several kinds of resources may have one ARN.
    """
    groups: dict[str, list[PermissionCheck]] = {}
    for permission in sorted(set(wanted)):
        for arn in arns_of(permission.kind, scope):
            if "${" in arn:
                continue
            service = ANY if arn == ANY else arn.split(":")[2]
            check = PermissionCheck(permission, arn, "missing")
            groups.setdefault(service, []).append(check)
    calls = []
    for group in groups.values():
        request = {
            "PolicySourceArn": principal,
            "ActionNames": sorted({each.permission.action for each in group}),
            "ResourceArns": sorted({example_of(each.arn) for each in group}),
            "ContextEntries": _context(scope),
            "MaxItems": 1000,
        }
        checks: dict[str, list[PermissionCheck]] = {}
        for each in group:
            checks.setdefault(f"{each.permission.action} {example_of(each.arn)}", []).append(each)
        calls.append((checks, request))
    return calls


def _context(scope: PolicyScope) -> list[dict[str, Any]]:
    """The condition keys that requests of batchml have."""
    entries = {
        "iam:PassedToService": ("string", ["ecs-tasks.amazonaws.com"]),
        "aws:ResourceTag/batchml:env": ("string", [scope.env]),
        "aws:RequestTag/batchml:env": ("string", [scope.env]),
        "kms:ViaService": ("string", [f"s3.{scope.region}.{scope.suffix}"]),
        "kms:ResourceAliases": ("stringList", [f"alias/batchml-{scope.env}-data"]),
        "kms:GrantIsForAWSResource": ("boolean", ["true"]),
    }
    return [
        {"ContextKeyName": key, "ContextKeyValues": values, "ContextKeyType": kind}
        for key, (kind, values) in entries.items()
    ]


def simulate(
    session: Session, principal: str, wanted: Iterable[Permission], scope: PolicyScope
) -> tuple[PermissionCheck, ...]:
    """Simulate each permission. No policy of the account is changed.

    Service control policies count if the organization lets the account see them; session policies
    do not count. Raises AccessError, ServiceError, ServiceUnreachable.
    """
    found: list[PermissionCheck] = []
    for checks, request in simulation_requests(principal, wanted, scope):
        results = read_entries(
            session.client("iam"), "SimulatePrincipalPolicy", "EvaluationResults", **request
        )
        for action, arn, result in _results(results):
            # AWS also answers for other pairs of action and ARN.
            found += [replace(each, result=result) for each in checks.get(f"{action} {arn}", ())]
    return tuple(found)


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
