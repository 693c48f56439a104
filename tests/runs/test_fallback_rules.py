"""A run that moves to another queue is one run, whoever is killed when."""

import os
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.requests import SubmissionRequests
from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import BatchmlError, ConfigError, NotFound, ServiceError, UsageError
from batchml.explain.failing import why_ended
from batchml.explain.missing import EndedRun
from batchml.history import History
from batchml.model.fallback import (
    MOVED,
    Fallback,
    describe_fallback,
    describe_move,
    fallback_mistakes,
    move_reason,
    moved_to,
    parse_fallback_flag,
)
from batchml.model.names import short_duration
from batchml.model.run import Attempt, JobStatus, Record, Run
from batchml.runs.fallback.move import (
    FallbackPlan,
    FallbackPlans,
    Mover,
    MoveStep,
    decide,
    encode_plan,
    next_requests,
    read_plan,
)
from batchml.runs.fallback.watch import (
    PLAN,
    QueueMoves,
    fetch_plan,
    find_successors,
    plans_of,
    watch_until_moved,
)
from batchml.runs.find import select
from batchml.runs.groups.members import group_bill
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare, to_requests
from batchml.runs.search import RunFilter, search
from batchml.runs.submit import submit_run
from batchml.runs.watch.events import RunEnded, RunMessage
from batchml.runs.watch.wait import follow, wait_for_runs
from batchml.runtime.entry.fetch import claim
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.folder import FolderStore
from tests.runs.test_submission import Aws as Account
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

SPOT, GPU = "batchml-dev-spot", "batchml-dev-gpu"
CONFIG = """
[env.dev]
region = "us-east-1"
[env.dev.compute.gpu]
instance_types = ["g5.xlarge"]
max_vcpus = 64
[env.dev.queues.gpu]
compute = ["gpu"]
[env.dev.queues.spot]
compute = ["gpu"]
[env.dev.queues.cpu]
compute = ["gpu"]
"""
JOB = """
image = "docker.io/library/python:3.12"
command = ["python", "-c", "print(1)"]
queue = "spot"
code = false
[fallback]
queue = "gpu"
after = "30m"
"""
NOW = 1_800_000_000


class Killed(BaseException):
    """The client ends at this very place, like from SIGKILL."""


