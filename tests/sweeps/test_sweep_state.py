"""The state of a sweep by its events, whatever the order of the messages of its trials."""

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.model.sweep import RecordedDecision, SweepLimits, TrialReport, TrialState
from batchml.runtime.protocol import sweep as messages
from batchml.runtime.protocol.sweep import MessageSender
from batchml.sweeps.control.events import (
    BatchSubmitted,
    Event,
    LimitsChanged,
    MessageReceived,
    NoticeGiven,
    PlannedTrial,
    SweepEnded,
    SweepReopened,
    SweepStopping,
    TrialBatch,
    TrialObserved,
)
from batchml.sweeps.control.state import SweepState


def wave(number: int, *trials: int, resumes: bool = False, target: int = 0) -> TrialBatch:
    planned = tuple(PlannedTrial(each, {"lr": each / 10}, each, resumes=resumes) for each in trials)
    return TrialBatch(number, number * 100.0, f"key{number}", planned, target)


def told(
    trial: int,
    kind: str = "report",
    at: float = 110.0,
    *,
    wave: int = 1,
    attempt: int = 1,
    seq: int = 0,
    state: str = "",
    code: int = 0,
    index: int | None = None,
    began: float | None = None,
    **more: Any,
) -> MessageReceived:
    place = trial if index is None else index
    start = wave * 100.0 + attempt * 10 if began is None else began
    sender = MessageSender(wave, trial, attempt, place, f"job{wave}:{place}", start)
    found = messages.make_message(sender, seq, kind, at, **more)
    return MessageReceived(
        messages.add_end(found, state, code, "why", ["tail"]) if state else found
    )


def ended(trial: int, state: str, at: float = 120.0, **more: Any) -> MessageReceived:
    return told(trial, "end", at, state=state, **more)


def fold(*events: Event) -> SweepState:
    state = SweepState()
    for event in events:
        state.apply(event)
    return state


def test_a_trial_from_its_plan_to_its_end() -> None:
    state = fold(wave(1, 0, 1))
    assert state.trials[1].state is TrialState.WAITING
    assert state.trials[1].params == {"lr": 0.1}
    assert state.open_batches == [state.batches[1]]
    state.apply(BatchSubmitted(1, "job1", 101.0))
    assert (state.trials[1].job_id, state.jobs) == ("job1:1", {1: "job1"})
    assert not state.open_batches

    state.apply(told(1, "start", 110.0))
    trial = state.trials[1]
    assert (trial.state, trial.attempt, trial.started_at) == (TrialState.RUNNING, 1, 110.0)
    assert trial.ran(115.0) == 5.0
    state.apply(told(1, at=112.0, seq=1, points=[[1, [0.5], 111.0], [2, [0.6], 112.0]]))
    state.apply(
        told(1, at=113.0, seq=2, metrics={"loss": 2.0}, decisions=[[2, 0.6, None, 3, True]])
    )
    state.apply(ended(1, "DONE", seq=3, metrics={"loss": 1.0, "lr": 0.1}))
    assert trial.reports == [TrialReport(1, (0.5,), 111.0), TrialReport(2, (0.6,), 112.0)]
    assert trial.decisions == [RecordedDecision(2, 0.6, None, 3, True)]
    assert trial.metrics == {"loss": 1.0, "lr": 0.1}
    assert (trial.state, trial.stopped_at, trial.seconds) == (TrialState.DONE, 120.0, 10.0)
    assert (trial.exit_code, trial.why, trial.tail) == (0, "why", ("tail",))
    assert +Counter(state.counts) == Counter(trial.state for trial in state.trials.values())


def test_a_wave_of_one_trial_is_a_plain_job() -> None:
    assert fold(wave(1, 7), BatchSubmitted(1, "job1", 1.0)).trials[7].job_id == "job1"
    assert fold(BatchSubmitted(1, "job1", 1.0), wave(1, 7)).trials[7].job_id == "job1"


def test_after_a_lost_host_the_next_attempt_counts_and_no_second_is_lost() -> None:
    state = fold(
        wave(1, 0, target=9),
        told(0, "start", 110.0, began=110.0),
        told(0, at=140.0, seq=1, points=[[1, [0.5], 130.0]], began=110.0),
        told(0, "start", 200.0, attempt=2, began=200.0),
        told(0, at=230.0, attempt=2, seq=1, began=200.0,
             points=[[1, [0.4], 220.0], [2, [0.7], 230.0]]),
    )  # fmt: skip
    trial = state.trials[0]
    assert (trial.state, trial.attempt, trial.target) == (TrialState.RUNNING, 2, 9)
    assert trial.reports == [
        TrialReport(1, (0.5,), 130.0),
        TrialReport(2, (0.7,), 230.0),
    ]  # the first wins
    assert (trial.started_at, trial.seconds, trial.ran(210.0)) == (110.0, 30.0, 40.0)


