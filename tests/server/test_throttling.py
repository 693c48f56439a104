"""Requests refused by fault injection, as AWS refuses those above its rate limit: B208, B209."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.local.batch.fault_injection import Chaos
from batchml.local.server.protocol import HttpRequest
from tests.server.test_idempotency import OTHER, call, job_id
from tests.support.server_rig import Rig, error_of, furnish, sign, sign_logs

ALL = Chaos(throttle=1.0, seed=1)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    furnish(made.client("batch"))
    yield made
    made.close()


def throttle(rig: Rig, asked: Chaos | None) -> None:
    rig.core.state = replace(rig.core.state, chaos=asked)


def test_each_service_says_it_in_its_own_way(rig: Rig) -> None:
    throttle(rig, ALL)
    batch, logs, sts = rig.handle(
        sign(), sign_logs("DescribeLogGroups", b"{}"), _identity_request()
    )
    assert (batch.status, *error_of(batch)) == (
        429, "TooManyRequestsException", "Too Many Requests",
    )  # fmt: skip
    assert (logs.status, *error_of(logs)) == (400, "ThrottlingException", "Rate exceeded")
    assert sts.status == 200


def _identity_request() -> HttpRequest:
    body = b"Action=GetCallerIdentity&Version=2011-06-15"
    return sign(
        "/", body, service="sts", headers={"content-type": "application/x-www-form-urlencoded"}
    )


def test_who_is_not_let_in_learns_nothing_of_it(rig: Rig) -> None:
    throttle(rig, ALL)
    forged = replace(sign(), body=b'{"maxResults": 1}')
    (answer,) = rig.handle(forged)
    assert answer.status == 403


def test_what_is_refused_is_not_done(rig: Rig) -> None:
    throttle(rig, ALL)
    assert [answer.status for answer in rig.handle(call(), call(), call(invocation="two"))] == [
        429, 429, 429,
    ]  # fmt: skip
    assert not rig.core.state.jobs
    throttle(rig, None)
    assert job_id(rig.handle(call())[0]) in rig.core.state.jobs, "the same call, sent again"


def test_what_was_done_is_answered_when_it_is_sent_again(rig: Rig) -> None:
    """Else its sender, told that nothing was done, would do it once more."""
    first = job_id(rig.handle(call())[0])
    unnamed = call(OTHER, "")
    second = rig.handle(unnamed)[0]
    throttle(rig, ALL)
    assert job_id(rig.handle(call())[0]) == first
    assert rig.handle(unnamed)[0].body == second.body


def test_a_part_means_that_part(rig: Rig) -> None:
    throttle(rig, Chaos(throttle=0.25, seed=7))
    answers = rig.handle(*(call(invocation=f"call {number}") for number in range(200)))
    refused = [answer for answer in answers if answer.status == 429]
    assert 25 < len(refused) < 75
    done = {json.loads(answer.body)["jobId"] for answer in answers if answer not in refused}
    assert done == set(rig.core.state.jobs)
