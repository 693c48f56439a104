"""Submitting exactly once, in a world where any answer may be lost and any client may be killed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.jobs import JobApi, NamedJob
from batchml.aws.batch.requests import SubmissionRequests
from batchml.aws.errors import translate_errors
from batchml.errors import (
    AccessError,
    BatchmlError,
    NoQueue,
    NotFound,
    ServiceError,
    ServiceUnreachable,
    SubmissionUnknown,
)
from batchml.history import History
from batchml.model.names import keyed_name, new_key
from batchml.model.run import JobStatus, Record
from batchml.runs.in_flight import InFlight
from batchml.runs.reconcile import NEVER_ARRIVED, reconcile
from batchml.runs.send import AWS_LISTING_DELAY, PATIENCE, RESENDS, TRIES, Interrupted, Submitter
from batchml.runs.submit import submit
from tests.aws.test_failures import client_error, named
from tests.support.fakes import FakeClock
from tests.support.generate import TORTURE

URL = {"endpoint_url": "https://batch.us-east-1.amazonaws.com/v1/submitjob"}


def error(kind: str) -> Exception:
    """What botocore raises."""
    made: Mapping[str, Callable[[], Exception]] = {
        "closed": lambda: named("ConnectionClosedError", **URL),
        "timeout": lambda: named("ReadTimeoutError", **URL),
        "not-json": lambda: ResponseParserError("no JSON"),
        "500": lambda: client_error("500", 500),
        "503": lambda: client_error("ServiceUnavailable", 503),
        "throttled": lambda: client_error("TooManyRequestsException", 429),
        "dns": lambda: named("EndpointConnectionError", error="no name", **URL),
        "connect": lambda: named("ConnectTimeoutError", error="", **URL),
        "denied": lambda: client_error("AccessDeniedException", 403),
        "refused": lambda: client_error("ClientException", 400, "no such share"),
    }
    return made[kind]()


NO_SUCH = "JobDefinition d not found"
AMBIGUOUS = ("closed", "timeout", "not-json", "500", "503")
HARMLESS = ("throttled", "dns", "connect")


class Killed(BaseException):
    """The client ends at this very place, like from SIGKILL."""


class World(JobApi):
    """An account. `plan` says what happens to each SubmitJob: "ok", an `error`, with "+" before it
    when the call is carried out all the same, or "kill". What is not planned is "ok".

    A job is listed `lag` seconds after it was made.
    """

    is_local = False

    def __init__(self, clock: FakeClock, plan: list[str] | None = None, lag: float = 0) -> None:
        self.clock = clock
        self.plan = plan or []
        self.lag = lag
        self.jobs: list[tuple[str, str, float]] = []  # id, name, when
        self.ended: dict[str, str] = {}  # id -> reason
        self.definitions = {"d"}
        self.listing: list[str] = []  # what happens to each ListJobs
        self.calls: list[str] = []
        self.refusal = ""

    def submit(self, request: Any) -> str:
        self.calls.append("SubmitJob")
        what = self.plan.pop(0) if self.plan else "ok"
        if self.refusal or request["jobDefinition"] not in self.definitions:
            raise ServiceError("SubmitJob", "ClientException", self.refusal or NO_SUCH, 400)
        if what == "ok" or what.startswith("+"):
            self.make(request["jobName"])
        self._happen("SubmitJob", what.removeprefix("+"))
        return self.jobs[-1][0]

    def make(self, name: str) -> str:
        self.jobs.append((f"job-{len(self.jobs)}", name, self.clock.now()))
        return self.jobs[-1][0]

    def find_by_name(self, queue: str, job_name: str, once: bool = False) -> list[NamedJob]:
        self.calls.append("ListJobs")
        self._happen("ListJobs", self.listing.pop(0) if self.listing else "ok")
        return [
            NamedJob(job_id, int(at * 1000), self.status(job_id))
            for job_id, name, at in self.jobs
            if name == job_name and at + self.lag <= self.clock.now()
        ]

    def status(self, job_id: str) -> JobStatus:
        return JobStatus.FAILED if job_id in self.ended else JobStatus.RUNNABLE

    def terminate(self, job_id: str, reason: str) -> None:
        self.calls.append("TerminateJob")
        self.ended[job_id] = reason

    def register(self, request: Any) -> None:
        self.calls.append("RegisterJobDefinition")
        self.definitions.add(request["jobDefinitionName"])

    def has_definition(self, name: str) -> bool:
        self.calls.append("DescribeJobDefinitions")
        return name in self.definitions

    def queues(self) -> list[str]:
        self.calls.append("DescribeJobQueues")
        return ["default", "urgent"]

    @property
    def live(self) -> list[str]:
        return [job_id for job_id, _, _ in self.jobs if job_id not in self.ended]

    def _happen(self, operation: str, what: str) -> None:
        if what == "kill":
            raise Killed
        if what == "ctrl-c":
            raise KeyboardInterrupt
        if what != "ok":
            with translate_errors(operation):
                raise error(what)


class Client:
    """One user's state folder and account."""

    def __init__(self, folder: Path, *plan: str, lag: float = 0) -> None:
        self.clock = FakeClock()
        self.world = World(self.clock, list(plan), lag)
        self.history = History(folder / "history.jsonl")
        self.flights = InFlight.beside(self.history, "aws")
        self.said: list[str] = []
        self.keys = 0

    def record(self) -> Record:
        self.keys += 1
        key = new_key(lambda size: self.keys.to_bytes(size, "big"))
        at = int(self.clock.now() * 1000)
        return Record(
            key=key, name="j", job_name=keyed_name("j", key), env="aws", queue="default", at=at
        )

    def submit(self, share: str = "", definition: str = "d", queue: str = "default") -> str:
        record = self.record()
        request = {"jobName": record.job_name, "jobDefinition": definition, "jobQueue": queue}
        requests = SubmissionRequests({"jobDefinitionName": definition}, request)
        return submit(replace(self.submitter, share=share), requests, record)

    @property
    def submitter(self) -> Submitter:
        return Submitter(self.world, self.history, self.clock, self.said.append)

    def reconcile(self) -> list[Any]:
        return reconcile(self.submitter, "aws")

    def kept(self) -> list[Record]:
        return self.history.newest_first("aws")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


