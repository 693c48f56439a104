"""The report's document: what a page is told of a sweep. tests/e2e/test_sweep_report.py draws."""

import csv
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.model.sweep import (
    Dimension,
    EarlyStop,
    Goal,
    SweepLimits,
    Trial,
    TrialReport,
    TrialState,
)
from batchml.sweeps.control.events import SweepReopened
from batchml.sweeps.control.state import SweepState
from batchml.sweeps.report.data import (
    BEST,
    SAMPLED,
    axes,
    failures,
    in_order_of_end,
    incumbents,
    make_document,
    positions,
    rung_table,
    saved_steps,
    spending,
)
from batchml.sweeps.report.page import MOST, render_page, to_csv, to_json, to_script, write_report
from batchml.sweeps.report.timeline import (
    frame_values,
    make_bars,
    make_timeline,
    round_off,
    thin_out,
)
from tests.support.fakes import FakeClock
from tests.support.sweep_story import BEGAN, PARETO, SPEC, started, told

NOW = BEGAN + 100_000


def trial(number: int = 0, state: TrialState = TrialState.DONE, **more: Any) -> Trial:
    return Trial(number, more.pop("params", {}), 1, state=state, **more)


def reports(*values: float, start: float = 0.0, apart: float = 10.0) -> list[TrialReport]:
    return [
        TrialReport(step, (value,), start + step * apart) for step, value in enumerate(values, 1)
    ]


# --- numbers --------------------------------------------------------------------------------


@given(st.lists(st.integers(), max_size=300), st.integers(1, 100))
@settings(max_examples=40, deadline=None)
def test_even_takes_at_most_so_many_in_order_and_both_ends(items: list[int], most: int) -> None:
    found = thin_out(list(enumerate(items)), most)
    assert len(found) == min(len(items), most)
    assert found == sorted(found)
    if items and most > 1:
        assert found[0] == (0, items[0]) and found[-1][0] == len(items) - 1


def test_numbers_that_json_cannot_say_become_nothing() -> None:
    assert [round_off(math.nan), round_off(math.inf), round_off(None)] == [None, None, None]
    assert round_off(0.123456789) == 0.123457
    assert repr(round_off(3.0)) == "3"


def test_a_frame_never_cuts_its_good_end_and_leaves_out_a_few_that_are_far_worse() -> None:
    values = [0.9 + number / 1000 for number in range(97)] + [-1e9, -1e8, 0.5]
    found = frame_values(values, "max")
    assert found is not None
    assert found.high >= 0.996 and found.low > 0 and found.beyond == 3
    down = frame_values([-value for value in values], "min")
    assert down is not None and down.low <= -0.996 and down.high < 0


def test_a_frame_over_magnitudes_is_logarithmic() -> None:
    found = frame_values([0.001, 0.1, 10.0], "min")
    assert found is not None and found.log
    assert frame_values([math.nan], "max") is None
    alone = frame_values([5.0], "max")
    assert alone is not None and alone.low < 5 < alone.high


# --- parts ----------------------------------------------------------------------------------


def test_axes_are_of_parameters_that_differ_and_as_wide_as_the_space() -> None:
    space = {
        "lr": Dimension("float", 0.001, 0.1, log=True),
        "opt": Dimension("choice", values=("sgd", "adam")),
        "same": Dimension("constant", values=(3,)),
        "flag": Dimension("choice", values=(True, False)),
    }
    tried: list[Any] = [
        {"lr": 0.01, "opt": "sgd", "same": 3, "flag": True},
        {"lr": 0.5, "opt": "lion", "same": 3, "flag": False},
        {"lr": 0.02, "same": 3, "flag": True},
    ]
    found = axes(space, tried)
    assert [axis["name"] for axis in found] == ["lr", "opt", "flag"]
    assert (found[0]["low"], found[0]["high"], found[0]["log"]) == (0.001, 0.5, True)
    assert found[1]["names"] == ["sgd", "adam", "lion"]
    assert found[2]["names"] == ["true", "false"]
    assert positions(found[1], tried) == [0, 2, None]


def test_the_incumbent_is_the_best_trained_trial_until_then() -> None:
    goal = Goal("loss", "min")
    trials = [
        trial(0, stopped_at=10, reports=reports(0.5)),
        trial(1, TrialState.PRUNED, stopped_at=20, reports=reports(0.1)),
        trial(2, stopped_at=30, reports=reports(0.6)),
        trial(3, stopped_at=40, reports=reports(0.4)),
        trial(4, TrialState.RUNNING, reports=reports(0.0)),
    ]
    came = in_order_of_end(trials, began=0)
    assert [each.trial.number for each in came] == [0, 1, 2, 3]
    assert [(row[0], row[3], row[4]) for row in incumbents(came, goal)] == [
        (1, 0.5, 0),
        (4, 0.4, 3),
    ]


def test_while_no_trial_has_trained_to_its_end_all_count() -> None:
    trials = [trial(1, TrialState.PRUNED, stopped_at=20, reports=reports(0.1))]
    assert incumbents(in_order_of_end(trials, 0), Goal("loss", "min"))[0][3] == 0.1


