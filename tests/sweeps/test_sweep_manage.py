"""Resume, top up, rerun, confirm and stop a sweep, up to what its controller then does."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from batchml.config.settings import load_settings
from batchml.context import Context
from batchml.errors import SweepHasController, UsageError
from batchml.model.job import JobSpec
from batchml.model.sweep import ConfirmSettings, Dimension, EarlyStop, Goal, SweepLimits, SweepSpec
from batchml.runtime.protocol import sweep as messages
from batchml.sweeps import manage
from batchml.sweeps.control import inbox
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    MessageReceived,
    PlannedTrial,
    SweepEnded,
    SweepReopened,
    SweepStopping,
    TrialBatch,
)
from batchml.sweeps.control.inbox import read_stop_signal, signal_stop
from batchml.sweeps.control.lease import (
    Lease,
    LeaseOwner,
    expect_controller,
    find_expected,
    find_holder,
    newest_lease,
    refuse_second_controller,
)
from batchml.sweeps.control.ledger import SweepLedger
from batchml.sweeps.manage import SweepStop, running_jobs
from batchml.sweeps.started import StartedSweep
from batchml.sweeps.stores import SweepStore, open_sweep_store
from tests.support.fakes import FakeClock

KEY = "2abcdefghijklmnop"
SPEC = SweepSpec(
    name="s", job="j", goals=(Goal("acc", "max"),), space={"lr": Dimension("float", 0.0, 1.0)},
    limits=SweepLimits(trials=4, parallel=2),
)  # fmt: skip
STARTED = StartedSweep(
    key=KEY, name="s", env="local", spec=SPEC,
    job=msgspec.to_builtins(JobSpec(name="j", image="i", command=("true",), code=False)),
)  # fmt: skip
OTHER = LeaseOwner("ann", "elsewhere", 7, "1")


class Meantime(FakeClock):
    """Something happens while somebody sleeps."""

    happens: Callable[[], object] = staticmethod(lambda: None)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.happens()


class Scene:
    """A sweep in a store, as its ledger defines it."""

    def __init__(self, folder: Path) -> None:
        self.clock = Meantime()
        environ = {"BATCHML_HOME": str(folder / "home"), "BATCHML_ENV": "local"}
        self.place = Context(load_settings(environ, folder, None), self.clock, folder)
        self.store: SweepStore = open_sweep_store(self.place, KEY)
        self.said: list[str] = []

    def happened(self, *events: Event) -> None:
        SweepLedger(self.store).append(events)

    def controlled(self) -> Lease:
        lease = Lease(self.store, self.clock, OTHER, 1000.0)
        lease.take()
        return lease


def trials(*states: str, first: int = 0) -> list[Event]:
    planned = tuple(PlannedTrial(first + n, {"lr": 0.1}, 1) for n in range(len(states)))
    return [
        TrialBatch(1, 1.0, "3bcdefghijklmnopq", planned),
        BatchSubmitted(1, "job-1", 2.0),
        *(told(first + n, state) for n, state in enumerate(states) if state),
    ]


def told(trial: int, state: str) -> MessageReceived:
    sender = messages.MessageSender(1, trial, 1, trial, f"job-1:{trial}", 2.0)
    point = [1, [0.5 + trial / 10], 2.5]
    return MessageReceived(
        messages.add_end(messages.make_message(sender, 1, "end", 3.0, [point]), state, 0)
    )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# --- the controller -----------------------------------------------------------------------------


def test_a_controller_that_was_submitted_is_expected_until_any_has_begun(scene: Scene) -> None:
    now = scene.clock.now()
    expect_controller(scene.store, "run-1", now + 60.0, newest_lease(scene.store))
    assert find_expected(scene.store, scene.clock) == LeaseOwner(job="run-1")
    refuse_second_controller(scene.store, scene.clock, KEY)  # it may never begin
    scene.controlled().release()
    assert find_expected(scene.store, scene.clock) is None
    expect_controller(scene.store, "run-2", now + 60.0, newest_lease(scene.store))
    assert find_expected(scene.store, scene.clock) == LeaseOwner(job="run-2")
    scene.clock.time += 61.0
    assert find_expected(scene.store, scene.clock) is None


# --- resume -------------------------------------------------------------------------------------


def test_a_sweep_without_a_controller_lacks_nothing_else(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    assert manage.make_resume(scene.store) is None
    refuse_second_controller(scene.store, scene.clock, KEY)


def test_a_second_controller_is_refused_and_the_first_named(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    scene.controlled()
    with pytest.raises(SweepHasController, match="process 7 on elsewhere, of ann"):
        refuse_second_controller(scene.store, scene.clock, KEY)
    scene.clock.time += 2000
    assert find_holder(scene.store, scene.clock) is None, "it was silent for too long"


@pytest.mark.parametrize("by", ["user", "failures"])
def test_one_that_was_stopped_goes_on(scene: Scene, by: str) -> None:
    scene.happened(
        *trials("DONE", "KILLED"), SweepStopping(by, "enough", 4.0), SweepEnded("enough", 5.0)
    )
    assert isinstance(manage.make_resume(scene.store), inbox.ResumeRequest)


def test_one_that_is_asked_to_stop_and_knows_it_not_yet_goes_on(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    signal_stop(scene.store, "stop")
    assert isinstance(manage.make_resume(scene.store), inbox.ResumeRequest)


def test_one_that_is_over_says_what_can_be_done(scene: Scene) -> None:
    scene.happened(*trials("DONE"), SweepEnded("all trials are over", 5.0))
    with pytest.raises(UsageError, match=r"all trials are over.*top-up"):
        manage.make_resume(scene.store)
    scene.happened(SweepReopened("top-up", 6.0))
    assert manage.make_resume(scene.store) is None


# --- top-up, rerun, confirm ---------------------------------------------------------------------


def test_limits_are_said_in_full_and_all_mistakes_at_once(scene: Scene) -> None:
    scene.happened(*trials("DONE", "DONE", "DONE"))
    asked = manage.make_top_up(STARTED, scene.store, trials=8, hours=2.0)
    assert (asked.trials, asked.hours, asked.cost) == (8, 2.0, None)
    with pytest.raises(UsageError, match="at least one"):
        manage.make_top_up(STARTED, scene.store)
    with pytest.raises(UsageError) as failed:
        manage.make_top_up(STARTED, scene.store, trials=3, hours=-1, cost=5.0)
    for part in ("3 trials already", "--hours -1", "unknown when the sweep was started"):
        assert part in str(failed.value)
    with pytest.raises(UsageError, match="limits already"):
        manage.make_top_up(STARTED, scene.store, trials=4)
    priced = replace(STARTED, hourly=1.0)
    assert manage.make_top_up(priced, scene.store, cost=5.0).cost == 5.0


def test_halving_takes_no_more_trials_and_says_what_to_do(scene: Scene) -> None:
    scene.happened(*trials("DONE", "PAUSED", "PAUSED"))
    stop = EarlyStop("halving", max=9)
    halving = replace(STARTED, spec=replace(STARTED.spec, early_stop=stop))
    with pytest.raises(UsageError, match=r"batchml sweep FILE --trials 18"):
        manage.make_top_up(halving, scene.store, trials=18)
    assert manage.make_top_up(halving, scene.store, hours=2.0).hours == 2.0


def test_confirmations_are_no_trials_that_count(scene: Scene) -> None:
    again = TrialBatch(
        2, 5.0, "4bcdefghijklmnopq", (PlannedTrial(4, {"lr": 0.1}, 9, "confirm", 0),)
    )
    scene.happened(*trials("DONE", "DONE", "DONE", "DONE"), again)
    assert manage.make_top_up(STARTED, scene.store, trials=5).trials == 5


def test_what_failed_runs_again_and_only_that(scene: Scene) -> None:
    scene.happened(*trials("DONE", "PRUNED", "DIVERGED", ""))
    assert manage.make_rerun(scene.store) is None, "what diverged has not failed"
    scene.happened(told(3, "FAILED"))
    asked = manage.make_rerun(scene.store)
    assert asked is not None and asked.numbers == ()


def test_named_trials_run_again_once_they_have_ended(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    asked = manage.make_rerun(scene.store, (0,))
    assert asked is not None and asked.numbers == (0,)
    with pytest.raises(UsageError, match=r"no such trial: 9\. not ended yet: 1"):
        manage.make_rerun(scene.store, (0, 1, 9))


def test_the_best_are_confirmed_once_there_are_some(scene: Scene) -> None:
    with pytest.raises(UsageError, match="no trial of this sweep has a result"):
        manage.make_confirm(STARTED, scene.store)
    scene.happened(*trials("DONE", "DONE"))
    assert manage.make_confirm(STARTED, scene.store).top == ConfirmSettings().top
    usual = replace(STARTED, spec=replace(SPEC, confirm=ConfirmSettings(1, 5)))
    asked = manage.make_confirm(usual, scene.store, seeds=2)
    assert (asked.top, asked.seeds) == (1, 2)
    with pytest.raises(UsageError, match="above 0"):
        manage.make_confirm(STARTED, scene.store, top=0)


# --- who does it --------------------------------------------------------------------------------


def test_what_is_asked_waits_for_a_controller_where_none_is(scene: Scene) -> None:
    asked = inbox.ResumeRequest("5bcdefghijklmnopq")
    assert manage.hand_over(scene.place, scene.store, asked) is None
    assert scene.clock.naps == []
    assert inbox.pending_requests(scene.store) == [asked]


def test_the_controller_that_there_is_takes_it_up(scene: Scene) -> None:
    asked = inbox.ResumeRequest("5bcdefghijklmnopq")
    scene.controlled()
    scene.clock.happens = lambda: scene.store.delete(*inbox.request_keys([asked]))
    found = manage.hand_over(scene.place, scene.store, asked)
    assert found is not None and found.holder == OTHER
    assert len(scene.clock.naps) == 1


def test_a_controller_that_is_slow_is_believed(scene: Scene) -> None:
    scene.controlled()
    found = manage.hand_over(scene.place, scene.store, inbox.ResumeRequest("5bcdefghijklmnopq"))
    assert found is not None and sum(scene.clock.naps) < 5


def test_one_that_ends_meanwhile_leaves_it_to_whoever_asked(scene: Scene) -> None:
    lease = scene.controlled()
    scene.clock.happens = lease.release
    asked = inbox.ResumeRequest("5bcdefghijklmnopq")
    assert manage.hand_over(scene.place, scene.store, asked) is None
    assert inbox.pending_requests(scene.store) == [asked], "it is not lost"


# --- stop ---------------------------------------------------------------------------------------


def test_a_stop_is_on_the_store_and_a_controller_sees_to_it(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    scene.controlled()
    scene.clock.happens = lambda: scene.happened(SweepStopping("user", "enough", 4.0))
    stop = SweepStop(scene.place, STARTED, scene.store, scene.said.append)
    assert stop.begin("enough")
    assert read_stop_signal(scene.store) == "enough"
    assert scene.said == [
        "Stopping: its trials have 30 s to save and end. The controller is process 7 on "
        "elsewhere, of ann."
    ]


def test_without_a_controller_whoever_asked_sees_to_it(scene: Scene) -> None:
    scene.happened(*trials("DONE", ""))
    assert not SweepStop(scene.place, STARTED, scene.store).begin("enough")
    assert read_stop_signal(scene.store) == "enough"


def test_one_that_has_ended_is_not_called_off(scene: Scene) -> None:
    """Else `top-up` would find all its trials stopped."""
    scene.happened(*trials("DONE"), SweepEnded("all trials are over", 5.0))
    assert SweepStop(scene.place, STARTED, scene.store, scene.said.append).begin("enough")
    assert read_stop_signal(scene.store) is None
    assert scene.said == ["The sweep had ended already: all trials are over."]


def test_only_what_goes_on_is_terminated(scene: Scene) -> None:
    second = TrialBatch(2, 5.0, "4bcdefghijklmnopq", (PlannedTrial(4, {"lr": 0.1}, 9),))
    rung = TrialBatch(3, 5.0, "5bcdefghijklmnopq", (), 3, 1, 2)
    scene.happened(
        *trials("DONE", "PRUNED"), second, BatchSubmitted(2, "job-2", 6.0), rung,
        BatchSubmitted(3, "job-3", 6.0),
    )  # fmt: skip
    assert running_jobs(SweepLedger(scene.store).load()) == ["job-2", "job-3"]
