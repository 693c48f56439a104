"""The account of `moto_aws.py` says no as AWS does, and evaluates policies as IAM does."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.iam_judge import Need, is_allowed, needs_of
from tests.support.moto_aws import MotoAws, moto_aws

ANYONE = {"Statement": [{"Effect": "Allow", "Principal": {"AWS": "*"}, "Action": "sts:AssumeRole"}]}


@pytest.fixture(scope="module")
def account() -> Iterator[MotoAws]:
    with moto_aws() as aws:
        yield aws


@pytest.fixture
def aws(account: MotoAws) -> Iterator[MotoAws]:
    yield account
    account.set(denied=[], scp=[], errors={}, keys="valid", missing_is_403=False)


READS: list[tuple[str, str, dict[str, Any], str]] = [
    ("ec2", "describe_vpcs", {}, "UnauthorizedOperation"),
    ("cloudformation", "describe_stacks", {}, "AccessDenied"),
    ("batch", "describe_jobs", {"jobs": ["x"]}, "AccessDeniedException"),
    ("logs", "describe_log_groups", {}, "AccessDeniedException"),
    ("s3", "list_objects_v2", {"Bucket": "batchml-x"}, "AccessDenied"),
]


@pytest.mark.parametrize(("service", "method", "request_", "code"), READS)
def test_a_denied_action_is_refused_in_the_words_of_its_service(
    aws: MotoAws, service: str, method: str, request_: dict[str, Any], code: str
) -> None:
    action = needs_of(service, aws.client(service).meta.method_to_api_mapping[method], request_)[0]
    for rules in ({"denied": [action.action]}, {"denied": [], "scp": [action.action]}):
        aws.set(**rules)
        with pytest.raises(ClientError) as refused:
            getattr(aws.client(service), method)(**request_)
        assert refused.value.response["Error"]["Code"] == code
        message = refused.value.response["Error"]["Message"]
        assert f"is not authorized to perform: {action.action} on resource: " in message
    assert "service control policy" in message


@pytest.mark.parametrize("keys", ["expired", "unknown"])
def test_keys_that_do_not_count_are_refused_whatever_is_asked(aws: MotoAws, keys: str) -> None:
    aws.set(keys=keys)
    for service, method, request in (("sts", "get_caller_identity", {}), *(r[:3] for r in READS)):
        with pytest.raises(ClientError, match=r"expired|invalid"):
            getattr(aws.client(service), method)(**request)


@pytest.mark.parametrize("denies", [False, True])
def test_a_missing_object_is_404_or_403(aws: MotoAws, denies: bool) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="batchml-some")
    s3.put_object(Bucket="batchml-some", Key="there", Body=b"x")
    aws.set(missing_is_403=denies)
    assert s3.get_object(Bucket="batchml-some", Key="there")["Body"].read() == b"x"
    with pytest.raises(ClientError) as missing:
        s3.head_object(Bucket="batchml-some", Key="gone")
    status = missing.value.response["ResponseMetadata"]["HTTPStatusCode"]
    assert status == (403 if denies else 404)


def test_a_role_may_do_what_its_policies_allow(aws: MotoAws) -> None:
    iam, sts = aws.client("iam"), aws.client("sts")
    role = iam.create_role(RoleName="reader", AssumeRolePolicyDocument=json.dumps(ANYONE))["Role"]
    allowed = {"Effect": "Allow", "Action": "ec2:DescribeVpcs", "Resource": "*"}
    policy = {"Version": "2012-10-17", "Statement": [allowed]}
    iam.put_role_policy(RoleName="reader", PolicyName="p", PolicyDocument=json.dumps(policy))
    made = sts.assume_role(RoleArn=role["Arn"], RoleSessionName="ses")["Credentials"]
    keys = {
        "aws_access_key_id": made["AccessKeyId"], "aws_session_token": made["SessionToken"],
        "aws_secret_access_key": made["SecretAccessKey"],
    }  # fmt: skip
    ec2 = aws.client("ec2", **keys)
    assert ec2.describe_vpcs()["Vpcs"]
    with pytest.raises(ClientError, match="assumed-role/reader/ses is not authorized to perform"):
        ec2.describe_subnets()


# --- the judge ------------------------------------------------------------------------------------

DEFINITION = {
    "jobDefinitionName": "one",
    "tags": {"batchml:env": "dev"},
    "containerProperties": {"image": "x@sha256:1", "jobRoleArn": "arn:aws:iam::1:role/r"},
}


def test_a_definition_needs_its_roles_and_its_tags() -> None:
    needs = needs_of("batch", "RegisterJobDefinition", DEFINITION)
    assert [need.action for need in needs] == [
        "batch:RegisterJobDefinition", "batch:TagResource", "iam:PassRole",
    ]  # fmt: skip
    assert needs[0].context["batch:Image"] == ("x@sha256:1",)


def test_reading_an_object_of_an_environment_needs_its_key() -> None:
    request = {"Bucket": "batchml-dev-123456789012-us-east-1", "Key": "code/x"}
    needs = needs_of("s3", "GetObject", request)
    assert [need.action for need in needs] == ["s3:GetObject", "kms:Decrypt"]
    assert needs[1].context["kms:ResourceAliases"] == ("alias/batchml-dev-data",)


ALLOW = {"Effect": "Allow", "Action": "batch:*", "Resource": "*"}


@pytest.mark.parametrize(
    ("statement", "context", "allowed"),
    [
        (ALLOW, {}, True),
        ({**ALLOW, "Action": ["batch:Describe*"]}, {}, False),
        ({**ALLOW, "Resource": ["arn:aws:batch:*:*:job/1"]}, {}, False),
        ({**ALLOW, "Condition": {"StringEquals": {"k": "a"}}}, {"k": ("a",)}, True),
        ({**ALLOW, "Condition": {"StringEquals": {"k": "a"}}}, {}, False),
        ({**ALLOW, "Condition": {"StringEqualsIfExists": {"k": "a"}}}, {}, True),
        ({**ALLOW, "Condition": {"StringEqualsIfExists": {"k": "a"}}}, {"k": ("b",)}, False),
        ({**ALLOW, "Condition": {"StringLike": {"k": ["a*", "b"]}}}, {"k": ("ab",)}, True),
        ({**ALLOW, "Condition": {"Null": {"k": "false"}}}, {}, False),
        ({**ALLOW, "Condition": {"StringNotLike": {"k": "a*"}}}, {"k": ("ab",)}, False),
    ],
)
def test_a_statement_applies(
    statement: dict[str, Any], context: dict[str, tuple[str, ...]], allowed: bool
) -> None:
    need = Need("batch:SubmitJob", "arn:aws:batch:us-east-1:1:job/2", context)
    assert is_allowed([statement], need) == allowed


def test_an_explicit_deny_wins() -> None:
    need = Need("batch:SubmitJob", "*")
    assert not is_allowed([ALLOW, {**ALLOW, "Effect": "Deny"}], need)