def test_a_failure_stands_until_another_attempt_says_something() -> None:
    state = fold(wave(1, 0), ended(0, "FAILED", code=1))
    assert state.trials[0].state is TrialState.FAILED
    state.apply(told(0, "start", 130.0, attempt=2))
    trial = state.trials[0]
    assert (trial.state, trial.exit_code, trial.why) == (TrialState.RUNNING, None, "")
    assert (trial.tail, trial.stopped_at) == ((), None)


def test_an_end_after_which_another_attempt_may_come_counts_once_the_job_has_ended() -> None:
    failed = ended(0, "FAILED", code=1)
    failed.message["again"] = True
    state = fold(wave(1, 0), told(0, "start", 110.0), failed)
    trial = state.trials[0]
    assert (trial.state, trial.seconds, trial.resumed_at) == (TrialState.WAITING, 10.0, None)
    over = TrialObserved(0, 1, "LOST", 300.0, "job1")
    for events in ((failed, over), (over, failed)):
        found = fold(wave(1, 0), *events).trials[0]
        assert (found.state, found.exit_code, found.tail) == (TrialState.FAILED, 1, ("tail",))
    state.apply(told(0, "start", 130.0, attempt=2))
    assert state.counts[TrialState.RUNNING] == 1
    state.apply(ended(0, "DONE", 140.0, attempt=2, seq=1))
    assert state.counts[TrialState.DONE] == 1


def test_a_good_end_stands_whatever_other_attempts_say() -> None:
    state = fold(wave(1, 0), ended(0, "DONE"), ended(0, "FAILED", at=150.0, attempt=2, code=1))
    assert (state.trials[0].state, state.trials[0].attempt) == (TrialState.DONE, 1)


def test_what_a_trial_says_of_its_end_outweighs_that_it_was_thought_lost() -> None:
    lost = TrialObserved(0, 1, "LOST", 400.0, why="no word", stopped_at=130.0)
    state = fold(wave(1, 0), told(0, "start", 110.0), lost)
    trial = state.trials[0]
    assert (trial.state, trial.why, trial.stopped_at) == (TrialState.LOST, "no word", 130.0)
    assert (trial.seconds, trial.resumed_at) == (20.0, None)
    state.apply(ended(0, "DONE", at=125.0, seq=1))
    assert (trial.state, trial.seconds) == (TrialState.DONE, 15.0)
    assert state.counts[TrialState.LOST] == 0


def test_batch_speaks_for_a_trial_that_said_nothing() -> None:
    state = fold(wave(1, 0), TrialObserved(0, 1, "RUNNING", 115.0, "j:0", started_at=110.0))
    assert state.trials[0].state is TrialState.RUNNING
    assert state.trials[0].ran(120.0) == 10.0
    state.apply(TrialObserved(0, 1, "KILLED", 130.0, "j:0", 143, "stopped", 110.0, 125.0))
    trial = state.trials[0]
    assert (trial.state, trial.exit_code, trial.why) == (TrialState.KILLED, 143, "stopped")
    assert (trial.seconds, trial.stopped_at, trial.job_id) == (15.0, 125.0, "j:0")


def test_who_stopped_a_trial_with_a_signal_is_what_batch_says() -> None:
    for reason, shown in (
        ("Cancelled in the dashboard", "Cancelled in the dashboard"),
        ("Host EC2 (instance i-1) terminated.", "Host EC2 (instance i-1) terminated."),
        ("Essential container in task exited", messages.SIGNALLED),
        ("", messages.SIGNALLED),
    ):
        killed = messages.add_end(told(0).message, "KILLED", 143, messages.SIGNALLED, again=True)
        seen = TrialObserved(0, 1, "LOST", 400.0, "j:0", 143, reason)
        for events in ((MessageReceived(killed), seen), (seen, MessageReceived(killed))):
            trial = fold(wave(1, 0), *events).trials[0]
            assert (trial.state, trial.why) == (TrialState.KILLED, shown)


def test_one_that_resumes_goes_on_and_one_that_begins_anew_forgets() -> None:
    first: list[Event] = [
        wave(1, 0, 1, target=1),
        *(told(n, at=115.0, points=[[1, [0.5], 115.0]], began=110.0) for n in (0, 1)),
        ended(0, "PAUSED", began=110.0, seq=1),
        ended(1, "FAILED", code=1, began=110.0, seq=1),
    ]
    late = told(1, at=118.0, seq=5, points=[[2, [0.9], 118.0]], metrics={"x": 1.0}, began=110.0)
    state = fold(*first, wave(2, 0, resumes=True, target=3), wave(3, 1), late)
    resumed, anew = state.trials[0], state.trials[1]
    assert (resumed.state, resumed.step, resumed.target) == (TrialState.WAITING, 1, 3)
    assert (anew.state, anew.reports, anew.metrics) == (TrialState.WAITING, [], {})
    assert (resumed.seconds, anew.seconds) == (10.0, 10.0)  # they were paid for
    state.apply(told(0, "start", 210.0, wave=2, began=210.0, index=0))
    assert resumed.ran(215.0) == 15.0
    assert resumed.started_at == 110.0