# --- answers that are lost --------------------------------------------------------------------


def test_one_call_when_nothing_goes_wrong(home: Path) -> None:
    user = Client(home)
    assert user.submit() == "job-0"
    assert user.world.calls == ["SubmitJob"]
    assert (user.kept()[0].job_id, user.history.unconfirmed("aws"), user.said) == ("job-0", [], [])
    assert user.flights.abandoned(1e12) == []


@pytest.mark.parametrize("lag", [0, 40])
@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_a_run_whose_answer_was_lost_is_found_by_its_name(
    home: Path, kind: str, lag: float
) -> None:
    user = Client(home, f"+{kind}", lag=lag)
    assert user.submit() == "job-0"
    assert user.world.calls.count("SubmitJob") == 1
    assert user.kept()[0].job_id == "job-0"
    assert user.said == ["The answer of AWS Batch was lost; looking for the run by its name."]


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_what_was_lost_on_the_way_there_is_sent_again_after_the_lag(home: Path, kind: str) -> None:
    user = Client(home, kind)
    assert user.submit() == "job-0"
    assert user.world.calls.count("SubmitJob") == 2
    assert sum(user.clock.naps) == AWS_LISTING_DELAY


def test_a_service_that_never_says_more_than_500_ends_without_a_run(home: Path) -> None:
    user = Client(home, *["500"] * 10)
    with pytest.raises(ServiceError):
        user.submit()
    assert user.world.calls.count("SubmitJob") == RESENDS + 1
    assert user.history.unconfirmed("aws") == []
    assert user.kept()[0].refused


