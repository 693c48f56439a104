"""Arrays and their dependencies, `engine.step`: docs/behaviours.md B120-B133."""

from pathlib import Path
from time import process_time
from typing import Any

import pytest

from batchml.local.batch.engine import restore, tasks_to_stop
from batchml.local.batch.events import AttemptExit, SaveSpec
from batchml.model.run import JobStatus
from tests.support.engine_world import (
    SEQUENTIAL,
    World,
    children,
    consuming,
    indexes,
    order_of,
    pairs,
    stored,
    world,
)


def journalled(folder: Path, vcpus: int = 4) -> World:
    return world(vcpus, journal=folder / "journal.db")


# --- what an array is -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [-1, 0, 1, 10_001])
def test_an_array_has_2_to_10_000_children(size: int) -> None:
    """B120."""
    w = world()
    asked = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
    text = w.refusal("SubmitJob", **asked, arrayProperties={"size": size})
    assert "between 2 and 10000" in text


def test_a_child_is_a_job_with_an_index_and_all_share_what_was_submitted() -> None:
    """B120."""
    w = world(vcpus=2)
    w.count = 40
    made = w.call("SubmitJob", jobName="n", jobQueue="q", jobDefinition="d",
                  arrayProperties={"size": 3}, tags={"k": "v"})  # fmt: skip
    assert (made["jobId"], sorted(w.jobs)) == ("j41", ["j41", *children("j41", 0, 1, 2)])
    found = [w.jobs[job_id] for job_id in children("j41", 0, 1, 2)]
    assert [job.index for job in found] == [0, 1, 2]
    assert {id(job.spec) for job in found} == {id(w.jobs["j41"].spec)}
    assert [job.tags for job in found] == [{"k": "v"}] * 3
    assert found[1].arn == "arn:aws:batch:us-east-1:000000000000:job/j41:1"


def test_what_an_array_was_submitted_with_is_kept_once() -> None:
    w = world()
    effects = w.apply(
        w._request(
            "SubmitJob",
            {"jobName": "n", "jobQueue": "q", "jobDefinition": "d", "arrayProperties": {"size": 9}},
            "x",
        )
    )
    assert len([effect for effect in effects if isinstance(effect, SaveSpec)]) == 1


def test_an_array_is_pending_while_its_children_run(tmp_path: Path) -> None:
    """B121: and its summary says at all times how many children are in which state."""
    w = journalled(tmp_path, vcpus=1)
    a = w.array(3)
    zero, one, two = children(a, 0, 1, 2)
    assert (w.status(a), w.counts(a)) == (["PENDING"], {"STARTING": 1, "RUNNABLE": 2})
    w.start(zero)
    assert (w.status(a), w.counts(a)) == (["PENDING"], {"RUNNING": 1, "RUNNABLE": 2})
    w.end(zero)
    assert w.counts(a) == {"SUCCEEDED": 1, "STARTING": 1, "RUNNABLE": 1}
    w.restart()
    assert w.counts(a) == {"SUCCEEDED": 1, "STARTING": 1, "RUNNABLE": 1}
    w.end(one)
    w.now += 5
    w.end(two)
    assert (w.status(a), w.counts(a)) == (["SUCCEEDED"], {"SUCCEEDED": 3})
    assert (w.jobs[a].status_reason, w.jobs[a].stopped_at) == ("", w.now)
    assert w.history[a] == ["PENDING", "SUCCEEDED"]
    assert w.history[one] == ["PENDING", "RUNNABLE", "STARTING", "SUCCEEDED"]
    assert not w.state.jobs
    assert not w.state.counts
    w.restart()
    shown = w.described(a)["arrayProperties"]
    assert (shown["size"], shown["statusSummary"]["SUCCEEDED"]) == (3, 3)
    assert set(shown["statusSummary"]) == set(JobStatus)
    assert w.described(one)["arrayProperties"] == {"index": 1}


def test_one_failed_child_fails_the_array_once_all_have_ended() -> None:
    """B122."""
    w = world()
    a = w.array(3)
    w.end(f"{a}:1", 9)
    assert w.status(a, *children(a, 0, 2)) == ["PENDING", "STARTING", "STARTING"]
    w.end(f"{a}:0")
    w.end(f"{a}:2")
    assert (w.status(a), w.reasons(a)) == (["FAILED"], ["Array Child Job failed"])
    assert w.counts(a) == {"SUCCEEDED": 2, "FAILED": 1}
    assert w.jobs[a].exit_code is None


