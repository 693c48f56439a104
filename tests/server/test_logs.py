"""Log calls on much output and many streams. docs/behaviours.md B50-B56, B116-B119, B260-B262.

What single calls answer is in test_answers.py; here is what holds when there is a lot of it.
"""

import asyncio
import gc
import json
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.errors import StateDamaged
from batchml.local.batch.events import NO_PROOF, AttemptEnded, AttemptExit, LogProof
from batchml.local.executors.runner.files import LogDigest
from batchml.local.logs.api import LogFiles, LogPosition, merge
from batchml.local.logs.files import MAX_SCAN, NO_TIME
from batchml.local.store.journal import LogStream
from batchml.model.logcheck import (
    HEADER,
    HEADER_OF_MANY,
    LogCheck,
    LogState,
    parse_header,
    parse_header_of_many,
)
from batchml.model.run import JobStatus
from tests.support.server_rig import Rig, error_of, furnish, sign, sign_logs

GROUP = "/aws/batch/job"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def add(rig: Rig, *names: str) -> None:
    """Streams of attempts that have ended; what they printed is in the file `NAME.log`."""
    rig.store._writer.executemany(
        "INSERT INTO streams (log_group, stream, task_id, created_at) VALUES (?, ?, ?, 0)",
        [(GROUP, name, name) for name in names],
    )


def append(rig: Rig, name: str, *events: tuple[int, str]) -> None:
    with open(rig.log_of(name), "ab") as file:
        file.write(b"".join(f"{time} {text}\n".encode() for time, text in events))


def pages(rig: Rig, operation: str, **params: Any) -> Iterator[dict[str, Any]]:
    """Answers, page by page."""
    token: dict[str, str] = {}
    while True:
        body = json.dumps({"logGroupName": GROUP, **params, **token}).encode()
        (answer,) = rig.handle(sign_logs(operation, body))
        assert answer.status == 200, answer.body
        page = json.loads(answer.body)
        yield page
        if "nextToken" not in page:
            return
        assert page["nextToken"] != token.get("nextToken")
        token = {"nextToken": page["nextToken"]}


def texts(page: dict[str, Any]) -> list[str]:
    return [event["message"] for event in page["events"]]


# --- many streams -----------------------------------------------------------------------------