def test_a_call_that_is_carried_out_late_leaves_one_run(home: Path) -> None:
    user = Client(home, "+timeout")
    look = user.world.find_by_name

    def find_by_name(queue: str, job_name: str, once: bool = False) -> list[NamedJob]:
        found = look(queue, job_name, once)
        return found if user.world.calls.count("SubmitJob") == 2 else []

    user.world.find_by_name = find_by_name  # type: ignore[method-assign]
    assert user.submit() == "job-0"
    assert user.world.live == ["job-0"]
    assert user.world.ended == {"job-1": "batchml: second run of one submission: job-0 goes on"}


def test_of_several_runs_the_oldest_that_lives_stays(home: Path) -> None:
    user = Client(home, "+timeout")
    name = user.record().job_name
    user.keys -= 1
    for _ in range(3):
        user.world.make(name)
        user.clock.time += 1
    user.world.ended["job-0"] = "it found the claim of another"
    assert user.submit() == "job-1"
    assert user.world.live == ["job-1"]


def test_what_cannot_be_looked_up_stays_open_and_is_said_to(home: Path) -> None:
    user = Client(home, "+timeout")
    user.world.listing = ["closed"] * 100
    with pytest.raises(SubmissionUnknown, match="batchml reconcile 2a") as told:
        user.submit()
    assert told.value.exit_code == 74
    (record,) = user.history.unconfirmed("aws")
    user.world.listing = []
    (settled,) = user.reconcile()
    assert (settled.record.key, settled.job_id) == (record.key, "job-0")
    assert user.history.unconfirmed("aws") == []


@pytest.mark.parametrize("kind", [*AMBIGUOUS, *HARMLESS])
def test_a_look_that_fails_for_a_while_is_repeated(home: Path, kind: str) -> None:
    user = Client(home, "+timeout")
    user.world.listing = [kind] * 3
    assert user.submit() == "job-0"
    assert user.world.calls == ["SubmitJob", *["ListJobs"] * 4]


def test_a_look_that_is_not_allowed_leaves_it_open(home: Path) -> None:
    user = Client(home, "+timeout")
    user.world.listing = ["denied"]
    with pytest.raises(SubmissionUnknown, match="is not allowed"):
        user.submit()
    assert len(user.history.unconfirmed("aws")) == 1


# --- what was certainly not carried out -------------------------------------------------------


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_was_not_carried_out_is_sent_again_without_a_look(home: Path, kind: str) -> None:
    user = Client(home, kind, kind)
    assert user.submit() == "job-0"
    assert user.world.calls == ["SubmitJob"] * 3
    assert len(user.said) == 1
    assert user.clock.naps[0] <= 1


def test_throttling_is_waited_out_for_minutes_and_not_for_ever(home: Path) -> None:
    user = Client(home, *["throttled"] * 500)
    with pytest.raises(ServiceUnreachable, match="too busy"):
        user.submit()
    assert PATIENCE <= sum(user.clock.naps) < PATIENCE + 30
    assert user.history.unconfirmed("aws") == []
    assert user.world.jobs == []


def test_without_a_network_a_few_tries_are_enough(home: Path) -> None:
    user = Client(home, *["dns"] * 10)
    with pytest.raises(ServiceUnreachable):
        user.submit()
    assert user.world.calls == ["SubmitJob"] * TRIES
    assert user.history.unconfirmed("aws") == []


def test_credentials_that_fail_are_told_at_once(home: Path) -> None:
    user = Client(home, "denied")
    with pytest.raises(AccessError):
        user.submit()
    assert user.world.calls == ["SubmitJob"]
    assert user.kept()[0].refused
    assert user.flights.abandoned(1e12) == []


def test_the_definition_is_registered_when_it_is_missing(home: Path) -> None:
    user = Client(home)
    assert user.submit(definition="new") == "job-0"
    expected = ["SubmitJob", "DescribeJobDefinitions", "RegisterJobDefinition", "SubmitJob"]
    assert user.world.calls == expected


