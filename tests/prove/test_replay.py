"""Recordings held against botocore's models and the embedded server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batchml.aws.recording import AWS
from batchml.clock import SystemClock
from batchml.prove.recording import (
    CallError,
    RecordedCall,
    Recording,
    make_header,
    read_recording,
)
from batchml.prove.replay import (
    EMBEDDED_SERVER,
    MODELS,
    ReplayResult,
    has_same_wording,
    render,
    replay,
    wording,
)

FOLDER = Path(__file__).parents[1] / "recorded"


def newest() -> Path:
    """The newest recording of the repository; those from an account before all others."""
    headers = {path: read_recording(path).header for path in FOLDER.glob("*.jsonl")}
    return max(headers, key=lambda path: (headers[path].made_by == AWS, headers[path].date))


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recording(newest())


def again(calls: list[RecordedCall]) -> ReplayResult:
    header = make_header(calls, AWS, "2026-11-28", "1")
    return replay(Recording(header, tuple(calls)), SystemClock())


def test_the_embedded_server_answers_like_the_newest_recording(recording: Recording) -> None:
    result = replay(recording, SystemClock())
    assert [*result.differences] == [], "\n".join(render(result))
    assert result.asked > 100
    operations = {call.operation for call in recording.calls}
    assert {"SubmitJob", "RegisterJobDefinition", "CreateJobQueue", "DeleteJobQueue", "ListJobs",
            "TerminateJob", "GetLogEvents", "DescribeJobs"} <= operations  # fmt: skip


def test_a_replay_says_the_same_each_time(recording: Recording) -> None:
    calls = [_without_reason(call) for call in recording.calls]
    assert again(calls).differences == again(calls).differences != ()


def _without_reason(call: RecordedCall) -> RecordedCall:
    answer = json.loads(json.dumps(call.answer))
    if call.operation == "DescribeJobs":
        for job in answer["jobs"]:
            job.pop("createdAt", None)
    return msgspec.structs.replace(call, answer=answer)


# --- Each kind of difference is found, and only it ------------------------------------------------

Change = Callable[[dict[str, Any]], object]


def of(operation: str, change: Change, recording: Recording) -> list[RecordedCall]:
    """The recording with one answer of an operation changed: the last with a body."""
    calls = list(recording.calls)
    at = max(
        number
        for number, call in enumerate(calls)
        if call.operation == operation and call.answer and _is_full(call.answer)
    )
    answer = json.loads(json.dumps(calls[at].answer))
    change(answer)
    calls[at] = msgspec.structs.replace(calls[at], answer=answer)
    return calls


def _is_full(answer: dict[str, Any]) -> bool:
    jobs = answer.get("jobs")
    return jobs is None or bool(
        jobs and jobs[0]["status"] == "SUCCEEDED" and "container" in jobs[0]
    )


@pytest.mark.parametrize(
    ("operation", "change", "against", "path"),
    [
        ("DescribeJobs", lambda a: a["jobs"][0].pop("platformCapabilities"), EMBEDDED_SERVER,
         "answer.jobs[].platformCapabilities"),
        ("DescribeJobs", lambda a: a["jobs"][0]["container"].update(ephemeralStorage={}),
         EMBEDDED_SERVER, "answer.jobs[].container.ephemeralStorage"),
        ("DescribeJobs", lambda a: a["jobs"][0]["container"].update(newMember=1), MODELS,
         "answer.jobs[].container.newMember"),
        ("DescribeJobs", lambda a: a["jobs"][0].update(isCancelled="no"), MODELS,
         "answer.jobs[].isCancelled"),
        ("DescribeJobs", lambda a: a["jobs"][0].update(status="FINISHED"), MODELS,
         "answer.jobs[].status"),
        ("DescribeJobs", lambda a: a["jobs"][0].pop("jobQueue"), MODELS, "answer.jobs[].jobQueue"),
        ("DescribeJobs", lambda a: a["jobs"][0].update(statusReason="Its program has ended"),
         EMBEDDED_SERVER, "answer.jobs[].statusReason"),
        ("DescribeJobs", lambda a: a["jobs"][0].update(jobName="another"), EMBEDDED_SERVER,
         "answer.jobs[].jobName"),
        ("DescribeJobs", lambda a: a["jobs"][0].update(status="RUNNING"), EMBEDDED_SERVER,
         "answer.jobs[].status"),
        ("DescribeJobs", lambda a: a["jobs"][0]["container"].update(exitCode=9), EMBEDDED_SERVER,
         "answer.jobs[].container.exitCode"),
        ("DescribeJobQueues", lambda a: a["jobQueues"][0].update(priority=77), EMBEDDED_SERVER,
         "answer.jobQueues[].priority"),
        ("DescribeJobQueues", lambda a: a["jobQueues"][0].update(state="DISABLED"), EMBEDDED_SERVER,
         "answer.jobQueues[].state"),
    ],
)  # fmt: skip
def test_a_changed_answer_is_found(
    operation: str, change: Change, against: str, path: str, recording: Recording
) -> None:
    result = again(of(operation, change, recording))
    found = {(each.operation, each.against, each.path) for each in result.differences}
    assert (f"batch:{operation}", against, path) in found
    assert {name for name, _, _ in found} == {f"batch:{operation}"}


def test_states_in_an_impossible_order_are_found(recording: Recording) -> None:
    looks: dict[str, list[int]] = {}
    for number, call in enumerate(recording.calls):
        if call.operation == "DescribeJobs" and len(call.answer["jobs"]) == 1:
            looks.setdefault(call.answer["jobs"][0]["jobId"], []).append(number)
    calls = list(recording.calls)
    first, last = next(
        (numbers[0], numbers[-1])
        for numbers in looks.values()
        if calls[numbers[-1]].answer["jobs"][0]["status"] == "SUCCEEDED"
        and calls[numbers[0]].answer["jobs"][0]["status"] != "SUCCEEDED"
    )
    calls.append(calls[first])
    assert first < last
    found = {(each.path, each.found) for each in again(calls).differences}
    assert ("states of a job", "never in this order") in found


def test_changed_errors_are_found_by_code_status_and_wording(recording: Recording) -> None:
    calls = list(recording.calls)
    at = next(number for number, call in enumerate(calls) if call.error is not None)
    error = CallError("ClientException", "This job definition is unknown to us.")
    calls[at] = msgspec.structs.replace(calls[at], error=error, status=404)
    found = [(each.path, each.found) for each in again(calls).differences]
    assert [path for path, _ in found] == ["error.message", "status"]
    assert found[1] == ("status", "400")
    calls[at] = msgspec.structs.replace(recording.calls[at], error=CallError("Odd", error.message))
    paths = {(each.against, each.path) for each in again(calls).differences}
    assert {(MODELS, "error.code"), (EMBEDDED_SERVER, "error.code")} <= paths


def test_what_a_request_may_not_have_is_found_in_every_service() -> None:
    calls = [
        RecordedCall("batchml setup", service, operation, "us-east-1", params, 200, answer)
        for service, operation, params, answer in (
            ("ec2", "DescribeVpcs", {"VpcId": ["vpc-1"]}, {"Vpcs": [{"State": "gone"}]}),
            ("iam", "GetRole", {}, {"Role": {"RoleName": "name-1"}}),
            ("batch", "MakeCoffee", {}, {}),
            ("nothing", "Do", {}, {}),
            ("s3", "PutObject", {"Bucket": "name-1", "Key": "k", "Body": {"bytes": 1}}, {}),
        )
    ]
    found = {(each.operation, each.path): each.found for each in again(calls).differences}
    assert found["ec2:DescribeVpcs", "request.VpcId"] == "is not a member of the shape"
    assert "enum" in found["ec2:DescribeVpcs", "answer.Vpcs[].State"]
    assert found["iam:GetRole", "request.RoleName"] == "must not be null"
    assert found["iam:GetRole", "answer.Role.Arn"] == "must not be null"
    assert found["batch:MakeCoffee", ""] == "no such operation"
    assert found["nothing:Do", ""].startswith("no such service")
    assert not any(operation == "s3:PutObject" for operation, _ in found)


def test_what_was_made_before_the_recording_is_not_asked() -> None:
    queue = "arn:aws:batch:eu-west-1:000000000001:job-queue/name-1"
    calls = [
        RecordedCall("batchml submit", "batch", "SubmitJob", "eu-west-1",
                     {"jobName": "name-2", "jobQueue": queue, "jobDefinition": "name-3:1"}, 200,
                     {"jobId": "j", "jobName": "name-2"}),
        RecordedCall("batchml ls", "batch", "ListJobs", "eu-west-1", {"jobQueue": "x"}, 0,
                     failure="ReadTimeoutError"),
        RecordedCall("batchml ls", "batch", "ListJobs", "eu-west-1", {"jobQueue": "x"}, 429,
                     error=CallError("TooManyRequestsException", "")),
    ]  # fmt: skip
    result = again(calls)
    assert result.asked == 0
    assert result.differences == ()
    assert sorted(result.not_asked) == [
        "its resource was made before the recording began",
        "no answer was recorded",
        "the call was throttled, or failed in the server",
    ]


@pytest.mark.parametrize(
    ("recorded", "found", "same"),
    [
        ("JobQueue name-1 not found", "JobQueue batchml-dev-1 not found", True),
        ("Host EC2 (instance i-00000000000000001) terminated.",
         "Host EC2 (instance i-0a1b2c3d4e5f60718) terminated.", True),
        ("JobQueue name-1 not found", "JobQueue name-1 does not exist", False),
        ("arn:aws:batch:us-east-1:000000000001:job/x is gone", "arn:aws:x is gone", True),
        ("", "Something", False),
    ],
)  # fmt: skip
def test_messages_are_compared_without_names(recorded: str, found: str, same: bool) -> None:
    assert has_same_wording(recorded, found) is same


def test_wording_keeps_the_words() -> None:
    assert wording("Job 'x' of name-3 ended after 12 s") == "Job * of * ended after * s"
