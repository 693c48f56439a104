"""Recordings of AWS calls: the lines that `CallRecorder` writes for real clients."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from batchml.aws.errors import call
from batchml.aws.recording import AWS, CallRecorder, RecordingFile, command_of, read_answer
from batchml.aws.session import Session
from batchml.errors import BatchmlError, UsageError
from batchml.local.server.protocol import service_model
from tests.support.fakes import FakeClock
from tests.support.wire import Refusal, Wire, keys

__all__ = ["keys"]

QUEUE = {
    "jobQueueName": "q",
    "jobQueueArn": "arn:aws:batch:us-east-1:123456789012:job-queue/q",
    "state": "ENABLED",
    "status": "VALID",
    "priority": 1,
    "computeEnvironmentOrder": [],
}


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def client_of(wire: Wire, service: str, path: Path) -> Any:
    client = wire.session().client(service)
    CallRecorder(str(path), is_local=False, clock=FakeClock(1_795_000_000.0)).watch(client)
    return client


@pytest.mark.usefixtures("keys")
def test_a_call_is_one_line_with_its_parameters_and_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    client = client_of(Wire({"DescribeJobQueues": {"jobQueues": [QUEUE]}}), "batch", path)
    call(client, "DescribeJobQueues", jobQueues=["q"])
    (line,) = recorded(path)
    assert line == {
        "time": 1_795_000_000.0,
        "seconds": 0.0,
        "process": line["process"],
        "command": "python",
        "server": AWS,
        "service": "batch",
        "operation": "DescribeJobQueues",
        "region": "us-east-1",
        "attempt": 1,
        "params": {"jobQueues": ["q"]},
        "status": 200,
        "answer": {"jobQueues": [QUEUE]},
        "error": None,
        "failure": "",
    }
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("keys")
def test_members_that_the_models_do_not_know_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    answer = {"jobQueues": [QUEUE | {"newMember": {"a": 1}}]}
    client = client_of(Wire({"DescribeJobQueues": answer}), "batch", path)
    assert "newMember" not in call(client, "DescribeJobQueues")["jobQueues"][0]
    assert recorded(path)[0]["answer"] == answer


@pytest.mark.usefixtures("keys")
def test_xml_is_recorded_by_the_names_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    subnet = {"SubnetId": "subnet-1", "AvailableIpAddressCount": 7, "MapPublicIpOnLaunch": False}
    answer = {"Subnets": [subnet | {"Tags": [{"Key": "k", "Value": "v"}]}]}
    client = client_of(Wire({"DescribeSubnets": answer}), "ec2", path)
    call(client, "DescribeSubnets", SubnetIds=["subnet-1"])
    assert recorded(path)[0]["answer"] == answer


def test_unknown_elements_and_flattened_lists_of_xml_are_kept() -> None:
    model = service_model("s3").operation_model("ListObjectsV2")
    body = b"""<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name>
        <KeyCount>2</KeyCount><Contents><Key>x</Key><Size>1</Size><New><A>1</A></New></Contents>
        <Contents><Key>y</Key><Size>2</Size></Contents><Newer/></ListBucketResult>"""
    assert read_answer(model, {"status_code": 200, "body": body}, {}) == {
        "Name": "b",
        "KeyCount": 2,
        "Contents": [{"Key": "x", "Size": 1, "New": {"A": "1"}}, {"Key": "y", "Size": 2}],
        "Newer": "",
    }


@pytest.mark.usefixtures("keys")
def test_a_refusal_is_recorded_with_its_code_and_status(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    client = client_of(Wire({"DescribeVpcs": Refusal("UnauthorizedOperation", "No.")}), "ec2", path)
    with pytest.raises(BatchmlError):
        call(client, "DescribeVpcs")
    (line,) = recorded(path)
    assert line["status"] == 403
    assert line["error"] == {"code": "UnauthorizedOperation", "message": "No."}


@pytest.mark.usefixtures("keys")
def test_secrets_are_never_written(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    credentials = {"AccessKeyId": "ASIAXXXXXXXXXXXXXXXX", "SecretAccessKey": "hidden-one",
                   "SessionToken": "hidden-two", "Expiration": "2026-11-18T10:00:00Z"}  # fmt: skip
    wire = Wire(
        {
            "AssumeRole": {"Credentials": credentials},
            "GetAuthorizationToken": {"authorizationData": [{"authorizationToken": "hidden-3"}]},
            "StartSession": {"SessionId": "s", "TokenValue": "hidden-4", "StreamUrl": "wss://x"},
            "GetParameter": {"Parameter": {"Name": "n", "Value": "hidden-5"}},
        }
    )
    role = {"RoleArn": "arn:aws:iam::123456789012:role/r", "RoleSessionName": "ss"}
    call(client_of(wire, "sts", path), "AssumeRole", **role)
    call(client_of(wire, "ecr", path), "GetAuthorizationToken")
    ssm = client_of(wire, "ssm", path)
    call(ssm, "StartSession", Target="i-0123456789abcdef0")
    call(ssm, "GetParameter", Name="n")
    assert len(recorded(path)) == 4
    text = path.read_text()
    assert "hidden" not in text
    assert "secret" not in text  # the key that signs
    assert "Signature" not in text


@pytest.mark.usefixtures("keys")
def test_of_an_object_only_size_and_hash_are_written(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    failure = EndpointConnectionError(endpoint_url="https://bucket")
    client = client_of(Wire({"PutObject": failure}), "s3", path)
    with pytest.raises(BatchmlError):
        call(client, "PutObject", Bucket="bucket", Key="k", Body=b"content")
    lines = recorded(path)
    assert [line["attempt"] for line in lines] == [1]
    assert lines[0]["params"]["Body"]["bytes"] == 7
    assert len(lines[0]["params"]["Body"]["sha256"]) == 64
    assert lines[0]["status"] == 0
    assert "Could not connect" in lines[0]["failure"]


@pytest.mark.usefixtures("keys")
def test_the_variable_makes_every_client_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls"
    monkeypatch.setenv("BATCHML_RECORDING", str(path))
    wire = Wire({"DescribeJobQueues": {"jobQueues": []}, "DescribeVpcs": {"Vpcs": []}})
    session = wire.session()
    for service, operation in (("batch", "DescribeJobQueues"), ("ec2", "DescribeVpcs")):
        call(session.client(service), operation)
    assert [line["operation"] for line in recorded(path)] == [*wire.operations]


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize("kind", ["folder", "missing folder", "open to others", "a pipe"])
def test_a_file_that_cannot_be_used_is_refused_before_any_call(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls"
    if kind == "folder":
        path.mkdir()
    elif kind == "missing folder":
        path = path / "calls"
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.touch(0o644)
        path.chmod(0o644)
    monkeypatch.setenv("BATCHML_RECORDING", str(path))
    wire = Wire({})
    with pytest.raises(UsageError, match="BATCHML_RECORDING="):
        Session.client(wire.session(), "batch")
    assert wire.calls == []


def test_a_line_that_was_cut_off_does_not_damage_the_next(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    file = RecordingFile(str(path))
    file.append({"a": 1})
    path.write_bytes(path.read_bytes() + b'{"b": "cut o')
    file.append({"c": 3})
    assert path.read_text() == '{"a":1}\n{"b": "cut o\n{"c":3}\n'


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/usr/bin/batchml", "submit", "--wait", "lenet"], "batchml submit"),
        (["/x/batchml/__main__.py", "queue", "list", "--json"], "batchml queue list"),
        (["batchml", "sweeps", "top-up", "name"], "batchml sweeps top-up"),
        (["batchml", "sweeps", "attend", "name"], "batchml sweeps attend"),
        (["batchml", "submit", "secret-name"], "batchml submit"),
        (["batchml", "--json"], "batchml"),
        (["train.py", "submit"], "python"),
        ([], "python"),
    ],
)
def test_a_command_is_named_without_its_arguments(arguments: list[str], command: str) -> None:
    assert command_of(arguments) == command
