"""What a command says while it follows, beside what happens to the run."""

import io
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer

from batchml.model.run import JobStatus, Run
from batchml.runs.commands.follow import _LogFilter
from batchml.runs.commands.interrupt import detaching
from batchml.runs.commands.live import LogView, show_live
from batchml.runs.watch.events import (
    CUT,
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
)
from tests.support.fakes import FakeClock

ENDED = RunEnded(Run("j", "n", "q", JobStatus.SUCCEEDED))


def test_lost_contact_is_told_once_where_there_is_no_status_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()

    def happenings() -> Iterator[RunEvent]:
        for pause in (2, 3, 4.5, 6.75, 10, 600, 2, 3, 600, 2, 3, 4.5, 6.75, 10):
            yield ContactLost("your session has expired")
            clock.sleep(pause)
        yield ENDED

    show_live(happenings(), LogView(clock, io.StringIO()), from_start=True)
    told = capsys.readouterr().err.splitlines()
    # The second time it came back within seconds, which nobody needs to know.
    assert told == ["Contact is lost; runs continue. Still trying: your session has expired"] * 2


def test_lines_that_are_not_picked_are_left_out_and_nothing_else() -> None:
    seen: list[RunEvent] = [
        OutputLine(1, "a"),
        OutputLine(2, "b"),
        LogClosed("s", 2, MARKED),
        ENDED,
    ]
    log = _LogFilter(lambda line: line.text == "b")
    assert list(log.watch(iter(seen))) == seen[1:]
    assert log.is_read


def test_a_log_that_was_cut_off_has_no_whole_metrics() -> None:
    log = _LogFilter(None)
    list(log.watch(iter([LogClosed("s", 2, CUT), ENDED])))
    assert log.is_complete is False
    assert not log.is_read


@pytest.fixture
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.usefixtures("signals")
def test_who_stops_waiting_is_told_how_to_go_on_with_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = cast(Any, SimpleNamespace(env_option=" --env dev"))

    def told(left: list[str]) -> str:
        with pytest.raises(typer.Exit) as end, detaching(place, left):
            left.remove("j0")  # it has ended
            raise KeyboardInterrupt
        assert end.value.exit_code == 130
        return capsys.readouterr().err

    few = told(["j0", "j1"])
    assert "batchml logs -f j1 --env dev" in few
    assert "j0" not in few
    many = told([f"j{number}" for number in range(1000)])
    assert many == "\nDetached: the jobs go on.\n  999 of them:  batchml ls --env dev\n"


def test_a_log_is_complete_when_that_of_each_attempt_is() -> None:
    def of(*proofs: str) -> bool | None:
        log = _LogFilter(None)
        list(log.watch(LogClosed("s", 2, proof) for proof in proofs))
        return log.is_complete

    assert [of(), of(MARKED, PROVEN), of(MARKED, QUIET)] == [None, True, None]
    assert [of(QUIET, DAMAGED), of(SHORT, MARKED)] == [False, False]


def test_metrics_of_a_damaged_log_are_not_kept() -> None:
    log = _LogFilter(None)
    list(log.watch(iter([LogClosed("s", 2, MARKED), LogClosed("t", 2, DAMAGED), ENDED])))
    assert not log.is_read