def test_each_child_is_tried_again_by_itself() -> None:
    """B123."""
    w = world()
    a = w.array(2, retryStrategy={"attempts": 2})
    w.end(f"{a}:0", 1)
    assert [len(w.jobs[c].attempts) for c in children(a, 0, 1)] == [1, 0]
    w.end(f"{a}:1")
    w.end(f"{a}:0")
    assert w.status(a) == ["SUCCEEDED"]
    tasks = {launch.attempt.task_id for launch in w.launches}
    assert len(tasks) == 3


def test_a_timeout_is_that_of_each_child() -> None:
    """B123."""
    w = world()
    a = w.array(2, timeout={"attemptDurationSeconds": 60}, retryStrategy={"attempts": 3})
    w.start(f"{a}:0")
    w.tick(30)
    w.start(f"{a}:1")
    w.tick(31)
    assert w.stops == [w.task(f"{a}:0")]
    w.end(f"{a}:0", 143)
    w.end(f"{a}:1")
    assert w.reasons(f"{a}:0", a) == [
        "Job attempt duration exceeded timeout", "Array Child Job failed",
    ]  # fmt: skip


def test_children_and_single_jobs_go_in_the_order_of_their_submission() -> None:
    """B2."""
    w = world(vcpus=1)
    first = w.submit()
    a = w.array(2)
    middle = w.submit()
    b = w.array(2)
    for job_id in (first, *children(a, 0, 1), middle, *children(b, 0, 1)):
        assert w.active() == [job_id]
        w.end(job_id)


def test_a_large_child_at_the_head_blocks_what_comes_after_its_array() -> None:
    """B3."""
    w = world(vcpus=3)
    a = w.array(2, containerOverrides={"vcpus": 2})
    small = w.submit()
    assert w.status(*children(a, 0, 1), small) == ["STARTING", "RUNNABLE", "RUNNABLE"]


# --- stopping -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_stopping_an_array_stops_each_child_where_it_is(how: str) -> None:
    """B124."""
    w = world(vcpus=2)
    a = w.array(5)
    w.start(f"{a}:0")
    w.end(f"{a}:0", 0)
    w.start(f"{a}:1")
    getattr(w, how)(a, "enough")
    assert w.status(*children(a, 3, 4)) == ["FAILED", "FAILED"]
    assert w.reasons(*children(a, 3, 4)) == ["enough", "enough"]
    assert w.status(a, *children(a, 1, 2)) == ["PENDING", "RUNNING", "STARTING"]
    going = [w.task(f"{a}:1"), w.task(f"{a}:2")]
    assert sorted(w.stops) == (sorted(going) if how == "terminate" else [])
    w.end(f"{a}:1", 0)
    w.end(f"{a}:2", 0)
    succeeded = how == "cancel"  # what has started is not cancelled
    assert w.status(*children(a, 1, 2)) == ["SUCCEEDED" if succeeded else "FAILED"] * 2
    assert (w.status(a), w.reasons(a)) == (["FAILED"], ["enough"])
    assert w.jobs[a].cancelled == (how == "cancel")
    assert w.jobs[a].terminated == (how == "terminate")
    assert w.history[a] == ["PENDING", "FAILED"]


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize("dependencies", [(), (SEQUENTIAL,)])
def test_an_array_of_which_nothing_has_started_ends_at_once(
    how: str, dependencies: tuple[dict[str, str], ...]
) -> None:
    """B124: all children with the caller's reason, in sequence or not."""
    w = world(vcpus=1)
    holder = w.submit()
    a = w.array(3, *dependencies)
    getattr(w, how)(a, "enough")
    assert w.status(a, *children(a, 0, 1, 2)) == ["FAILED"] * 4
    assert w.reasons(a, *children(a, 0, 1, 2)) == ["enough"] * 4
    assert all(getattr(w.jobs[c], f"{how}ed".replace("eed", "ed").replace("celed", "celled"))
               for c in children(a, 0, 1, 2))  # fmt: skip
    assert w.active() == [holder]