def test_ten_thousand_streams_are_one_and_their_token_stays_small(rig: Rig) -> None:
    """B116: an array job's children, many events at the same time."""
    names = [f"child/{number:05d}" for number in range(10_000)]
    add(rig, *(name.replace("/", "-") for name in names))
    expected = []
    for number, name in enumerate(names):
        times = [number // 500, 7 + number % 3]
        events = [(time, f"{number}.{place}") for place, time in enumerate(sorted(times))]
        append(rig, name.replace("/", "-"), *events)
        expected += [(time, number, text) for time, text in events]
    found = []
    for page in pages(rig, "FilterLogEvents", limit=7000):
        found += texts(page)
        assert len(page.get("nextToken", "")) < 200
    assert found == [text for _, _, text in sorted(expected)]


def test_streams_that_grow_and_appear_meanwhile_lose_and_double_nothing(rig: Rig) -> None:
    """B116: what is written during a listing has later times than what was read."""
    add(rig, "a", "b")
    append(rig, "a", *[(10 * n, f"a{n}") for n in range(10)])
    append(rig, "b", *[(10 * n + 5, f"b{n}") for n in range(10)])
    found: list[str] = []
    for number, page in enumerate(pages(rig, "FilterLogEvents", limit=3)):
        found += texts(page)
        if number == 3:
            append(rig, "a", (200, "a late"), (200, "a later"))
            add(rig, "c")
            append(rig, "c", (200, "c late"), (201, "c later"))
    early = [f"{name}{n}" for n in range(10) for name in "ab"]
    assert found == [*early, "a late", "a later", "c late", "c later"]


def test_a_page_does_not_make_the_next_one_more_costly(rig: Rig) -> None:
    """A line that a page leaves for the next one must not wrap the rest of the merge."""
    add(rig, "a")
    append(rig, "a", *[(n, f"{n}") for n in range(100)])
    wraps = {}
    for number, page in enumerate(pages(rig, "FilterLogEvents", limit=1)):
        assert texts(page) == [f"{number}"]
        if number in (1, 98):  # looking takes a while
            wraps[number] = sum(isinstance(each, chain) for each in gc.get_objects())
    assert number == 99
    assert wraps[98] <= wraps[1]


def test_a_client_that_stops_paging_leaves_nothing_in_memory(rig: Rig) -> None:
    add(rig, "a")
    append(rig, "a", (1, "a1"), (2, "a2"), (3, "a3"))
    found: list[str] = []
    for wait, page in zip((5, 11, 0), pages(rig, "FilterLogEvents", limit=1), strict=True):
        found += texts(page)
        rig.clock.ahead += wait
        rig.logs.forget_old_merge()
        # No log changes like this: it shows which lines come from memory, and which from the file.
        rig.log_of("a").write_text("1 b1\n2 b2\n3 b3\n")
    assert found == ["a1", "a2", "b3"]


Written = dict[str, list[tuple[int, str]]]
WRITTEN = st.dictionaries(
    st.sampled_from(["a", "a0", "b", "c", "é"]),
    st.lists(st.integers(0, 6), max_size=12).map(lambda times: [(t, "x") for t in sorted(times)]),
    max_size=5,
)


def read_all(
    folder: Path, written: Written, limits: list[int], junk: bytes = b""
) -> list[LogPosition]:
    """The places of all events, with a new merge every few."""
    streams = []
    for name, events in written.items():
        body = b"".join(b"%d %s\n" % (time, text.encode()) for time, text in events)
        (folder / name).write_bytes(body + junk)
        streams.append(LogStream(GROUP, name, name, 0))
    found: list[LogPosition] = []
    reached = LogPosition(0, "", 0)
    for number in range(10_000):
        limit = limits[number % len(limits)]
        taken = 0
        for line, _, place in merge(streams, LogFiles(lambda task: folder / task), reached):
            if taken == limit:
                break
            assert place > reached
            reached = place
            taken += 1
            if line.timestamp != NO_TIME:
                found.append(place)
        if taken < limit:
            return found
    raise AssertionError("no end")


@settings(deadline=None)
@given(WRITTEN, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_merge_that_is_taken_up_anywhere_is_the_whole(
    written: Written, limits: list[int]
) -> None:
    """B116."""
    with tempfile.TemporaryDirectory() as folder:
        found = read_all(Path(folder), written, limits)
    every = sorted((time, name) for name, events in written.items() for time, _ in events)
    assert [(place.time, place.stream) for place in found] == every


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abc"), st.lists(st.tuples(st.integers(0, 6), st.just("x")), max_size=9)
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.binary(max_size=40),
)
def test_files_that_jobs_have_spoilt_come_to_an_end(
    written: Written, limits: list[int], junk: bytes
) -> None:
    """Times that go back, and lines that are none: no page may lead back to an earlier one."""
    with tempfile.TemporaryDirectory() as folder:
        read_all(Path(folder), written, limits, junk + b"\n")


# --- much output ------------------------------------------------------------------------------


def fill(rig: Rig, name: str, size: int) -> int:
    """Lines that nobody looks for; how many."""
    line = b"5 " + b"x" * 97 + b"\n"
    count = size // len(line)
    with open(rig.log_of(name), "ab") as file:
        file.write(line * count)
    return count


def test_a_search_looks_at_a_bounded_part_for_each_page(rig: Rig) -> None:
    """B117: empty pages with a token are normal."""
    add(rig, "a", "b")
    append(rig, "a", (1, "needle 1"))
    fill(rig, "a", 3 * MAX_SCAN)
    append(rig, "b", (5, "needle 2"))
    append(rig, "a", (6, "needle 3"))
    found = [texts(page) for page in pages(rig, "FilterLogEvents", filterPattern="needle")]
    assert 3 <= len(found) <= 6
    assert [] in found
    assert [text for page in found for text in page] == ["needle 1", "needle 2", "needle 3"]


def test_a_search_from_a_late_time_passes_over_the_rest(rig: Rig) -> None:
    add(rig, "a")
    fill(rig, "a", 3 * MAX_SCAN)
    append(rig, "a", (6, "needle"))
    (page,) = pages(rig, "FilterLogEvents", startTime=6)
    assert texts(page) == ["needle"]
    assert [texts(page) for page in pages(rig, "FilterLogEvents", endTime=5)] == [[]]


def test_a_page_keeps_to_a_mebibyte(rig: Rig) -> None:
    """B52."""
    add(rig, "a", "b")
    for name in "ab":
        append(rig, name, *[(n, f"{name}{n}" + "x" * 250_000) for n in range(6)])
    found = [len(texts(page)) for page in pages(rig, "FilterLogEvents")]
    assert found == [4, 4, 4]


def test_a_search_does_not_hold_up_other_calls(rig: Rig) -> None:
    """B117: it runs in a thread of its own."""
    furnish(rig.client("batch"))
    add(rig, "a")
    fill(rig, "a", 2 * MAX_SCAN)
    search = sign_logs(
        "FilterLogEvents",
        json.dumps({"logGroupName": GROUP, "filterPattern": "needle"}).encode(),
    )
    done: list[str] = []

    async def answer(name: str, request: Any) -> None:
        assert (await rig.server.handle(request)).status == 200
        done.append(name)

    async def together() -> None:
        searching = asyncio.create_task(answer("search", search))
        await asyncio.sleep(0)
        for _ in range(5):
            await answer("look", sign())
        await searching

    rig.loop.run_until_complete(together())
    assert done == ["look"] * 5 + ["search"]


# --- what streams there are -------------------------------------------------------------------


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("order", ["LogStreamName", "LastEventTime"])
def test_streams_are_listed_in_pages_that_make_up_the_whole(
    rig: Rig, order: str, descending: bool
) -> None:
    """B118: also when there are more of them than before, and several have the same time."""
    names = [f"s{number:02d}" for number in range(23)]
    add(rig, *names, "empty")
    for number, name in enumerate(names):
        append(rig, name, (1, "first"), (50 - number // 4, "last"))
    times = {name: 50 - number // 4 for number, name in enumerate(names)} | {"empty": 0}
    key = (lambda name: (times[name], name)) if order == "LastEventTime" else str
    found: list[str] = []
    params = {"orderBy": order, "descending": descending, "limit": 5}
    for page in pages(rig, "DescribeLogStreams", **params):
        found += [stream["logStreamName"] for stream in page["logStreams"]]
        for stream in page["logStreams"]:
            assert stream.get("lastEventTimestamp", 0) == times[stream["logStreamName"]]
    assert found == sorted(times, key=key, reverse=descending)


def test_a_prefix_chooses_streams_by_name_only(rig: Rig) -> None:
    """B118."""
    add(rig, "a", "ab/1", "ab/2", "ab%", "ab\U0001f600", "b", "ab")
    for page_size in (1, 50):
        found = [
            stream["logStreamName"]
            for page in pages(rig, "DescribeLogStreams", logStreamNamePrefix="ab", limit=page_size)
            for stream in page["logStreams"]
        ]
        assert found == ["ab", "ab%", "ab/1", "ab/2", "ab\U0001f600"]
    body = {"logGroupName": GROUP, "orderBy": "LastEventTime", "logStreamNamePrefix": "ab"}
    (answer,) = rig.handle(sign_logs("DescribeLogStreams", json.dumps(body).encode()))
    assert (answer.status, error_of(answer)[0]) == (400, "InvalidParameterException")


def test_a_stream_that_grows_shows_its_newest_event(rig: Rig) -> None:
    """What is known of a file is asked again once it has grown."""
    add(rig, "a")
    for time in (3, 4, 9):
        append(rig, "a", (time, "x"))
        (page,) = pages(rig, "DescribeLogStreams")
        assert page["logStreams"][0]["firstEventTimestamp"] == 3
        assert page["logStreams"][0]["lastEventTimestamp"] == time


@pytest.mark.parametrize("operation", ["FilterLogEvents", "DescribeLogStreams"])
def test_a_token_of_another_order_is_refused(rig: Rig, operation: str) -> None:
    add(rig, *(f"s{number}" for number in range(9)))
    for number in range(9):
        append(rig, f"s{number}", (1, "x"))
    others = [
        next(pages(rig, "DescribeLogStreams", limit=2))["nextToken"],
        next(pages(rig, "DescribeLogStreams", limit=2, orderBy="LastEventTime"))["nextToken"],
        next(pages(rig, "FilterLogEvents", limit=2))["nextToken"],
    ]
    accepted = 0
    for token in others:
        body = json.dumps({"logGroupName": GROUP, "nextToken": token}).encode()
        (answer,) = rig.handle(sign_logs(operation, body))
        accepted += answer.status == 200
        assert answer.status in (200, 400)
    assert accepted == 1


# --- the proof of a log -----------------------------------------------------------------------


def proof_of(data: bytes) -> LogProof:
    digest = LogDigest()
    digest.add(data, data.count(b"\n"))
    return msgspec.convert(digest.proof(), LogProof)


def submit(rig: Rig) -> str:
    batch = rig.client("batch")
    furnish(batch)
    found = batch.submit_job(jobName="j", jobQueue="q", jobDefinition="d")
    rig.start(found["jobId"])
    return str(found["jobId"])


def checked(rig: Rig, stream: str, **params: Any) -> LogCheck | None:
    """What the server says of a log with a page of it, beside AWS's own answer."""
    body = json.dumps({"logGroupName": GROUP, "logStreamName": stream, **params}).encode()
    (answer,) = rig.handle(sign_logs("GetLogEvents", body))
    assert answer.status == 200
    assert set(json.loads(answer.body)) == {"events", "nextForwardToken", "nextBackwardToken"}
    return parse_header(dict(answer.headers).get(HEADER))


def test_a_log_is_checked_once_its_attempt_has_ended(rig: Rig) -> None:
    """B260: while it is read forward, at its end; and where the end is read."""
    job = submit(rig)
    task, stream = rig.task(job), f"d/default/{rig.task(job)}"
    data = b"1 a\n2 b\n3 c\n"
    rig.log_of(task).write_bytes(data)
    head = {"startFromHead": True}
    assert checked(rig, stream, **head) is None
    rig.end(job, log=proof_of(data))
    whole = LogCheck(LogState.COMPLETE, 3)
    assert checked(rig, stream, **head) == whole
    assert checked(rig, stream) == whole
    assert checked(rig, stream, nextToken="f/12") == whole
    assert checked(rig, stream, limit=2, **head) == LogCheck(LogState.UNCHECKED)
    assert checked(rig, stream, nextToken="b/8") is None
    rig.log_of(task).write_bytes(data[:8])
    file = str(rig.log_of(task))
    cut = LogCheck(LogState.CUT, 3, found=2, first=3, last=3, file=file)
    assert checked(rig, stream, nextToken="f/12") == cut
    rig.log_of(task).unlink()
    assert checked(rig, stream, **head) == LogCheck(LogState.GONE, 3, file=file)


def test_a_log_that_the_journal_contains_is_gone_when_somebody_deletes_it(rig: Rig) -> None:
    data = b"1 ::batchml host x\n2 ::batchml end code=0 lines=0\n"
    job = submit(rig)
    task = rig.task(job)
    file = rig.log_of(task)
    rig.end(job, log=msgspec.structs.replace(proof_of(data), text=data.decode()))
    found = checked(rig, f"d/default/{task}", startFromHead=True)
    assert found == LogCheck(LogState.GONE, 0, file=str(file))
    assert not file.exists()


def test_logs_that_are_read_together_are_checked_together(rig: Rig) -> None:
    """Only complete ones are in the header: those of the first and the third job."""
    batch = rig.client("batch")
    furnish(batch)
    asked = {"jobName": "j", "jobQueue": "q", "jobDefinition": "d"}
    jobs = [batch.submit_job(**asked)["jobId"] for _ in range(4)]
    for job in jobs:
        rig.start(job)
    tasks, data = [rig.task(job) for job in jobs], b"1 a\n2 ::batchml end lines=1\n"
    streams = [f"d/default/{task}" for task in tasks]
    for task in tasks:
        rig.log_of(task).write_bytes(data)
    for job in jobs[:3]:
        rig.end(job, log=proof_of(data))
    rig.log_of(tasks[1]).write_bytes(data.replace(b"a", b"b", 1))

    def header(**params: Any) -> str | None:
        body = json.dumps({"logGroupName": GROUP, "logStreamNames": streams, **params}).encode()
        (answer,) = rig.handle(sign_logs("FilterLogEvents", body))
        assert answer.status == 200
        assert set(json.loads(answer.body)) <= {"events", "searchedLogStreams", "nextToken"}
        return dict(answer.headers).get(HEADER_OF_MANY)

    whole = LogCheck(LogState.COMPLETE, 1)
    assert parse_header_of_many(header()) == [whole, None, whole, None]
    assert parse_header_of_many(header(limit=3)) == []  # more pages follow
    assert header(startTime=2) is None
    assert header(filterPattern="a") is None


def test_the_proof_of_a_log_is_committed_with_the_end_of_its_attempt(tmp_path: Path) -> None:
    """B261: both or neither, and the next server has it."""
    rig = Rig(tmp_path)
    job = submit(rig)
    task = rig.task(job)
    rig.log_of(task).write_bytes(b"1 a\n")
    writer = rig.store._writer
    writer.execute(
        "CREATE TRIGGER full BEFORE INSERT ON log_ends BEGIN SELECT raise(ABORT, 'full'); END"
    )
    rig.core.report(AttemptEnded(task, AttemptExit(0, log=proof_of(b"1 a\n")), 1))
    rig.loop.run_until_complete(asyncio.wait({rig.running}))
    with pytest.raises(StateDamaged, match="full"):
        rig.running.result()
    assert rig.store.jobs([job])[job].status is JobStatus.RUNNING
    writer.execute("DROP TRIGGER full")
    rig.close()
    rig = Rig(tmp_path)
    rig.end(job, log=proof_of(b"1 a\n"))
    rig.close()
    rig = Rig(tmp_path)
    assert rig.store.jobs([job])[job].exit_code == 0
    assert checked(rig, f"d/default/{task}") == LogCheck(LogState.COMPLETE, 1)
    rig.close()


@pytest.mark.parametrize(
    ("how", "state", "why"),
    [
        ({"lost": "Host EC2 gone"}, LogState.UNPROVEN, "Host EC2 gone"),
        ({"lost": "Host EC2 gone", "log": True}, LogState.UNPROVEN, "Host EC2 gone"),
        ({}, LogState.UNPROVEN, NO_PROOF),
        ({"start_failure": "no image", "log": True}, LogState.COMPLETE, ""),
    ],
)
def test_an_end_without_a_proof_is_reported(
    rig: Rig, how: dict[str, Any], state: LogState, why: str
) -> None:
    """B262."""
    job = submit(rig)
    stream = f"d/default/{rig.task(job)}"
    log = {"log": proof_of(b"")} if "log" in how else {}
    rig.end(job, **{"code": None, **how, **log})
    assert checked(rig, stream) == LogCheck(state, why=why)