def test_the_rung_table_says_who_came_went_on_was_stopped_failed_or_is_there() -> None:
    stop = EarlyStop("asha", "epoch", 9, 1, 3)
    trials = [
        trial(0, reports=reports(*range(9))),
        trial(1, TrialState.PRUNED, reports=reports(1)),
        trial(2, TrialState.PRUNED, reports=reports(1, 2, 3)),
        trial(3, TrialState.FAILED, reports=reports(1)),
        trial(4, TrialState.RUNNING, reports=reports(1)),
        trial(5, TrialState.WAITING),
    ]
    first, second = rung_table(trials, stop)
    assert first == {"step": 1, "in": 5, "on": 2, "out": 1, "ended": 1, "now": 1, "saved": 8,
                     "cutoff": None}  # fmt: skip
    assert (second["in"], second["on"], second["out"], second["saved"]) == (2, 1, 1, 6)
    assert saved_steps(trials, stop) == (14, 27)


def test_failures_with_the_same_last_line_but_for_numbers_are_one_group() -> None:
    bad = TrialState.FAILED
    trials = [
        trial(0, bad, tail=("Traceback", "out of memory: 12 MiB", "  ")),
        trial(1, bad, tail=("out of memory: 9.5 MiB",)),
        trial(2, bad, tail=(), why="exit code 3"),
        trial(3, TrialState.DIVERGED, tail=("loss nan",)),
        trial(4, TrialState.DONE, tail=("fine",)),
    ]
    found = failures(trials)
    assert [(group["count"], group["line"], group["trials"]) for group in found] == [
        (2, "out of memory: 12 MiB", [0, 1]),
        (1, "exit code 3", [2]),
        (1, "loss nan", [3]),
    ]


def test_a_trial_that_paused_has_a_bar_for_each_stretch() -> None:
    """Its longest gap without a report is the pause, for its containers ran only 40 s."""
    points = [TrialReport(1, (0.1,), 10), TrialReport(2, (0.2,), 20), TrialReport(3, (0.3,), 990)]
    one = trial(7, started_at=0, stopped_at=1000, seconds=40, reports=points)
    assert [(bar.start, bar.end) for bar in make_bars([one], 2000)] == [(0, 20), (990, 1000)]


def test_start_up_ends_one_step_before_the_first_report() -> None:
    one = trial(0, started_at=0, stopped_at=91, seconds=91, reports=reports(1, 2, 3, start=50))
    (bar,) = make_bars([one], 1000)
    assert (bar.start, bar.trains, bar.end) == (0, 50, 91)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0.5, 300)), min_size=1, max_size=40))
@settings(max_examples=40, deadline=None)
def test_bars_of_a_lane_do_not_overlap_and_the_shares_add_up(
    spans: list[tuple[float, float]],
) -> None:
    trials = [
        trial(number, started_at=start, stopped_at=start + long, seconds=long)
        for number, (start, long) in enumerate(spans)
    ]
    found = make_timeline(trials, 0.0, 2000.0, 8)
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for place in range(0, len(found["bars"]), 6):
        lane, start, _, end, _, _ = found["bars"][place : place + 6]
        by_lane.setdefault(lane, []).append((start, end))
    for lane in by_lane.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(lane), sorted(lane)[1:], strict=False))
    busy = sum(row[1] + row[2] for row in found["busy"]) * found["span"] / len(found["busy"])
    assert busy == pytest.approx(sum(long for _, long in spans), rel=0.01)
    assert sum(found["shares"].values()) == pytest.approx(1, abs=0.001)


def test_money_is_split_by_how_trials_ended_and_what_was_not_run_is_estimated() -> None:
    stop = EarlyStop("asha", "epoch", 10, 1, 3)
    trials = [
        trial(0, seconds=3600, stopped_at=10, reports=reports(*range(10))),
        trial(1, TrialState.PRUNED, seconds=720, stopped_at=5, reports=reports(0, 1)),
    ]
    found = spending(trials, stop, 2.0, 0.0, 100.0)
    assert (found["unit"], found["parts"]) == ("USD", {"PRUNED": 0.4, "DONE": 2})
    assert found["over"][-1] == [10, 2.4]
    assert found["saved"] == pytest.approx(8 * 360 / 3600 * 2)
    assert spending(trials, stop, None, 0.0, 100.0)["total"] == pytest.approx(1.2)
    assert spending([], stop, None, 0.0, 1.0)["over"] == []


# --- the whole document ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> SweepState:
    return told(10_000)


def test_ten_thousand_trials_stay_far_below_two_megabytes(large: SweepState) -> None:
    text = render_page(started(), large, NOW)
    assert len(text.encode()) < MOST / 2
    found = make_document(started(), large, NOW)
    assert len(found["shown"]["n"]) <= 2000
    assert (len(found["shown"]["best"]), len(found["shown"]["rest"])) == (BEST, SAMPLED)
    assert found["head"]["trials"] == 10_000
    ranks = [found["shown"]["rank"][place] for place in found["shown"]["best"]]
    assert ranks == list(range(BEST))