@pytest.mark.parametrize("how", ["cancel", "terminate"])
@pytest.mark.parametrize("code", [0, 1])
def test_an_array_that_waits_ends_once_its_dependencies_have(how: str, code: int) -> None:
    """B13, B124."""
    w = world()
    other = w.submit()
    a = w.array(2, {"jobId": other})
    getattr(w, how)(a, "enough")
    assert w.status(a, *children(a, 0, 1)) == ["PENDING"] * 3
    w.end(other, code)
    assert w.status(a, *children(a, 0, 1)) == ["FAILED"] * 3
    assert w.reasons(a, *children(a, 0, 1)) == ["enough"] * 3
    marks = [(w.jobs[c].cancelled, w.jobs[c].terminated) for c in children(a, 0, 1)]
    assert marks == [(how == "cancel", how == "terminate")] * 2


@pytest.mark.parametrize("how", ["cancel", "terminate"])
def test_one_child_is_stopped_by_its_own_id(how: str) -> None:
    """B125."""
    w = world(vcpus=1)
    a = w.array(3)
    getattr(w, how)(f"{a}:1", "enough")
    assert (w.status(f"{a}:1"), w.reasons(f"{a}:1")) == (["FAILED"], ["enough"])
    getattr(w, how)(f"{a}:0", "enough")
    assert w.status(f"{a}:0") == ["STARTING"]
    w.end(f"{a}:0")
    assert w.status(f"{a}:0") == ["SUCCEEDED" if how == "cancel" else "FAILED"]
    w.end(f"{a}:2")
    assert w.reasons(a) == ["Array Child Job failed"]
    assert not w.jobs[a].is_ending


@pytest.mark.parametrize("code", [0, 1])
def test_a_child_whose_array_waits_is_stopped_once_that_has_its_dependencies(code: int) -> None:
    """B13, B125."""
    w = world()
    other = w.submit()
    a = w.array(2, {"jobId": other})
    w.cancel(f"{a}:1", "enough")
    assert w.status(f"{a}:1") == ["PENDING"]
    w.end(other, code)
    assert (w.status(f"{a}:1"), w.reasons(f"{a}:1")) == (["FAILED"], ["enough"])
    if code == 0:
        w.end(f"{a}:0")
    expected = "Dependent Job failed" if code else "Array Child Job failed"
    assert w.reasons(a) == [expected]


def test_terminating_an_array_twice_stops_each_child_once() -> None:
    w = world()
    a = w.array(3)
    w.terminate(a, "first")
    w.terminate(a, "second")
    w.terminate(f"{a}:0", "third")
    assert len(w.stops) == 3
    for child in children(a, 0, 1, 2):
        w.end(child, 143)
    assert set(w.reasons(a, *children(a, 0, 1, 2))) == {"first"}


def test_an_array_that_was_cancelled_can_be_terminated() -> None:
    w = world(vcpus=1)
    a = w.array(2)
    w.cancel(a, "first")
    w.terminate(a, "second")
    assert w.stops == [w.task(f"{a}:0")]
    w.end(f"{a}:0", 143)
    assert w.reasons(a, f"{a}:0", f"{a}:1") == ["second", "second", "first"]


def test_deleting_a_queue_ends_its_arrays() -> None:
    """B17."""
    w = world(vcpus=1)
    running, waiting = w.array(2), w.array(2)
    w.drop_queue()
    assert w.status(waiting, *children(waiting, 0, 1), f"{running}:1") == ["FAILED"] * 4
    assert w.status(running, f"{running}:0") == ["PENDING", "STARTING"]
    w.end(f"{running}:0", 143)
    assert set(w.reasons(running, waiting, *children(waiting, 0, 1))) == {"JobQueue deleted"}
    assert not w.state.jobs


def test_a_server_killed_while_an_array_was_terminated_stops_the_rest() -> None:
    """B33."""
    w = world(vcpus=2)
    a = w.array(4)
    w.terminate(a)
    w.stops.clear()
    w.restart()
    assert sorted(tasks_to_stop(w.state)) == sorted(w.task(c) for c in children(a, 0, 1))


# --- plain dependencies -----------------------------------------------------------------------