def test_a_definition_that_another_process_registers_meanwhile_is_used(home: Path) -> None:
    user = Client(home)
    there = user.world.has_definition

    def registered(name: str) -> bool:
        user.world.definitions.add(name)
        return there(name)

    user.world.has_definition = registered  # type: ignore[method-assign]
    assert user.submit(definition="new") == "job-0"
    expected = ["SubmitJob", "DescribeJobDefinitions", "DescribeJobQueues", "SubmitJob"]
    assert user.world.calls == expected


def test_a_definition_that_is_there_and_refused_again_is_not_tried_for_ever(home: Path) -> None:
    user = Client(home)
    user.world.refusal = "JobDefinition d is of another type"
    with pytest.raises(ServiceError, match="of another type"):
        user.submit()
    assert user.world.calls.count("SubmitJob") == 2
    assert user.history.unconfirmed("aws") == []


def test_another_refusal_is_passed_on_and_nothing_is_registered(home: Path) -> None:
    user = Client(home)
    user.world.refusal = "no such share"
    with pytest.raises(ServiceError, match="no such share"):
        user.submit()
    assert user.world.calls == ["SubmitJob", "DescribeJobDefinitions", "DescribeJobQueues"]
    assert "no such share" in user.kept()[0].refused


def test_a_queue_that_does_not_exist_is_told_with_those_that_do(home: Path) -> None:
    user = Client(home)
    user.world.refusal = "JobQueue urgnet not found"
    with pytest.raises(NotFound, match="Did you mean 'urgent'"):
        user.submit(queue="urgnet")


def test_a_queue_that_is_not_there_is_told_for_a_job_that_was_not_registered(home: Path) -> None:
    user = Client(home)
    user.world.definitions.clear()
    user.world.refusal = "JobQueue urgnet not found"
    with pytest.raises(NoQueue) as caught:
        user.submit(queue="urgnet")
    assert caught.value.exit_code == 78
    assert user.world.calls == ["SubmitJob", "DescribeJobQueues"]


def test_a_full_disk_after_the_call_hides_no_job_id(home: Path) -> None:
    user = Client(home)

    def full(key: str, job_id: str) -> None:
        raise OSError(28, "No space left on device")

    user.history.add_job_id = full  # type: ignore[method-assign]
    assert user.submit() == "job-0"
    assert user.said == [
        "The outcome could not be written to disk (No space left on device). Later "
        "`batchml reconcile` writes it."
    ]
    del user.history.add_job_id
    assert [one.job_id for one in user.reconcile()] == ["job-0"]


def test_an_intent_that_cannot_be_kept_is_not_sent(home: Path) -> None:
    user = Client(home)

    def full(*records: Record) -> None:
        raise OSError(28, "No space left on device")

    user.history.intend = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        user.submit()
    assert user.world.calls == []


# --- clients that are killed or interrupted ---------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "runs"), [("kill", 0), ("+kill", 1)], ids=["before it was sent", "after"]
)
def test_the_next_submission_settles_what_a_killed_one_left(
    home: Path, plan: str, runs: int
) -> None:
    user = Client(home, plan)
    with pytest.raises(Killed):
        user.submit()
    user.clock.time = 1e10  # the file's own time is the system's
    user.submit()
    told = ["An interrupted submission of 'j' did arrive: job job-0."] if runs else []
    assert user.said == told
    assert user.history.unconfirmed("aws") == []
    assert len(user.world.jobs) == runs + 1
    assert [record.refused for record in user.kept()] == ["", "" if runs else NEVER_ARRIVED]


def test_a_submission_under_way_is_left_to_its_own_process(home: Path) -> None:
    user = Client(home, "+kill")
    with pytest.raises(Killed):
        user.submit()
    (record,) = user.history.unconfirmed("aws")
    with user.flights.mark(record.key):
        (settled,) = user.reconcile()
        assert settled.is_open
    (settled,) = user.reconcile()
    assert settled.job_id == "job-0"


