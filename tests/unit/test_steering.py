"""What is done with a sweep that exists, up to what its controller then does."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from batchml.client.place import Place
from batchml.client.sweeping import steering
from batchml.client.sweeping.boards import Board, open_board
from batchml.client.sweeping.ending import Stop, going_on
from batchml.client.sweeping.freezing import Frozen
from batchml.client.sweeping.holding import AnotherController, holder, refuse_second
from batchml.errors import UsageError
from batchml.model.job import JobSpec
from batchml.model.sweep import Confirm, Dimension, EarlyStop, Goal, Limits, SweepSpec
from batchml.runtime.protocol import messages
from batchml.settings import load_settings
from batchml.sweep import asking
from batchml.sweep.events import (
    Ended,
    Event,
    Planned,
    Reopened,
    Stopping,
    Submitted,
    Told,
    Wave,
)
from batchml.sweep.lease import Lease, Owner
from batchml.sweep.ledger import Ledger
from batchml.sweep.signals import call_off, called_off
from tests.fakes import FakeClock

KEY = "2abcdefghijklmnop"
SPEC = SweepSpec(
    name="s", job="j", goals=(Goal("acc", "max"),), space={"lr": Dimension("float", 0.0, 1.0)},
    limits=Limits(trials=4, parallel=2),
)  # fmt: skip
FROZEN = Frozen(
    key=KEY, name="s", env="local", spec=SPEC,
    job=msgspec.to_builtins(JobSpec(name="j", image="i", command=("true",), code=False)),
)  # fmt: skip
OTHER = Owner("ann", "elsewhere", 7, "1")


class Meantime(FakeClock):
    """Something happens while somebody sleeps."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.happens()


