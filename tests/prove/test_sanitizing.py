"""Nothing of an account's owner is left in sanitized calls."""

import json
from base64 import b64encode, urlsafe_b64encode
from typing import Any
from urllib.parse import quote, quote_plus

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.local.server.protocol import problems, service_model
from batchml.prove.recording import CallError, RecordedCall
from batchml.prove.sanitizing import sanitize

HEX = "0123456789abcdef"


def words(prefix: str, alphabet: str, size: int) -> st.SearchStrategy[str]:
    """Texts that occur nowhere by chance."""
    return st.text(alphabet, min_size=size, max_size=size).map(lambda text: prefix + text)


NAMES = words("zq", "abcdefghijklmnopqrstuvwxyz0123456789-_", 8).map(lambda text: f"{text}k")
# Values of variables, tags and commands may be anything.
ANYTHING = st.text(min_size=5, max_size=20).map(lambda text: f"zqj{text}jqz")


class Owner(msgspec.Struct, frozen=True):
    """What says whose account it is."""

    account: str
    role: str
    queue: str
    user: str
    key: str
    token: str
    bucket: str
    host: str
    instance: str
    subnet: str
    role_id: str
    address: str
    job: str
    digest: str
    value: str
    tag: str
    line: str

    @property
    def secrets(self) -> list[str]:
        return [str(each) for each in msgspec.structs.astuple(self)]


