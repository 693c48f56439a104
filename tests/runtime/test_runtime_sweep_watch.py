"""A trial while it runs: what it tells its sweep, and when it stops. No process, no real time."""

from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.protocol.sweep import Cutoffs, deadline_key, ranked
from batchml.runtime.telemetry.metrics import append_point
from tests.support.trial_world import AT, Make, TrialWorld, a_contract


@pytest.fixture
def trial(tmp_path: Path) -> Make:
    def make(
        after: int = 0, entry: dict[str, Any] | None = None, wave: int = 2, **contract: Any
    ) -> TrialWorld:
        store = str(tmp_path / "store")
        return TrialWorld(store, a_contract(**contract), after, wave, **(entry or {}))

    return make


def epochs(first: int, last: int, acc: float = 0.5) -> list[str]:
    return [f"epoch={epoch} acc={acc} loss=0.1" for epoch in range(first, last + 1)]


# --- what it tells ------------------------------------------------------------------------------


def test_a_short_trial_tells_its_end_alone(trial: Make) -> None:
    world = trial(method="none", rungs=(), max=0, is_step_given=False)
    world.prints("acc=0.5", "acc=0.6 loss=0.1")
    assert world.ends() == 0
    assert world.messages == [
        {
            "wave": 2, "trial": 17, "attempt": 1, "seq": 0, "index": 5, "job": "job:5",
            "began": AT, "at": AT, "kind": "end", "state": "DONE", "code": 0,
            "points": [[1, [0.5], AT], [2, [0.6], AT]], "metrics": {"loss": 0.1},
        }
    ]  # fmt: skip


def test_a_long_one_says_that_it_began_and_reports_at_rungs_at_once(trial: Make) -> None:
    world = trial()
    world.runs(2)
    assert [each["kind"] for each in world.messages] == ["start"]
    world.prints(*epochs(1, 2))
    assert [each["kind"] for each in world.messages] == ["start", "report"]
    assert world.messages[-1]["decisions"] == [[1, 0.5, None, 0, True]]
    world.runs(58)
    assert len(world.messages) == 2
    world.runs(2)
    assert world.points == [(1, 0.5), (2, 0.5)]
    world.runs(600)
    assert len(world.messages) == 3  # nothing new, nothing said


def test_of_very_many_steps_ever_fewer_are_told_and_the_last(trial: Make) -> None:
    world = trial(rungs=(100, 10_007), max=0, method="none")
    world.prints(*(f"acc={step}" for step in range(1, 20_001)))
    world.ends()
    steps = [step for step, _ in world.points]
    assert steps[:256] == list(range(1, 257))
    assert len(steps) < 1500
    assert {100, 10_007, 20_000} < set(steps)
    assert steps == sorted(steps)


def test_what_is_reported_to_the_file_is_told(trial: Make) -> None:
    world = trial()
    append_point(world.metrics, {"time": 1.0, "epoch": 1, "acc": 0.25})
    append_point(world.metrics, {"time": 1.0, "step": 900, "loss": 0.25})
    world.watch.read_reports()
    assert world.points == [(1, 0.25)]
    append_point(world.metrics, {"time": 1.0, "epoch": 2, "acc": 0.5})
    world.ends()
    assert world.points == [(1, 0.25), (2, 0.5)]
    assert world.end["metrics"] == {"loss": 0.25, "step": 900.0}


# --- early stopping -----------------------------------------------------------------------------


def test_one_that_is_worse_than_the_cutoff_stops_at_its_rung(trial: Make) -> None:
    world = trial()
    world.publish(Cutoffs(4, {0: (2, 0.9), 1: (6, 0.75)}, {}))
    world.prints(*epochs(1, 5))
    why = "acc 0.5 at epoch 3 is below the cut-off 0.75"
    assert world.stopped == [(f"{why}: others do better, the trial is stopped.", 0)]
    assert world.ends(code=-9) == 0
    assert (world.end["state"], world.end["code"], world.end["why"]) == ("PRUNED", 0, why)
    decisions = [each for message in world.messages for each in message.get("decisions", ())]
    assert decisions == [[1, 0.5, None, 4, True], [3, 0.5, 0.75, 4, False]]
    assert world.points[-1] == (3, 0.5)  # what it did while it stopped does not count


def test_a_program_that_goes_on_to_the_end_is_still_pruned(trial: Make) -> None:
    world = trial()
    world.publish(Cutoffs(4, {0: (3, 0.9)}, {}))
    world.prints(*epochs(1, 27))
    assert len(world.stopped) == 1
    assert world.ends(code=0) == 0
    assert world.end["state"] == "PRUNED"


