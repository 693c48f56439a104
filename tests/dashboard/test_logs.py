"""The logs that the pages show: which lines are kept, and how often a run is followed."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from batchml.dashboard.logs import (
    MOST_CHARACTERS,
    MOST_KEPT,
    MOST_LINES,
    FollowedLogs,
    LogLines,
    log_file,
)
from batchml.errors import LogDamaged, ServiceUnreachable
from batchml.handles import RunHandle
from batchml.model.run import JobStatus, Record, Run
from batchml.runs.search import FoundRun
from batchml.runs.watch.events import (
    ContactLost,
    LogOpened,
    OutputLine,
    PollingPaused,
    RunEvent,
    StatusChanged,
)


class FakeRun:
    """A run whose events are given. Its watching ends when it is stopped, or after these events if
    the run has ended.
    """

    def __init__(
        self, job_id: str, make: Callable[[], Iterator[RunEvent]], has_ended: bool = False
    ) -> None:
        self.job_id = job_id
        self.seen = FoundRun(None, Record(patterns={"loss": r"loss=(\S+)"}))
        self.watched = 0
        self.stops: list[threading.Event] = []
        self._make = make
        self._has_ended = has_ended

    def watch(self, stop: threading.Event) -> Iterator[RunEvent]:
        self.watched += 1
        self.stops.append(stop)
        yield from self._make()
        if not self._has_ended:
            yield PollingPaused()
            stop.wait()


def _lines(*texts: str) -> LogLines:
    found = LogLines()
    for text in texts:
        found.take(OutputLine(1, text))
    return found


def _ask(logs: FollowedLogs, run: FakeRun, after: int = 0) -> dict[str, Any]:
    return logs.document(cast(RunHandle, run), after)


def test_only_the_lines_after_those_that_a_page_has_are_sent() -> None:
    found = _lines("a", "b", "c").document(2)
    assert (found["first"], found["total"], found["lines"]) == (2, 3, [(1, "", "c")])
    assert _lines("a").document(1)["lines"] == []


def test_a_page_that_knows_more_than_there_is_learns_the_real_number() -> None:
    assert _lines("a").document(50)["total"] == 1


def test_of_a_very_long_log_the_newest_lines_are_kept() -> None:
    found = _lines(*map(str, range(MOST_LINES + 5))).document(0)
    assert (found["first"], found["oldest"], found["lines"][0]) == (5, 5, (1, "", "5"))


def test_of_very_long_lines_only_some_are_kept() -> None:
    found = _lines(*(["x" * MOST_CHARACTERS] * (MOST_KEPT // MOST_CHARACTERS + 3)))
    assert (found.document(0)["oldest"], found.total) == (3, MOST_KEPT // MOST_CHARACTERS + 3)


def test_a_log_to_save_has_all_lines_as_they_were_printed() -> None:
    class Run(FakeRun):
        def logs(self) -> Iterator[OutputLine]:
            yield OutputLine(1, "10%\r50%\x1b[0m\udcff")
            yield OutputLine(1, "x" * (1 << 20), "3")
            raise LogDamaged("its end is missing")

    async def read() -> bytes:
        found = log_file(cast(RunHandle, Run("1a/..", lambda: iter(()))))
        assert found.headers["content-disposition"].startswith('attachment; filename="1a.log"')
        assert found.stream is not None
        return b"".join([part async for part in found.stream])

    last = b"\n# its end is missing\n"
    assert asyncio.run(read()) == b"10%\r50%\x1b[0m?\n3 | " + b"x" * (1 << 20) + last


def test_a_line_is_shown_as_a_terminal_leaves_it() -> None:
    link = "see \x1b]8;;javascript:alert(1)\x1b\\here\x1b]8;;\x07 \x1b[2K\x1b]0;title"
    progress, shown, ended = _lines("10%\r 50%\r100%\r", link, "a\r\n").document(0)["lines"]
    assert (progress[2], shown[2], ended[2]) == ("100%", "see here ", "\n")


def test_a_line_is_shown_without_colours_and_never_longer_than_a_screen() -> None:
    coloured, long = _lines("\x1b[31mred\x1b[0m\u202e", "x" * (1 << 20)).document(0)["lines"]
    assert coloured[2] == "red\ufffd"
    assert long[2] == f"{'x' * MOST_CHARACTERS} ... ({(1 << 20) - MOST_CHARACTERS} more characters)"


def test_a_second_attempt_is_announced_and_a_lost_contact_is_said_until_lines_come() -> None:
    lines = _lines("first")
    lines.take(LogOpened("stream", 2))
    lines.take(ContactLost("no network"))
    assert lines.document(0)["lines"][1][2] == "--- attempt 2 ---"
    assert lines.document(0)["notice"] == "No new lines now: no network"
    lines.take(OutputLine(2, "again"))
    assert lines.document(0)["notice"] == ""


def test_a_run_is_followed_once_for_all_its_tabs() -> None:
    run, logs = FakeRun("a", lambda: iter([OutputLine(1, "hello")])), FollowedLogs(lambda: 0.0)
    assert [_ask(logs, run)["total"] for _ in range(3)] == [1, 1, 1]
    assert run.watched == 1
    logs.stop()


def test_the_log_that_was_asked_for_longest_ago_gives_way() -> None:
    logs = FollowedLogs(lambda: 0.0, most=2)
    runs = [FakeRun(name, lambda: iter(())) for name in "abc"]
    _ask(logs, runs[0])
    _ask(logs, runs[1])
    _ask(logs, runs[0])
    _ask(logs, runs[2])
    assert [run.stops[0].is_set() for run in runs] == [False, True, False]
    logs.stop()


def test_following_ends_when_no_tab_asks_any_more() -> None:
    clock = [0.0]
    logs = FollowedLogs(lambda: clock[0])
    left, shown = FakeRun("left", lambda: iter(())), FakeRun("shown", lambda: iter(()))
    _ask(logs, left)
    clock[0] = 1000.0
    _ask(logs, shown)
    assert (left.stops[0].is_set(), shown.stops[0].is_set()) == (True, False)
    clock[0] = 2000.0
    logs.drop_left()
    assert shown.stops[0].is_set()


def test_a_run_that_cannot_be_followed_says_why_and_is_tried_again() -> None:
    def fail() -> Iterator[RunEvent]:
        yield from ()
        raise ServiceUnreachable("AWS is away")

    run, logs = FakeRun("a", fail), FollowedLogs(lambda: 0.0)
    found = _ask(logs, run)
    assert (found["notice"], found["over"]) == ("AWS is away", True)
    assert _ask(logs, run)["notice"] == "AWS is away" and run.watched == 2


def test_the_curves_are_of_the_same_lines_and_say_whether_there_may_be_more() -> None:
    goes_on = threading.Event()

    def events() -> Iterator[RunEvent]:
        yield OutputLine(1, "loss=0.5")
        goes_on.wait()
        yield OutputLine(2, "loss=0.25")

    run = FakeRun("a", events)
    logs = FollowedLogs(lambda: 0.0)
    _, is_whole = logs.series(cast(RunHandle, run), 0.0)
    assert not is_whole
    goes_on.set()
    series, is_whole = logs.series(cast(RunHandle, run), 60.0)
    assert is_whole and series["loss"].values == [0.5, 0.25]
    assert _ask(logs, run)["total"] == 2 and run.watched == 1
    logs.stop()


def test_a_run_that_waits_has_no_log_that_is_still_being_read() -> None:
    waits = Run("a", "lenet", "gpu", JobStatus.RUNNABLE)
    begins = threading.Event()

    def events() -> Iterator[RunEvent]:
        yield StatusChanged(waits)
        begins.wait()

    logs = FollowedLogs(lambda: 0.0)
    run = FakeRun("a", events)
    assert logs.series(cast(RunHandle, run), 60.0) == ({}, True)
    begins.set()
    logs.stop()


def test_the_curves_of_a_run_that_has_ended_are_whole_when_all_its_logs_were_read() -> None:
    goes_on = threading.Event()

    def events() -> Iterator[RunEvent]:
        yield OutputLine(1, "loss=0.5", "0")
        yield PollingPaused()
        goes_on.wait()
        yield OutputLine(2, "loss=0.25", "1")

    run = FakeRun("a", events, has_ended=True)
    run.seen = FoundRun(Run("a", "many", "gpu", JobStatus.SUCCEEDED), run.seen.record)
    logs = FollowedLogs(lambda: 0.0)
    series, is_whole = logs.series(cast(RunHandle, run), 60.0)
    assert list(series) == ["loss:0"] and not is_whole
    goes_on.set()
    while not is_whole:
        series, is_whole = logs.series(cast(RunHandle, run), 60.0)
    assert list(series) == ["loss:0", "loss:1"]
    logs.stop()
