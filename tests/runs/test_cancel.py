"""Stopping runs: all of them, once, and looked at afterwards."""

import threading
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi
from batchml.errors import AccessError, ServiceError, UsageError
from batchml.model.run import JobStatus, Run
from batchml.runs.cancel import PATIENCE, cancel, without_covered_children
from tests.support.fakes import FakeClock


class FakeBatch(JobApi):
    """Runs that end `delay` looks after they were told to; some are `deaf`, some `forbidden`."""

    def __init__(self, *runs: Run, delay: int = 1, deaf: str = "", forbidden: str = "") -> None:
        self.runs = {run.job_id: run for run in runs}
        self.told: list[str] = []
        self.looks = 0
        self._delay, self._deaf, self._forbidden = delay, deaf, forbidden
        self._lock = threading.Lock()

    def terminate(self, job_id: str, reason: str) -> None:
        with self._lock:
            self.told.append(job_id)
        if job_id == self._forbidden:
            raise AccessError("not yours", code="AccessDeniedException")

    def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
        self.looks += 1
        for job_id in self.told:
            if self.looks >= self._delay and job_id not in (self._deaf, self._forbidden):
                self.runs[job_id] = replace(self.runs[job_id], is_terminated=True)
        return {job_id: self.runs[job_id] for job_id in job_ids if job_id in self.runs}


def run(job_id: str, status: str = "RUNNING") -> Run:
    return Run(job_id, "n", "q", JobStatus(status))


def stop(api: FakeBatch, clock: FakeClock | None = None) -> dict[str, str]:
    """What became of each: `ended`, `stopped`, or why it is left."""
    found = cancel(api, dict(api.runs), "enough", clock or FakeClock())
    return {
        job_id: "ended" if each.had_ended else each.left or "stopped"
        for job_id, each in found.items()
    }


def test_each_is_told_once_and_one_look_is_enough() -> None:
    api = FakeBatch(run("a"), run("b", "RUNNABLE"), run("c", "SUCCEEDED"))
    assert stop(api) == {"a": "stopped", "b": "stopped", "c": "ended"}
    assert sorted(api.told) == ["a", "b"]
    assert api.looks == 1


def test_what_has_ended_is_left_alone_and_costs_no_call() -> None:
    api = FakeBatch(run("a", "FAILED"))
    assert stop(api) == {"a": "ended"}
    assert (api.told, api.looks) == ([], 0)


def test_it_is_looked_again_until_aws_shows_that_it_has_heard() -> None:
    clock = FakeClock()
    assert stop(FakeBatch(run("a"), delay=4), clock) == {"a": "stopped"}
    assert len(clock.naps) == 3


def test_what_is_not_being_stopped_is_said_after_some_seconds() -> None:
    clock = FakeClock()
    left = stop(FakeBatch(run("a"), run("b"), deaf="b"), clock)
    assert left["a"] == "stopped"
    assert "is not stopping yet" in left["b"]
    assert sum(clock.naps) == PATIENCE


def test_one_that_may_not_be_stopped_does_not_keep_the_others_from_it() -> None:
    api = FakeBatch(*(run(str(number)) for number in range(20)), forbidden="7")
    found = cancel(api, dict(api.runs), "enough", FakeClock())
    assert [each.left for each in found.values() if each.left] == ["not yours"]
    assert isinstance(found["7"].error, AccessError)
    assert len(api.told) == 20


def test_a_run_that_ended_just_before_it_was_refused_is_no_failure() -> None:
    class Ending(FakeBatch):
        def terminate(self, job_id: str, reason: str) -> None:
            self.runs[job_id] = replace(self.runs[job_id], status=JobStatus.SUCCEEDED)
            raise ServiceError("TerminateJob", "ClientException", "has ended", 400)

        def describe(self, job_ids: Sequence[str]) -> dict[str, Run]:
            return {job_id: self.runs[job_id] for job_id in job_ids}

    assert stop(Ending(run("a"))) == {"a": "stopped"}


def test_one_node_is_not_stopped_because_that_would_stop_all() -> None:
    api = FakeBatch(run("a"), run("b#1"))
    with pytest.raises(UsageError, match=r"batchml cancel b$"):
        stop(api)
    assert api.told == []


def test_children_of_an_array_that_is_stopped_are_not_told_themselves() -> None:
    assert without_covered_children(["a:1", "a", "b:1", "a:2"]) == ["a", "b:1"]