def test_one_that_is_as_good_goes_on(trial: Make) -> None:
    world = trial()
    world.publish(Cutoffs(4, {0: (3, 0.5), 1: (3, 0.5), 2: (3, 0.5)}, {}))
    world.prints(*epochs(1, 27))
    assert world.stopped == []
    world.ends()
    assert world.end["state"] == "DONE"


def test_a_trial_that_is_run_to_the_full_is_not_judged(trial: Make) -> None:
    world = trial(entry={"full": True, "target": 27})
    world.publish(Cutoffs(4, {0: (3, 0.9), 1: (3, 0.9), 2: (3, 0.9)}, {}))
    world.prints(*epochs(1, 27))
    world.ends()
    assert (world.stopped, world.end["state"]) == ([], "DONE")


def test_less_is_better_where_the_goal_says_so(trial: Make) -> None:
    world = trial(goals=(("loss", "min"),))
    world.publish(Cutoffs(4, {0: (3, 0.05)}, {}))
    world.prints(*epochs(1, 1))
    assert "loss 0.1 at epoch 1 is above the cut-off 0.05" in world.stopped[0][0]


def test_the_median_stops_one_whose_best_is_worse(trial: Make) -> None:
    world = trial(method="median", rungs=())
    world.publish(Cutoffs(2, {}, {4: (5, 0.4), 5: (5, 0.7)}))
    world.prints(*epochs(1, 4))
    assert world.stopped == []
    world.prints(*epochs(5, 5))
    assert "acc 0.5 at epoch 5 is below the cut-off 0.7" in world.stopped[0][0]


def test_cutoffs_are_read_anew_at_each_rung(trial: Make) -> None:
    world = trial()
    world.publish(Cutoffs(4, {0: (3, 0.1)}, {}))
    world.prints(*epochs(1, 2))
    world.publish(Cutoffs(5, {1: (3, 0.9)}, {}))
    world.prints(*epochs(3, 3))
    assert "the cut-off 0.9" in world.stopped[0][0]


# --- trials in parts ----------------------------------------------------------------------------


def test_a_part_of_a_trial_pauses_at_its_target(trial: Make) -> None:
    world = trial(entry={"target": 3}, resume=True)
    world.prints(*epochs(1, 3))
    assert (world.asked, world.stopped) == (1, [])  # it may save
    assert world.ends() == 0
    assert world.end["state"] == "PAUSED"


def test_one_that_obeys_the_stop_file_pauses_too(trial: Make) -> None:
    world = trial(entry={"target": 3}, resume=True)
    world.prints(*epochs(1, 3))
    assert world.ends(code=143) == 0
    assert world.end["state"] == "PAUSED"


def test_one_that_goes_on_after_its_target_is_stopped(trial: Make) -> None:
    world = trial(entry={"target": 3}, resume=True)
    world.prints(*epochs(1, 4))
    why = "it continued after epoch 3, the last of this part"
    assert world.stopped == [(f"{why}: it is stopped.", 0)]
    assert world.ends(code=143) == 0
    assert world.end["state"] == "PAUSED"


def test_one_that_does_not_end_at_its_target_is_stopped_after_the_grace(trial: Make) -> None:
    world = trial(entry={"target": 3}, resume=True)
    world.prints(*epochs(1, 3))
    world.runs(29)
    assert world.stopped == []
    world.runs(2)
    assert len(world.stopped) == 1


def test_a_rung_is_marked_for_the_next_one(trial: Make) -> None:
    world = trial(entry={"target": 3}, method="halving", shape="rungs")
    world.prints(*epochs(1, 3))
    assert world.ends() == 0
    [mark] = world.store.keys("rungs/1/")
    assert ranked([mark]) == [17]


def test_a_trial_that_is_run_again_is_not_shown_to_the_rungs_that_go_on(trial: Make) -> None:
    world = trial(wave=4, entry={"target": 1}, method="halving", shape="rungs")
    world.prints(*epochs(1, 1))
    assert world.ends() == 0
    assert world.end["state"] == "PAUSED" and world.store.keys("rungs/") == []


@pytest.mark.parametrize(("code", "lines"), [(3, epochs(1, 3)), (0, ["nothing"])])
def test_a_program_that_failed_at_a_rung_is_not_marked_and_ends_well_for_batch(
    trial: Make, code: int, lines: list[str]
) -> None:
    world = trial(entry={"target": 3}, method="halving", shape="rungs")
    world.prints(*lines)
    assert world.ends(code=code) == 0
    assert world.end["state"] == "FAILED"
    assert world.store.keys("rungs/") == []