class Aws:
    """An account with two queues. Nothing finds a host by itself; `die_at` is a number of a call.

    A client dies before that call is carried out, or behind it where `after` says so.
    """

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.jobs: dict[str, dict[str, Any]] = {}
        self.die_at = 0
        self.after = False
        self.count = 0
        self.queues = [SPOT, GPU]
        self.starts_on_cancel = False
        self.hidden: dict[str, float] = {}  # job -> until when ListJobs does not tell of it
        self.busy: dict[str, int] = {}  # operation -> calls that are throttled
        self.refused: dict[str, str] = {}  # operation -> the error
        self.on_submit: Callable[[], None] = lambda: None
        self.others: Account | None = None  # who answers for what is not AWS Batch

    def answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        self.count += 1
        if self.count == self.die_at and not self.after:
            raise Killed
        found = self._answer(operation, params)
        if self.count == self.die_at:
            raise Killed
        return found

    def _answer(self, operation: str, params: dict[str, Any]) -> Mapping[str, Any] | str:
        if operation in self.refused:
            return self.refused[operation]
        if self.busy.get(operation, 0) > 0:
            self.busy[operation] -= 1
            return "TooManyRequestsException: too many"
        match operation:
            case "SubmitJob":
                if params["jobQueue"] not in self.queues:
                    return "ClientException: JobQueue not found"
                self.on_submit()
                job_id = f"{len(self.jobs):08d}-0000-0000-0000-000000000000"
                self.jobs[job_id] = {
                    "jobId": job_id, "jobName": params["jobName"], "jobQueue": params["jobQueue"],
                    "jobDefinition": params["jobDefinition"], "status": "RUNNABLE",
                    "createdAt": int(self.clock.time * 1000), "tags": params.get("tags", {}),
                    "container": params["containerOverrides"], "startedAt": None,
                }  # fmt: skip
                return {"jobId": job_id, "jobName": params["jobName"]}
            case "CancelJob":
                job = self.jobs[params["jobId"]]
                if self.starts_on_cancel:
                    job |= {"status": "RUNNING", "startedAt": int(self.clock.time * 1000)}
                elif job["status"] == "RUNNABLE":
                    job |= {
                        "status": "FAILED", "statusReason": params["reason"], "isCancelled": True,
                        "stoppedAt": int(self.clock.time * 1000),
                    }  # fmt: skip
                return {}
            case "DescribeJobs":
                return {"jobs": [_told(self.jobs[j]) for j in params["jobs"] if j in self.jobs]}
            case "ListJobs":
                (chosen,) = params["filters"]
                return {"jobSummaryList": [
                    _told(job) for job in self.jobs.values()
                    if job["jobQueue"] == params["jobQueue"]
                    and self.hidden.get(job["jobId"], 0) <= self.clock.time
                    and (chosen["name"] != "JOB_NAME" or job["jobName"] in chosen["values"])
                ]}  # fmt: skip
            case "TerminateJob":
                self.jobs[params["jobId"]]["status"] = "FAILED"
                return {}
            case "DescribeJobQueues":
                return {"jobQueues": [{"jobQueueName": q, "priority": 1} for q in self.queues]}
            case "DescribeJobDefinitions" | "RegisterJobDefinition":
                return {"jobDefinitions": [{"jobDefinitionName": "d"}]}
            case "GetObject" if self.others:
                return {"Body": BytesIO(self.others.objects[params["Key"]])}
            case _ if self.others:
                return self.others.answer(operation, params)
            case "DescribeStacks":
                return "ValidationError: Stack does not exist"
            case "GetLogEvents":
                return "ResourceNotFoundException: no"
        return "AccessDeniedException: not in this test"

    @property
    def alive(self) -> list[dict[str, Any]]:
        """Jobs that run, or that may yet."""
        return [job for job in self.jobs.values() if job["status"] != "FAILED"]

    def end(self, job: dict[str, Any]) -> None:
        now = int(self.clock.time * 1000)
        job |= {"status": "SUCCEEDED", "startedAt": now - 5000, "stoppedAt": now}


def _told(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if value is not None}


@pytest.fixture(scope="module", autouse=True)
def keys() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "example")
        yield


@pytest.fixture
def aws() -> Aws:
    return Aws(FakeClock(NOW))


_ACCOUNTS: list[Aws] = []  # the one that is asked now
_SESSION = ScriptedSession(lambda operation, params: _ACCOUNTS[-1].answer(operation, params))


def place_in(folder: Path, aws: Aws, more: str = "") -> Context:
    (folder / "jobs" / "hello").mkdir(parents=True, exist_ok=True)
    text = CONFIG.replace("[env.dev.compute", f"{more}[env.dev.compute", 1)
    (folder / "batchml.toml").write_text(text)
    (folder / "jobs" / "hello" / "job.toml").write_text(JOB)
    settings = load_settings({"BATCHML_HOME": str(folder / "home")}, folder, "dev")
    context = Context(settings, aws.clock, folder)
    _ACCOUNTS[:] = [aws]
    context._session = _SESSION  # clients take long to make: all tests have the same
    return context


def submitted(context: Context, told: list[str] | None = None) -> tuple[PreparedRun, str]:
    prepared = prepare(context, RunRequest(job="hello"), dry_run=False)
    said = told if told is not None else []
    return prepared, submit_run(context, prepared, said.append)


# --- what the file and the flag say ---------------------------------------------------------