def test_many_parameters_leave_fewer_trials_but_a_small_page() -> None:
    words = tuple(f"a choice with a name as long as people write them {n}" for n in range(200))
    space = {f"x{n}": Dimension("choice", values=words) for n in range(60)}
    spec = replace(SPEC, space={**SPEC.space, **space})
    text = render_page(started(spec), told(3000, spec), NOW)
    assert len(text.encode()) <= MOST


def test_a_sweep_without_trials_and_one_that_just_began_have_a_page() -> None:
    assert "lenet-tune" in render_page(started(), SweepState(), NOW)
    some = told(20, until=1.0)
    some.ended = None
    assert make_document(started(), some, BEGAN + 1)["counts"] == {"WAITING": 20}


def test_time_between_an_end_and_a_reopening_does_not_count_as_taken() -> None:
    state = told(20, until=10.0)
    assert make_document(started(), state, BEGAN + 500)["head"]["took"] == 500
    state.apply(SweepReopened("topped up", BEGAN + 400, paused=300.0))
    assert make_document(started(), state, BEGAN + 500)["head"]["took"] == 200


def test_nothing_in_a_sweep_can_end_the_script_or_become_markup() -> None:
    evil = "</script><script>alert(1)</script><!--"
    spec = replace(SPEC, name=evil)
    text = render_page(started(spec), told(100), NOW, (f"{evil}.csv",))
    assert text.count("<script") == 2 and text.count("</script>") == 2
    assert "<!--" not in text
    assert json.loads(to_script({"a": evil})) == {"a": evil}


def test_a_page_may_ask_for_nothing_and_run_nothing_but_its_own_script() -> None:
    text = render_page(started(), told(3), NOW)
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    for name in ("http://www.w3.org/2000/svg", "url(#"):  # of XML, and of the page's own parts
        text = text.replace(name, "")
    for word in ("http://", "https://", "src=", "@import", "url("):
        assert word not in text, word


def test_the_best_of_several_goals_are_a_front() -> None:
    found = make_document(started(PARETO, None), told(200, PARETO), NOW)
    assert len(found["goals"]) == 2
    shown = found["shown"]
    values = {n: (-a, b) for n, a, b in zip(shown["n"], *shown["values"], strict=True) if a}
    front = [values[number] for number in found["pareto"]]
    assert front and all(
        not any(a <= x and b <= y and (a, b) != (x, y) for a, b in values.values())
        for x, y in front
    )


def test_trials_that_confirm_stand_with_the_best_and_not_in_the_plots() -> None:
    state = told(30)
    best = make_document(started(), state, NOW)["best"]["n"]
    again = replace_trial(state.trials[best], number=30, confirms=best)
    state.trials[30] = again
    found = make_document(started(), state, NOW)
    assert 30 not in found["shown"]["n"]
    assert found["best"]["confirmed"][0]["runs"] == 2


def replace_trial(one: Trial, **changes: Any) -> Trial:
    return replace(one, **changes)


def test_limits_show_what_is_used_of_them() -> None:
    spec = replace(SPEC, limits=SweepLimits(trials=50, parallel=4, hours=1, failed_count=3))
    found = make_document(started(spec, None), told(50, spec), NOW)["limits"]
    assert [each["name"] for each in found] == ["trials", "hours", "failed"]
    assert found[0]["used"] == found[0]["limit"] == 50


# --- files ----------------------------------------------------------------------------------


def test_the_csv_has_a_row_for_each_trial_and_a_column_for_each_parameter() -> None:
    state = told(50)
    rows = list(csv.DictReader(StringIO(to_csv(started(), state, NOW))))
    assert [int(row["trial"]) for row in rows] == list(range(50))
    first = next(row for row in rows if row["rank"] == "1")
    params = state.trials[int(first["trial"])].params
    assert {name: first[f"param.{name}"] for name in params} == {
        name: str(value) for name, value in params.items()
    }
    assert any(row["param.momentum"] == "" for row in rows)
    assert float(first["goal.val_accuracy"]) > 0.9


def test_what_a_program_printed_is_no_formula_in_the_csv() -> None:
    state = told(1)
    state.trials[0].why = "=HYPERLINK(1)\nmore"
    (row,) = csv.DictReader(StringIO(to_csv(started(), state, NOW)))
    assert row["why"] == "'=HYPERLINK(1) more"


def test_the_json_has_every_report_and_no_nan() -> None:
    state = told(10)
    state.trials[0].metrics["loss"] = math.nan
    found = json.loads(to_json(started(), state, NOW))
    assert found["trials"][0]["metrics"]["loss"] is None
    assert [len(each["reports"]) for each in found["trials"]] == [
        len(state.trials[number].reports) for number in range(10)
    ]
    assert found["spec"]["space"]["lr"]["log"] is True


def test_a_report_is_three_files(tmp_path: Path) -> None:
    path = write_report(started(), told(5), tmp_path / "new" / "a&b.html", FakeClock())
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "a&b.csv", "a&b.html", "a&b.json",
    ]  # fmt: skip
    assert 'href="./a%26b.csv"' in path.read_text()