class Scene:
    """A sweep on a board, as its ledger tells it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Meantime()
        environ = {"BATCHML_HOME": str(folder / "home"), "BATCHML_ENV": "local"}
        self.place = Place(load_settings(environ, folder, None), self.clock, folder)
        self.board: Board = open_board(self.place, KEY)
        self.said: list[str] = []

    def happened(self, *events: Event) -> None:
        Ledger(self.board).append(events)

    def controlled(self) -> Lease:
        lease = Lease(self.board, self.clock, OTHER, 1000.0)
        lease.take()
        return lease


def trials(*states: str, first: int = 0) -> list[Event]:
    planned = tuple(Planned(first + n, {"lr": 0.1}, 1) for n in range(len(states)))
    return [
        Wave(1, 1.0, "3bcdefghijklmnopq", planned),
        Submitted(1, "job-1", 2.0),
        *(told(first + n, state) for n, state in enumerate(states) if state),
    ]


def told(trial: int, state: str) -> Told:
    sender = messages.Sender(1, trial, 1, trial, f"job-1:{trial}", 2.0)
    point = [1, [0.5 + trial / 10], 2.5]
    return Told(messages.with_end(messages.make(sender, 1, "end", 3.0, [point]), state, 0))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# --- resume -------------------------------------------------------------------------------------


def test_a_sweep_without_a_controller_lacks_nothing_else(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    assert steering.go_on(scene.board) is None
    refuse_second(scene.place, scene.board)


def test_a_second_controller_is_refused_and_the_first_named(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    scene.controlled()
    with pytest.raises(AnotherController, match="process 7 on elsewhere, of ann"):
        refuse_second(scene.place, scene.board)
    scene.clock.time += 2000
    assert holder(scene.place, scene.board) is None, "it was silent for too long"


@pytest.mark.parametrize("by", ["user", "failures"])
def test_one_that_was_stopped_goes_on(scene: Scene, by: str) -> None:
    scene.happened(*trials("DONE", "KILLED"), Stopping(by, "enough", 4.0), Ended("enough", 5.0))
    assert isinstance(steering.go_on(scene.board), asking.GoOn)


def test_one_that_is_asked_to_stop_and_knows_it_not_yet_goes_on(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    call_off(scene.board, "stop")
    assert isinstance(steering.go_on(scene.board), asking.GoOn)


def test_one_that_is_over_says_what_can_be_done(scene: Scene) -> None:
    scene.happened(*trials("DONE"), Ended("all trials are over", 5.0))
    with pytest.raises(UsageError, match=r"all trials are over.*top-up"):
        steering.go_on(scene.board)
    scene.happened(Reopened("top-up", 6.0))
    assert steering.go_on(scene.board) is None


# --- top-up, rerun, confirm ---------------------------------------------------------------------


def test_limits_are_said_in_full_and_all_mistakes_at_once(scene: Scene) -> None:
    scene.happened(*trials("DONE", "DONE", "DONE"))
    asked = steering.top_up(FROZEN, scene.board, trials=8, hours=2.0)
    assert (asked.trials, asked.hours, asked.cost) == (8, 2.0, None)
    with pytest.raises(UsageError, match="at least one"):
        steering.top_up(FROZEN, scene.board)
    with pytest.raises(UsageError) as failed:
        steering.top_up(FROZEN, scene.board, trials=3, hours=-1, cost=5.0)
    for part in ("3 trials already", "--hours -1", "not known when the sweep was started"):
        assert part in str(failed.value)
    with pytest.raises(UsageError, match="limits already"):
        steering.top_up(FROZEN, scene.board, trials=4)
    priced = replace(FROZEN, hourly=1.0)
    assert steering.top_up(priced, scene.board, cost=5.0).cost == 5.0


def test_halving_takes_no_more_trials_and_says_what_to_do(scene: Scene) -> None:
    scene.happened(*trials("DONE", "PAUSED", "PAUSED"))
    stop = EarlyStop("halving", max=9)
    halving = replace(FROZEN, spec=replace(FROZEN.spec, early_stop=stop))
    with pytest.raises(UsageError, match=r"batchml sweep FILE --trials 18"):
        steering.top_up(halving, scene.board, trials=18)
    assert steering.top_up(halving, scene.board, hours=2.0).hours == 2.0


def test_confirmations_are_no_trials_that_count(scene: Scene) -> None:
    again = Wave(2, 5.0, "4bcdefghijklmnopq", (Planned(4, {"lr": 0.1}, 9, "confirm", 0),))
    scene.happened(*trials("DONE", "DONE", "DONE", "DONE"), again)
    assert steering.top_up(FROZEN, scene.board, trials=5).trials == 5


def test_what_failed_runs_again_and_only_that(scene: Scene) -> None:
    scene.happened(*trials("DONE", "PRUNED", "DIVERGED", ""))
    assert steering.rerun(scene.board) is None, "what diverged has not failed"
    scene.happened(told(3, "FAILED"))
    asked = steering.rerun(scene.board)
    assert asked is not None and asked.numbers == ()


def test_named_trials_run_again_once_they_have_ended(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    asked = steering.rerun(scene.board, (0,))
    assert asked is not None and asked.numbers == (0,)
    with pytest.raises(UsageError, match=r"no such trial: 9\. not at their end yet: 1"):
        steering.rerun(scene.board, (0, 1, 9))


def test_the_best_are_confirmed_once_there_are_some(scene: Scene) -> None:
    with pytest.raises(UsageError, match="no trial of this sweep has a result"):
        steering.confirm(FROZEN, scene.board)
    scene.happened(*trials("DONE", "DONE"))
    assert steering.confirm(FROZEN, scene.board).top == Confirm().top
    usual = replace(FROZEN, spec=replace(SPEC, confirm=Confirm(1, 5)))
    asked = steering.confirm(usual, scene.board, seeds=2)
    assert (asked.top, asked.seeds) == (1, 2)
    with pytest.raises(UsageError, match="above 0"):
        steering.confirm(FROZEN, scene.board, top=0)


# --- who does it --------------------------------------------------------------------------------


def test_what_is_asked_waits_for_a_controller_where_none_is(scene: Scene) -> None:
    asked = asking.GoOn("5bcdefghijklmnopq")
    assert steering.leave_ask(scene.place, scene.board, asked) is None
    assert scene.clock.naps == []
    assert asking.pending(scene.board) == [asked]


def test_the_controller_that_there_is_takes_it_up(scene: Scene) -> None:
    asked = asking.GoOn("5bcdefghijklmnopq")
    scene.controlled()
    scene.clock.happens = lambda: scene.board.delete(*asking.places([asked]))
    found = steering.leave_ask(scene.place, scene.board, asked)
    assert found is not None and found.holder == OTHER
    assert len(scene.clock.naps) == 1


def test_a_controller_that_is_slow_is_believed(scene: Scene) -> None:
    scene.controlled()
    found = steering.leave_ask(scene.place, scene.board, asking.GoOn("5bcdefghijklmnopq"))
    assert found is not None and sum(scene.clock.naps) < 5


def test_one_that_ends_meanwhile_leaves_it_to_whoever_asked(scene: Scene) -> None:
    lease = scene.controlled()
    scene.clock.happens = lease.release
    asked = asking.GoOn("5bcdefghijklmnopq")
    assert steering.leave_ask(scene.place, scene.board, asked) is None
    assert asking.pending(scene.board) == [asked], "it is not lost"


# --- stop ---------------------------------------------------------------------------------------


def test_a_stop_is_on_the_board_and_a_controller_sees_to_it(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    scene.controlled()
    scene.clock.happens = lambda: scene.happened(Stopping("user", "enough", 4.0))
    stop = Stop(scene.place, FROZEN, scene.board, scene.said.append)
    assert stop.begin("enough")
    assert called_off(scene.board) == "enough"
    assert scene.said == [
        "Stopping: its trials have 30 s to save and end. Its controller, process 7 on elsewhere, "
        "of ann, sees to it."
    ]


def test_without_a_controller_whoever_asked_sees_to_it(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    assert not Stop(scene.place, FROZEN, scene.board).begin("enough")
    assert called_off(scene.board) == "enough"


def test_one_that_has_ended_is_not_called_off(scene: Scene) -> None:
    """Else `top-up` would find all its trials stopped."""
    scene.happened(*trials("DONE"), Ended("all trials are over", 5.0))
    assert Stop(scene.place, FROZEN, scene.board, scene.said.append).begin("enough")
    assert called_off(scene.board) is None
    assert scene.said == ["It had ended already: all trials are over."]


def test_only_what_goes_on_is_terminated(scene: Scene) -> None:
    second = Wave(2, 5.0, "4bcdefghijklmnopq", (Planned(4, {"lr": 0.1}, 9),))
    rung = Wave(3, 5.0, "5bcdefghijklmnopq", (), 3, 1, 2)
    scene.happened(
        *trials("DONE", "PRUNED"), second, Submitted(2, "job-2", 6.0), rung,
        Submitted(3, "job-3", 6.0),
    )  # fmt: skip
    assert going_on(Ledger(scene.board).load()) == ["job-2", "job-3"]
