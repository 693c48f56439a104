"""Following runs: every change once, every line once, an honest end, and patience with a bound."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.logs import LogLine, LogPage, StreamReader
from batchml.context import PollIntervals, backoff
from batchml.errors import ServiceUnreachable
from batchml.model.logcheck import LogCheck, LogState
from batchml.model.outcome import describe_outcome
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runs.watch.events import (
    DAMAGED,
    MARKED,
    PROVEN,
    QUIET,
    SHORT,
    ContactLost,
    LogClosed,
    OutputLine,
    RunEnded,
    RunEvent,
    RunMessage,
    StatusChanged,
)
from batchml.runs.watch.follow import as_node, follow
from batchml.runs.watch.poller import poll_until_ended
from batchml.runtime.protocol.log_marks import NEEDED_MEMORY, end_mark
from tests.support.fakes import FakeClock

STOPPED = 1_000_000_000  # ms: now, on the test's clock
PACE = PollIntervals(shortest=2.0, longest=15.0, quiet=10.0, startup_limit=60.0)


class FakeReader(StreamReader):
    """`reads[i]` is what the i-th read finds."""

    def __init__(self, stream: str, reads: list[list[str]]) -> None:
        self.stream = stream
        self._reads = reads
        self._all = [message for read in reads for message in read]

    def read_page(self) -> LogPage:
        messages = self._reads.pop(0) if self._reads else []
        return LogPage([LogLine(0, message) for message in messages], True)

    def restart(self, since: int | None = None) -> StreamReader:
        seen = self._all[: len(self._all) - sum(map(len, self._reads))]
        return FakeReader(self.stream, [seen])


def run_of(status: str, *attempts: Attempt, reason: str = "") -> Run:
    return Run("j", "n", "q", JobStatus(status), status_reason=reason, attempts=attempts)


def followed(
    runs: Sequence[Run | Exception | None], logs: dict[str, list[list[str]]], clock: FakeClock
) -> list[RunEvent]:
    """Follow a run whose looks are scripted; the last look repeats."""
    looks = list(runs)

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        look = looks.pop(0) if len(looks) > 1 else looks[0]
        if isinstance(look, Exception):
            raise look
        return {} if look is None else {"j": look}

    def open_log(run: Run, stream: str) -> StreamReader:
        return FakeReader(stream, logs[stream])

    return list(follow(describe, open_log, "j", clock=clock, pace=PACE))


def lines(happenings: Sequence[RunEvent]) -> list[str]:
    return [happening.text for happening in happenings if isinstance(happening, OutputLine)]


def kinds(happenings: Sequence[RunEvent], kind: type[Any]) -> list[Any]:
    return [happening for happening in happenings if isinstance(happening, kind)]


def test_watch_reports_each_change_once_and_backs_off() -> None:
    clock = FakeClock()
    waiting = [run_of("SUBMITTED")] * 4
    seen = followed([*waiting, run_of("FAILED")], {}, clock)
    assert [change.run.status for change in kinds(seen, StatusChanged)] == ["SUBMITTED", "FAILED"]
    assert clock.naps == [2.0, 3.0, 4.5, 6.75]


def test_backoff_grows_by_half_up_to_its_bound() -> None:
    delays = backoff(PACE)
    assert [next(delays) for _ in range(7)] == [2.0, 3.0, 4.5, 6.75, 10.125, 15.0, 15.0]


def test_progress_of_the_start_is_told_once() -> None:
    making = run_of("STARTING", reason="installing")
    seen = followed([making, making, run_of("FAILED")], {}, FakeClock())
    assert [progress.text for progress in kinds(seen, RunMessage)] == ["installing"]


def test_lines_that_come_after_the_end_are_waited_for_and_the_mark_proves_them() -> None:
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    late = {"s": [["one"], [], ["two"], ["three", end_mark(0, 3)]]}
    seen = followed([over], late, FakeClock())
    assert lines(seen) == ["one", "two", "three"]
    assert [closed.proof for closed in kinds(seen, LogClosed)] == [MARKED]
    assert isinstance(seen[-1], RunEnded)


def test_without_a_mark_the_log_ends_after_a_quiet_time_and_is_not_called_complete() -> None:
    clock = FakeClock()
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    seen = followed([over], {"s": [["one"]]}, clock)
    assert [(closed.proof, closed.lines) for closed in kinds(seen, LogClosed)] == [(QUIET, 1)]
    assert sum(clock.naps) >= PACE.quiet


def test_a_mark_that_counts_more_lines_than_came_is_told() -> None:
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    seen = followed([over], {"s": [["one", end_mark(0, 2)]]}, FakeClock())
    assert [closed.proof for closed in kinds(seen, LogClosed)] == [SHORT]


@pytest.mark.parametrize(
    ("state", "last", "proof"),
    [
        (LogState.COMPLETE, "two", PROVEN),
        (LogState.COMPLETE, end_mark(0, 1), PROVEN),
        (LogState.COMPLETE, end_mark(0, 2), SHORT),
        (LogState.UNPROVEN, end_mark(0, 1), QUIET),
        (LogState.CUT, end_mark(0, 1), DAMAGED),
        (LogState.GONE, "two", DAMAGED),
    ],
)
def test_where_a_server_checks_logs_its_result_is_what_counts(
    state: LogState, last: str, proof: str
) -> None:
    """And it is waited for: while a large log is checked, the pages are empty."""

    class Checked(FakeReader):
        def read_page(self) -> LogPage:
            left = len(self._reads)
            found = LogCheck(LogState.UNCHECKED if left > 1 else state)
            return super().read_page()._replace(caught_up=False, check=found)

    clock = FakeClock()
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    seen = list(
        follow(
            lambda ids: {"j": over}, lambda run, stream: Checked(stream, [["one"], [], [last]]),
            "j", clock=clock, pace=PACE,
        )
    )  # fmt: skip
    assert [(closed.proof, closed.check) for closed in kinds(seen, LogClosed)] == [
        (proof, LogCheck(state))
    ]
    assert sum(clock.naps) < PACE.settle


def test_a_log_that_is_gone_is_told_though_it_has_no_line() -> None:
    gone = LogCheck(LogState.GONE, 3)

    class Gone(FakeReader):
        def read_page(self) -> LogPage:
            return LogPage([], True, check=gone)

    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    watched = follow(
        lambda ids: {"j": over}, lambda run, stream: Gone(stream, []), "j",
        clock=FakeClock(), pace=PACE,
    )  # fmt: skip
    (closed,) = kinds(list(watched), LogClosed)
    assert (closed.proof, closed.is_complete, closed.check) == (DAMAGED, False, gone)


def test_what_the_server_says_after_the_mark_does_not_make_a_log_incomplete() -> None:
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    seen = followed([over], {"s": [["one", end_mark(0, 1), NEEDED_MEMORY]]}, FakeClock())
    assert lines(seen) == ["one", NEEDED_MEMORY]
    assert [closed.proof for closed in kinds(seen, LogClosed)] == [MARKED]


def test_the_output_of_all_attempts_is_shown_in_their_order() -> None:
    first = Attempt(log_stream="a", stopped_at=STOPPED)
    second = Attempt(log_stream="b")
    looks = [
        run_of("RUNNING", first, second),
        run_of("SUCCEEDED", first, Attempt(log_stream="b", stopped_at=2)),
    ]
    logs = {"a": [["a1"], ["a2", end_mark(1, 2)]], "b": [["b1", end_mark(0, 1)]]}
    seen = followed(looks, logs, FakeClock())
    assert lines(seen) == ["a1", "a2", "b1"]
    assert [closed.proof for closed in kinds(seen, LogClosed)] == [MARKED, MARKED]


@given(
    st.lists(st.lists(st.text("ab ", max_size=3), max_size=4), min_size=1, max_size=12),
    st.integers(0, 11),
)
def test_no_line_is_lost_or_doubled_however_they_arrive(reads: list[list[str]], end: int) -> None:
    whole = [line for read in reads for line in read]
    scripted = [list(read) for read in reads]
    scripted[-1] = [*scripted[-1], end_mark(0, len(whole))]
    running = run_of("RUNNING", Attempt(log_stream="s"))
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    looks = [running] * min(end, len(reads) - 1) + [over]
    # A quiet time as long as the gaps in this script, which the mark then proves.
    seen = followed(looks, {"s": scripted}, FakeClock())
    arrived = lines(seen)
    assert arrived == whole[: len(arrived)]
    closed = kinds(seen, LogClosed)
    if closed and closed[0].proof == MARKED:
        assert arrived == whole


def test_a_failed_call_is_no_news_of_the_run() -> None:
    looks: list[Run | Exception] = [
        run_of("RUNNING"),
        ServiceUnreachable("timeout"),
        ServiceUnreachable("timeout"),
        run_of("SUCCEEDED"),
    ]
    seen = followed(looks, {}, FakeClock())
    assert len(kinds(seen, ContactLost)) == 2
    assert isinstance(seen[-1], RunEnded)


def test_a_job_that_stays_invisible_ends_the_watch_with_a_reason() -> None:
    clock = FakeClock()
    with pytest.raises(ServiceUnreachable, match="AWS Batch does not return the job"):
        followed([None], {}, clock)
    assert PACE.startup_limit <= sum(clock.naps) < PACE.startup_limit + PACE.longest


def test_wait_asks_for_all_that_are_left_at_once() -> None:
    asked: list[list[str]] = []

    def describe(ids: Sequence[str]) -> dict[str, Run]:
        asked.append(list(ids))
        done = {"a"} if len(asked) == 1 else {"a", "b"}
        return {
            job_id: Run(
                job_id, "n", "q", JobStatus.SUCCEEDED if job_id in done else JobStatus.RUNNING
            )
            for job_id in ids
        }

    ended = list(poll_until_ended(describe, ["a", "b", "a"], clock=FakeClock(), pace=PACE))
    assert [run.job_id for run in ended] == ["a", "b"]
    assert asked == [["a", "b"], ["b"]]


def test_a_run_that_vanishes_does_not_keep_anyone_waiting_for_ever() -> None:
    clock = FakeClock()
    with pytest.raises(ServiceUnreachable, match="AWS Batch does not return the job"):
        list(poll_until_ended(lambda ids: {}, ["a"], clock=clock, pace=PACE))
    assert sum(clock.naps) < PACE.startup_limit + PACE.longest


class Unreachable(FakeReader):
    def read_page(self) -> LogPage:
        raise ServiceUnreachable("no logs")


def test_a_log_out_of_reach_ends_the_watch_with_what_is_known() -> None:
    clock = FakeClock()
    running = run_of("RUNNING", Attempt(log_stream="s"))
    over = run_of("SUCCEEDED", Attempt(log_stream="s", stopped_at=STOPPED))
    looks = [running] * 100

    happenings = list(
        follow(
            lambda ids: {"j": looks.pop() if looks else over},
            lambda run, stream: Unreachable(stream, []),
            "j",
            clock=clock,
            pace=PACE,
        )
    )
    assert isinstance(happenings[-1], RunEnded)
    assert happenings[-1].run is over
    (told,) = kinds(happenings, RunMessage)
    assert "cannot be read" in told.text


@pytest.mark.parametrize(
    ("code", "whole", "said"),
    [
        (143, {"is_terminated": True}, "cancelled: the program was stopped: by hand"),
        (1, {"is_terminated": True}, "app-error: the program ended with code 1"),
        (143, {}, "app-error: the program ended with code 143, signal SIGTERM"),
    ],
)
def test_nodes_of_a_run_that_was_stopped_are_told_as_stopped(
    code: int, whole: dict[str, bool], said: str
) -> None:
    node = replace(run_of("FAILED", Attempt(exit_code=code)), exit_code=code, node_index=1)
    parent = replace(run_of("FAILED", reason="by hand"), nodes=2, **whole)
    assert describe_outcome(as_node(node, parent)) == said
