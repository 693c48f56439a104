"""doctor: what is asked of AWS, and what is said of the answers."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from batchml.aws.iam import Permission, arns_of, scope_of
from batchml.aws.session import CallerIdentity
from batchml.aws.simulation import PermissionCheck
from batchml.clock import SystemClock
from batchml.model.environment import Compute, Environment, Network, Queue
from batchml.setup.doctor import (
    AccountCheck,
    FailedQuestion,
    Finding,
    ask_account,
    check_account,
    exit_code,
)
from tests.aws.test_quotas import ON_DEMAND_G, entry
from tests.aws.test_simulation import ACCOUNT, ME, ROLE, deciding
from tests.support.fakes import FakeClock
from tests.support.wire import NOW, Refusal, Script, Wire
from tests.support.wire import keys as keys

ENV = Environment(
    region="us-east-1",
    compute={"gpu": Compute(instance_types=("g5.xlarge",), max_vcpus=64)},
    queues={"default": Queue(compute=("gpu",))},
)
DENIED = Refusal("AccessDenied", "User: me is not authorized to perform: iam:X on resource: *")
SERVICE_ROLE = {
    "Path": "/aws-service-role/batch.amazonaws.com/", "RoleName": "AWSServiceRoleForBatch",
    "RoleId": "AROAEXAMPLE", "CreateDate": "2026-01-01T00:00:00Z",
    "Arn": f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/batch.amazonaws.com/"
    "AWSServiceRoleForBatch",
}  # fmt: skip


def who(arn: str = ME.arn) -> dict[str, Any]:
    return {"UserId": "X", "Account": ACCOUNT, "Arn": arn}


def healthy(**more: Any) -> Script:
    """An account in which nothing is wrong."""
    region = {"RegionName": "us-east-1", "OptInStatus": "opt-in-not-required", "Endpoint": "e"}
    return {
        "GetCallerIdentity": who(),
        "DescribeRegions": {"Regions": [region]},
        "GetRole": {"Role": SERVICE_ROLE},
        "SimulatePrincipalPolicy": deciding(lambda action, arn: {"EvalDecision": "allowed"}),
        "ListServiceQuotas": {"Quotas": [entry(ON_DEMAND_G, "L-DB2E81BA", 64.0)]},
        "DescribeComputeEnvironments": {"computeEnvironments": []},
        "DescribeJobQueues": {"jobQueues": []},
        "DescribeVpcs": {"Vpcs": []},
        "DescribeAddresses": {"Addresses": []},
        **more,
    }


def examined(
    script: Script, environment: Environment = ENV, late: float = 0.0, server_time: float = NOW
) -> tuple[list[Finding], Wire]:
    """The findings about an account; `late` is what our clock is ahead of its."""
    wire = Wire(script, server_time)
    clock = FakeClock()
    clock.sleep(NOW + late - clock.now())
    account = ask_account(wire.session(), wire.session(), "dev", environment, clock)
    assert wire.wrong == []
    return list(check_account(account)), wire


@cache
def found_in_healthy() -> list[Finding]:
    return examined(healthy())[0]


def bad(findings: list[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings if each.mark != "ok"}


pytestmark = pytest.mark.usefixtures("keys")


def test_a_healthy_account_has_no_problem_and_is_asked_little() -> None:
    findings, wire = examined(healthy())
    assert bad(findings) == {}
    assert exit_code(findings) == 0
    assert len(wire.calls) <= 20
    asked = {each.check for each in findings}
    assert asked == {
        "credentials", "clock", "region", "permissions", "quotas", "limits", "service-role",
    }  # fmt: skip


def test_nothing_that_is_asked_changes_anything() -> None:
    _, wire = examined(healthy(SimulatePrincipalPolicy=DENIED, ListStacks={},
                               DescribeRepositories={}, DescribeLogGroups={}))  # fmt: skip
    reading = ("Get", "Describe", "List", "Simulate")
    assert all(name.startswith(reading) for name in wire.operations)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal("ExpiredToken"), "have expired"),
        (Refusal("InvalidClientTokenId"), "does not know these credentials"),
        (Refusal("SignatureDoesNotMatch"), "secret key does not belong"),
    ],
)
def test_without_credentials_nothing_else_is_asked(refusal: Refusal, words: str) -> None:
    # Errors are judged by the time of day.
    script = healthy(GetCallerIdentity=refusal)
    findings, wire = examined(script, server_time=SystemClock().now())
    (found,) = findings
    assert (found.check, found.mark, found.exit_code) == ("credentials", "problem", 77)
    assert words in found.text
    assert found.fix  # of keys in variables
    assert found.fix[-1].startswith("unset AWS_ACCESS_KEY_ID")
    assert exit_code(findings) == 77
    assert wire.operations == ["GetCallerIdentity"]


@pytest.mark.parametrize(
    "operation", sorted(set(healthy()) - {"GetCallerIdentity", "SimulatePrincipalPolicy"})
)
def test_a_question_that_fails_leaves_the_others(operation: str) -> None:
    expected = found_in_healthy()
    findings, _ = examined(healthy(**{operation: Refusal("InternalFailure", status=400)}))
    assert exit_code(findings) == 0
    missing = {each.check for each in expected} - {each.check for each in findings}
    assert missing <= {"service-role"}
    assert len(findings) >= len(expected) - 1


def test_a_lost_connection_is_told_and_is_no_matter_of_access() -> None:
    from botocore.exceptions import EndpointConnectionError

    lost = EndpointConnectionError(endpoint_url="https://sts.amazonaws.com")
    findings, _ = examined(healthy(GetCallerIdentity=lost))
    assert exit_code(findings) == 74
    assert "no answer from the service" in findings[0].text


@pytest.mark.parametrize(("minutes", "mark"), [(2, "warning"), (7, "problem"), (0, "ok")])
def test_a_wrong_clock_is_found_while_aws_still_answers(minutes: int, mark: str) -> None:
    findings, _ = examined(healthy(), late=minutes * 60.0)
    (clock,) = (each for each in findings if each.check == "clock")
    assert clock.mark == mark
    if minutes:
        assert f"{minutes} min fast" in clock.text
        assert clock.fix == ("sudo timedatectl set-ntp true",)


def test_a_region_that_is_not_enabled_is_found_and_not_asked() -> None:
    region = {"RegionName": "ap-east-1", "OptInStatus": "not-opted-in"}
    script = healthy(DescribeRegions={"Regions": [region]})
    findings, wire = examined(script, replace(ENV, region="ap-east-1", profile="team"))
    assert bad(findings)["region"].fix == (
        "aws account enable-region --region-name ap-east-1 --profile team",
    )
    assert "DescribeComputeEnvironments" not in wire.operations
    nowhere, _ = examined(healthy(DescribeRegions={"Regions": []}), replace(ENV, region="xx-ab-1"))
    assert "no region 'xx-ab-1'" in bad(nowhere)["region"].text


# --- permissions ---------------------------------------------------------------------------------


def denying(*actions: str, decision: str = "implicitDeny") -> Callable[..., dict[str, Any]]:
    def decide(action: str, arn: str) -> dict[str, Any]:
        return {"EvalDecision": decision if action in actions else "allowed"}

    return deciding(decide)  # type: ignore[no-any-return]


def test_what_is_missing_comes_as_statements_that_allow_exactly_that() -> None:
    script = healthy(SimulatePrincipalPolicy=denying("batch:SubmitJob", "logs:GetLogEvents"))
    findings, _ = examined(script)
    problems = [each for each in findings if each.mark == "problem"]
    assert [each.text.partition(":")[0] for each in problems] == [
        "permissions for submit", "permissions for logs",
    ]  # fmt: skip
    assert [json.loads(line) for line in problems[0].fix] == [
        {
            "Effect": "Allow",
            "Action": ["batch:SubmitJob"],
            "Resource": [
                f"arn:aws:batch:us-east-1:{ACCOUNT}:job-definition/*",
                f"arn:aws:batch:us-east-1:{ACCOUNT}:job-queue/batchml-dev-*",
                f"arn:aws:batch:us-east-1:{ACCOUNT}:job/*",
            ],
        }
    ]
    stream = f"arn:aws:logs:us-east-1:{ACCOUNT}:log-group:/aws/batch/batchml-dev:log-stream:*"
    assert [json.loads(line)["Resource"] for line in problems[1].fix] == [[stream]]
    assert exit_code(findings) == 77


def test_who_submits_to_what_is_set_up_need_not_be_allowed_to_set_up() -> None:
    denied = denying("cloudformation:CreateStack")
    findings, _ = examined(healthy(SimulatePrincipalPolicy=denied))
    assert bad(findings)["permissions"].mark == "problem"
    queue = {"jobQueueName": "batchml-dev-default", "status": "VALID"}
    findings, wire = examined(
        healthy(SimulatePrincipalPolicy=denied, DescribeJobQueues={"jobQueues": [queue]})
    )
    assert bad(findings)["permissions"].mark == "warning"
    assert exit_code(findings) == 0
    assert "DescribeVpcs" not in wire.operations  # the network is there


def test_an_explicit_deny_comes_without_a_statement() -> None:
    script = healthy(SimulatePrincipalPolicy=denying("batch:SubmitJob", decision="explicitDeny"))
    found = bad(examined(script)[0])["permissions"]
    assert "explicit deny" in found.text and "batch:SubmitJob" in found.text
    assert found.fix == ()
    assert found.exit_code == 77


@pytest.mark.parametrize("word", ["organization", "boundary", "conditional"])
def test_who_has_to_be_asked_is_said(word: Any) -> None:
    permission = Permission("batch:SubmitJob", "queue")
    verdict = PermissionCheck(
        permission, arns_of("queue", scope_of(ME, "us-east-1", "dev"))[0], word
    )
    (found,) = bad(list(check_account(AccountCheck("dev", ENV, verdicts=(verdict,))))).values()
    assert found.mark == ("warning" if word == "conditional" else "problem")
    words = {"organization": "SCP", "boundary": "boundary", "conditional": "conditions"}
    assert words[word] in found.text


def test_where_policies_may_not_be_simulated_reading_is_tried_and_writing_not_known() -> None:
    script = healthy(
        SimulatePrincipalPolicy=DENIED, ListStacks={}, DescribeRepositories=DENIED,
        DescribeLogGroups={},
    )  # fmt: skip
    findings, wire = examined(script)
    problem, warning = (each for each in findings if each.check == "permissions")
    assert problem.mark == "problem" and "DescribeRepositories" in problem.text
    assert warning.mark == "warning"
    assert "could not be checked" in warning.text
    assert "cloudformation:ListStacks" in warning.text
    assert "ecr:DescribeRepositories" not in warning.text
    assert any('"iam:X"' in line for line in warning.fix)  # how to be allowed to simulate
    assert exit_code(findings) == 77
    assert {"ListStacks", "DescribeRepositories", "DescribeLogGroups"} <= set(wire.operations)


@pytest.mark.parametrize("may_look", [True, False])
def test_an_assumed_role_is_simulated_as_the_role(may_look: bool) -> None:
    full = f"arn:aws:iam::{ACCOUNT}:role/aws-reserved/AWSReservedSSO_Dev_0123"

    def role(params: dict[str, Any]) -> Any:
        if params["RoleName"] == "AWSServiceRoleForBatch":
            return {"Role": SERVICE_ROLE}
        return {"Role": {**SERVICE_ROLE, "Arn": full}} if may_look else DENIED

    findings, wire = examined(healthy(GetCallerIdentity=who(ROLE), GetRole=role))
    assert bad(findings) == {}
    sources = {
        params["PolicySourceArn"]
        for name, params in wire.calls
        if name == "SimulatePrincipalPolicy"
    }
    guess = f"arn:aws:iam::{ACCOUNT}:role/AWSReservedSSO_Dev_0123"
    assert sources == {full if may_look else guess}


def test_the_root_user_is_warned_and_not_simulated() -> None:
    findings, wire = examined(healthy(GetCallerIdentity=who(f"arn:aws:iam::{ACCOUNT}:root")))
    assert bad(findings)["credentials"].mark == "warning"
    assert "SimulatePrincipalPolicy" not in wire.operations
    federated = who(f"arn:aws:sts::{ACCOUNT}:federated-user/me")
    script = healthy(GetCallerIdentity=federated, ListStacks={}, DescribeRepositories={},
                     DescribeLogGroups={})  # fmt: skip
    findings, wire = examined(script)
    assert "cannot be simulated" in bad(findings)["permissions"].text
    assert "SimulatePrincipalPolicy" not in wire.operations


# --- quotas and counts ---------------------------------------------------------------------------


def test_a_quota_of_0_is_found() -> None:
    script = healthy(ListServiceQuotas={"Quotas": [entry(ON_DEMAND_G, "L-DB2E81BA", 0.0)]})
    findings, _ = examined(script, replace(ENV, profile="team"))
    found = bad(findings)["quotas"]
    assert found.mark == "problem"
    assert found.fix[0].endswith("--desired-value 64 --region us-east-1 --profile team")
    assert exit_code(findings) == 1


def test_an_environment_without_compute_needs_no_quota() -> None:
    _, wire = examined(healthy(), Environment(region="us-east-1"))
    assert "ListServiceQuotas" not in wire.operations


def environments(count: int, **first: Any) -> dict[str, Any]:
    details = [
        {"computeEnvironmentName": f"other-{number}", "computeEnvironmentArn": "a",
         "ecsClusterArn": "c"}
        for number in range(count)
    ]  # fmt: skip
    details[0] |= first
    return {"computeEnvironments": details}


@pytest.mark.parametrize(("count", "marks"), [(49, {"ok"}), (50, {"ok", "problem"})])
def test_there_has_to_be_room_for_what_is_to_come(count: int, marks: set[str]) -> None:
    findings, _ = examined(healthy(DescribeComputeEnvironments=environments(count)))
    assert {each.mark for each in findings if each.check == "limits"} == marks


def test_what_is_there_already_needs_no_room_and_its_trouble_is_told() -> None:
    ours = {"computeEnvironmentName": "batchml-dev-gpu", "status": "INVALID",
            "statusReason": "no such role"}  # fmt: skip
    findings, _ = examined(healthy(DescribeComputeEnvironments=environments(50, **ours)))
    (found,) = (each for each in findings if each.mark == "problem")
    assert "batchml-dev-gpu is INVALID: no such role" in found.text


def test_a_network_needs_a_vpc_and_an_address() -> None:
    vpcs = {"Vpcs": [{"VpcId": f"vpc-{number}"} for number in range(5)]}
    addresses = {"Addresses": [{"PublicIp": f"10.0.0.{number}"} for number in range(5)]}
    script = healthy(DescribeVpcs=vpcs, DescribeAddresses=addresses)
    findings, _ = examined(script)
    warnings = [each.text for each in findings if each.mark == "warning"]
    assert [text.partition(" has ")[2][:6] for text in warnings] == ["5 VPCs", "5 Elas"]
    closed = replace(ENV, network=Network(egress="endpoints"))
    (found,) = bad(examined(script, closed)[0]).values()
    assert found.text.startswith("the account has 5 VPCs;")
    many = healthy(DescribeVpcs={"Vpcs": vpcs["Vpcs"] * 4})
    (found,) = bad(examined(many, closed)[0]).values()
    assert "--desired-value 25 " in found.fix[0], "AWS refuses a quota that is no higher"
    given = replace(ENV, network=Network(subnets=("subnet-1",), security_groups=("sg-1",)))
    findings, wire = examined(script, given)
    assert bad(findings) == {}
    assert not {"DescribeVpcs", "DescribeAddresses"} & set(wire.operations)


@pytest.mark.parametrize(
    ("answer", "mark", "words"),
    [
        ({"State": "active", "EndDate": NOW + 86_400}, "warning", "(in 23 h 30 min)"),
        ({"State": "active", "EndDate": NOW + 9 * 86_400}, "ok", "until"),
        ({"State": "active"}, "ok", "until it is cancelled"),
        ({"State": "expired", "EndDate": NOW - 60}, "problem", "over since"),
        ({"State": "cancelled"}, "problem", "cancelled"),
        (None, "problem", "gone"),
    ],
)
def test_reserved_hosts_that_end_soon_are_told(
    answer: dict[str, Any] | None, mark: str, words: str
) -> None:
    entry = {"CapacityReservationId": "cr-1", "InstanceType": "p5.48xlarge",
             "ReservationType": "capacity-block", **(answer or {})}  # fmt: skip
    gone = Refusal("InvalidCapacityReservationId.NotFound", "no")
    told = {"CapacityReservations": [entry]} if answer else gone
    block = replace(ENV.compute["gpu"], capacity_block="cr-1")
    script = healthy(DescribeCapacityReservations=told)
    findings, _ = examined(script, replace(ENV, compute={"gpu": block}))
    (found,) = (each for each in findings if each.check == "reservations")
    assert found.mark == mark
    assert words in found.text
    assert found.text.startswith("compute gpu: capacity ")


# --- findings ------------------------------------------------------------------------------------


def test_exit_codes_tell_access_from_the_rest() -> None:
    fine, warned = Finding("a", "ok", ""), Finding("a", "warning", "", exit_code=77)
    problem = Finding("a", "problem", "")
    access, silence = (Finding("a", "problem", "", exit_code=code) for code in (77, 74))
    assert exit_code([fine, warned]) == exit_code([]) == 0
    assert exit_code([fine, problem]) == 1
    assert exit_code([problem, silence]) == exit_code([silence]) == 74
    assert exit_code([problem, silence, access]) == exit_code([access]) == 77


def test_errors_become_a_line_and_its_fixes() -> None:
    account = AccountCheck(
        "dev", ENV, identity=FailedQuestion("what is wrong\n  do this\n  or that", 77)
    )
    (found,) = check_account(account)
    assert (found.text, found.fix) == ("what is wrong", ("do this", "or that"))
    assert list(check_account(AccountCheck("dev", ENV, identity=CallerIdentity(ACCOUNT, ME.arn))))
