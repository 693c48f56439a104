"""A program begins at most once: what is committed before its start, and what follows a loss."""

from typing import Any

from batchml.local.batch import engine
from batchml.local.batch.events import (
    AttemptNeverBegan,
    AttemptPrepared,
    BeginAttempt,
    Effect,
    PrepareAttempt,
    SaveJob,
)
from batchml.local.batch.lifecycle import DID_NOT_START, STOPPED_EARLY, task_id_of
from batchml.local.batch.state import JobAttempt
from tests.support.engine_world import World, world


def attempt_of(w: World, job: str) -> JobAttempt:
    attempt = w.state.jobs[job].attempt
    assert attempt is not None
    return attempt


def prepared(w: World, job: str) -> list[Effect]:
    return w.apply(AttemptPrepared((attempt_of(w, job).task_id,), w.now))


def never_began(w: World, job: str) -> list[Effect]:
    return w.apply(AttemptNeverBegan(attempt_of(w, job).task_id, w.now))


def kinds(effects: list[Effect]) -> list[Any]:
    return [type(effect) for effect in effects]


def submitted() -> tuple[World, str]:
    w = world()
    return w, w.submit()


def test_what_is_prepared_is_committed_as_begun_and_then_begins() -> None:
    w, job = submitted()
    assert not attempt_of(w, job).may_have_begun
    effects = prepared(w, job)
    assert kinds(effects) == [SaveJob, BeginAttempt]
    assert attempt_of(w, job).may_have_begun
    assert prepared(w, job) == [], "once"


def test_what_was_stopped_meanwhile_does_not_begin() -> None:
    w, job = submitted()
    w.call("TerminateJob", jobId=job, reason="enough")
    assert BeginAttempt not in kinds(prepared(w, job))


def test_an_attempt_that_never_began_goes_on_in_its_place_under_another_task_id() -> None:
    w, job = submitted()
    prepared(w, job)
    before, used = attempt_of(w, job), w.state.used
    effects = never_began(w, job)
    assert kinds(effects) == [SaveJob, PrepareAttempt]
    after = attempt_of(w, job)
    assert (after.number, after.may_have_begun, w.state.used) == (before.number, False, used)
    assert after.task_id == task_id_of(job, 1, 2) != before.task_id
    assert w.state.by_task.get(before.task_id) is None
    assert w.apply(AttemptNeverBegan(before.task_id, w.now)) == [], "an old word"
    assert engine.restore(w.state).by_task.get(after.task_id) == job
    w.start(job)
    w.end(job)
    assert len(w.jobs[job].attempts) == 1


def test_an_attempt_that_never_began_and_is_to_stop_ends() -> None:
    w, job = submitted()
    prepared(w, job)
    w.call("TerminateJob", jobId=job, reason="enough")
    never_began(w, job)
    ended = w.jobs[job]
    assert (ended.status, ended.status_reason) == ("FAILED", "enough")
    (attempt,) = ended.attempts
    assert (attempt["statusReason"], attempt["container"]["reason"]) == (
        DID_NOT_START, STOPPED_EARLY,
    )  # fmt: skip


def test_a_retry_begins_anew() -> None:
    w, job = submitted()
    job = w.submit(retryStrategy={"attempts": 2})
    prepared(w, job)
    w.start(job)
    w.end(job, 1)
    assert attempt_of(w, job).number == 2
    assert not attempt_of(w, job).may_have_begun
