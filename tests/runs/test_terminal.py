"""What is shown on a terminal: it fits any window, and says how far a run is where it can."""

import io
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.cli.output import say_error
from batchml.cli.render import cells, cut, output_line, table, without_colours
from batchml.cli.status_line import HINT, Curve, StatusBoard, add_state, status_line
from batchml.cli.terminal import (
    ERASE,
    BottomLine,
    Screen,
    StreamAbove,
    live_line,
    screen,
    sparkline,
)
from batchml.errors import ConfigError
from batchml.model.run import JobStatus, Run
from batchml.runs.commands.live import LogView, TerminalView, show_live
from batchml.runs.metrics.series import (
    Metrics,
    ProgressTrend,
    Sample,
    Series,
    metric_lines,
    read_progress,
)
from batchml.runs.watch.events import (
    CUT,
    MARKED,
    ContactLost,
    HostAssigned,
    LogClosed,
    LogOpened,
    MetricsReported,
    OutputLine,
    PollingPaused,
    RunEnded,
    RunEvent,
    RunMessage,
    StatusChanged,
    UsageReported,
)
from batchml.runs.watch.progress import RunProgress
from tests.support.fakes import FakeClock

RUN = Run("6b0e1234-1111-4111-8111-111111111111", "lenet", "default", JobStatus.RUNNING)


def text_of(board: StatusBoard, width: int, now: float = 100.0) -> str:
    return "  ".join(part.text for part in status_line(board, now, width))


# --- sparklines and tables ---


@given(st.lists(st.floats(), max_size=300), st.integers(0, 60))
def test_a_sparkline_is_never_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_sparkline_rises_with_its_values_and_shows_what_is_no_number() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5, 5], 8) == "▄▄▄"
    assert sparkline([0.0, 5e-324], 8) == "▄▄"
    assert sparkline([1, math.nan, 2], 3) == "▁\N{MULTIPLICATION SIGN}█"
    assert sparkline(list(range(1000)), 4) == "▁▃▆█"


def test_a_sparkline_has_bars_between_attempts() -> None:
    assert sparkline([4, 1, 4, 1, 4], 8, [2, 4]) == "█▁|█▁|█"
    assert sparkline([*range(500), *range(500)], 9, [500]) == "▁▃▆█|▁▃▆█"
    assert sparkline([4, 1, 4], 2, [1]) == sparkline([4, 1, 4], 2)  # no room