def test_the_flag_is_a_queue_and_a_time() -> None:
    assert parse_fallback_flag(None) == {}
    assert parse_fallback_flag("gpu") == {"queue": "gpu", "after": "30m"}
    assert parse_fallback_flag("gpu:2h") == {"queue": "gpu", "after": "2h"}
    for wrong in ("gpu:", ":5m"):
        with pytest.raises(UsageError, match="QUEUE:30m"):
            parse_fallback_flag(wrong)


def test_all_mistakes_of_a_fallback_are_said() -> None:
    found = list(fallback_mistakes(Fallback("spot", "soon"), "spot", ("a group",)))
    assert [text.partition(":")[0] for text in found] == [
        "fallback.after", "fallback.queue", "fallback",
    ]  # fmt: skip
    assert not list(fallback_mistakes(Fallback(), "spot", ("a group",)))


def test_an_array_does_not_move(tmp_path: Path, aws: Aws) -> None:
    with pytest.raises(ConfigError, match="with --array"):
        prepare(place_in(tmp_path, aws), RunRequest(job="hello", array=3), dry_run=True)


def test_a_dry_run_says_that_it_moves_and_both_jobs_are_one_definition(
    tmp_path: Path, aws: Aws
) -> None:
    found = prepare(place_in(tmp_path, aws), RunRequest(job="hello"), dry_run=True)
    assert found.plan is not None
    first, second = found.requests, found.plan.requests
    assert (first.submit["jobQueue"], second.submit["jobQueue"]) == (SPOT, GPU)
    assert first.register == second.register
    assert first.submit["jobName"] == second.submit["jobName"]
    assert first.submit["tags"]["batchml:fallback"] == f"{GPU}:1800"
    assert any("Moves to the queue gpu" in notice for notice in found.notices)


@given(st.integers(0, 10**6))
def test_words_of_a_move_are_read_back(seconds: int) -> None:
    reason = move_reason(f"arn:aws:batch:us-east-1:123456789012:job-queue/{GPU}", seconds)
    run = Run("j", "n", SPOT, JobStatus.FAILED, status_reason=reason)
    assert moved_to(run) == GPU
    assert short_duration(seconds) in reason
    assert not moved_to(Run("j", "n", SPOT, JobStatus.RUNNABLE, status_reason=reason))


def test_moves_are_told() -> None:
    assert describe_fallback(f"{GPU}:5400") == (
        f"to the queue {GPU}, if it finds no host within 1 h 30 min"
    )
    assert describe_move(f"{GPU}:60", "j-1").endswith(
        "after 1 min without a host; its earlier job was j-1"
    )
    assert describe_move("", "j-1").endswith("its earlier job was j-1")


# --- when -----------------------------------------------------------------------------------


def plan(**changes: Any) -> FallbackPlan:
    requests = SubmissionRequests({}, {"jobQueue": GPU, "jobName": "n-k", "containerOverrides": {}})
    return FallbackPlan(
        **{"key": "k", "after": 60, "requests": requests, "record": Record(), **changes}
    )


def after_attempt(stopped_at: int) -> dict[str, Any]:
    return {"status": "RUNNABLE", "attempts": (Attempt(stopped_at=stopped_at),)}


