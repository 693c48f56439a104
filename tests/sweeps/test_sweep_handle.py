"""SweepHandle and Client.sweeps: what a program asks of a sweep that was started."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.client import Client
from batchml.context import Context
from batchml.errors import UsageError
from batchml.model.sweep import Trial, TrialState
from batchml.sweeps.commands.render import describe_next_commands
from batchml.sweeps.control.inbox import (
    ConfirmRequest,
    RerunRequest,
    SweepRequest,
    TopUpRequest,
    pending_requests,
)
from batchml.sweeps.control.totals import Tally
from batchml.sweeps.handle import SweepHandle
from batchml.sweeps.stores import SweepStore
from batchml.sweeps.view import SweepView
from tests.support.sweep_story import context as context
from tests.support.sweep_story import fill, started, story, unfinished
from tests.support.sweep_world import spec_of


@pytest.fixture
def store(context: Context) -> SweepStore:
    return fill(context, started(), story(60))


@pytest.fixture
def handle(context: Context, store: SweepStore) -> SweepHandle:
    return SweepHandle(context, store.key)


def only(store: SweepStore) -> SweepRequest:
    (asked,) = pending_requests(store)
    return asked


def test_trials_are_asked_for_again(handle: SweepHandle, store: SweepStore) -> None:
    assert not handle.rerun(), "none has failed"
    assert handle.rerun([3])
    asked = only(store)
    assert isinstance(asked, RerunRequest) and asked.numbers == (3,)
    with pytest.raises(UsageError, match="no such trial: 999"):
        handle.rerun([999])


def test_todays_code_of_a_job_that_has_none_is_refused_before_anything_is_asked(
    handle: SweepHandle, store: SweepStore
) -> None:
    with pytest.raises(UsageError, match="in the image"):
        handle.rerun([3], code=True)
    assert pending_requests(store) == []


def test_more_trials_and_the_best_again_are_asked_for(
    handle: SweepHandle, store: SweepStore
) -> None:
    handle.top_up(trials=200, hours=9)
    asked = only(store)
    assert isinstance(asked, TopUpRequest) and (asked.trials, asked.hours) == (200, 9)
    handle.confirm(top=2)
    (again,) = (each for each in pending_requests(store) if isinstance(each, ConfirmRequest))
    assert (again.top, again.seeds) == (2, 3)


def test_a_sweep_is_listed(handle: SweepHandle, context: Context) -> None:
    home = str(Path(context.settings.home.value))
    client = Client("local", context.folder, environ={"BATCHML_HOME": home})
    assert client.sweeps() == [client.sweeps(handle.key)]


def test_a_picture_is_short_words(context: Context, store: SweepStore) -> None:
    shown = str(SweepView(context, started(), store).snapshot())
    assert shown.startswith("60 of 100 trials: ") and "; best 0.9" in shown
    assert "\n" not in shown and len(shown) < 200


def spans(*found: tuple[float, float | None]) -> list[Trial]:
    """Trials that began and ended then; that of None still runs."""
    ended, planned_at = TrialState.DONE, -500.0
    return [
        Trial(number, {}, 0, planned_at=planned_at, state=TrialState.RUNNING, resumed_at=start)
        if end is None
        else Trial(number, {}, 0, planned_at=planned_at, state=ended, seconds=end - start,
                   stopped_at=end)
        for number, (start, end) in enumerate(found)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("trials", "seconds"),
    [
        (spans((0, 10), (0, 20), (15, 30)), 30),
        (spans((0, 10), (60, None)), 50),
        (spans((60, None), (0, 10), (5, 40)), 80),
        (spans((0, None)), 100),
        ([Trial(0, {}, 0, planned_at=3.0)], 0),
        (spans(), 0),
    ],
)
def test_time_in_which_no_trial_ran_is_not_busy(trials: list[Trial], seconds: float) -> None:
    assert Tally(spec_of(), trials).busy(100) == seconds


def test_that_the_local_server_is_down_is_said_and_what_brings_it_back(context: Context) -> None:
    store = fill(context, started(), unfinished(40))
    view = SweepView(context, started(), store)
    words = describe_next_commands(context, started(), view.state, view.snapshot(), "")
    assert "The local server is not running" in words and "batchml local start" in words
    ended = replace(view.snapshot(), ended="all are over")
    assert "local start" not in describe_next_commands(context, started(), view.state, ended, "")