OWNERS = st.builds(
    Owner,
    account=words("7", "0123456789", 11),
    role=NAMES,
    queue=NAMES,
    user=NAMES,
    key=words("AKIA", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 16),
    token=words("IQoJb3", "abcdefghijkXYZ0123456789+/", 40),
    bucket=NAMES,
    host=NAMES.map(lambda name: f"{name}.example.org"),
    instance=words("i-0", HEX, 16),
    subnet=words("subnet-0", HEX, 16),
    role_id=words("AROA", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", 17),
    address=st.integers(10, 99).map(lambda number: f"172.{number}.201.{number}"),
    job=st.uuids(version=4).map(str),
    digest=words("f0", HEX, 62),
    value=ANYTHING,
    tag=ANYTHING,
    line=ANYTHING,
)


def conversation(owner: Owner) -> list[RecordedCall]:
    """Calls with each secret in many places: also in texts inside texts, and encoded."""
    arn = f"arn:aws:batch:us-east-1:{owner.account}:job-queue/{owner.queue}"
    role = f"arn:aws:iam::{owner.account}:role/path/{owner.role}"
    caller = f"arn:aws:sts::{owner.account}:assumed-role/{owner.role}/{owner.user}@{owner.host}"
    image = f"{owner.account}.dkr.ecr.us-east-1.amazonaws.com/{owner.role}@sha256:{owner.digest}"
    condition = {"x": json.dumps({"a": owner.user})}
    policy = json.dumps({"Statement": [{"Resource": [role, f"{arn}/*"], "Condition": condition}]})
    encoded = [
        form
        for text in owner.secrets
        for form in (
            b64encode(text.encode()).decode(), urlsafe_b64encode(text.encode()).decode(),
            quote(text, safe=""), quote_plus(text),
        )
    ]  # fmt: skip
    denial = (
        f"User: {caller} is not authorized to perform: batch:SubmitJob on resource: {arn} because "
        f"no identity-based policy allows the batch:SubmitJob action. Ask {owner.user}, "
        f"{owner.instance} ({owner.address}), '{owner.queue}' in \"{owner.bucket}\"; "
        f"{' '.join(encoded)} {owner.token}"
    )
    submit: dict[str, Any] = {
        "jobName": owner.user,
        "jobQueue": arn,
        "jobDefinition": f"{owner.role}:3",
        "parameters": {owner.user: owner.value},
        "containerOverrides": {
            "command": ["python", owner.value, f"--host={owner.host}", f"Ref::{owner.user}"],
            "environment": [{"name": owner.role, "value": owner.value},
                            {"name": "BATCHML_KEY", "value": owner.tag}],
        },
        "tags": {"batchml:key": owner.tag, owner.user: owner.tag},
    }  # fmt: skip
    job = {
        "jobId": owner.job,
        "jobName": owner.user,
        "jobQueue": arn,
        "jobDefinition": f"arn:aws:batch:us-east-1:{owner.account}:job-definition/{owner.role}:3",
        "status": "FAILED",
        "statusReason": f"Host EC2 (instance {owner.instance}) terminated.",
        "startedAt": 1795862229696,
        "container": {
            "image": image,
            "reason": f"CannotPullContainerError: {image} for {owner.user}",
            "jobRoleArn": role,
            "logStreamName": f"{owner.role}/default/{owner.digest[:32]}",
            "networkInterfaces": [{"privateIpv4Address": owner.address}],
            "newMember": {"of": owner.host, "list": [owner.bucket, policy], owner.user: 1},
        },
        "tags": {owner.user: owner.tag},
    }

    def call(service: str, operation: str, params: Any, answer: Any, **more: Any) -> RecordedCall:
        return RecordedCall(
            "batchml submit", service, operation, "us-east-1", params,
            **{"status": 200} | more, answer=answer,
        )  # fmt: skip

    error = {
        "error": CallError("AccessDeniedException", denial),
        "status": 403,
    }
    refusal = {"__type": "AccessDeniedException", "message": denial, "more": policy}
    keys = {"AccessKeyId": owner.key, "SecretAccessKey": "REDACTED", "SessionToken": "REDACTED"}
    return [
        call("batch", "SubmitJob", submit, {"jobId": owner.job, "jobName": owner.user}),
        call("batch", "DescribeJobs", {"jobs": [owner.job, f"{owner.job}:0"]}, {"jobs": [job]}),
        call("batch", "SubmitJob", submit, refusal, **error),
        call("batch", "ListJobs", {"jobQueue": owner.queue, "nextToken": owner.token,
                                   "filters": [{"name": "JOB_NAME", "values": [owner.user]}]},
             {"jobSummaryList": [], "nextToken": encoded[0]}),
        call("logs", "GetLogEvents", {"logGroupName": owner.bucket, "logStreamName": owner.role},
             {"events": [{"timestamp": 1, "message": f"{owner.line} {owner.key}"}]}),
        call("iam", "GetRole", {"RoleName": owner.role},
             {"Role": {"Arn": role, "RoleId": owner.role_id, "CreateDate": "2026-11-28T11:00:38.5Z",
                       "AssumeRolePolicyDocument": policy,
                       "AssumeRolePolicyDocument2": quote(policy), "Tags":
                       [{"Key": owner.user, "Value": owner.tag}]}}),
        call("sts", "AssumeRole", {"RoleArn": role, "RoleSessionName": owner.user},
             {"Credentials": keys, "AssumedRoleUser": {"Arn": caller}}),
        call("s3", "PutObject", {"Bucket": owner.bucket, "Key": f"a/{owner.user}/{owner.digest}",
                                 "Body": {"bytes": 7, "sha256": owner.digest},
                                 "Metadata": {owner.user: owner.value}}, {"ETag": owner.digest}),
        call("cloudformation", "CreateStack",
             {"StackName": owner.queue, "TemplateBody": f"Role: {role}\n" * 3, "Parameters":
              [{"ParameterKey": "Subnet", "ParameterValue": f"{owner.subnet},{owner.user}"}]},
             None, status=0, failure=f"EndpointConnectionError: https://{owner.host}/{arn}"),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(OWNERS)
def test_no_original_is_left_in_any_form(owner: Owner) -> None:
    found = sanitize(conversation(owner))
    text = json.dumps(msgspec.to_builtins(found), ensure_ascii=False)
    escaped = json.dumps(msgspec.to_builtins(found))
    for original in owner.secrets:
        forms = {
            original, b64encode(original.encode()).decode().rstrip("="),
            urlsafe_b64encode(original.encode()).decode().rstrip("="), quote(original, safe=""),
            quote_plus(original), json.dumps(original)[1:-1],
        }  # fmt: skip
        for form in forms:
            assert form not in text, form
            assert form not in escaped, form


OWNER = Owner(
    "712345678901", "zq-role", "zq-queue", "zquser", "AKIAABCDEFGHIJKLMNOP", "IQoJb3zq/+abc",
    "zq-bucket", "zq.example.org", "i-0123456789abcdef0", "subnet-0123456789abcdef0",
    "AROAABCDEFGHIJKLMNOPQ", "172.31.5.6", "8a1bdcf0-5b1c-4dbb-9c8f-1c4b2b8e8f00", "f0" * 32,
    "zq value", "zq tag", "zq line",
)  # fmt: skip


def test_the_same_text_gets_the_same_replacement_wherever_it_is() -> None:
    submit, describe, denied, listed, *_ = sanitize(conversation(OWNER))
    (job,) = describe.answer["jobs"]
    assert submit.answer["jobId"] == job["jobId"] == describe.params["jobs"][0]
    assert describe.params["jobs"][1] == f"{job['jobId']}:0"
    assert submit.params["jobQueue"] == job["jobQueue"]
    assert job["jobQueue"].rpartition("/")[2] == listed.params["jobQueue"]
    assert job["jobDefinition"].rpartition("/")[2] == submit.params["jobDefinition"]
    assert job["jobDefinition"].endswith(":3")
    assert submit.params["parameters"].keys() == {submit.params["jobName"]}
    assert submit.params["containerOverrides"]["command"][3] == f"Ref::{submit.params['jobName']}"
    assert denied.error is not None
    assert str(denied.error.message).startswith(
        "User: arn:aws:sts::000000000001:assumed-role/name-"
    )


def test_the_words_of_aws_stay() -> None:
    _, describe, denied, listed, *_ = sanitize(conversation(OWNER))
    (job,) = describe.answer["jobs"]
    assert job["status"] == "FAILED"
    assert job["startedAt"] == 1795862229696
    assert job["statusReason"] == "Host EC2 (instance i-00000000000000001) terminated."
    assert job["container"]["reason"].startswith("CannotPullContainerError: 000000000001.dkr.ecr.")
    assert {"of", "list", job["jobName"]} == {*job["container"]["newMember"]}
    assert denied.error is not None
    assert denied.error.code == "AccessDeniedException"
    message = str(denied.error.message)
    assert "is not authorized to perform: batch:SubmitJob on resource: arn:aws:batch:" in message
    assert "because no identity-based policy allows the batch:SubmitJob action." in message
    assert listed.params["filters"][0]["name"] == "JOB_NAME"


def test_sanitized_calls_still_satisfy_the_models() -> None:
    for call in sanitize(conversation(OWNER)):
        shape = service_model(call.service).operation_model(call.operation).input_shape
        assert [*problems(shape, call.params, strict=True)] == []
