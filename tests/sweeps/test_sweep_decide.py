"""What a sweep does next, as a function of its ledger and of observations."""

import msgspec
from msgspec.structs import replace

from batchml.model.sweep import ConfirmSettings as Wanted
from batchml.model.sweep import SweepSpec
from batchml.sweeps.control.decide import (
    BeginTrials,
    ConfirmBest,
    DecisionInputs,
    EndSweep,
    PlanRungs,
    PromoteTrials,
    ReopenSweep,
    SignalStop,
    StopSweep,
    TerminateJobs,
    decide,
)
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    MessageReceived,
    PlannedTrial,
    SweepEnded,
    SweepStopping,
    TrialBatch,
)
from batchml.sweeps.control.plan import SubmitMode
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.control.totals import Money, SweepTotals
from tests.support.sweep_world import spec_of

FACTS = DecisionInputs(now=100.0, mode=SubmitMode.BATCHES, wanted=8, grace=30.0)


def book_of(spec: SweepSpec, *events: Event) -> SweepTotals:
    totals = SweepTotals(spec, SweepState())
    for event in events:
        totals.apply(event)
    return totals


def wave(number: int, *trials: int, at: float = 0.0, rung: int | None = None) -> TrialBatch:
    planned = tuple(PlannedTrial(each, {"x": each / 10}, 0) for each in trials)
    return TrialBatch(number, at, f"2{number:016}".replace("0", "a"), planned, rung=rung)


def end(
    trial: int, state: str = "DONE", value: float | None = 0.5, wave: int = 1
) -> MessageReceived:
    """A trial's only message: it began, printed a value at its step 1, and ended so."""
    points = [] if value is None else [[1, [value], 2.0]]
    return MessageReceived(
        {
            "wave": wave, "trial": trial, "attempt": 1, "seq": 0, "index": 0, "job": "j",
            "began": 1.0, "at": 2.0, "kind": "end", "points": points, "state": state, "code": 0,
        }
    )  # fmt: skip


def start(trial: int) -> MessageReceived:
    told = end(trial, value=None).message
    return MessageReceived(
        {**{k: v for k, v in told.items() if k not in ("state", "code")}, "kind": "start"}
    )


def test_an_array_is_planned_whole_and_once() -> None:
    spec = spec_of("random", trials=8)
    facts = replace(FACTS, mode=SubmitMode.ARRAY)
    assert decide(book_of(spec), facts) == [BeginTrials(8)]
    assert decide(book_of(spec, wave(1, *range(8))), facts) == []
    assert decide(book_of(spec, wave(1, *range(5))), facts) == [BeginTrials(3)]


def test_an_array_is_over_when_its_job_is() -> None:
    facts = replace(FACTS, mode=SubmitMode.ARRAY, wanted=1)
    done = book_of(spec_of("random", trials=1), wave(1, 0), BatchSubmitted(1, "j", 0.0), end(0))
    assert decide(done, facts) == []
    over = replace(facts, ended_batches=frozenset([1]))
    assert decide(done, over) == [EndSweep("done", "its only trial is over")]


def test_halving_is_planned_as_a_chain() -> None:
    spec = spec_of("random", "halving", trials=8)
    assert decide(book_of(spec), replace(FACTS, mode=SubmitMode.RUNGS)) == [PlanRungs(8)]


def test_waves_wait_for_places_and_in_aws_for_some_seconds() -> None:
    spec = spec_of("tpe", trials=8, parallel=3)
    assert decide(book_of(spec), FACTS) == [BeginTrials(3)]
    started = book_of(spec, wave(1, 0, 1, 2, at=90.0), end(0))
    assert decide(started, FACTS) == [BeginTrials(1)]
    assert decide(started, replace(FACTS, between_batches=20.0)) == []
    assert decide(started, replace(FACTS, between_batches=20.0, now=111.0)) == [BeginTrials(1)]


def test_with_nothing_under_way_nobody_waits_for_seconds() -> None:
    idle = book_of(spec_of("tpe", trials=8, parallel=3), wave(1, 0, at=90.0), end(0))
    assert decide(idle, replace(FACTS, between_batches=20.0)) == [BeginTrials(3)]


def test_promotions_go_before_new_trials() -> None:
    spec = spec_of("tpe", "asha", trials=8, parallel=4, resume=True)
    paused = [end(number, "PAUSED", number / 10) for number in range(3)]
    totals = book_of(spec, wave(1, 0, 1, 2), *paused)
    assert decide(totals, FACTS) == [PromoteTrials(((0, 3),)), BeginTrials(3)]