def test_a_job_that_depends_on_an_array_waits_for_all_of_it() -> None:
    """B126."""
    w = world()
    a = w.array(2)
    b = w.submit(after=(a,))
    w.end(f"{a}:0")
    assert w.status(b) == ["PENDING"]
    w.end(f"{a}:1")
    assert w.status(b) == ["STARTING"]


def test_a_failed_array_fails_what_depends_on_it() -> None:
    """B126."""
    w = world()
    a = w.array(2)
    b = w.submit(after=(a,))
    late = w.array(2, {"jobId": b})
    w.end(f"{a}:0", 1)
    assert w.status(b) == ["PENDING"]
    w.end(f"{a}:1")
    assert w.reasons(a, b, late) == [
        "Array Child Job failed", "Dependent Job failed", "Dependent Job failed",
    ]  # fmt: skip
    assert w.reasons(*children(late, 0, 1)) == ["Dependent Job failed"] * 2


def test_a_job_can_depend_on_one_child() -> None:
    """B126."""
    w = world()
    a = w.array(3)
    on_one, on_two = w.submit(after=(f"{a}:1",)), w.submit(after=(f"{a}:2",))
    w.end(f"{a}:1")
    w.end(f"{a}:2", 1)
    assert w.status(a, on_one, on_two) == ["PENDING", "STARTING", "FAILED"]
    assert w.status(w.submit(after=(f"{a}:2",))) == ["FAILED"]
    assert "does not exist" in w.refusal(
        "SubmitJob", jobName="n", jobQueue="q", jobDefinition="d",
        dependsOn=[{"jobId": f"{a}:3"}],
    )  # fmt: skip


def test_the_children_of_an_array_that_waits_are_pending() -> None:
    """B127."""
    w = world()
    other = w.submit()
    a = w.array(2, {"jobId": other})
    assert (w.status(a), w.counts(a)) == (["PENDING"], {"PENDING": 2})
    w.restart()
    w.end(other)
    assert w.counts(a) == {"STARTING": 2}


def test_an_array_that_waits_fails_with_what_it_waits_for() -> None:
    """B127."""
    w = world()
    one, other = w.submit(), w.submit()
    a = w.array(2, {"jobId": one}, {"jobId": other})
    w.end(one, 1)
    assert w.reasons(a, *children(a, 0, 1)) == ["Dependent Job failed"] * 3
    assert w.counts(a) == {"FAILED": 2}
    w.end(other)
    assert w.history[a] == ["PENDING", "FAILED"]
    late = w.array(2, {"jobId": one}, SEQUENTIAL)
    assert w.reasons(late, *children(late, 0, 1)) == ["Dependent Job failed"] * 3


# --- SEQUENTIAL -------------------------------------------------------------------------------


def test_children_in_sequence_run_one_after_the_other() -> None:
    """B128."""
    w = world()
    a = w.array(3, SEQUENTIAL)
    for index in range(3):
        assert w.active() == [f"{a}:{index}"]
        assert w.status(a) == ["PENDING"]
        w.restart()
        w.end(f"{a}:{index}")
    assert w.status(a) == ["SUCCEEDED"]


def test_a_child_that_fails_fails_all_after_it_in_the_sequence() -> None:
    """B128."""
    w = world()
    a = w.array(4, SEQUENTIAL, retryStrategy={"attempts": 2})
    w.end(f"{a}:0")
    w.end(f"{a}:1", 1)
    assert w.status(*children(a, 1, 2)) == ["STARTING", "PENDING"]
    w.end(f"{a}:1", 1)
    assert w.status(*children(a, 0, 1, 2, 3)) == ["SUCCEEDED", "FAILED", "FAILED", "FAILED"]
    assert w.reasons(*children(a, 2, 3), a) == [
        "Dependent Job failed", "Dependent Job failed", "Array Child Job failed",
    ]  # fmt: skip


def test_a_child_in_sequence_that_is_stopped_fails_those_after_it() -> None:
    """B128."""
    w = world()
    a = w.array(3, SEQUENTIAL)
    w.cancel(f"{a}:1", "enough")
    assert w.status(f"{a}:1") == ["PENDING"]
    w.end(f"{a}:0")
    assert w.reasons(*children(a, 1, 2)) == ["enough", "Dependent Job failed"]
    assert w.status(a) == ["FAILED"]


