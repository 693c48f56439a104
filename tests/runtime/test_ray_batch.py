"""What a Ray gang asks AWS Batch, and what it reads from its answers."""

import json
from typing import Any

import pytest

from batchml.runtime.nodes.ray.batch_api import (
    ATTEMPTS,
    HEAD_JOB,
    BatchApi,
    attempts_of,
    is_head_over,
    is_last,
    unfinished,
)
from batchml.runtime.storage.store import StoreError

KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret"}
ELSEWHERE = {"action": "RETRY", "onExitCode": "75"}
NEVER = {"action": "EXIT", "onExitCode": "*"}
HOST = {"action": "RETRY", "onStatusReason": "Host EC2*"}


class Wire:
    """A wire to Batch that answers with what it is given."""

    def __init__(self, answer: Any = None, error: OSError | None = None) -> None:
        self.answer, self.error, self.sent = answer, error, list[tuple[str, Any, str]]()

    def __call__(self, url: str, headers: dict[str, str], body: bytes, timeout: float) -> bytes:
        self.sent.append((url, json.loads(body), headers["authorization"]))
        if self.error:
            raise self.error
        return json.dumps(self.answer).encode()


def batch(wire: Wire, **environ: str) -> BatchApi:
    return BatchApi({**KEYS, **environ}, lambda: 1_800_000_000.0, wire)


def test_the_region_comes_from_the_name_of_the_bucket() -> None:
    wire = Wire({"jobs": [{"jobId": "j"}]})
    found = batch(wire, BATCHML_GANG="s3://batchml-123456789012-eu-west-1/runs/k").describe("j")
    assert found == {"jobId": "j"}
    url, body, authorization = wire.sent[0]
    assert (url, body) == (
        "https://batch.eu-west-1.amazonaws.com/v1/describejobs", {"jobs": ["j"]},
    )  # fmt: skip
    assert "/eu-west-1/batch/aws4_request," in authorization
    assert "SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date" in authorization


def test_on_this_machine_the_embedded_server_is_called() -> None:
    """Also for a job with keys of its own to another account."""
    wire = Wire({})
    ours = {"BATCHML_ENDPOINT_URL": "http://127.0.0.1:9", "BATCHML_ACCESS_KEY_ID": "OURS"}
    batch(wire, **ours, BATCHML_SECRET_ACCESS_KEY="s", AWS_SESSION_TOKEN="t").terminate("j", "why")
    url, body, authorization = wire.sent[0]
    assert url == "http://127.0.0.1:9/v1/terminatejob"
    assert body == {"jobId": "j", "reason": "why"}
    assert "Credential=OURS/" in authorization


def test_jobs_are_found_by_their_whole_name() -> None:
    wire = Wire({"jobSummaryList": [{"jobId": "a"}]})
    assert batch(wire).list_by_name("q", "x-cpu-k") == [{"jobId": "a"}]
    assert wire.sent[0][1]["filters"] == [{"name": "JOB_NAME", "values": ["x-cpu-k"]}]


def test_every_failed_call_is_a_store_error() -> None:
    for wire in (Wire(error=ConnectionRefusedError(111, "refused")), Wire("no object")):
        if wire.error:
            with pytest.raises(StoreError, match=r"AWS Batch, describejobs: .*refused"):
                batch(wire).describe("j")
        else:
            assert batch(wire).describe("j") is None


def test_only_jobs_that_have_not_ended_are_terminated() -> None:
    jobs = [{"jobId": state, "status": state} for state in ("RUNNABLE", "RUNNING", "FAILED")]
    assert unfinished([*jobs, {"jobId": "d", "status": "SUCCEEDED"}]) == ["RUNNABLE", "RUNNING"]


@pytest.mark.parametrize(
    ("code", "attempt", "rules", "last"),
    [
        (0, 1, [ELSEWHERE, NEVER], True),
        (75, 1, [ELSEWHERE, NEVER], False),
        (75, 3, [ELSEWHERE, NEVER], True),  # the last attempt
        (1, 1, [HOST, ELSEWHERE, NEVER], True),  # the host is there, so that rule does not match
        (1, 1, [HOST, ELSEWHERE], False),  # what no rule matches is tried again
        (76, 1, [{"action": "EXIT", "onExitCode": "7*"}], True),
        (1, 1, [{"action": "EXIT", "onStatusReason": "Essential container*"}], True),
    ],
)
def test_whether_aws_batch_starts_a_head_again(
    code: int, attempt: int, rules: list[dict[str, str]], last: bool
) -> None:
    job = {"retryStrategy": {"attempts": 3, "evaluateOnExit": rules}}
    assert is_last(job, attempt, code) is last


def test_a_stop_is_final_if_a_user_requested_it() -> None:
    job: dict[str, Any] = {"retryStrategy": {"attempts": 3, "evaluateOnExit": [NEVER]}}
    assert not is_last(job, 1, None)
    assert is_last({**job, "isTerminated": True}, 1, None)
    assert is_last({}, 1, None)  # of one attempt


def test_without_a_job_only_a_lost_host_leads_to_another_attempt() -> None:
    codes = (0, 1, 75, None)
    assert [is_last(None, 1, code) for code in codes] == [True, True, False, False]
    assert [is_last(None, 2, code, attempts=3) for code in codes] == [True, True, False, False]
    assert all(is_last(None, 3, code, attempts=3) for code in codes)


@pytest.mark.parametrize(("status", "over"), [("RUNNABLE", False), ("FAILED", True), ("", False)])
def test_workers_learn_that_a_head_ended_which_they_never_found(status: str, over: bool) -> None:
    """By its job: an image that cannot be fetched ends a head that never said a word."""
    jobs = [{"jobId": "j", "status": status}] if status else []
    wire = Wire({"jobSummaryList": jobs, "jobs": jobs})
    assert is_head_over(batch(wire), {HEAD_JOB: "gpu/x-k"}, "") is over
    assert is_head_over(batch(wire), {}, "j") is over
    assert [url.rpartition("/")[2] for url, *_ in wire.sent] == ["listjobs", "describejobs"]
    assert not is_head_over(batch(wire), {}, "")  # nobody has said which it is


def test_the_number_of_attempts_of_a_head_may_be_unknown() -> None:
    assert [attempts_of({ATTEMPTS: text}) for text in ("3", "", "many")] == [3, 0, 0]
    assert attempts_of({}) == 0
