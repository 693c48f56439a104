"""SweepHandle and Client.sweeps: what a program asks of a sweep that was started."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.cli.sweep_ways import ways_on
from batchml.client.client import Client
from batchml.client.place import Place
from batchml.client.sweeping.boards import Board
from batchml.client.sweeping.handle import SweepHandle
from batchml.client.sweeping.looking import Onlooker
from batchml.errors import UsageError
from batchml.model.sweep import Trial, TrialState
from batchml.sweep.asking import Ask, Reconfirm, Rerun, TopUp, pending
from batchml.sweep.idling import idle
from tests.sweep_story import frozen, story
from tests.unit.test_sweeps import fill, unfinished
from tests.unit.test_sweeps import place as place


@pytest.fixture
def board(place: Place) -> Board:
    return fill(place, frozen(), story(60))


@pytest.fixture
def handle(place: Place, board: Board) -> SweepHandle:
    return SweepHandle(place, board.key)


def only(board: Board) -> Ask:
    (asked,) = pending(board)
    return asked


def test_trials_are_asked_for_again(handle: SweepHandle, board: Board) -> None:
    assert not handle.rerun(), "none has failed"
    assert handle.rerun([3])
    asked = only(board)
    assert isinstance(asked, Rerun) and asked.numbers == (3,)
    with pytest.raises(UsageError, match="no such trial: 999"):
        handle.rerun([999])


def test_todays_code_of_a_job_that_has_none_is_refused_before_anything_is_asked(
    handle: SweepHandle, board: Board
) -> None:
    with pytest.raises(UsageError, match="in the image"):
        handle.rerun([3], code=True)
    assert pending(board) == []


def test_more_trials_and_the_best_again_are_asked_for(handle: SweepHandle, board: Board) -> None:
    handle.top_up(trials=200, hours=9)
    asked = only(board)
    assert isinstance(asked, TopUp) and (asked.trials, asked.hours) == (200, 9)
    handle.confirm(top=2)
    (again,) = (each for each in pending(board) if isinstance(each, Reconfirm))
    assert (again.top, again.seeds) == (2, 3)


def test_a_sweep_is_exported_and_listed(handle: SweepHandle, place: Place) -> None:
    path = handle.export(place.here / "trials.log")
    assert all(json.loads(line) for line in path.read_text().splitlines())
    home = str(Path(place.settings.home.value))
    client = Client("local", place.here, environ={"BATCHML_HOME": home})
    assert client.sweeps() == [client.sweeps(handle.key)]


def test_a_picture_is_short_words(place: Place, board: Board) -> None:
    shown = str(Onlooker(place, frozen(), board).look())
    assert shown.startswith("60 of 100 trials: ") and "; best 0.9" in shown
    assert "\n" not in shown and len(shown) < 200


def spans(*found: tuple[float, float | None]) -> list[Trial]:
    ended = TrialState.DONE
    return [
        Trial(
            number, {}, 0, planned_at=start, stopped_at=end,
            state=TrialState.RUNNING if end is None else ended,
        )
        for number, (start, end) in enumerate(found)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("trials", "seconds"),
    [
        (spans((0, 10), (0, 20), (15, 30)), 70),
        (spans((0, 10), (60, None)), 50),
        (spans((60, None), (0, 10), (5, 40)), 20),
        (spans((0, None)), 0),
        (spans(), 100),
    ],
)
def test_time_in_which_no_trial_was_under_way_is_idle(trials: list[Trial], seconds: float) -> None:
    assert idle(trials, 0, 100) == seconds


def test_that_the_local_server_is_down_is_said_and_what_brings_it_back(place: Place) -> None:
    board = fill(place, frozen(), unfinished(40))
    onlooker = Onlooker(place, frozen(), board)
    words = ways_on(place, frozen(), onlooker.state, onlooker.look(), "")
    assert "The local server does not run" in words and "batchml local start" in words
    ended = replace(onlooker.look(), ended="all are over")
    assert "local start" not in ways_on(place, frozen(), onlooker.state, ended, "")
