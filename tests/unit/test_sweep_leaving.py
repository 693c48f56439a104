"""What Ctrl-C says of a sweep, at each point at which it may come."""

import json
import os
import signal
from pathlib import Path

import pytest
import typer

from batchml.cli.sweep_leaving import Leaving
from batchml.client.place import Place
from batchml.client.sweeping.boards import open_board
from batchml.client.sweeping.freezing import write_frozen
from batchml.client.sweeping.looking import picture_of
from batchml.settings import load_settings
from tests.fakes import FakeClock
from tests.sweep_story import BEGAN, frozen, told


@pytest.fixture
def place(tmp_path: Path) -> Place:
    environ = {"BATCHML_HOME": str(tmp_path / "home")}
    return Place(load_settings(environ, tmp_path, None), FakeClock(BEGAN), tmp_path)


def interrupted(leaving: Leaving, number: signal.Signals = signal.SIGINT) -> int:
    """The exit code of a command that a signal ends; its handlers are put back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(typer.Exit) as stop, leaving.told():
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
    place: Place,
    capsys: pytest.CaptureFixture[str],
    is_started: bool | None,
    is_written: bool,
    words: str,
    number: signal.Signals,
) -> None:
    if is_written:
        write_frozen(open_board(place, frozen().key), frozen())
    leaving = Leaving(place, frozen(), json_=True, is_started=is_started)
    assert interrupted(leaving, number) == 130
    out, err = capsys.readouterr()
    assert words in err
    document = json.loads(out)
    assert document["exitCode"] == 130
    assert document["sweepId"] == (frozen().key if is_written else None)
    assert document["status"] == ("paused" if is_written else None)


def test_what_was_seen_last_is_in_the_document(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = Leaving(place, frozen(), json_=True)
    picture = picture_of(frozen(), told(30), BEGAN)
    assert list(leaving.watch(iter([picture]))) == [picture]
    assert interrupted(leaving) == 130
    document = json.loads(capsys.readouterr().out)
    assert document["best"]["metrics"]["val_accuracy"] > 0.9 and document["trials"] == 30


def test_one_inside_another_says_it_once(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    outer = Leaving(place, frozen(), json_=False)

    class Inner(Leaving):
        def _tell(self) -> None:
            with outer.told():
                raise KeyboardInterrupt

    assert interrupted(Inner(place, frozen(), json_=False)) == 130
    assert capsys.readouterr().err.count("go on:") == 1