def test_the_last_part_is_the_end(trial: Make) -> None:
    world = trial(after=9, entry={"target": 27, "resumes": True}, resume=True)
    world.prints(*["acc=0.5"] * 18)
    world.ends()
    assert world.points[0] == (10, 0.5)
    assert (world.end["state"], world.asked, world.stopped) == ("DONE", 0, [])


@pytest.mark.parametrize("value", [0.9, float("nan")])
def test_a_program_that_trains_on_after_its_last_step_is_ended_and_that_does_not_count(
    trial: Make, value: float
) -> None:
    world = trial()
    world.prints(*epochs(1, 29, 0.5)[:27], *epochs(28, 28, value))
    assert world.stopped == []  # it may save its model now
    world.prints(*epochs(29, 29, value))
    why = "it continued after epoch 27, its early_stop.max"
    assert world.stopped == [(f"{why}: it is stopped.", 0)]
    assert world.ends(code=143) == 0
    assert (world.end["state"], world.points[-1]) == ("DONE", (27, 0.5))


def test_a_program_that_ends_by_itself_after_one_more_step_was_not_stopped(trial: Make) -> None:
    world = trial(step="iter", max=100, rungs=())
    world.prints(*(f"iter {step}: acc={step / 200}" for step in range(101)))
    assert world.stopped == []
    assert world.ends() == 0
    assert (world.end["state"], world.points[-1]) == ("DONE", (100, 0.495))
    assert "why" not in world.end


def test_a_counter_from_0_that_advances_by_more_than_one_counts_as_it_is(trial: Make) -> None:
    world = trial(step="iter", max=100, rungs=())
    world.prints(*(f"iter {step}: acc={step / 200}" for step in range(0, 101, 20)))
    assert world.points == []
    assert world.ends() == 0
    assert [step for step, _ in world.points] == [1, 20, 40, 60, 80, 100]
    assert world.end["state"] == "DONE"


@pytest.mark.parametrize("first", [0, 20])
def test_where_the_file_names_no_step_the_single_counter_of_the_lines_is_it(
    trial: Make, first: int
) -> None:
    world = trial(max=100, rungs=(), is_step_given=False)
    world.prints(*(f"iter {step}: acc={step / 200}" for step in range(first, 101, 20)))
    world.ends()
    assert [step for step, _ in world.points][1 if first == 0 else 0 :] == [20, 40, 60, 80, 100]
    assert (world.end["counter"], world.end.get("other")) == ("iter", None)


def test_iterations_from_0_by_one_are_learned_too(trial: Make) -> None:
    world = trial(max=27, is_step_given=False)
    world.prints(*(f"iter={step} acc=0.5" for step in range(27)))
    world.ends()
    assert [step for step, _ in world.points] == list(range(1, 28))
    assert "why" not in world.end


@pytest.mark.parametrize(
    ("line", "given", "other"),
    [
        ("iter {}: acc=0.5", True, "iter"),
        ("acc=0.5", True, "none"),
        ("acc=0.5", False, None),
        ("step {} iter {}: acc=0.5", False, None),
        ("iter {}00: acc=0.5", False, "iter"),  # beyond max: what max counts is something else
    ],
)
def test_another_counter_that_cannot_be_the_step_is_named_and_values_are_counted(
    trial: Make, line: str, given: bool, other: str | None
) -> None:
    world = trial(is_step_given=given)
    world.prints(*(line.replace("{}", str(number)) for number in range(1, 6)))
    world.ends()
    assert [step for step, _ in world.points] == [1, 2, 3, 4, 5]
    assert (world.end.get("counter"), world.end.get("other")) == (None, other)


def test_a_program_that_counts_from_0_is_told_of_the_step_that_it_printed(trial: Make) -> None:
    world = trial()
    world.prints(*epochs(0, 28))
    why = "it continued after epoch 26, the last of 27 (its early_stop.max)"
    assert world.stopped == [(f"{why}: it is stopped.", 0)]


def test_results_without_a_step_after_lines_with_steps_do_not_count(trial: Make) -> None:
    world = trial()
    world.prints(*epochs(1, 27), "best: acc=0.9", "last: acc=0.8", "test: acc=0.7")
    assert world.stopped == []
    world.ends()
    assert world.points[-1] == (27, 0.5)


def test_one_that_passes_its_last_step_without_a_value_there_has_the_next_one(trial: Make) -> None:
    world = trial()
    world.prints(*epochs(1, 25), *epochs(30, 30, 0.9))
    assert world.stopped == []
    world.prints(*epochs(31, 32))
    assert len(world.stopped) == 1
    assert world.ends(code=143) == 0
    assert world.points[-1] == (30, 0.9)