def test_when_all_is_over_the_best_are_confirmed_and_then_it_ends() -> None:
    spec = msgspec.structs.replace(spec_of("tpe", trials=2), confirm=Wanted(1, 2))
    facts = replace(FACTS, wanted=2)
    events = (wave(1, 0, 1), end(0, value=0.5), end(1, value=0.4))
    assert decide(book_of(spec, *events), facts) == [ConfirmBest(((1, 2),))]
    dear = replace(facts, money=Money(9.0, 0.0, 1.0))
    costly = replace(spec, limits=replace(spec.limits, cost=10.0))
    assert decide(book_of(costly, *events), dear) == [EndSweep("done", "all 2 trials are over")]
    again = TrialBatch(
        2, 3.0, "2bb", (PlannedTrial(2, {}, 1, confirms=1), PlannedTrial(3, {}, 2, confirms=1))
    )
    confirmed = book_of(spec, *events, again, end(2, wave=2), end(3, wave=2))
    words = "all 2 trials and 2 confirming runs are over"
    assert decide(confirmed, facts) == [EndSweep("done", words)]


def test_who_calls_it_off_is_heard_and_the_store_says_it_already() -> None:
    totals = book_of(spec_of("tpe", trials=8), wave(1, 0))
    assert decide(totals, replace(FACTS, stop_signal="enough")) == [StopSweep("user", "enough")]


def test_a_stop_is_said_then_what_waits_is_ended_then_what_runs() -> None:
    stopping = SweepStopping("limit", "enough", 95.0)
    runs = book_of(spec_of("tpe", trials=8), wave(1, 0, 1), start(0), stopping)
    assert decide(runs, FACTS) == [SignalStop("enough")]
    said = replace(FACTS, stop_signal="enough")
    assert decide(runs, said) == []
    assert decide(runs, replace(said, now=126.0)) == [TerminateJobs((1,), "enough")]
    waits = book_of(spec_of("tpe", trials=8), wave(1, 0, 1), end(0, "KILLED"), stopping)
    assert decide(waits, said) == [TerminateJobs((1,), "enough")]
    over = book_of(spec_of("tpe", trials=8), wave(1, 0), end(0, "KILLED"), stopping)
    assert decide(over, said) == [EndSweep("limit", "enough")]


def test_a_target_stops_what_runs_and_is_reopened_only_to_confirm() -> None:
    spec = spec_of("tpe", trials=8, target=0.5)
    reached = (wave(1, 0, 1), start(0), end(1))
    assert decide(book_of(spec, *reached), FACTS) == [StopSweep("target", "loss reached 0.5")]
    wanting = replace(spec, confirm=Wanted(1, 1))
    stopping = SweepStopping("target", "loss reached 0.5", 95.0)
    stopped = (wave(1, 0, 1), end(0, "KILLED", None), end(1), stopping)
    assert decide(book_of(wanting, *stopped), FACTS) == [ReopenSweep("the best are run again")]
    assert decide(book_of(spec, *stopped), FACTS) == [EndSweep("target", "loss reached 0.5")]
    said = replace(FACTS, stop_signal="loss reached 0.5")
    assert decide(book_of(wanting, *stopped), said) == [ReopenSweep("the best are run again")]
    by_user = replace(FACTS, stop_signal="ann wants her machine")
    assert decide(book_of(wanting, *stopped), by_user) == [EndSweep("target", "loss reached 0.5")]
    assert decide(book_of(wanting, *stopped[:3]), FACTS) == [ConfirmBest(((1, 1),))]


def test_no_money_for_another_trial_ends_it() -> None:
    spec = spec_of("tpe", trials=8, cost=10.0)
    facts = replace(FACTS, money=Money(9.0, 0.0, 2.0))
    found = decide(book_of(spec, wave(1, 0), end(0)), facts)
    assert found == [EndSweep("limit", "the rest of its 10 USD is less than a trial costs")]


def test_hours_are_over_for_everything_at_one_moment() -> None:
    spec = spec_of("tpe", trials=8, hours=0.01)
    totals = book_of(spec, wave(1, 0, at=80.0))
    assert decide(totals, replace(FACTS, now=115.9)) == [BeginTrials(2)]
    assert decide(totals, replace(FACTS, now=116.0)) == [
        StopSweep("limit", "its time is over: 36 seconds")
    ]


def test_what_is_over_stays_over() -> None:
    totals = book_of(spec_of("tpe", trials=8), SweepEnded("all 8 trials are over", 5.0))
    assert decide(totals, replace(FACTS, stop_signal="enough")) == []


def test_a_broken_chain_is_taken_up_at_the_first_rung_that_is_not_full() -> None:
    spec = spec_of("random", "halving", trials=9, steps=9)
    first = TrialBatch(1, 0.0, "2aa", wave(1, *range(9)).trials, target=1, rung=0)
    rest = [TrialBatch(n, 0.0, f"2a{n}", (), 3**n, rung=n - 1, after=n - 1) for n in (2, 3)]
    paused = [end(number, "PAUSED", number / 10) for number in range(8)]
    totals = book_of(spec, first, *rest, *paused, end(8, "FAILED", None))
    facts = replace(FACTS, mode=SubmitMode.RUNGS, wanted=9)
    assert decide(totals, facts) == []
    over = replace(facts, ended_batches=frozenset([1, 2, 3]))
    assert decide(totals, over) == [PromoteTrials(((0, 3), (1, 3), (2, 3)))]