def test_a_rung_learns_its_trials_from_themselves() -> None:
    rung = TrialBatch(2, 2.0, "key2", (), target=3, rung=1, after=1)
    state = fold(wave(1, 0, 1, 2, target=1), rung, ended(2, "PAUSED"))
    state.apply(told(2, "start", 210.0, wave=2, index=0))
    trial = state.trials[2]
    assert (trial.wave, trial.index, trial.target, trial.job_id) == (2, 0, 3, "job2:0")
    assert trial.state is TrialState.RUNNING


def test_a_child_that_knows_only_its_place_is_the_trial_in_that_place() -> None:
    state = fold(wave(1, 5, 6))
    state.apply(ended(messages.unknown_trial(1), "FAILED", index=1, code=78))
    assert state.trials[6].state is TrialState.FAILED
    state.apply(ended(messages.unknown_trial(9), "FAILED", index=9, code=78))  # nobody is there
    state.apply(ended(99, "DONE"))  # no such trial
    state.apply(ended(5, "DONE", wave=7))  # no such wave
    assert state.counts[TrialState.WAITING] == 1


def test_limits_notices_and_the_end_of_a_sweep() -> None:
    state = fold(
        NoticeGiven("wide", "much at once", 1.0),
        NoticeGiven("wide", "much at once, still", 2.0),
        LimitsChanged(SweepLimits(trials=8), 3.0),
        SweepStopping("limit", "8 trials", 4.0),
        SweepStopping("user", "stop", 5.0),
        SweepEnded("all done", 6.0),
    )
    assert [each.words for each in state.notices.values()] == ["much at once"]
    assert state.limits == SweepLimits(trials=8)
    assert state.stopping == SweepStopping("limit", "8 trials", 4.0)
    assert state.ended == SweepEnded("all done", 6.0)
    state.apply(SweepReopened("top-up", 7.0))
    assert not state.stopping
    assert not state.ended


# --- any order ----------------------------------------------------------------------------------

WAVES: list[Event] = [
    wave(1, 0, 1, 2, 3, target=1),
    wave(2, 0, 1, resumes=True, target=3),
    wave(3, 1, 2),
    TrialBatch(4, 400.0, "key4", (), 9, rung=1, after=1),
]
STATES = ("DONE", "PRUNED", "PAUSED", "FAILED", "KILLED", "DIVERGED")


@st.composite
def heard(draw: st.DrawFn) -> MessageReceived | TrialObserved:
    """What a trial, or AWS Batch of it, may say."""
    number, trial = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    attempt, seq = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    at = 100.0 * number + 10 * attempt + draw(st.integers(0, 20))
    dice = random.Random(f"{number} {trial} {attempt} {seq} {at}")  # one says one thing only
    if draw(st.integers(0, 4)) == 0:
        state = dice.choice(("RUNNING", "LOST", "KILLED"))
        return TrialObserved(
            trial, number, state, at, "", 1, state, at - 5, dice.choice((None, at))
        )
    kind = dice.choice(("start", "report", "report", "end"))
    step = dice.randrange(1, 4)
    return told(
        trial, kind, at, wave=number, attempt=attempt, seq=seq,
        state=dice.choice(STATES) if kind == "end" else "", code=dice.randrange(2),
        points=[[step, [dice.random()], at], [step + 1, [dice.random()], at + 1]],
        decisions=[[step, dice.random(), None, 1, True]],
        metrics={dice.choice("abc"): dice.random()},
    )  # fmt: skip


def key_of(event: MessageReceived | TrialObserved) -> tuple[Any, ...]:
    if isinstance(event, TrialObserved):
        return ("seen", event.trial, event.wave, event.at)
    return tuple(event.message[name] for name in ("wave", "trial", "attempt", "seq"))


def mixed(events: list[MessageReceived | TrialObserved], dice: random.Random) -> list[Event]:
    """The events in any order, some of them twice, each after the wave that it is about."""
    begun = sorted(dice.random() for _ in WAVES)
    placed: list[tuple[float, int, Event]] = [
        (place, -1, each) for place, each in zip(begun, WAVES, strict=True)
    ]
    for count, event in enumerate([*events, *dice.sample(events, len(events) // 2)]):
        number = event.wave if isinstance(event, TrialObserved) else event.message["wave"]
        placed.append((dice.uniform(begun[number - 1], 1.0), count, event))
    return [event for _, _, event in sorted(placed, key=lambda each: each[:2])]


@settings(max_examples=150)
@given(st.lists(heard(), max_size=14, unique_by=key_of), st.randoms(use_true_random=False))
def test_repeated_and_reordered_messages_come_to_the_same(
    events: list[MessageReceived | TrialObserved], dice: random.Random
) -> None:
    expected = fold(*WAVES, *events)
    for _ in range(4):
        state = fold(*mixed(events, dice))
        assert state == expected
        assert +Counter(state.counts) == Counter(each.state for each in state.trials.values())


@settings(max_examples=30)
@given(st.lists(heard(), max_size=10, unique_by=key_of))
def test_folding_all_of_it_twice_changes_nothing(
    events: list[MessageReceived | TrialObserved],
) -> None:
    assert fold(*WAVES, *events, *WAVES, *events) == fold(*WAVES, *events)