# --- colours of programs ---


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;32mok\x1b[0m 3", "\x1b[1;32mok\x1b[0m 3\x1b[0m"),
        ("\x1b[38;5;8mgrey\x1b[m", "\x1b[38;5;8mgrey\x1b[m\x1b[0m"),
        ("\x1b[38;2;1;2;8mblue", "\x1b[38;2;1;2;8mblue\x1b[0m"),
        ("10%\r\x1b[31m20%\r", "\x1b[31m20%\x1b[0m"),
        ("\x1b[8mhidden", "hidden\x1b[0m"),
        ("\x1b[38;5;1;8mhidden", "hidden\x1b[0m"),
        ("\x1b[2J\x1b]0;title\a", "\ufffd[2J\ufffd]0;title\ufffd\x1b[0m"),
    ],
)
def test_colours_of_a_program_pass_and_other_escapes_do_not(text: str, shown: str) -> None:
    assert output_line(text, colour=True) == shown


@given(st.text(st.sampled_from("\x1b[0128;:mKHJ\r\aa")))
def test_no_text_of_a_program_moves_the_cursor(text: str) -> None:
    shown = output_line(text, colour=True)
    assert "\x1b" not in without_colours(shown) and "\r" not in shown
    assert output_line(text, colour=False).isprintable()


ROWS = [
    ["ID", "NAME", "QUEUE", "STATUS", "CLASS", "CODE", "AGE", "RAN"],
    ["6b0e1234", "a-rather-long-name-of-a-run-that-someone-gave", "default", "SUCCEEDED",
     "succeeded", "0", "1:02:03", "0:12"],
    ["7c0e1234", "数据", "default", "FAILED", "app-error", "1", "0:03", ""],
]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_fits_the_window(width: int) -> None:
    lines = table(ROWS, Screen(width)).splitlines()
    assert len(lines) == 3
    assert max(map(cells, lines)) <= width
    assert "6b0e1234" in lines[1]
    assert "SUCCEEDED" in lines[1]


def test_a_long_name_costs_no_column() -> None:
    heading, first, _ = table(ROWS, Screen(80)).splitlines()
    assert heading.split() == ["ID", "NAME", "QUEUE", "STATUS", "CLASS", "CODE", "AGE", "RAN"]
    assert first.split()[:3] == ["6b0e1234", "a-rather-long-nam…", "default"]


def test_long_cells_give_way_together() -> None:
    rows = [["", "ONE", "OTHER"], ["what", "a" * 50, "b" * 40]]
    assert table(rows, Screen(30)).splitlines()[1].split() == [
        "what",
        "a" * 10 + "…",
        "b" * 10 + "…",
    ]


QUEUES = [
    ["NAME", "PRIORITY", "STATE", "STATUS", "COMPUTE", "ORDER", "EXTRA", "REASON"],
    ["default", "10", "ENABLED", "VALID", "this-machine-and-another", "first come", "x" * 20, ""],
]


@pytest.mark.parametrize("width", [8, 20, 50, 80])
def test_a_table_of_many_columns_fits_as_well(width: int) -> None:
    heading, row = table(QUEUES, Screen(width)).splitlines()
    assert cells(heading) <= width and cells(row) <= width
    assert row.startswith("default")
    assert ("REASON" in heading) is False  # nothing stands in it
    assert ("STATUS" in heading) == (width >= 50)


def test_a_table_that_is_no_terminals_is_whole_and_plain() -> None:
    assert ROWS[1][1] in table(ROWS, Screen())
    assert "\x1b" not in table(ROWS, Screen())


def test_colours_change_nothing_but_colours() -> None:
    painted = table(ROWS, Screen(80, True))
    assert "\x1b[31mFAILED\x1b[0m" in painted
    plain = painted
    for code in ("1", "31", "32", "0"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == table(ROWS, Screen(80))


def test_text_is_cut_by_cells() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert cut("数据数据", 5) == "数据…"
    assert cut("abc", 0) == ""


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_metrics_have_a_line_each_that_fits(width: int) -> None:
    loss = Series("loss", tuple(Sample(1 / (i + 1), float(i), None) for i in range(40)))
    once = Series("val_accuracy", (Sample(math.nan, 0.0, None),))
    lines = metric_lines({"loss": loss, "val_accuracy": once}, width)
    assert len(lines) == 2
    assert max(map(cells, lines)) <= max(width, 24)
    if width == 80:
        assert lines[0] == "loss          0.025     █▄▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁  0.025 to 1, 40 values"
        assert lines[1] == "val_accuracy  nan         1 value"


def test_colours_go_with_terminals_and_with_what_the_user_says() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    term = {"TERM": "xterm", "COLUMNS": "123"}
    assert screen(Terminal(), term) == Screen(123, True)
    assert screen(Terminal(), {**term, "NO_COLOR": "1"}) == Screen(123, False)
    assert screen(Terminal(), {**term, "TERM": "dumb"}) == Screen(123, False)
    assert screen(io.StringIO(), term) == Screen(0, False)
    assert screen(io.StringIO(), {**term, "FORCE_COLOR": "1"}) == Screen(0, True)


# --- progress ---


@pytest.mark.parametrize(
    ("line", "epoch", "part"),
    [
        ("Epoch 3/10", (3, 10), None),
        ("[Epoch 3 of 10] loss=0.5", (3, 10), None),
        ("epoch: 3/10, step 50/200 loss 0.1", (3, 10), 0.25),
        ("Epoch [3/10], Step [50/200], Loss: 0.1", (3, 10), 0.25),
        (" 45%|####5     | 45/100 [00:10<00:12, 4.4it/s]", None, 0.45),
        ("Epoch 3:  45%|####5     | 45/100 [00:10<00:12]", None, 0.45),
        ("\x1b[1m50/200\x1b[0m \x1b[32m━━━━\x1b[0m 1s", None, 0.25),
        (" 50/200 [=====>.....] - ETA: 3s", None, 0.25),
        ("step 5/20", None, 0.25),
        ("iter 3/12 train_acc 0.91", None, 0.25),
        ("Iteration [3 of 12]", None, 0.25),
        ("progress: 12.5 %", None, 0.125),
    ],
)
def test_the_usual_ways_to_say_how_far_are_read(
    line: str, epoch: tuple[int, int] | None, part: float | None
) -> None:
    told = read_progress(line)
    assert told is not None
    assert (told.epoch, told.part) == (epoch, part)


@pytest.mark.parametrize(
    "line",
    ["accuracy 97%", "Epoch[0] Batch [100]\tSpeed: 1.5", "loss 1/2", "on 2026/11/22", "step 9/3",
     "epoch 1/0", "x" * 5000 + "epoch 1/2"],
)  # fmt: skip
def test_other_numbers_are_no_progress(line: str) -> None:
    assert read_progress(line) is None


def test_the_rest_goes_as_what_was_seen() -> None:
    course = ProgressTrend()
    for epoch in range(1, 6):
        course.feed(f"epoch {epoch}/10 loss=0.5", 100.0 + 60 * epoch)
    assert course.fraction == 0.5
    assert course.left(400.0) == pytest.approx(300.0)
    assert course.left(430.0) == pytest.approx(270.0)
    assert course.left(4000.0) == 0.0


def test_an_epoch_that_has_only_begun_is_not_done() -> None:
    course = ProgressTrend()
    course.feed("Epoch 1/2", 0.0)
    assert course.fraction == 0.0
    course.feed("100/200 [=====>....]", 10.0)
    assert course.fraction == 0.25
    course.feed("Epoch 2/2", 20.0)
    assert course.fraction == 0.5
    assert course.left(20.0) == pytest.approx(20.0)


def test_epochs_from_nought_are_counted_right() -> None:
    course = ProgressTrend()
    course.feed("epoch 0/10 loss=1", 0.0)
    course.feed("epoch 9/10 loss=1", 90.0)
    assert course.fraction == 1.0


def test_a_bar_that_begins_again_and_again_says_nothing_of_the_whole() -> None:
    course = ProgressTrend()
    for percent in (10, 90, 5):
        course.feed(f"{percent:3d}%|###   | 1/2", float(percent))
    assert course.fraction is None
    assert course.left(100.0) is None


def test_what_the_program_reports_outranks_its_output() -> None:
    course = ProgressTrend()
    course.report(10, 100, 0.0)
    course.feed("epoch 1/2 loss=1", 1.0)
    course.report(20, 100, 10.0)
    assert course.fraction == 0.2
    assert course.left(10.0) == pytest.approx(80.0)


@given(st.lists(st.text(max_size=40), max_size=6))
def test_any_output_is_survived(lines: Sequence[str]) -> None:
    course = ProgressTrend()
    for place, line in enumerate(lines):
        course.feed(line, float(place))
        assert course.fraction is None or 0 <= course.fraction <= 1


# --- the status line ---

FULL = StatusBoard(
    "lenet 6b0e1234",
    states=(("RUNNABLE", 0.0), ("STARTING", 5.0), ("RUNNING", 35.0)),
    fraction=0.34,
    left=85.0,
    curve=Curve("val_accuracy", [0.5, 0.9, 0.97]),
    usage={"cpu": 1.934, "memory": 812, "gpu": 45, "gpu_memory": 3000},
)


def test_a_wide_window_has_all_of_it() -> None:
    assert text_of(FULL, 200) == (
        "lenet 6b0e1234  RUNNABLE 0:05 · STARTING 0:30  RUNNING 1:05  ━━━───────  34% ~1:25 left"
        "  val_accuracy 0.97  ▁▇█  1.9 cores, 812 MiB, GPU 45 %, 3.0 GiB  Ctrl-C detaches"
    )


def test_the_curve_of_the_newest_values_has_bars_between_attempts() -> None:
    curve = Curve("loss", [1.0] * 130 + [2.0] * 120, [10, 130])
    board = StatusBoard("n", curve=curve)
    assert text_of(board, 200) == f"n  loss 2  {'▁' * 6}|{'█' * 9}  Ctrl-C detaches"


def test_a_narrow_window_keeps_what_matters() -> None:
    assert text_of(FULL, 80) == (
        "lenet 6b0e1234  RUNNING 1:05  ━━━───────  34% ~1:25 left  val_accuracy 0.97"
    )
    assert text_of(FULL, 40) == "RUNNING 1:05  34% ~1:25 left"
    assert text_of(FULL, 12) == "RUNNING 1:05"
    assert text_of(FULL, 5) == "RUNN…"


@given(st.integers(1, 250), st.text(max_size=300), st.booleans())
def test_no_window_is_too_narrow(width: int, text: str, busy: bool) -> None:
    board = StatusBoard("lenet 6b0e1234", states=(("RUNNABLE", 0.0),), text=text)
    for each in (board, StatusBoard("submitted"), FULL if busy else board):
        assert cells(text_of(each, width)) <= width


def test_why_it_waits_is_cut_before_it_is_left_out() -> None:
    board = StatusBoard(
        "lenet 6b0e1234", states=(("RUNNABLE", 0.0),), text="MISCONFIGURATION: " * 9
    )
    assert text_of(board, 60).endswith("RUNNABLE 1:40  MISCONFIGURATION: MISCONFIGU…")
    assert HINT not in text_of(board, 60)


def test_states_that_nobody_has_seen_are_known_from_the_run() -> None:
    run = Run("j", "n", "q", JobStatus.RUNNING, created_at=900_000, started_at=960_000)
    assert add_state((), run, 1000.0, 100.0) == (("waited", 0.0), ("RUNNING", 60.0))
    ahead = Run("j", "n", "q", JobStatus.RUNNING, created_at=2_000_000, started_at=2_000_000)
    assert add_state((), ahead, 1000.0, 100.0) == (("waited", 100.0), ("RUNNING", 100.0))


def seen_of(*happenings: RunEvent, clock: FakeClock | None = None) -> StatusBoard:
    clock = clock or FakeClock()
    metrics = Metrics()
    seen = RunProgress(clock, metrics)
    for happening in metrics.watch(happenings):
        seen.take(happening)
    return seen.board(clock.monotonic())


def test_the_board_gathers_what_happens() -> None:
    board = seen_of(
        StatusChanged(RUN),
        LogOpened("s", 1),
        MetricsReported("s", ({"step": 25, "total": 100, "time": 5.0, "loss": 0.5},)),
        UsageReported("s", {"cpu": 1.0}),
    )
    assert board.title == "lenet 6b0e1234"
    assert board.fraction == 0.25
    assert board.curve == Curve("loss", [0.5])
    assert board.usage == {"cpu": 1.0}


def test_a_new_attempt_is_not_as_far_as_the_one_before() -> None:
    board = seen_of(
        StatusChanged(RUN), LogOpened("a", 1), OutputLine(0, "epoch 9/10 loss"), LogOpened("b", 2)
    )
    assert board.fraction is None


def test_an_array_is_as_far_as_its_children() -> None:
    array = Run("j", "n", "q", JobStatus.PENDING, children={"SUCCEEDED": 3, "RUNNING": 1})
    board = seen_of(StatusChanged(array), OutputLine(0, "epoch 1/10 loss", "2"))
    assert board.fraction == 0.75
    assert board.children == "1 RUNNING, 3/4 done"
    assert board.states[-1][0] == "RUNNING"  # AWS Batch says PENDING


def test_lost_contact_is_said_until_there_is_contact_again() -> None:
    clock, text = FakeClock(), "no contact: refused"
    seen = RunProgress(clock, Metrics())
    seen.take(StatusChanged(RUN))
    seen.take(ContactLost("refused"))
    assert seen.board(clock.monotonic()).text == text
    seen.take(OutputLine(0, "hello", "3/2"))
    assert seen.board(clock.monotonic()).text == ""
    seen.take(ContactLost("refused"))
    clock.sleep(60)
    assert seen.board(clock.monotonic()).text == ""


def test_who_waits_long_is_told_how_to_ask_why() -> None:
    clock = FakeClock()
    seen = RunProgress(clock, Metrics())
    seen.take(StatusChanged(Run(RUN.job_id, "lenet", "default", JobStatus.RUNNABLE)))
    assert seen.board(clock.monotonic()).text == ""
    assert seen.board(clock.monotonic() + 10).text == "why: batchml explain 6b0e1234"
    seen.take(RunMessage(RUN, "MISCONFIGURATION: no"))
    assert seen.board(clock.monotonic() + 10).text == "MISCONFIGURATION: no"


def test_who_waits_for_another_run_says_so() -> None:
    run = Run(RUN.job_id, "n", "q", JobStatus.PENDING, depends_on=("7c0e0000-" + RUN.job_id[9:],))
    assert seen_of(StatusChanged(run)).text == "after 7c0e0000"


# --- the view ---


def test_the_bottom_line_leaves_nothing_behind() -> None:
    stream, drawn = io.StringIO(), iter(["one", "two", "three"])
    bottom = BottomLine(stream, lambda width: f"{next(drawn)} {width}", lambda: 40)
    bottom.refresh()
    bottom.print("a\n")
    bottom.print("b\n")
    bottom.refresh()
    bottom.start()
    bottom.stop()
    bottom.refresh()
    assert stream.getvalue() == (
        f"{ERASE} one 38\r{ERASE}a\n one 38\r{ERASE}b\n one 38\r{ERASE} two 38\r{ERASE}"
    )


def test_the_bottom_line_is_made_anew_for_another_width() -> None:
    stream, widths = io.StringIO(), iter([40, 20])
    bottom = BottomLine(stream, lambda width: f"for {width}", lambda: next(widths))
    bottom.refresh()
    bottom.print("a\n")
    assert stream.getvalue() == f"{ERASE} for 38\r{ERASE}a\n for 18\r"


def test_words_for_people_go_above_the_line() -> None:
    stream, other = io.StringIO(), io.StringIO()
    bottom = BottomLine(stream, lambda width: "line", lambda: 40)
    bottom.refresh()
    print("a word", file=StreamAbove(bottom, other))
    assert other.getvalue() == "a word\n"
    assert stream.getvalue() == f"{ERASE} line\r{ERASE} line\r"
    above = StreamAbove(bottom, other)
    print("half", end="", file=above)  # the line may be drawn now: nothing must stand there
    assert other.getvalue() == "a word\n"
    print(" and half", file=above)
    assert other.getvalue() == "a word\nhalf and half\n"
    print("asked? ", end="", file=above, flush=True)
    assert other.getvalue().endswith("asked? ")
    bottom.refresh()
    assert stream.getvalue().endswith(f"{ERASE} line\r")


def test_an_error_is_short_and_harmless_whatever_it_quotes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "x" * 9000
    say_error(ConfigError("lenet", [f"-p lr={long}: so give a number.", "a\x1b[2J\rb"]))
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert not out and first.startswith("batchml: lenet: 2 mistakes")
    assert lines[0].startswith("  - -p lr=xxx") and lines[0].endswith("xxx: so give a number.")
    assert " characters ...] " in lines[0] and len(lines[0]) < 1100
    assert lines[1] == "  - a\ufffd[2J b"


def test_a_terminal_shows_what_a_pipe_does_and_a_line_below() -> None:
    stream = io.StringIO()
    view = TerminalView(FakeClock(), Metrics(), stream, colour=False)
    view.line("\x1b[2Jhello", "3")
    view.note("a note")
    view.rule()
    assert stream.getvalue() == ""
    view.flush()
    assert stream.getvalue() == "3 | \ufffd[2Jhello\na note\n" + "=" * 80 + "\n"


def shown(*happenings: RunEvent) -> str:
    stream = io.StringIO()

    def all_of() -> Iterator[RunEvent]:
        yield from happenings

    show_live(all_of(), LogView(FakeClock(), stream), from_start=True)
    return stream.getvalue()


def test_the_classic_text_is_as_the_contract_has_it() -> None:
    done = Run(RUN.job_id, "lenet", "default", JobStatus.SUCCEEDED, started_at=1)
    assert shown(
        StatusChanged(RUN),
        LogOpened("s", 1),
        OutputLine(0, "hello"),
        LogClosed("s", 1, MARKED),
        RunEnded(done),
    ) == (
        f"Job [lenet - {RUN.job_id}] is RUNNING.\n"
        "Output [s]:\n" + "=" * 80 + "\n[1970-01-01T00:00:00.000Z] hello\n" + "=" * 80 + "\n"
        f"Job [lenet - {RUN.job_id}] SUCCEEDED\n"
    )


class Writes(io.StringIO):
    """Counts what it is told to write at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write(self, text: str) -> int:
        self.count += 1
        return super().write(text)


def test_a_flood_of_lines_is_written_page_by_page_and_shown_before_a_pause() -> None:
    for on_terminal in (False, True):
        stream, clock = Writes(), FakeClock()
        plain = LogView(clock, stream)
        view = TerminalView(clock, Metrics(), stream, colour=False) if on_terminal else plain
        after: list[int] = []

        def happenings(stream: Writes = stream, after: list[int] = after) -> Iterator[RunEvent]:
            for page in range(3):
                yield from (OutputLine(page, f"line {page}") for _ in range(1000))
                yield PollingPaused()
                after.append(stream.getvalue().count("line"))
            yield RunEnded(RUN)

        show_live(happenings(), view, from_start=False)
        assert after == [1000, 2000, 3000]
        assert stream.count == 4


def test_what_was_held_back_comes_before_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), LogView(FakeClock(), stream) as view:
        view.line("one")
        view.note("a word")
        assert stream.getvalue() == "one\n"
        view.line("two")
        raise KeyboardInterrupt
    assert stream.getvalue() == "one\ntwo\n"
    assert capsys.readouterr().err == "a word\n"


def test_lines_of_children_say_whose_they_are() -> None:
    done = Run("j", "n", "q", JobStatus.SUCCEEDED)
    found = shown(
        StatusChanged(Run("j", "n", "q", JobStatus.PENDING, children={"RUNNING": 2})),
        RunMessage(RUN, "words"), ContactLost("words"),
        LogOpened("s", 1, "0"), LogOpened("t", 1, "1"), OutputLine(0, "a", "0"),
        OutputLine(0, "b", "1"),
        LogClosed("s", 1, MARKED, "0"), RunEnded(done),
    )  # fmt: skip
    assert found.startswith(
        "0 | Output [s]:\n0 | [1970-01-01T00:00:00.000Z] a\n"
        "1 | Output [t]:\n1 | [1970-01-01T00:00:00.000Z] b\n"
    )
    assert "=" * 80 not in found


def test_children_that_print_nothing_have_no_block(capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(
        LogOpened("s", 1, "0"), LogOpened("t", 1, "1"), LogClosed("s", 0, MARKED, "0"),
        LogClosed("t", 0, CUT, "1"), LogOpened("u", 1, "2"), LogOpened("v", 2, "2/2"),
        OutputLine(0, "a", "2/2"),
        LogClosed("v", 1, MARKED, "2/2"), RunEnded(Run("j", "n", "q", JobStatus.SUCCEEDED)),
    )  # fmt: skip
    assert found.startswith("1 | Output [t]:\n2/2 | Output [v]:\n2/2 | [1970")
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "Log of 1 INCOMPLETE: 0 lines arrived, then the log could not be read.",
        "Log of 2/2 complete: 1 line.",
    ]


@pytest.mark.parametrize(("command", "code"), [("env list >&-", 0), ("submit 2>&-", 2)])
def test_a_stream_that_is_closed_is_no_error_and_not_the_other(
    tmp_path: Path, command: str, code: int
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m batchml {command}', sys.executable],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "BATCHML_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_what_nodes_run_in_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    own = {"environment": "pytorch-1", "executor": "process"}
    done = Run("j", "n", "q", JobStatus.SUCCEEDED)
    shown(HostAssigned({**own, "address": "a"}), HostAssigned({**own, "address": "b"}),
          HostAssigned({"image": "i"}), RunEnded(done))  # fmt: skip
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_how_an_environment_was_made_is_told_at_its_beginning_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Run("j", "n", "q", JobStatus.STARTING)
    making = "Making the environment pytorch-1:"
    made = quote("made in 14 s: 1.2 GiB; torch 2.13.0+cpu is a build for CPUs")
    shown(
        RunMessage(run, f"{making} creating it"),
        RunMessage(run, f"{making} fetching torch: 10 MiB of 200 MiB"),
        RunMessage(run, f"{making} fetching torch: 50 MiB of 200 MiB"),
        HostAssigned({"environment": "pytorch-1", "executor": "process", "made": made}),
        RunEnded(Run("j", "n", "q", JobStatus.SUCCEEDED)),
    )
    assert capsys.readouterr().err.splitlines() == [
        f"{making} creating it",
        "Runs as a process of this machine, in the environment pytorch-1, made in 14 s: 1.2 GiB; "
        "torch 2.13.0+cpu is a build for CPUs.",
    ]


def test_a_live_line_is_cut_to_the_window_and_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with live_line(stream, lambda width: f"for {width} " + "x" * 100):
        pass
    drawn = stream.getvalue()
    first, *_ = [line for line in drawn.replace("\x1b[?25l", "").splitlines() if "for" in line]
    assert first.startswith("for 39 x") and len(first) <= 41
    assert drawn.endswith("\x1b[2K")  # the line is erased
