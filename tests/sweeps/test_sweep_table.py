"""The live table, and its lines where there is no terminal."""

import sys

import pytest
from msgspec.structs import replace

from batchml.cli.render import cells
from batchml.cli.terminal import Screen
from batchml.model.sweep import TrialState
from batchml.sweeps.commands.running import draw, open_view, plain_lines
from batchml.sweeps.control.events import NoticeGiven
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.summary import SweepSnapshot
from batchml.sweeps.view import snapshot_of
from tests.support.sweep_story import BEGAN, SPEC, started, told


def pictured(seconds: float, count: int = 100) -> SweepSnapshot:
    state = told(count, until=seconds)
    state.ended = None
    return snapshot_of(started(), state, BEGAN + seconds)


def test_the_table_says_how_many_trials_the_best_and_what_is_used() -> None:
    text = draw(pictured(150), started(), Screen(100))
    assert text.splitlines()[0] == "lenet-tune 2bcdefgh  tpe + asha  running  2:30"
    assert "64 of 100 trials: 6 done, 56 pruned, 2 failed, 14 running, 22 waiting" in text
    assert "best   val_accuracy 0.983075, trial 33, epoch 27" in text
    assert "of $20.00" in text and "2:30 of 4:00:00" in text
    assert "epochs not run" in text and "left   about" in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
@pytest.mark.parametrize("seconds", [0, 30, 150, 1000])
def test_no_line_is_wider_than_the_window(width: int, seconds: float) -> None:
    for line in draw(pictured(seconds), started(), Screen(width)).splitlines():
        assert cells(line) <= width


def test_colours_add_nothing_but_colours() -> None:
    import re

    plain = draw(pictured(150), started(), Screen(90))
    coloured = draw(pictured(150), started(), Screen(90, colour=True))
    assert "\x1b[" in coloured and re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_one_that_has_not_begun_and_one_that_has_ended() -> None:
    empty = draw(snapshot_of(started(), SweepState(), BEGAN), started(), Screen(80))
    assert "none yet" in empty
    ended = draw(snapshot_of(started(), told(100), BEGAN + 1e6), started(), Screen(80))
    assert "ended" in ended.splitlines()[0] and "Ended: all 100 trials are over" in ended
    assert "left" not in ended


def test_runs_that_confirm_the_best_are_not_called_trials() -> None:
    done = {TrialState.DONE: 17}
    snapshot = replace(pictured(150), counts=done, planned=8, wanted=8)
    assert "17 of 17 trials and confirming runs: 17 done" in draw(snapshot, started(), Screen(80))


def test_the_bar_has_a_mark_for_each_state_that_has_a_trial() -> None:
    bar = draw(pictured(150), started(), Screen(80)).splitlines()[1]
    assert {"\u2588", "\u2592", "x", ">", "\u00b7"} <= set(bar)
    assert len(bar.strip()) == 40


def test_text_of_others_cannot_move_the_cursor() -> None:
    snapshot = pictured(150)
    assert snapshot.best is not None
    snapshot.best.params["opt"] = "\x1b[2Jgone"
    snapshot.best.state = TrialState.DONE
    assert "\x1b" not in draw(snapshot, started(), Screen(200))
    assert not any("\x1b" in line for line in plain_lines(snapshot, started()))


def test_without_a_terminal_there_is_a_line_for_news_and_none_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moments = [10.0, 10.3, 10.6, 100.0, 100.3, 150.0, 150.3, 1000.0, 1000.3]
    with open_view(started(), to_stderr=False) as view:
        for seconds in moments:
            view.show(pictured(seconds))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0 of 100 trials: 16 RUNNING, 84 WAITING; " + lines[0].partition("; ")[2]
    assert [line for line in lines if line.startswith("Best: ")][-1].endswith("epoch 27")
    assert len(lines) == len(set(lines)) <= 9
    assert lines.count("2 hosts were lost; their trials run again.") == 1


def test_the_last_lines_of_a_failed_trial_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    state = told(100, until=1000)
    lines = ["Trial 0 failed: exit code 1. Its last lines:", "  a", "  b", "  c\x1b[2J"]
    state.apply(NoticeGiven("failures", "\n".join(lines), BEGAN))
    snapshot = snapshot_of(started(), state, BEGAN + 1e6)
    shown = [line.strip() for line in draw(snapshot, started(), Screen(80)).splitlines()]
    with open_view(started(), to_stderr=False) as view:
        view.show(snapshot)
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for text in (shown, printed):
        at = text.index(lines[0])
        assert text[at + 1 : at + 3] == ["a", "b"] and text[at + 3].startswith("c")
        assert not any("\x1b" in line for line in text)


def test_a_json_document_has_stdout_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stdout.isatty()
    with open_view(started(), to_stderr=True) as view:
        view.show(pictured(150))
    out, err = capsys.readouterr()
    assert out == "" and "64 of 100 trials" in err


def test_a_sweep_without_a_price_says_nothing_of_cost() -> None:
    state = told(20, until=150)
    snapshot = snapshot_of(started(SPEC, None), state, BEGAN + 150)
    assert "cost" not in draw(snapshot, started(SPEC, None), Screen(80))