def test_a_young_submission_without_a_run_may_still_get_one(home: Path) -> None:
    user = Client(home, "+kill", lag=30)
    with pytest.raises(Killed):
        user.submit()
    (open_,) = reconcile(user.submitter, "aws", wait=False)
    assert open_.is_open
    (settled,) = user.reconcile()
    assert settled.job_id == "job-0"


@pytest.mark.parametrize(
    ("plan", "job_id", "is_open"),
    [(["+ctrl-c"], "job-0", False), (["ctrl-c"], "", True), (["+timeout"], "job-0", False)],
)
def test_ctrl_c_looks_the_run_up_once(
    home: Path, plan: list[str], job_id: str, is_open: bool
) -> None:
    user = Client(home, *plan)
    user.world.listing = ["ctrl-c"] if "+timeout" in plan else []
    with pytest.raises(Interrupted) as stop:
        user.submit()
    assert (stop.value.job_id, stop.value.is_open) == (job_id, is_open)
    assert bool(user.history.unconfirmed("aws")) == is_open
    assert user.kept()[0].job_id == job_id


def test_ctrl_c_while_it_waits_for_its_turn_leaves_nothing(home: Path) -> None:
    user = Client(home, "throttled")

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    user.clock.sleep = stop  # type: ignore[method-assign]
    with pytest.raises(Interrupted) as told:
        user.submit()
    assert (told.value.job_id, told.value.is_open) == ("", False)
    assert user.history.unconfirmed("aws") == []


def test_ctrl_c_after_the_answer_hides_no_job_id(home: Path) -> None:
    user = Client(home, lag=30)
    submitted = user.history.add_job_id

    def press(key: str, job_id: str) -> None:
        user.history.add_job_id = submitted  # type: ignore[method-assign]
        raise KeyboardInterrupt

    user.history.add_job_id = press  # type: ignore[method-assign]
    with pytest.raises(Interrupted) as stop:
        user.submit()
    assert stop.value.job_id == "job-0"
    assert user.kept()[0].job_id == "job-0"


WAYS = ("ok", "kill", "+kill", "ctrl-c", "+ctrl-c", *HARMLESS, "denied", "refused")
FATES = st.sampled_from([*WAYS, *AMBIGUOUS, *(f"+{kind}" for kind in AMBIGUOUS)])
LOOKS = st.sampled_from(["ok", "ok", "ok", "closed", "throttled", "denied", "kill", "ctrl-c"])


@given(
    plan=st.lists(FATES, max_size=8),
    looks=st.lists(LOOKS, max_size=12),
    lag=st.sampled_from([0.0, 5.0, AWS_LISTING_DELAY - 1]),
)
@examples(max_examples=40 * TORTURE)
def test_whatever_happens_there_is_one_run_or_none_and_the_history_knows(
    tmp_path_factory: pytest.TempPathFactory, plan: list[str], looks: list[str], lag: float
) -> None:
    user = Client(tmp_path_factory.mktemp("home"), *plan, lag=lag)
    user.world.listing = looks
    told: list[str] = []
    for _ in range(3):
        try:
            told.append(user.submit())
        except Interrupted as stop:
            told += [stop.job_id] if stop.job_id else []
        except (BatchmlError, Killed, KeyboardInterrupt):
            pass
    user.world.plan.clear()
    user.world.listing.clear()
    user.reconcile()
    assert user.history.unconfirmed("aws") == []
    kept = user.kept()
    assert len(kept) <= 3
    live = {job_id: name for job_id, name, _ in user.world.jobs if job_id in user.world.live}
    assert len(set(live.values())) == len(live), "never two runs of one submission"
    assert {record.job_id: record.job_name for record in kept if record.job_id} == live
    assert set(told) <= live.keys()