def test_stopping_a_sequence_while_a_child_runs() -> None:
    w = world()
    a = w.array(3, SEQUENTIAL)
    w.terminate(a, "enough")
    assert w.status(*children(a, 0, 1, 2)) == ["STARTING", "PENDING", "PENDING"]
    w.end(f"{a}:0", 0)
    assert w.reasons(a, *children(a, 0, 1, 2)) == ["enough"] * 4


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"type": "N_TO_N"}, "does not exist"),
        ({"type": "N_TO_N", "jobId": "none"}, "does not exist"),
        ({"type": "N_TO_N", "jobId": "{}"}, "same size"),
        ({"type": "N_TO_N", "jobId": "{}:0"}, "same size"),
    ],
)
def test_dependencies_that_make_no_sense_are_refused(entry: dict[str, str], text: str) -> None:
    """B129."""
    w = world()
    a = w.array(3)
    asked: dict[str, Any] = {"jobName": "n", "jobQueue": "q", "jobDefinition": "d"}
    entry = {key: value.format(a) for key, value in entry.items()}
    refused = w.refusal(
        "SubmitJob",
        **asked,
        dependsOn=[entry],
        arrayProperties={"size": 3 if ":" in str(entry.get("jobId")) else 2},
    )
    assert text in refused


@pytest.mark.parametrize("entry", [{**SEQUENTIAL, "jobId": "j4"}, pairs("j4")])
def test_a_job_that_is_no_array_waits_for_the_whole_job_whatever_the_type(
    entry: dict[str, str],
) -> None:
    """B129: AWS does not say that such a type is refused."""
    w = world()
    assert w.array(2) == "j4"
    job = w.submit(dependsOn=[entry])
    assert w.status(job) == ["PENDING"]
    w.end("j4:0")
    w.end("j4:1")
    assert w.status(job) == ["STARTING"]
    assert w.status(w.submit(dependsOn=[SEQUENTIAL])) == ["STARTING"]


def test_an_array_in_sequence_that_names_a_job_waits_for_it_first() -> None:
    """B129."""
    w = world()
    first = w.submit()
    array = w.array(2, {**SEQUENTIAL, "jobId": first})
    assert w.status(f"{array}:0") == ["PENDING"]
    w.end(first)
    assert w.status(*children(array, 0, 1)) == ["STARTING", "PENDING"]


# --- N_TO_N -----------------------------------------------------------------------------------


def test_each_child_waits_for_the_child_of_the_same_index() -> None:
    """B130."""
    w = world(vcpus=9)
    a = w.array(3)
    b = w.array(3, pairs(a))
    assert w.counts(b) == {"PENDING": 3}
    w.end(f"{a}:1")
    w.restart()
    assert w.status(*children(b, 0, 1, 2)) == ["PENDING", "STARTING", "PENDING"]
    w.end(f"{b}:1")
    w.end(f"{a}:0")
    w.end(f"{a}:2")
    assert w.status(a, *children(b, 0, 2)) == ["SUCCEEDED", "STARTING", "STARTING"]


def test_a_failed_child_fails_the_one_of_the_same_index_alone() -> None:
    """B130."""
    w = world(vcpus=9)
    a = w.array(2)
    b = w.array(2, pairs(a))
    c = w.array(2, pairs(b))
    w.end(f"{a}:0", 1)
    assert w.reasons(f"{b}:0", f"{c}:0") == ["Dependent Job failed"] * 2
    w.end(f"{a}:1")
    w.end(f"{b}:1")
    w.end(f"{c}:1")
    assert w.status(f"{b}:1", f"{c}:1") == ["SUCCEEDED"] * 2
    assert w.reasons(a, b, c) == ["Array Child Job failed"] * 3


def test_pairs_with_an_array_that_is_partly_over_count_as_their_children_ended() -> None:
    """B130."""
    w = world(vcpus=9)
    a = w.array(3)
    w.end(f"{a}:0")
    w.end(f"{a}:1", 1)
    b = w.array(3, pairs(a))
    assert w.status(*children(b, 0, 1, 2)) == ["STARTING", "FAILED", "PENDING"]
    assert w.reasons(f"{b}:1") == ["Dependent Job failed"]
    w.end(f"{a}:2")
    assert w.status(f"{b}:2") == ["STARTING"]


