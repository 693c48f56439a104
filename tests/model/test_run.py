"""When a run started, how long it ran, and how long it waited."""

import pytest

from batchml.aws.batch.responses import to_run
from batchml.cli.status_line import add_state
from batchml.cost.bill import free_bill
from batchml.model.run import Attempt, JobStatus, Run, RunTimes, first_start, times_of

ID = "6b0e1234-1111-4111-8111-111111111111"
S = 1000  # ms


def run(status: str, **more: object) -> Run:
    return Run(ID, "n", "q", JobStatus(status), **more)  # type: ignore[arg-type]


# Submitted at 10 s, tried from 12 to 15 s and from 20 to 24 s.
TWICE = (Attempt(12 * S, 15 * S, 1), Attempt(20 * S, 24 * S, 0))
RETRIED = run("SUCCEEDED", created_at=10 * S, started_at=20 * S, stopped_at=24 * S, attempts=TWICE)


def test_a_run_began_with_its_first_attempt() -> None:
    assert first_start(None) is None
    assert first_start(run("RUNNABLE")) is None
    assert first_start(run("RUNNING", started_at=9, attempts=(Attempt(started_at=4),))) == 4


@pytest.mark.parametrize(
    ("known", "times"),
    [
        (RETRIED, RunTimes(12 * S, 7.0, 7.0)),
        (run("RUNNABLE", created_at=10 * S), RunTimes(None, None, 20.0)),
        (run("RUNNABLE", created_at=10 * S, attempts=TWICE[:1]), RunTimes(12 * S, 3.0, 17.0)),
        (
            run("RUNNING", created_at=10 * S, started_at=25 * S,
                attempts=(TWICE[0], Attempt(25 * S))),
            RunTimes(12 * S, 8.0, 12.0),
        ),
        (  # its host was lost while it started
            run("FAILED", created_at=10 * S, stopped_at=16 * S, attempts=(Attempt(),)),
            RunTimes(None, None, 6.0),
        ),
        (  # of ListJobs, which has no attempts
            run("SUCCEEDED", created_at=10 * S, started_at=11 * S, stopped_at=14 * S),
            RunTimes(11 * S, 3.0, 1.0),
        ),
        (  # an array, with the start of its first child
            run("PENDING", created_at=10 * S, started_at=11 * S, children={"RUNNING": 2}),
            RunTimes(11 * S, 19.0, 1.0),
        ),
        (  # an array whose children AWS Batch has forgotten
            run("SUCCEEDED", created_at=10 * S, stopped_at=14 * S, children={"SUCCEEDED": 2}),
            RunTimes(None, None, None),
        ),
        (run("RUNNABLE"), RunTimes(None, None, None)),
    ],
)  # fmt: skip
def test_a_run_runs_in_its_attempts_and_waits_in_the_rest_of_its_time(
    known: Run, times: RunTimes
) -> None:
    assert times_of(known, now_ms=30 * S) == times


def test_a_bill_counts_the_same_seconds() -> None:
    for known in (RETRIED, run("RUNNING", created_at=10 * S, attempts=(Attempt(12 * S),))):
        bill = free_bill(known, "this machine", 30 * S)
        assert bill.seconds == times_of(known, 30 * S).ran


def test_a_status_line_that_begins_in_a_later_attempt_does_not_count_computing_as_waiting() -> None:
    again = run(
        "RUNNING", created_at=10 * S, started_at=20 * S, attempts=(TWICE[0], Attempt(20 * S))
    )
    # It ran for 3 + 10 s of the 20 s since its submission.
    assert add_state((), again, 30.0, 100.0) == (("waited", 80.0), ("RUNNING", 87.0))


def test_an_attempt_that_is_being_started_has_not_the_start_of_the_one_before() -> None:
    attempt = {"startedAt": 12 * S, "stoppedAt": 15 * S, "container": {"logStreamName": "a"}}
    detail = {
        "jobId": ID, "jobName": "n", "jobQueue": "q", "status": "STARTING", "createdAt": 10 * S,
        "startedAt": 12 * S, "attempts": [attempt], "container": {"logStreamName": "b"},
    }  # fmt: skip
    assert times_of(to_run(detail), now_ms=30 * S) == RunTimes(12 * S, 3.0, 17.0)