@pytest.mark.parametrize(
    ("run", "keeps", "ready", "step"),
    [
        ({"status": "SUBMITTED"}, False, 0, MoveStep.LEAVE),
        ({"status": "RUNNABLE"}, False, 0, MoveStep.LEAVE),
        ({"status": "RUNNABLE", "created_at": 990_001}, False, 0, MoveStep.WAIT),
        ({"status": "PENDING"}, False, 0, MoveStep.WAIT),
        ({"status": "STARTING"}, False, 0, MoveStep.WAIT),
        ({"status": "RUNNING"}, False, 0, MoveStep.WAIT),
        ({"status": "SUCCEEDED"}, False, 0, MoveStep.OVER),
        # It is there already: to leave that queue would end the run.
        ({"status": "RUNNABLE", "queue": GPU}, False, 0, MoveStep.OVER),
        ({"status": "RUNNABLE", "is_terminated": True}, False, 0, MoveStep.WAIT),
        ({"status": "FAILED", "status_reason": "Cancelled by the user"}, False, 0, MoveStep.OVER),
        ({"status": "FAILED", "status_reason": move_reason(GPU, 60)}, False, 0, MoveStep.GO_ON),
        ({"status": "FAILED", "status_reason": move_reason("x", 60)}, False, 0, MoveStep.OVER),
        # What it depended on ended some time: since when it is ready only who watched it knows.
        ({"status": "RUNNABLE", "depends_on": ("a",)}, False, 0, MoveStep.WAIT),
        ({"status": "RUNNABLE", "depends_on": ("a",)}, False, 995_000, MoveStep.WAIT),
        ({"status": "RUNNABLE", "depends_on": ("a",)}, False, 930_000, MoveStep.LEAVE),
        # Its host was lost: back in the queue since then, and it moves if its checkpoints do.
        (after_attempt(995_000), True, 0, MoveStep.WAIT),
        (after_attempt(900_000), True, 0, MoveStep.LEAVE),
        (after_attempt(900_000), False, 0, MoveStep.OVER),
    ],
)  # fmt: skip
def test_when_a_run_moves(run: dict[str, Any], keeps: bool, ready: int, step: MoveStep) -> None:
    more = {"queue": SPOT, "created_at": 1, **run, "status": JobStatus(run["status"])}
    given_ = Run(job_id="j", name="n", **more)
    assert decide(plan(keeps=keeps), given_, 1_000_000, ready).step is step


def test_every_node_of_the_next_job_knows_whom_it_follows() -> None:
    override = {"targetNodes": "0:", "containerOverrides": {"command": ["x"]}}
    nodes = {"numNodes": 2, "nodePropertyOverrides": [override]}
    found = next_requests(
        SubmissionRequests({}, {"nodeOverrides": nodes, "tags": {"a": "b"}}), "j-1"
    ).submit
    (told,) = found["nodeOverrides"]["nodePropertyOverrides"]
    assert told["containerOverrides"] == {
        "command": ["x"], "environment": [{"name": MOVED, "value": "j-1"}],
    }  # fmt: skip
    assert found["tags"] == {"a": "b", "batchml:moved": "j-1"}
    assert "environment" not in override["containerOverrides"]  # the plan stays as it was


# --- one run --------------------------------------------------------------------------------


def test_whoever_waits_moves_it_and_is_told_of_where_it_is(tmp_path: Path, aws: Aws) -> None:
    """Nobody else looks after it: the environment has no queue for that, and says so."""
    place, told = place_in(tmp_path, aws), list[str]()
    _, job_id = submitted(place, told)
    assert any("only while a command" in words for words in told)
    aws.clock.time += 1801
    seen = []
    for happening in follow(place, job_id):
        seen.append(happening)
        if len(aws.alive) == 1 and aws.alive[0]["jobQueue"] == GPU:
            aws.end(aws.alive[0])
    last = seen[-1]
    assert isinstance(last, RunEnded)
    assert last.run.queue == GPU
    assert last.run.job_id != job_id
    assert next(each.text for each in seen if isinstance(each, RunMessage)).startswith("Moved to")
    variables = aws.jobs[last.run.job_id]["container"]["environment"]
    assert {"name": MOVED, "value": job_id} in variables
    assert select(place, [job_id, "hello", "@last"]) == [last.run.job_id] * 3
    (record,) = place.history.newest_first("dev")
    assert (record.moved, record.queue, record.status) == (job_id, GPU, "")
    assert plans_of(place).find(record.key) is None
    (ended,) = wait_for_runs(place, select(place, [job_id]))
    assert place.history.newest_first("dev")[0].status == ended.status == "SUCCEEDED"