# --- ends ---------------------------------------------------------------------------------------


def test_three_reports_in_a_row_that_are_not_finite_end_it(trial: Make) -> None:
    world = trial()
    world.prints("epoch=1 acc=nan", "epoch=2 acc=inf")
    assert world.stopped == []
    world.prints("epoch=3 acc=nan")
    assert world.stopped == [("acc is nan at epoch 3: the trial is stopped.", 0)]
    assert world.ends(code=-15) == 0
    assert (world.end["state"], "points" in world.end) == ("DIVERGED", False)


def test_a_value_that_is_not_finite_is_passed_over_when_others_follow(trial: Make) -> None:
    """Also at a rung, which the next report decides."""
    world = trial()
    steps = range(1, 27)
    world.prints(*(f"epoch={n} acc={'nan' if n in (1, 3, 8, 9) else n / 100}" for n in steps))
    world.prints("epoch=27 acc=0.9")
    world.ends()
    assert (world.end["state"], world.stopped) == ("DONE", [])
    assert [step for step, _ in world.points if step < 11] == [2, 4, 5, 6, 7, 10]


@pytest.mark.parametrize(
    ("lines", "code"),
    [(["epoch=1 acc=0.5", "epoch=2 acc=nan"], 0), (["epoch=1 acc=nan"], 1)],
)
def test_a_trial_whose_last_report_is_not_finite_has_diverged(
    trial: Make, lines: list[str], code: int
) -> None:
    world = trial()
    world.prints(*lines)
    assert world.ends(code=code) == 0
    assert (world.stopped, world.end["state"]) == ([], "DIVERGED")


def test_a_last_step_that_is_not_finite_ends_it(trial: Make) -> None:
    world = trial()
    world.prints("epoch=1 acc=0.5", "epoch=27 acc=nan")
    assert world.stopped == [("acc is nan at epoch 27: the trial is stopped.", 0)]
    world.ends(code=-15)
    assert world.end["state"] == "DIVERGED"


def test_a_program_that_fails_tells_its_last_lines(trial: Make) -> None:
    world = trial()
    world.prints(*epochs(1, 1), *(f"line {n}" for n in range(30)), "ValueError: \x1b[31mno\udc80")
    assert world.ends(code=3) == 3
    assert (world.end["state"], world.end["code"]) == ("FAILED", 3)
    assert world.end["why"] == "exit code 3"
    assert len(world.end["tail"]) == 20
    assert world.end["tail"][-1].startswith("ValueError")


def test_a_command_that_never_began_says_why(trial: Make) -> None:
    world = trial()
    assert world.ends(code=127, why="cannot run 'trian.py'") == 127
    assert (world.end["state"], world.end["why"]) == ("FAILED", "cannot run 'trian.py'")


def test_a_metric_that_never_came_is_a_failure_with_the_closest_names(trial: Make) -> None:
    world = trial(goals=(("val_acc", "max"),))
    world.prints("loss=0.5", "val_accuracy=0.9", "bye")
    assert world.ends() == 1
    assert world.end["why"] == (
        "val_acc never printed; last lines were: loss=0.5 | val_accuracy=0.9 | bye; "
        "metrics seen: val_accuracy, loss"
    )
    assert world.end["state"] == "FAILED"


@pytest.mark.parametrize("contract", [{"resume": True}, {"shape": "rungs", "method": "halving"}])
def test_one_whose_checkpoint_is_beyond_its_rung_is_done_when_it_goes_on(
    trial: Make, contract: dict[str, Any]
) -> None:
    """A fast program that does not look at BATCHML_STEPS has trained fully, and saved that."""
    world = trial(after=1, entry={"target": 3, "resumes": True}, **contract)
    world.prints("nothing left to train")
    assert world.ends() == 0
    assert world.end["state"] == "DONE" and "BATCHML_STEPS" in world.end["why"]
    assert not world.store.keys("rungs/")


def test_one_that_goes_on_and_fails_or_prints_something_else_is_no_such(trial: Make) -> None:
    for lines, code in (((), 1), (("loss=0.5",), 0)):
        world = trial(after=1, entry={"target": 3, "resumes": True}, resume=True)
        world.prints(*lines)
        world.ends(code)
        assert world.end["state"] == "FAILED"


def test_another_goal_that_was_printed_is_among_the_metrics_seen(trial: Make) -> None:
    world = trial(goals=(("accuracy", "max"), ("loss", "min")), method="none")
    world.prints("loss=0.5 f1=0.2")
    assert world.ends() == 1
    assert world.end["why"] == (
        "accuracy never printed; last lines were: loss=0.5 f1=0.2; metrics seen: loss, f1"
    )