def test_pairs_with_an_array_that_is_over_count_as_their_children_ended() -> None:
    """B130."""
    w = world(vcpus=9)
    a = w.array(2)
    w.end(f"{a}:0")
    w.end(f"{a}:1", 1)
    b = w.array(2, pairs(a))
    assert w.status(a, *children(b, 0, 1)) == ["FAILED", "STARTING", "FAILED"]
    gone = w.array(2)
    w.terminate(gone)
    w.end(f"{gone}:0", 143)
    w.end(f"{gone}:1", 143)
    late = w.array(2, pairs(gone))
    assert w.status(late, *children(late, 0, 1)) == ["FAILED"] * 3
    assert w.reasons(late) == ["Array Child Job failed"]
    text = w.refusal("SubmitJob", jobName="n", jobQueue="q", jobDefinition="d",
                     dependsOn=[pairs(gone)], arrayProperties={"size": 3})  # fmt: skip
    assert "has 2 children" in text


def test_pairs_sequence_and_plain_dependencies_all_hold() -> None:
    """B131."""
    w = world(vcpus=9)
    first, a = w.submit(), w.array(2)
    b = w.array(2, pairs(a), SEQUENTIAL, {"jobId": first})
    w.end(f"{a}:1")
    w.end(f"{a}:0")
    assert w.counts(b) == {"PENDING": 2}
    w.end(first)
    assert w.status(*children(b, 0, 1)) == ["STARTING", "PENDING"]
    w.end(f"{b}:0")
    assert w.status(f"{b}:1") == ["STARTING"]


def test_a_pair_that_failed_fails_the_child_at_once_though_its_array_still_waits() -> None:
    """B131."""
    w = world(vcpus=9)
    first, a = w.submit(), w.array(2)
    w.end(f"{a}:0", 1)
    b = w.array(2, pairs(a), {"jobId": first})
    assert w.status(b, *children(b, 0, 1)) == ["PENDING", "FAILED", "PENDING"]
    w.end(f"{a}:1", 1)
    assert (w.status(b), w.reasons(b)) == (["FAILED"], ["Array Child Job failed"])
    w.end(first)
    assert w.history[b] == ["PENDING", "FAILED"]


def test_a_pair_that_failed_fails_a_child_in_sequence_before_its_turn() -> None:
    """B131."""
    w = world(vcpus=9)
    a = w.array(3)
    for index, code in enumerate((0, 1, 0)):
        w.end(f"{a}:{index}", code)
    b = w.array(3, pairs(a), SEQUENTIAL)
    assert w.status(*children(b, 0, 1, 2)) == ["STARTING", "FAILED", "FAILED"]
    w.end(f"{b}:0")
    assert w.status(b) == ["FAILED"]


def test_an_array_that_two_ends_take_along_ends_once() -> None:
    """B127: one of its dependencies is the child, the other its array."""
    w = world(vcpus=9)
    a = w.array(2)
    b = w.array(2, {"jobId": f"{a}:1"}, {"jobId": a})
    single = w.submit(after=(f"{a}:1", a))
    w.end(f"{a}:0")
    w.end(f"{a}:1", 1)
    assert w.reasons(b, single, *children(b, 0, 1)) == ["Dependent Job failed"] * 4
    assert set(w.ends.values()) == {1}


def test_a_paired_child_that_is_stopped_waits_for_its_pair() -> None:
    """B13."""
    w = world(vcpus=9)
    a = w.array(2)
    b = w.array(2, pairs(a))
    w.terminate(b, "enough")
    assert w.counts(b) == {"PENDING": 2}
    w.end(f"{a}:0")
    w.end(f"{a}:1", 1)
    assert w.reasons(b, *children(b, 0, 1)) == ["enough"] * 3


# --- lists ------------------------------------------------------------------------------------


