"""The time axis of a run."""

from batchml.dashboard.timeline import draw_timeline, marks_of, spans_of
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.metrics.usage import Restart, UnfitNotice

S = 1000


def run(status: str, *attempts: Attempt, stopped: int | None = None) -> Run:
    return Run("a", "lenet", "gpu", JobStatus(status), created_at=10 * S, attempts=attempts,
               stopped_at=stopped)  # fmt: skip


def told(found: Run, now: int = 100 * S) -> list[tuple[str, str, int, int, bool]]:
    return [
        (each.name, each.state, each.since // S, each.until // S, each.is_open)
        for each in spans_of(found, now)
    ]


def test_a_run_that_waits_is_in_its_present_state_since_its_submission() -> None:
    assert told(run("RUNNABLE")) == [("RUNNABLE", "waiting", 10, 100, True)]
    assert told(run("STARTING")) == [("STARTING", "starting", 10, 100, True)]


def test_a_run_that_runs() -> None:
    found = told(run("RUNNING", Attempt(started_at=30 * S)))
    assert found == [("Waiting", "waiting", 10, 30, False), ("Running", "running", 30, 100, True)]


def test_attempts_and_the_times_between_them() -> None:
    attempts = (Attempt(20 * S, 40 * S, exit_code=1), Attempt(60 * S, 90 * S, exit_code=0))
    assert told(run("SUCCEEDED", *attempts, stopped=90 * S)) == [
        ("Waiting", "waiting", 10, 20, False),
        ("Attempt 1", "failed", 20, 40, False),
        ("Waiting", "waiting", 40, 60, False),
        ("Attempt 2", "succeeded", 60, 90, False),
    ]
    again = told(run("RUNNABLE", attempts[0]))
    assert again[-1] == ("RUNNABLE", "waiting", 40, 100, True)


def test_a_run_that_never_started() -> None:
    found = told(run("FAILED", stopped=15 * S))
    assert found == [("Never started", "waiting", 10, 15, False)]


def test_marks_are_in_the_picture_and_in_a_table_and_their_texts_stay_texts() -> None:
    spans = spans_of(run("RUNNING", Attempt(started_at=30 * S)), 100 * S)
    marks = marks_of([Restart(80 * S, "<b>rank 3 ended</b>")],
                     [UnfitNotice(50 * S, "i-0abc", "GPU 1 fell off the bus")])  # fmt: skip
    assert [each.kind for each in marks] == ["unfit host", "restart"]
    made = str(draw_timeline(spans, marks))
    assert made.count("<circle") == 2 and "&lt;b&gt;rank 3" in made and "<b>" not in made
    assert made.count('class="span ') == 2 and "so far" in made and "style=" not in made


def test_a_span_of_no_time_can_be_seen_and_stays_in_the_picture() -> None:
    attempt = Attempt(10 * S, 10 * S, exit_code=0)
    made = str(draw_timeline(spans_of(run("SUCCEEDED", attempt, stopped=10 * S), 0), []))
    assert 'width="0.400%"' in made