def test_silence_is_told_too(trial: Make) -> None:
    world = trial()
    world.ends()
    assert world.end["why"] == "acc never printed; it printed nothing; metrics seen: none"


@pytest.mark.parametrize("key", ["stop/all", "stop/17"])
def test_whoever_asks_it_to_stop_is_heard_in_time(trial: Make, key: str) -> None:
    world = trial()
    world.prints(*epochs(1, 2))
    world.store.put("stop/18", b"another")
    world.runs(40)
    assert world.stopped == []
    world.store.put(key, b"the sweep has\nspent its money")
    world.runs(16)
    assert world.stopped == [("the sweep has spent its money: the trial is stopped.", 143)]
    assert world.ends(code=0) == 143
    assert (world.end["state"], world.end["code"]) == ("KILLED", 143)
    assert world.end["why"] == "the sweep has spent its money"


def test_the_sweeps_time_ends_it_also_when_the_store_is_away(trial: Make) -> None:
    world = trial()
    world.store.put(deadline_key(AT + 100), b"")
    world.runs(20)
    world.store.put(deadline_key(AT + 200), b"")  # a top-up
    world.runs(100)
    world.store.is_away = True
    world.runs(79)
    assert world.stopped == []
    world.runs(2)
    assert world.stopped == [("the sweep's time is over: the trial is stopped.", 143)]


def test_one_whose_host_goes_is_killed_and_may_be_tried_again(trial: Make) -> None:
    for attempts in (1, 2):
        world = trial(attempts=attempts, retries=("host-lost",))
        world.prints(*epochs(1, 2))
        assert world.ends(code=0, was_asked=True) == 143
        assert world.end["state"] == "KILLED" and world.end.get("again", False) is (attempts == 2)


@pytest.mark.parametrize(
    ("retries", "code", "again"),
    [
        (("app-error",), 1, True), (("host-lost",), 1, False), ((), 1, False),
        (("host-lost",), 75, True), (("out-of-memory",), 137, True), (("out-of-memory",), 1, False),
    ],
)  # fmt: skip
def test_a_failure_that_is_tried_again_says_so(
    trial: Make, retries: tuple[str, ...], code: int, again: bool
) -> None:
    world = trial(attempts=2, retries=retries)
    assert world.ends(code=code) == code
    assert world.end.get("again", False) is again
    last = trial(attempts=1, retries=retries)
    last.ends(code=code)
    assert "again" not in last.end


def test_a_trial_that_is_stopped_is_not_tried_again_as_a_program_that_failed(trial: Make) -> None:
    world = trial(attempts=3, retries=("app-error",))
    world.store.put("stop/all", b"enough")
    world.runs(16)
    assert world.ends(code=143) == 0
    assert world.end["state"] == "KILLED" and "again" not in world.end


def test_one_that_was_done_when_the_signal_came_is_done(trial: Make) -> None:
    world = trial()
    world.prints(*epochs(1, 27))
    assert world.ends(code=0, was_asked=True) == 0
    assert world.end["state"] == "DONE"


# --- a store that is away -----------------------------------------------------------------------


def test_while_the_store_is_away_the_trial_goes_on_and_nothing_is_lost(trial: Make) -> None:
    world = trial()
    world.publish(Cutoffs(4, {0: (3, 0.1)}, {}))
    world.prints(*epochs(1, 1))
    world.store.is_away = True
    world.prints(*epochs(2, 9))
    world.runs(300)
    assert world.stopped == []
    assert len(world.said) == 1
    assert world.store.calls < 40  # it is left alone for ever longer
    world.store.is_away = False
    world.runs(120)
    assert [step for step, _ in world.points] == list(range(1, 10))
    assert [each["seq"] for each in world.messages] == list(range(len(world.messages)))


def test_a_message_whose_answer_was_lost_is_sent_again_as_it_was(trial: Make) -> None:
    """It may be in the ledger by then, and another of its number would be passed over."""
    world = trial(method="none")
    world.store.is_away = True
    world.prints(*epochs(1, 2))  # the message of the rung is tried
    world.store.is_away = False
    world.prints(*epochs(3, 4))
    world.ends()
    first = world.messages[0]
    assert [step for step, _, _ in first["points"]] == [1]
    assert [step for step, _ in world.points] == [1, 2, 3, 4]


def test_an_end_that_cannot_be_told_is_tried_again_and_then_left_to_another_attempt(
    trial: Make,
) -> None:
    world = trial()
    world.prints(*epochs(1, 27))
    world.store.is_away = True
    assert world.ends() == 75
    assert world.naps == [1.0, 2.0]
    assert "could not be reported" in world.said[-1]