def test_the_children_of_an_array_are_listed_by_status_in_pages(tmp_path: Path) -> None:
    """B132."""
    w = journalled(tmp_path, vcpus=2)
    a = w.array(5)
    single = w.submit()
    w.start(f"{a}:0", f"{a}:1")
    w.end(f"{a}:1", 3)
    assert w.listed(arrayJobId=a) == [f"{a}:0"]
    assert w.listed(arrayJobId=a, jobStatus="FAILED") == [f"{a}:1"]
    assert w.listed(arrayJobId=a, jobStatus="RUNNABLE") == children(a, 4, 3)
    assert w.listed(jobQueue="q", jobStatus="PENDING") == [a]
    assert w.listed(jobQueue="q", jobStatus="RUNNABLE") == [single]
    assert w.listed(jobQueue="q", filters=[{"name": "JOB_NAME", "values": ["*"]}]) == [single, a]
    w.terminate(a)
    w.end(f"{a}:0")
    w.end(f"{a}:2")
    seen: list[str] = []
    token: dict[str, str] = {}
    while True:
        page = w.read("ListJobs", arrayJobId=a, jobStatus="FAILED", maxResults=2, **token)
        seen += [job["jobId"] for job in page["jobSummaryList"]]
        if "nextToken" not in page:
            break
        token = {"nextToken": page["nextToken"]}
    assert seen == children(a, 4, 3, 2, 1, 0)
    (summary,) = w.read("ListJobs", jobQueue="q", jobStatus="FAILED")["jobSummaryList"]
    assert summary["arrayProperties"]["statusSummary"]["FAILED"] == 5
    assert summary["isTerminated"] is True
    assert "isCancelled" not in summary


def test_a_child_is_described_by_its_id(tmp_path: Path) -> None:
    w = journalled(tmp_path)
    a = w.array(2)
    w.end(f"{a}:1", 3)
    w.restart()
    shown = w.described(f"{a}:1")
    assert shown["jobArn"].endswith(f"/{a}:1")
    assert (shown["arrayProperties"], shown["container"]["exitCode"]) == ({"index": 1}, 3)


# --- large ------------------------------------------------------------------------------------


def stopwatch(seconds: float) -> Any:
    """Fails when what is done within takes more processor time than that."""

    class Watch:
        def __enter__(self) -> None:
            self.began = process_time()

        def __exit__(self, *error: object) -> None:
            assert error[0] is not None or process_time() - self.began < seconds

    return Watch()


@pytest.mark.parametrize("dependencies", [(), (SEQUENTIAL,)])
def test_ten_thousand_children_are_submitted_and_terminated_in_moments(
    dependencies: tuple[dict[str, str], ...],
) -> None:
    """B133: a step over all of an array is linear in its size; an hour's limit would be seconds."""
    w = world(vcpus=1)
    w.submit()
    with stopwatch(4):
        a = w.array(10_000, *dependencies)
    with stopwatch(4):
        back = restore(stored(w.state))
    assert back.counts[a] == w.counts(a)
    with stopwatch(4):
        w.terminate(a, "enough")
    assert w.counts(a) == {"FAILED": 10_000}
    assert len(w.state.jobs) == 1


def test_ten_thousand_children_end_one_by_one_in_moments() -> None:
    """B133."""
    w = world(vcpus=64, memory=10**6)
    a = w.array(10_000)
    b = w.array(10_000, pairs(a))
    with stopwatch(30):
        for index in range(10_000):
            w.end(f"{a}:{index}")
    assert w.status(a) == ["SUCCEEDED"]
    assert w.counts(b) == {"STARTING": 64, "RUNNABLE": 9_936}
    assert order_of(w.state, "q")[0] == f"{b}:64"


def test_ten_thousand_children_that_wait_for_a_resource_cost_no_more() -> None:
    """B133."""
    w = world(vcpus=64, memory=10**6)
    w.call("CreateConsumableResource", consumableResourceName="seat", totalQuantity=7)
    with stopwatch(6):
        a = w.array(10_000, consumableResourcePropertiesOverride=consuming(seat=2))
    with stopwatch(4):
        for index in range(500):
            w.end(f"{a}:{index}", AttemptExit(code=0))
    assert w.counts(a) == {"SUCCEEDED": 500, "STARTING": 3, "RUNNABLE": 9_497}
    assert indexes(restore(stored(w.state))) == indexes(w.state)
