"""What IAM's simulation says of a permission, and how it is asked."""

from typing import Any

import pytest

from batchml.aws.iam import Permission, arns_of, needed_permissions, scope_of
from batchml.aws.session import (
    CallerIdentity,
    get_caller_identity,
    has_service_role,
    home_region,
    principal_arn,
    region_status,
)
from batchml.aws.simulation import PROBES, probe, simulate, simulation_requests
from batchml.errors import AccessError, ServiceError
from batchml.model.environment import Budget, Environment, Storage
from tests.support.models import faults
from tests.support.wire import Refusal, Wire
from tests.support.wire import keys as keys

ACCOUNT = "123456789012"
ROLE = f"arn:aws:sts::{ACCOUNT}:assumed-role/AWSReservedSSO_Dev_0123/me@example.com"
ME = CallerIdentity(ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/team/me")
SCOPE = scope_of(ME, "us-east-1", "dev")
EVERYTHING = Environment(
    region="us-east-1", ami="build", storage=Storage(workspace="fsx-lustre"),
    budget=Budget(usd=1, email="a@b.c"),
)  # fmt: skip


def wanted(environment: Environment) -> set[Permission]:
    return {each for group in needed_permissions(environment).values() for each in group}


@pytest.mark.parametrize(
    ("environment", "most"), [(Environment(region="us-east-1"), 12), (EVERYTHING, 15)]
)
def test_every_simulation_is_what_iam_asks_for_and_they_are_few(
    environment: Environment, most: int
) -> None:
    """A call for each service with named resources, and one for all other actions."""
    permissions = wanted(environment)
    calls = simulation_requests(ME.arn, permissions, SCOPE)
    arns = {arn for each in permissions for arn in arns_of(each.kind, SCOPE)}
    assert len(calls) == len({arn.split(":")[2] for arn in arns - {"*"}}) + 1 <= most
    covered = set()
    for checks, request in calls:
        assert faults("iam", "SimulatePrincipalPolicy", request) == []
        assert len({arn.split(":")[2] for arn in request["ResourceArns"] if arn != "*"}) <= 1
        assert not any(set("*?") & set(arn) for arn in request["ResourceArns"] if arn != "*")
        covered |= {check.permission for some in checks.values() for check in some}
    # The ARN of one's own session has a variable.
    assert permissions - covered == {Permission("ssm:TerminateSession", "session")}


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
    found = simulate(wire.session(), ME.arn, SUBMIT, SCOPE)
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

    several = [*SUBMIT, Permission("batch:RegisterJobDefinition", "definition")]
    wire = Wire({"SimulatePrincipalPolicy": answer})
    found = simulate(wire.session(), ME.arn, several, SCOPE)
    assert {each.permission for each in found} == set(several)
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
