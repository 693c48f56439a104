"""What AWS says when it denies, as AWS words it, and what would mend it."""

import json

import pytest

from batchml.aws.credentials_help import Denial, explain_denial, parse_denial
from batchml.aws.errors import translate
from tests.aws.test_failures import client_error

WHO = "arn:aws:sts::123456789012:assumed-role/dev/me"
QUEUE = "arn:aws:batch:us-east-1:123456789012:job-queue/default"
BASE = f"User: {WHO} is not authorized to perform: batch:SubmitJob on resource: {QUEUE}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (BASE, Denial("batch:SubmitJob", QUEUE, WHO)),
        (f"{BASE} because no identity-based policy allows the batch:SubmitJob action",
         Denial("batch:SubmitJob", QUEUE, WHO, policy="identity-based policy")),
        (f"{BASE} with an explicit deny in an identity-based policy",
         Denial("batch:SubmitJob", QUEUE, WHO, True, "identity-based policy")),
        (f"{BASE} with an explicit deny in a service control policy: "
         "arn:aws:organizations::111111111111:policy/o-1/service_control_policy/p-2",
         Denial("batch:SubmitJob", QUEUE, WHO, True, "service control policy",
                "arn:aws:organizations::111111111111:policy/o-1/service_control_policy/p-2")),
        (f"{BASE} with an explicit deny", Denial("batch:SubmitJob", QUEUE, WHO, True)),
        (f"{BASE} because no permissions boundary allows the batch:SubmitJob action",
         Denial("batch:SubmitJob", QUEUE, WHO, policy="permissions boundary")),
        (f"{BASE} because no VPC endpoint policy allows the batch:SubmitJob action",
         Denial("batch:SubmitJob", QUEUE, WHO, policy="VPC endpoint policy")),
        (f"User: {WHO} is not authorized to perform: ecr:GetAuthorizationToken on resource: * "
         "because no identity-based policy allows the ecr:GetAuthorizationToken action",
         Denial("ecr:GetAuthorizationToken", "*", WHO, policy="identity-based policy")),
        (f"User: {WHO} is not authorized to perform: batch:ListJobs",
         Denial("batch:ListJobs", "", WHO)),
        ("You are not authorized to perform this operation. Encoded authorization failure "
         "message: 4OiU_xyz-9", Denial("", encoded="4OiU_xyz-9")),
        (f"You are not authorized to perform this operation. User: {WHO} is not authorized to "
         "perform: ec2:CreateVpc on resource: arn:aws:ec2:us-east-1:123456789012:vpc/* because no "
         "identity-based policy allows the ec2:CreateVpc action. Encoded authorization failure "
         "message: 4OiU",
         Denial("ec2:CreateVpc", "arn:aws:ec2:us-east-1:123456789012:vpc/*", WHO,
                policy="identity-based policy", encoded="4OiU")),
        ("Access Denied", None),
        ("You are not authorized to perform this operation.", None),
    ],
)  # fmt: skip
def test_aws_own_words_are_understood(message: str, expected: Denial | None) -> None:
    assert parse_denial(message) == expected


def test_what_is_missing_is_told_as_the_statement_to_add() -> None:
    text = str(translate("SubmitJob", client_error("AccessDeniedException", 403, BASE)))
    first, fix = text.splitlines()
    assert f"AWS denies batch:SubmitJob on {QUEUE} to {WHO}" in first
    assert json.loads(fix) == {
        "Effect": "Allow", "Action": ["batch:SubmitJob"], "Resource": [QUEUE],
    }  # fmt: skip


@pytest.mark.parametrize(
    "end",
    [
        " with an explicit deny in an identity-based policy",
        " with an explicit deny in a service control policy",
        " because no permissions boundary allows the batch:SubmitJob action",
        " because no service control policy allows the batch:SubmitJob action",
        " because no session policy allows the batch:SubmitJob action",
    ],
)
def test_what_no_statement_can_mend_is_not_told_to_be_mended_by_one(end: str) -> None:
    denial = parse_denial(BASE + end)
    assert denial is not None and not denial.is_fixable
    text = explain_denial("SubmitJob", denial)
    assert '"Effect"' not in text
    assert f"ask whoever owns {'that policy' if denial.explicit else 'the'}" in text


def test_an_encoded_message_comes_with_the_command_that_reads_it() -> None:
    text = explain_denial("CreateVpc", Denial("", encoded="4OiU"))
    assert text.splitlines()[-1].endswith("--encoded-message 4OiU")
    assert "sts decode-authorization-message" in text


def test_a_message_without_an_action_leads_to_doctor() -> None:
    text = str(translate("PutObject", client_error("AccessDenied", 403, "Access Denied")))
    assert "batchml doctor" in text
