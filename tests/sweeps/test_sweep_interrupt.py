"""What Ctrl-C prints for a sweep, at each point at which it may come."""

import json
import os
import signal
from pathlib import Path

import pytest
import typer

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import ServiceUnreachable
from batchml.runs.send import Interrupted
from batchml.sweeps.commands.running import SweepInterrupt
from batchml.sweeps.started import write_started
from batchml.sweeps.stores import open_sweep_store
from batchml.sweeps.view import snapshot_of
from tests.support.fakes import FakeClock
from tests.support.sweep_story import BEGAN, started, told


@pytest.fixture
def context(tmp_path: Path) -> Context:
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    return Context(load_settings(environ, tmp_path, None), FakeClock(BEGAN), tmp_path)


def interrupted(leaving: SweepInterrupt, number: signal.Signals = signal.SIGINT) -> int:
    """The exit code of a command that a signal ends; its handlers are put back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(typer.Exit) as stop, leaving.reported():
            os.kill(os.getpid(), number)
            signal.sigtimedwait([signal.SIGUSR1], 1.0)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return int(getattr(stop.value, "exit_code", -1))


@pytest.mark.parametrize(
    ("is_started", "is_written", "words"),
    [
        (False, False, "Nothing was started"),
        (None, False, "Nothing was started"),
        (None, True, "batchml sweeps resume 2bcdefgh2345abcde"),
        (True, True, "batchml sweeps resume 2bcdefgh2345abcde"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_left_is_said_and_how_to_go_on(
    context: Context,
    capsys: pytest.CaptureFixture[str],
    is_started: bool | None,
    is_written: bool,
    words: str,
    number: signal.Signals,
) -> None:
    if is_written:
        write_started(open_sweep_store(context, started().key), started())
    leaving = SweepInterrupt(context, started(), json_=True, is_started=is_started)
    assert interrupted(leaving, number) == 130
    out, err = capsys.readouterr()
    assert words in err
    document = json.loads(out)
    assert document["exitCode"] == 130
    assert document["sweepId"] == (started().key if is_written else None)
    assert document["status"] == ("paused" if is_written else None)


def test_what_was_seen_last_is_in_the_document(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = SweepInterrupt(context, started(), json_=True)
    snapshot = snapshot_of(started(), told(30), BEGAN)
    assert list(leaving.watch(iter([snapshot]))) == [snapshot]
    assert interrupted(leaving) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["metrics"]["val_accuracy"] > 0.9 and document["trials"] == 30


@pytest.mark.parametrize(
    ("fails", "words", "status"),
    [
        (None, "Detached: the sweep goes on.", "running"),
        (Interrupted("2key", "job"), "Detached: the sweep goes on.", "running"),
        (Interrupted("2key"), "No run took over the control: interrupted", "paused"),
        (KeyboardInterrupt(), "No run took over the control: interrupted", "paused"),
        (ServiceUnreachable("no answer"), "No run took over the control: no answer", "paused"),
    ],
)
def test_a_run_takes_over_a_sweep_that_needs_a_controller(
    context: Context,
    capsys: pytest.CaptureFixture[str],
    fails: BaseException | None,
    words: str,
    status: str,
) -> None:
    calls = []

    def hand_over() -> None:
        calls.append(1)
        if fails is not None:
            raise fails

    leaving = SweepInterrupt(context, started(), json_=True, hand_over=hand_over)
    assert interrupted(leaving) == 130
    out, err = capsys.readouterr()
    assert (len(calls), json.loads(out)["status"]) == (1, status)
    assert words in err
    assert ("sweeps resume" in err) == (status == "paused")
    assert "sweeps stop" in err


def test_no_run_takes_over_a_sweep_that_does_not_exist_yet(context: Context) -> None:
    def hand_over() -> None:
        raise AssertionError

    leaving = SweepInterrupt(context, started(), json_=False, is_started=False, hand_over=hand_over)
    assert interrupted(leaving) == 130


def test_one_inside_another_says_it_once(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = SweepInterrupt(context, started(), json_=False)

    class Inner(SweepInterrupt):
        def _tell(self) -> None:
            with outer.reported():
                raise KeyboardInterrupt

    assert interrupted(Inner(context, started(), json_=False)) == 130
    assert capsys.readouterr().err.count("resume:") == 1