def test_who_waits_for_where_it_has_moved_leaves_it_there(tmp_path: Path, aws: Aws) -> None:
    """Moved by a watcher elsewhere, its plan is still here, and it has waited long in there."""
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    now = watch_until_moved(
        place_in(tmp_path / "container", aws), prepared.plan, job_id, lambda _: None
    )
    aws.clock.time += 7200
    assert plans_of(place).find(prepared.plan.key) is not None
    assert QueueMoves(place, place.describe)([now])[now].status is JobStatus.RUNNABLE
    assert watch_until_moved(place, prepared.plan, now, lambda _: None) == now
    assert [job["jobId"] for job in aws.alive] == [now]


def test_two_of_this_machine_who_move_it_at_once_move_it_once(tmp_path: Path, aws: Aws) -> None:
    """The second saw it wait before the first had moved it, and AWS hides what is new a while."""
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    movers = [
        Mover(lambda: place.batch, place.history, prepared.plan, aws.clock, lambda _: None)
        for _ in range(2)
    ]
    waiting = place.describe([job_id])[job_id]
    now = movers[0].move(waiting)
    aws.hidden = {now: aws.clock.time + 20}
    assert movers[1].move(waiting) == now
    assert len(aws.jobs) == 2


def test_two_moves_from_different_places_leave_one_job(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    elsewhere = place_in(tmp_path / "container", aws)
    first = watch_until_moved(elsewhere, prepared.plan, job_id, lambda _: None)
    aws.clock.time += 1
    aws.hidden = {first: aws.clock.time + 70}  # longer than anybody looks for it
    mover = Mover(lambda: place.batch, place.history, prepared.plan, aws.clock, lambda _: None)
    aws.on_submit = aws.hidden.clear
    assert mover.move(place.describe([job_id])[job_id]) == first
    assert [job["jobId"] for job in aws.alive] == [first]
    assert next(iter(place.history.names("dev"))).job_id == first


def test_no_value_of_a_variable_is_kept_and_the_second_job_has_them_all(
    tmp_path: Path, aws: Aws
) -> None:
    place = place_in(tmp_path, aws)
    order = RunRequest(job="hello", changes={"env": {"TOKEN": "s3cret", "LR": "0.1"}})
    prepared = prepare(place, order, dry_run=False)
    job_id = submit_run(place, prepared, lambda _: None)
    kept = [each for each in (tmp_path / "home").rglob("*") if each.is_file()]
    assert any(each.parent.name == "dev" and each.name == prepared.record.key for each in kept)
    assert not [each for each in kept if b"s3cret" in each.read_bytes()]
    assert prepared.plan is not None
    assert prepared.plan.lent == ("TOKEN", "LR")
    assert to_requests(prepared)["fallback"]["variablesOfTheFirstJob"] == ["TOKEN", "LR"]
    aws.clock.time += 1801
    untold = aws.jobs[job_id]["container"]
    aws.jobs[job_id]["container"] = {}
    with pytest.raises(ServiceError, match="TOKEN, LR"):
        watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    assert len(aws.alive) == 1
    aws.jobs[job_id]["container"] = untold
    now = watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    found = {each["name"]: each["value"] for each in aws.jobs[now]["container"]["environment"]}
    assert (found["TOKEN"], found["LR"], found[MOVED]) == ("s3cret", "0.1", job_id)


def test_whoever_looks_after_it_outlives_an_outage(tmp_path: Path, aws: Aws) -> None:
    place, told = place_in(tmp_path, aws), list[str]()
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    aws.busy = {"DescribeJobs": 5, "CancelJob": 2, "ListJobs": 3}
    now = watch_until_moved(place, prepared.plan, job_id, told.append)
    assert [job["jobId"] for job in aws.alive] == [now]
    assert len([text for text in told if text.startswith("Trying again")]) >= 7
    assert told[-1] == f"Moved to the queue {GPU}: the new job is {now}."


@pytest.mark.parametrize(
    "error", ["AccessDeniedException: no", "ClientException: no", "TooManyRequestsException: no"]
)
@pytest.mark.parametrize(
    "call", ["DescribeJobs", "DescribeJobQueues", "CancelJob", "ListJobs", "SubmitJob"]
)
def test_refused_at_any_call_it_is_one_run_and_can_be_moved_later(
    tmp_path: Path, aws: Aws, call: str, error: str
) -> None:
    place, told = place_in(tmp_path, aws), list[str]()
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    aws.refused = {call: error}
    with pytest.raises(BatchmlError):
        watch_until_moved(place, prepared.plan, job_id, told.append)
    assert len(aws.alive) == (call not in ("ListJobs", "SubmitJob"))
    assert any("is not in" in text for text in told) == (call == "SubmitJob")
    aws.refused = {}
    now = watch_until_moved(place, prepared.plan, job_id, told.append)
    assert [job["jobId"] for job in aws.alive] == [now]
    assert select(place, [job_id, "hello"]) == [now, now]


def test_a_fallback_to_a_queue_that_is_not_there_is_refused_before_anything_is_sent(
    tmp_path: Path, aws: Aws
) -> None:
    place = place_in(tmp_path, aws)
    aws.queues = [SPOT]
    with pytest.raises(NotFound, match="takes jobs"):  # and before it is said that it moves
        prepare(place, RunRequest(job="hello"), dry_run=False)
    assert not aws.jobs


def test_cancelled_between_its_two_jobs_it_is_found_in_the_other_queue(
    tmp_path: Path, aws: Aws
) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    now = watch_until_moved(
        place_in(tmp_path / "container", aws), prepared.plan, job_id, lambda _: None
    )
    aws.hidden = {now: aws.clock.time + 30}
    assert find_successors(place, place.describe([job_id]).values()) == {job_id: now}
    assert next(iter(place.history.names("dev"))).job_id == now


def test_left_and_submitted_nowhere_it_is_still_in_the_list(tmp_path: Path, aws: Aws) -> None:
    """Whoever moved it was killed in between: it would be in no list at all."""
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    place.batch.cancel(job_id, move_reason(GPU, 1800))

    def listed() -> list[str]:
        found = search(place.batch, place.history, "dev", aws.queues, RunFilter())
        return [each.job_id for each in found]

    assert listed() == [job_id]
    now = watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    assert listed() == [now]


def test_it_is_explained_what_moves_and_what_that_made_fail() -> None:
    gone = Run(
        "j-1", "n", SPOT, JobStatus.FAILED, status_reason=move_reason(GPU, 60), is_cancelled=True
    )
    found = why_ended(EndedRun(gone))
    assert (found.cause, found.command) == ("moving", "batchml wait j-1")
    reason = "Dependent Job failed"
    later = Run("j-2", "m", SPOT, JobStatus.FAILED, status_reason=reason, depends_on=("j-1",))
    found = why_ended(EndedRun(later, dependencies=(gone,)))
    assert found.cause == "dependency-moved"
    assert found.command == "batchml wait j-1 && batchml rerun j-2"


def test_interrupted_while_it_is_moved_it_can_be_moved_again(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801

    def interrupt() -> None:
        aws.on_submit = lambda: None
        raise KeyboardInterrupt

    aws.on_submit = interrupt
    with pytest.raises(KeyboardInterrupt):
        watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    (name,) = place.history.names("dev")
    assert (name.job_id, name.refused) == (job_id, "")
    assert select(place, ["hello"]) == [job_id]
    assert watch_until_moved(place, prepared.plan, job_id, lambda _: None) == aws.alive[0]["jobId"]


def test_the_bill_of_one_that_moved_has_the_attempts_of_both(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    now = watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    ms = int(aws.clock.time * 1000)
    lost = {"startedAt": ms - 9000, "stoppedAt": ms - 5000, "container": {"logStreamName": "a"}}
    aws.jobs[job_id]["attempts"] = [lost]
    aws.jobs[now]["attempts"] = [{**lost, "startedAt": ms - 1000, "stoppedAt": ms}]
    aws.end(aws.jobs[now])
    _, bill = group_bill(place, now)
    assert (bill.seconds, bill.job_id) == (5.0, now)


def test_one_that_starts_while_it_is_cancelled_stays(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    aws.clock.time += 1801
    aws.starts_on_cancel = True
    moves = QueueMoves(place, place.describe)
    assert moves([job_id])[job_id].job_id == job_id
    assert len(aws.jobs) == 1
    assert prepared.plan is not None


def test_without_a_queue_to_go_to_it_stays_where_it_is(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    aws.queues, aws.clock.time = [SPOT], NOW + 1801
    assert prepared.plan is not None
    with pytest.raises(ServiceError, match="the run stays in its queue"):
        watch_until_moved(place, prepared.plan, job_id, lambda _: None)
    assert aws.jobs[job_id]["status"] == "RUNNABLE"


def test_who_waits_goes_on_waiting_where_a_move_is_refused(tmp_path: Path, aws: Aws) -> None:
    place = place_in(tmp_path, aws)
    _, job_id = submitted(place)
    aws.queues, aws.clock.time = [SPOT], NOW + 1801
    texts = []
    for happening in follow(place, job_id):
        if isinstance(happening, RunMessage):
            texts.append(happening.text)
            aws.end(aws.jobs[job_id])
    assert isinstance(happening, RunEnded)
    assert happening.run.status is JobStatus.SUCCEEDED
    (said,) = texts
    assert "It is not moved" in said
    assert "the run stays in its queue" in said
    assert plans_of(place).find(happening.run.key) is None  # it has ended


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_it_is_one_run_in_the_end(tmp_path: Path, after: bool) -> None:
    """At each call of the watcher in turn, before AWS has carried it out or after that."""
    for die_at in range(1, 30):
        world = Aws(FakeClock(NOW))
        folder = tmp_path / f"{die_at}"
        place = place_in(folder, world)
        prepared, job_id = submitted(place)
        assert prepared.plan is not None
        world.clock.time += 1801
        world.count, world.die_at, world.after = 0, die_at, after
        try:
            watch_until_moved(place, prepared.plan, job_id, lambda _: None)
        except Killed:
            pass
        else:
            assert die_at > 5
            break
        assert len(world.alive) <= 1, die_at
        world.die_at = 0
        # The next attempt of the watcher, or a client that waits.
        second = place_in(folder, world)
        bystander = {job["jobId"] for job in world.alive} or {job_id}
        assert set(select(second, [job_id])) == bystander, die_at
        now = watch_until_moved(second, prepared.plan, job_id, lambda _: None)
        assert [job["jobId"] for job in world.alive] == [now], die_at
        assert select(second, [job_id]) == [now]
    else:
        raise AssertionError("it never came to its end")


def test_in_aws_a_small_run_in_the_queue_of_controllers_looks_after_it(
    tmp_path: Path, aws: Aws
) -> None:
    """It is told where the plan is, and takes no other: programs in jobs write there, too."""
    account = Account()
    roles = {**account.stacks["batchml-dev-roles"], "ControllerRoleArn": "arn:controller"}
    account.stacks["batchml-dev-roles"] = roles
    aws.others, aws.queues = account, [SPOT, GPU, "batchml-dev-cpu"]
    place, told = place_in(tmp_path, aws, 'controller_queue = "cpu"\n'), list[str]()
    prepared, job_id = submitted(place, told)
    assert not told
    assert prepared.plan is not None
    address = f"runs/{prepared.plan.key}/{PLAN}"
    assert account.objects[address] == encode_plan(prepared.plan)
    (watcher,) = [job for job in aws.jobs.values() if job["jobQueue"] == "batchml-dev-cpu"]
    words = watcher["container"]["command"]
    assert words[:5] == ["python", "-m", "batchml", "attend", prepared.plan.key]
    given_ = dict(zip(words[5::2], words[6::2], strict=True))
    assert given_["--job"] == job_id
    assert given_["--plan"] == f"s3://bucket/{address}"
    assert plans_of(place).watcher(prepared.plan.key) == watcher["jobId"]
    assert fetch_plan(place, given_["--plan"], given_["--digest"]).queue == GPU
    account.objects[address] = encode_plan(replace(prepared.plan, after=1))
    with pytest.raises(ConfigError, match="has changed since the run was submitted"):
        fetch_plan(place, given_["--plan"], given_["--digest"])
    aws.clock.time += 1801  # who waits leaves it to the watcher for a while, then does it himself
    assert QueueMoves(place, place.describe)([job_id])[job_id].queue == SPOT
    aws.clock.time += 600
    assert QueueMoves(place, place.describe)([job_id])[job_id].queue == GPU


def test_moved_by_a_watcher_elsewhere_it_is_found_and_remembered(tmp_path: Path, aws: Aws) -> None:
    """This machine's history knows nothing of it; AWS does."""
    place = place_in(tmp_path, aws)
    prepared, job_id = submitted(place)
    assert prepared.plan is not None
    aws.clock.time += 1801
    there = place_in(tmp_path / "container", aws)
    now = watch_until_moved(there, read_plan(encode_plan(prepared.plan)), job_id, lambda _: None)
    assert select(place, ["hello"]) == [now]
    assert place.history.records("dev").get(now) is not None
    assert QueueMoves(place, place.describe)([job_id])[job_id].queue == GPU


def test_of_two_jobs_that_follow_one_only_the_first_runs(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))

    def env(run: str, moved: str = "") -> RuntimeEnv:
        return RuntimeEnv.read({"AWS_BATCH_JOB_ID": run, "BATCHML_MOVED": moved})

    assert claim(store, env("a")) is None  # it had begun once, before its host was lost
    assert claim(store, env("b", moved="a")) is None
    assert claim(store, env("c", moved="a")) == "b"
    assert claim(store, env("b", moved="a")) is None  # a later attempt


def test_the_end_of_the_job_before_is_no_end_of_the_run(tmp_path: Path) -> None:
    """Whoever saw that end, before or after the move was written down."""
    history = History(tmp_path / "history.jsonl")
    record = Record(key="2aaaaaaaaaaaaaaaa", env="dev", name="n", job_name="n-k", fallback="gpu:60")
    gone = Run("a", "n", SPOT, JobStatus.FAILED, status_reason=move_reason(GPU, 60), key=record.key)
    history.intend(record)
    history.add_job_id(record.key, "a")
    history.add_end(gone)
    history.intend(Record(**{**_fields(record), "job_id": "a", "moved": "a", "queue": GPU}))
    history.add_end(gone)
    history.add_job_id(record.key, "b")
    history.add_end(gone)
    (found,) = history.newest_first("dev")
    assert (found.job_id, found.moved, found.status, found.queue) == ("b", "a", "", GPU)
    assert not history.unconfirmed("dev")


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_plans_are_the_users_own_and_old_ones_go(tmp_path: Path) -> None:
    plans = FallbackPlans.beside(History(tmp_path / "history.jsonl"), "dev")
    plans.keep(plan(key="old"))
    folder = tmp_path / "fallbacks" / "dev"
    assert (folder / "old").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    long_ago = (folder / "old").stat().st_mtime - 31 * 86_400
    os.utime(folder / "old", (long_ago, long_ago))
    plans.keep(plan(key="new"))
    plans.keep(plan(key="newer"))
    plans.save_watcher("new", "j-1")
    assert plans.watcher("new") == "j-1"
    assert sorted(each.name for each in folder.iterdir()) == ["new", "new.watcher", "newer"]
    assert plans.find("old") is None
    plans.drop("new")
    assert (plans.find("new"), plans.watcher("new")) == (None, "")
