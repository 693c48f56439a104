"""Watching: how many calls it makes, who is told what, and how long is borne what."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.logs import LogLine, StreamReader
from batchml.aws.session import Session
from batchml.context import LOCAL_INTERVALS, PollIntervals
from batchml.errors import AccessError, ServiceError, ServiceUnreachable
from batchml.model.logcheck import HEADER_OF_MANY
from batchml.model.run import Attempt, JobStatus, Record, Run
from batchml.runs.watch.events import (
    CUT,
    MARKED,
    PROVEN,
    ContactLost,
    LogClosed,
    MetricsReported,
    OutputLine,
    RunEnded,
    RunEvent,
    RunMessage,
    UsageReported,
)
from batchml.runs.watch.follow import follow
from batchml.runs.watch.logs import read_output
from batchml.runs.watch.parts import PartSchedule
from batchml.runs.watch.poller import Limiter, make_recall, poll_until_ended
from batchml.runtime.protocol.log_marks import end_mark
from tests.support.fakes import FakeClock
from tests.support.watch_world import CALM, Job, Trouble, World, attempt

PACE = PollIntervals()
START = 1_000_000.0


def of_kind(happenings: Sequence[RunEvent], kind: type[Any]) -> list[Any]:
    return [happening for happening in happenings if isinstance(happening, kind)]


def run_of(status: str, *attempts: Attempt, **more: Any) -> Run:
    return Run("j", "n", "q", JobStatus(status), attempts=attempts, **more)


def test_waiting_on_a_thousand_runs_makes_at_most_one_call_a_second() -> None:
    clock, calls = FakeClock(), list[float]()

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        calls.append(clock.time - START)
        assert len(ids) <= 100
        over = JobStatus.SUCCEEDED if clock.time > START + 600 else JobStatus.RUNNING
        return {job_id: Run(job_id, "n", "q", over) for job_id in ids}

    ids = [f"j{number}" for number in range(1000)]
    ended = [run.job_id for run in poll_until_ended(describe, ids, clock=clock, pace=PACE)]
    assert sorted(ended) == sorted(ids)
    assert all(later - earlier > 0.999 for earlier, later in pairwise(calls))


def test_a_busy_service_is_asked_less_and_more_again_when_it_recovers() -> None:
    clock = FakeClock()
    limiter = Limiter(clock, 8.0)

    def gap() -> float:
        limiter.take()
        before = clock.time
        limiter.take()
        limiter.succeeded()
        return clock.time - before

    assert gap() == pytest.approx(1 / 8)
    limiter.failed()
    limiter.failed()  # of the same moment
    clock.sleep(1)
    assert gap() == pytest.approx(1 / 4)
    for _ in range(40):
        gap()
    assert gap() == pytest.approx(1 / 5.76)


def a_large_array(size: int) -> World:
    """Children that run ten at a time, half a minute each."""
    random = Random(1)
    jobs = []
    for number in range(size):
        at = START + 5 + (number // 10) * 30
        lines = [(at + 1, f"hello {number}")]
        jobs.append(Job(f"j:{number}", (attempt(f"s/{number}", at, lines, at + 30),)))
    return World(jobs, CALM, random, ":")


def test_the_children_of_a_large_array_are_found_with_few_calls() -> None:
    world = a_large_array(300)
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert sorted(line.text for line in of_kind(seen, OutputLine)) == sorted(
        f"hello {number}" for number in range(300)
    )
    assert {closed.proof for closed in of_kind(seen, LogClosed)} == {MARKED}
    seconds = world.clock.time - START
    assert sum(name == "DescribeJobs" for name, _ in world.calls) <= seconds + 1
    assert sum(name == "GetLogEvents" for name, _ in world.calls) <= 8 * seconds + 1


class Slow:
    """An array on this machine, where each call takes its time."""

    def __init__(self, seconds: float) -> None:
        self.world = a_large_array(40)
        self.seconds = seconds
        self.spent = 0.0

    def describe(self, ids: Sequence[str]) -> dict[str, Run]:
        self._take()
        return self.world.describe(ids)

    def client(self, service: str) -> Any:
        self._take()
        return self.world.client(service)

    def open_log(self, run: Run, stream: str) -> StreamReader:
        return StreamReader(lambda: cast(Session, self), run.log_group, stream)

    def _take(self) -> None:
        self.spent += self.seconds
        self.world.clock.time += self.seconds


def test_on_this_machine_an_array_is_followed_with_a_small_part_of_its_time() -> None:
    slow = Slow(0.02)
    clock = slow.world.clock
    seen: list[RunEvent] = []
    for each in follow(slow.describe, slow.open_log, "j", clock=clock, pace=LOCAL_INTERVALS):
        seen.append(each)
        if isinstance(each, OutputLine):
            clock.time += 0.5  # whoever reads it takes his time, which is nobody's rest
    assert len(of_kind(seen, OutputLine)) == 40
    assert slow.spent < (clock.time - START) / 4


def test_a_call_that_hung_is_no_reason_to_rest_for_minutes() -> None:
    clock, asked = FakeClock(), list[float]()

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        asked.append(clock.time)
        if len(asked) == 2:
            clock.time += 19
            raise ServiceUnreachable("hung")
        return {"j": run_of("RUNNING" if len(asked) < 4 else "SUCCEEDED")}

    list(follow(describe, no_log, "j", clock=clock, pace=LOCAL_INTERVALS))
    assert asked[2] - asked[1] <= 19 + 2


def test_a_finished_array_is_read_child_by_child() -> None:
    world = a_large_array(120)
    world.clock.time += 10_000
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [line.child for line in of_kind(seen, OutputLine)] == [str(n) for n in range(120)]
    names = [name for name, _ in world.calls]  # the logs and the states in hundreds
    assert (names.count("FilterLogEvents"), names.count("GetLogEvents")) == (2, 0)
    assert len(names) <= 2 + 4
    assert {closed.proof for closed in of_kind(seen, LogClosed)} == {MARKED}


def test_only_logs_that_are_proven_whole_are_read_together() -> None:
    """Two lines of the third are late; the embedded server proves all logs but the fifth."""
    world = a_large_array(6)
    late = world.jobs["j:2"].tries[0]
    events = [replace(event, visible_at=START + 20_000) for event in late.events]
    world._streams["s/2"] = replace(late, events=tuple(events))
    world.clock.time += 10_000
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    closed = {each.child: each.proof for each in of_kind(seen, LogClosed)}
    assert closed == {number: MARKED for number in "01345"}
    assert {name for name, _ in world.calls} == {"DescribeJobs", "FilterLogEvents", "GetLogEvents"}

    world, asked = a_large_array(6), list[str]()
    world.clock.time += 10_000
    ask = world.filter_log_events
    world.filter_log_events = lambda **request: {  # type: ignore[method-assign]
        **ask(**request),
        "ResponseMetadata": {"HTTPHeaders": {HEADER_OF_MANY: "[1, 1, 1, 1, null, 2]"}},
    }
    get = world.get_log_events

    def get_and_note(**request: Any) -> dict[str, Any]:
        asked.append(request["logStreamName"])
        return get(**request)

    world.get_log_events = get_and_note  # type: ignore[method-assign,assignment]
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [line.child for line in of_kind(seen, OutputLine)] == list("012345")
    proofs = {each.child: each.proof for each in of_kind(seen, LogClosed)}
    assert proofs == {**dict.fromkeys("0123", PROVEN), "4": MARKED, "5": MARKED}
    assert asked == ["s/4", "s/5"]


@pytest.mark.parametrize("code", ["AccessDeniedException", "ResourceNotFoundException"])
def test_logs_that_cannot_be_read_together_are_read_one_by_one(code: str) -> None:
    world = a_large_array(30)
    world.clock.time += 10_000

    def refuse(**_: Any) -> dict[str, Any]:
        raise ClientError({"Error": {"Code": code, "Message": "no"}}, "FilterLogEvents")

    world.filter_log_events = refuse  # type: ignore[method-assign,assignment]
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [line.child for line in of_kind(seen, OutputLine)] == [str(n) for n in range(30)]


def test_long_logs_are_read_one_by_one() -> None:
    """What is read together is kept in memory, so only a few pages of it are read."""
    lines = [(START + number, f"line {number}") for number in range(40)]
    jobs = [Job(f"j:{n}", (attempt(f"s/{n}", START, lines, START + 50),)) for n in range(64)]
    world = World(jobs, Trouble(page=50), Random(1), ":")
    world.clock.time += 10_000
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [line.text for line in of_kind(seen, OutputLine)] == [text for _, text in lines] * 64
    assert {closed.proof for closed in of_kind(seen, LogClosed)} == {MARKED}
    assert sum(name == "FilterLogEvents" for name, _ in world.calls) <= 5 * 6


@settings(max_examples=30)
@given(st.integers(2, 1000), st.randoms(use_true_random=False), st.integers(0, 10))
def test_every_child_that_has_begun_is_asked_about_soon(size: int, random: Any, tick: int) -> None:
    parent = Run("j", "n", "q", JobStatus.PENDING, array_size=size, children={"RUNNING": size})
    family = PartSchedule(parent)
    running = set(random.sample(range(size), min(size, 150)))
    waiting = size - len(running)
    counts = {"RUNNING": len(running), "RUNNABLE": waiting}
    parent = Run("j", "n", "q", JobStatus.PENDING, array_size=size, children=counts)
    found: set[int] = set()
    for _ in range(size // 200 + 6):  # the first ones first, while these have begun
        chosen = family.choose(parent, 400)
        assert len(chosen) == len(set(chosen)) <= 400
        for number in chosen:
            assert family.number(family.job_id(number)) == number
            status = JobStatus.RUNNING if number in running else JobStatus.RUNNABLE
            family.update(number, Run(family.job_id(number), "n", "q", status))
            found.add(number)
    assert running <= found


class Door:
    """Who asks is let in until `closes`, and from `opens` on again."""

    def __init__(self, clock: FakeClock, closes: float, opens: float) -> None:
        self.clock, self.closes, self.opens = clock, START + closes, START + opens
        self.renewed = 0

    def describe(self, ids: Sequence[str]) -> dict[str, Run]:
        if self.closes <= self.clock.time < self.opens:
            raise AccessError("your session has expired", code="ExpiredTokenException")
        over = self.clock.time > START + 1000
        status = JobStatus.SUCCEEDED if over else JobStatus.RUNNING
        return {job_id: Run(job_id, "n", "q", status) for job_id in ids}

    def renew(self) -> None:
        self.renewed += 1


def test_waiting_goes_on_when_the_user_signs_in_again() -> None:
    clock, told = FakeClock(), list[str]()
    door = Door(clock, 100, 900)
    (run,) = poll_until_ended(
        door.describe, ["j"], clock=clock, pace=PACE, renew=door.renew, tell=told.append
    )
    assert run.status is JobStatus.SUCCEEDED
    assert told == ["your session has expired"]
    assert door.renewed > 10


def test_following_goes_on_when_the_user_signs_in_again() -> None:
    clock = FakeClock()
    door = Door(clock, 100, 900)
    seen = list(follow(door.describe, no_log, "j", clock=clock, pace=PACE, renew=door.renew))
    assert isinstance(seen[-1], RunEnded)
    assert of_kind(seen, ContactLost)[0].error == "your session has expired"


def test_who_does_not_sign_in_for_a_quarter_of_an_hour_is_told_so() -> None:
    clock = FakeClock()
    door = Door(clock, 100, 10_000)
    with pytest.raises(AccessError, match="expired") as raised:
        list(poll_until_ended(door.describe, ["j"], clock=clock, pace=PACE))
    assert raised.value.exit_code == 77
    assert 1000 <= clock.time - START < 1100


def test_who_was_never_signed_in_is_told_at_once() -> None:
    clock = FakeClock()
    with pytest.raises(AccessError):
        list(poll_until_ended(Door(clock, 0, 10_000).describe, ["j"], clock=clock, pace=PACE))
    assert clock.time == START


def test_a_refusal_ends_the_wait_and_an_outage_does_not() -> None:
    errors = [ServiceError("DescribeJobs", "InternalError", "oops", 500)] * 3

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        if errors:
            raise errors.pop()
        return {"j": run_of("SUCCEEDED")}

    assert len(list(poll_until_ended(describe, ["j"], clock=FakeClock(), pace=PACE))) == 1
    errors = [ServiceError("DescribeJobs", "ClientException", "no", 400)]
    with pytest.raises(ServiceError):
        list(poll_until_ended(describe, ["j"], clock=FakeClock(), pace=PACE))


def no_log(run: Run, stream: str) -> StreamReader:
    raise AssertionError("there is no log to read")


class Logs:
    """A session whose GetLogEvents fails in one way."""

    def __init__(self, code: str, message: str) -> None:
        self._error = ClientError({"Error": {"Code": code, "Message": message}}, "GetLogEvents")

    def client(self, _: str) -> "Logs":
        return self

    def get_log_events(self, **_: Any) -> dict[str, Any]:
        raise self._error

    def open_log(self, run: Run, stream: str) -> StreamReader:
        return StreamReader(lambda: cast(Session, self), run.log_group, stream)


def followed(logs: Logs, seconds: float, status: str = "SUCCEEDED") -> list[RunEvent]:
    """Follow a run that began now and ends after so many seconds."""
    clock = FakeClock()
    began = int(START * 1000)

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        if clock.time < START + seconds:
            return {"j": run_of("RUNNING", Attempt(started_at=began, log_stream="s"))}
        stopped = began + int(seconds * 1000)
        over = Attempt(started_at=began, stopped_at=stopped, log_stream="s")
        return {"j": run_of(status, over)}

    return list(follow(describe, logs.open_log, "j", clock=clock, pace=PACE))


def test_a_log_stream_that_is_not_there_is_told_of_after_two_minutes_and_at_the_end() -> None:
    gone = Logs("ResourceNotFoundException", "The specified log stream does not exist.")
    (late,) = of_kind(followed(gone, 300), RunMessage)
    assert late.text == "No output yet: the log stream s does not exist."
    (end,) = of_kind(followed(gone, 30), RunMessage)
    assert "the log stream s does not exist" in end.text
    assert "The retention time of the log group" in end.text


def test_a_log_group_that_is_not_there_is_called_by_its_name() -> None:
    gone = Logs("ResourceNotFoundException", "The specified log group does not exist.")
    (told,) = of_kind(followed(gone, 300), RunMessage)
    assert told.text == "No output: the log group /aws/batch/job does not exist in this region."


def test_who_may_not_read_logs_still_learns_how_the_run_ends() -> None:
    seen = followed(Logs("AccessDeniedException", "User u is not authorized to ..."), 300)
    (told,) = of_kind(seen, RunMessage)
    assert told.text.startswith("Its output cannot be read: GetLogEvents")
    assert isinstance(seen[-1], RunEnded)


def test_a_log_that_is_out_of_reach_at_the_end_is_not_called_whole() -> None:
    random = Random(0)
    job = Job("j", (attempt("s", START, [(START + 1, "one")], START + 30, marked=False),))
    world = World([job], Trouble(), random)
    readable = world.client

    def client(service: str) -> World:
        if world.clock.time > START + 20:
            raise ServiceUnreachable("no route")
        return readable(service)

    world.client = client  # type: ignore[method-assign]
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [closed.proof for closed in of_kind(seen, LogClosed)] == [CUT]
    assert isinstance(seen[-1], RunEnded)


def test_a_log_that_was_out_of_reach_for_long_has_its_time_after_the_end() -> None:
    job = Job("j", (attempt("s", START, [(START + 1, "one")], START + 1000),))
    world = World([job], Trouble(), Random(0))
    readable = world.client

    def client(service: str) -> World:
        if START + 20 < world.clock.time < START + 1200:
            raise ServiceUnreachable("no route")
        return readable(service)

    world.client = client  # type: ignore[method-assign]
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [closed.proof for closed in of_kind(seen, LogClosed)] == [MARKED]


class Listed:
    """ListJobs of one queue."""

    def __init__(self, *runs: Run) -> None:
        self.runs = runs

    def list_recent(self, queue: str, since: int = 0, name: str = "") -> tuple[Run, ...]:
        assert (queue, name) == ("q", "n-key")
        return self.runs


class Kept:
    def __init__(self, *records: Record) -> None:
        self.records = list(records)

    def find(self, env: str, job_id: str) -> Record | None:
        return next((each for each in self.records if each.job_id == job_id), None)


RECORD = Record(key="key", job_id="j", name="n", job_name="n-key", env="e", queue="q")


def test_a_job_that_is_only_listed_is_found_by_its_name() -> None:
    over = run_of("SUCCEEDED")
    clock = FakeClock()
    recall = make_recall(lambda: Listed(over), Kept(RECORD), "e")
    assert list(poll_until_ended(lambda ids: {}, ["j"], clock=clock, pace=PACE, recall=recall)) == [
        over
    ]
    assert clock.time - START >= PACE.startup_limit


def test_a_job_that_batch_has_forgotten_is_answered_from_the_history() -> None:
    ended = Record(key="key", job_id="j", name="n", job_name="n-key", env="e", queue="q",
                   status="FAILED", outcome="app-error", exit_code=3)  # fmt: skip
    recall = make_recall(lambda: Listed(), Kept(ended), "e")
    seen = list(follow(lambda ids: {}, no_log, "j", clock=FakeClock(), pace=PACE, recall=recall))
    assert isinstance(seen[-1], RunEnded)
    assert seen[-1].run.exit_code == 3


def test_a_job_that_nobody_knows_ends_the_watch_within_a_bound() -> None:
    clock = FakeClock()
    recall = make_recall(lambda: Listed(), Kept(RECORD), "e")
    with pytest.raises(ServiceUnreachable, match="AWS Batch does not return the job"):
        list(follow(lambda ids: {}, no_log, "j", clock=clock, pace=PACE, recall=recall))
    assert clock.time - START < PACE.startup_limit + PACE.longest


def test_marks_become_measurements_and_are_no_lines() -> None:
    lines = [
        (START + 1, "one"),
        (START + 2, '::batchml metrics [{"step": 1, "loss": 0.5}]'),
        (START + 3, "::batchml usage cpu=1.93 memory=812"),
    ]
    job = Job("j", (attempt("s", START, lines, START + 30, marked=False),))
    world = World([job], CALM, Random(0))
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert of_kind(seen, MetricsReported) == [MetricsReported("s", ({"step": 1, "loss": 0.5},))]
    assert of_kind(seen, UsageReported) == [UsageReported("s", {"cpu": 1.93, "memory": 812.0})]
    assert [closed.lines for closed in of_kind(seen, LogClosed)] == [1]


def test_a_run_that_ended_long_ago_is_read_without_the_quiet_time() -> None:
    job = Job("j", (attempt("s", START, [(START, "one")], START + 1, marked=False),))
    world = World([job], CALM, Random(0))
    world.clock.time += 3600
    seen = list(follow(world.describe, world.open_log, "j", clock=world.clock, pace=PACE))
    assert [line.text for line in of_kind(seen, OutputLine)] == ["one"]
    assert world.clock.time - START - 3600 < 5


class Book:
    """GetLogEvents over a list of events, two a page, in both directions."""

    def __init__(self, events: list[LogLine]) -> None:
        self.events = events
        self.is_expired = False

    def client(self, _: str) -> "Book":
        return self

    def get_log_events(
        self, startFromHead: bool = False, nextToken: str = "", startTime: int = 0, **_: Any
    ) -> dict[str, Any]:
        if nextToken and self.is_expired:
            self.is_expired = False
            error: Any = {"Code": "InvalidParameterException", "Message": "token expired"}
            raise ClientError({"Error": error}, "GetLogEvents")
        events = [event for event in self.events if event.timestamp >= startTime]
        kind, _slash, at = nextToken.partition("/")
        at = at or ("0" if startFromHead else str(len(events)))
        first = int(at) if startFromHead or kind == "f" else max(0, int(at) - 2)
        last = min(len(events), first + 2) if startFromHead or kind == "f" else int(at)
        return {
            "events": [event._asdict() for event in events[first:last]],
            "nextForwardToken": f"f/{last}",
            "nextBackwardToken": f"b/{first}",
        }

    def open_log(self, run: Run, stream: str) -> StreamReader:
        return StreamReader(lambda: cast(Session, self), run.log_group, stream)


EVENTS = [LogLine(at, text) for at, text in [(5, "a"), (7, "b"), (7, "b"), (7, "c"), (9, "d")]]


def test_an_expired_token_neither_loses_nor_doubles_lines_of_the_same_millisecond() -> None:
    for expires_after in range(6):
        book = Book(EVENTS)
        reader, found = book.open_log(run_of("RUNNING"), "s"), list[LogLine]()
        for count in range(12):
            book.is_expired = count == expires_after
            found += reader.read_page().lines
        assert found == EVENTS


def test_a_page_is_seen_once_it_was_given_whatever_becomes_of_the_reader() -> None:
    reader = Book(EVENTS).open_log(run_of("RUNNING"), "s")
    lines = reader.read()
    assert next(lines) == EVENTS[0]
    lines.close()  # type: ignore[attr-defined]
    assert list(reader.read()) == EVENTS[2:]


def test_the_last_lines_are_read_from_the_end_over_all_attempts() -> None:
    book, clock = Book(EVENTS), FakeClock()
    run = run_of("SUCCEEDED", Attempt(log_stream="one"), Attempt(log_stream="two"))
    parts = list(read_output(lambda ids: {}, book.open_log, run, clock=clock, pace=PACE, last=7))
    shown = [(part.number, [line.message for line in part.lines]) for part in parts]
    assert shown == [(1, ["c", "d"]), (2, ["a", "b", "b", "c", "d"])]
    parts = list(read_output(lambda ids: {}, book.open_log, run, clock=clock, pace=PACE, last=2))
    assert [part.number for part in parts] == [2]


def test_the_log_of_an_array_is_printed_with_a_call_a_child_at_no_more_than_is_allowed() -> None:
    world = a_large_array(120)
    world.clock.time += 10_000
    run = world.describe(["j"])["j"]
    world.calls.clear()
    before = world.clock.time
    parts = read_output(world.describe, world.open_log, run, clock=world.clock, pace=PACE)
    shown = [line.message for part in parts for line in part.lines]
    assert shown == [f"hello {number}" for number in range(120)]
    assert sum(name == "GetLogEvents" for name, _ in world.calls) == 120
    assert world.clock.time - before >= 119 / 8


def test_what_came_after_the_end_mark_is_printed_where_the_mark_counts_it() -> None:
    late = [LogLine(1, "one"), LogLine(2, end_mark(0, 3)), LogLine(2, "two"), LogLine(2, "three")]
    run = run_of("SUCCEEDED", Attempt(log_stream="s"))
    clock, book = FakeClock(), Book(late)
    (part,) = read_output(lambda ids: {}, book.open_log, run, clock=clock, pace=PACE)
    assert [line.message for line in part.lines] == ["one", "two", "three"]
