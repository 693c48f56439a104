"""How far an array is, said in the same words everywhere; metrics of its children together."""

import pytest

from batchml.cli.status_line import parts
from batchml.model.run import JobStatus, Run, describe_state, effective_state
from batchml.runs.commands.live import WaitingRuns
from batchml.runs.metrics.plot import children_charts
from batchml.runs.metrics.series import Sample, Series, by_child, children_texts, metric_texts
from tests.support.fakes import FakeClock


def run(status: str, **more: object) -> Run:
    return Run("6b0e1234-1111-4111-8111-111111111111", "n", "q", JobStatus(status), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "children", "state", "text"),
    [
        ("PENDING", {}, "PENDING", "PENDING"),
        ("PENDING", {"RUNNABLE": 6}, "RUNNABLE", "6 RUNNABLE, 0/6 done"),
        ("PENDING", {"STARTING": 1, "RUNNABLE": 5}, "RUNNING", "1 STARTING, 0/6 done"),
        ("PENDING", {"RUNNING": 2, "SUCCEEDED": 4}, "RUNNING", "2 RUNNING, 4/6 done"),
        ("PENDING", {"RUNNABLE": 2, "SUCCEEDED": 4}, "RUNNING", "2 RUNNABLE, 4/6 done"),
        ("PENDING", {"RUNNING": 3, "FAILED": 3}, "RUNNING", "3 RUNNING, 3/6 done, 3 FAILED"),
        ("FAILED", {"FAILED": 2, "SUCCEEDED": 4}, "FAILED", "FAILED, 2 of 6"),
        ("SUCCEEDED", {"SUCCEEDED": 6}, "SUCCEEDED", "SUCCEEDED, 6 of 6"),
    ],
)
def test_an_array_is_as_far_as_its_children(
    status: str, children: dict[str, int], state: str, text: str
) -> None:
    array = run(status, children=children)
    assert (effective_state(array), describe_state(array)) == (state, text)


def test_few_values_of_children_are_told_and_many_as_their_spread() -> None:
    few = {"lr": 0.1, "loss:0": 1.0, "loss:2": 2.0, "a:b": 3.0}
    assert metric_texts(few) == [("lr", "0.1"), ("loss:0", "1"), ("loss:2", "2"), ("a:b", "3")]
    many = {"lr": 0.1, **{f"loss:{child}": float(child) for child in range(6)}, "acc:1": 0.5}
    assert metric_texts(many) == [
        ("lr", "0.1"), ("loss", "2.5 \u00b1 1.9, 0 to 5, of 6 children"), ("acc:1", "0.5"),
    ]  # fmt: skip
    assert by_child({"x": 1.0, "y:3": 2.0}) == {"y": {3: 2.0}}


def test_the_best_child_is_named_if_it_is_known_which_value_is_the_best() -> None:
    last, best = {"loss:0": 2.0, "loss:4": 4.0, "lr": 1.0}, {"loss:0": 1.5, "loss:4": 1.0}
    spread = "3 \u00b1 1.4, 2 to 4, of 2 children"
    assert children_texts(last, {}, {}) == [("loss", spread)]
    for direction, end in (("min", "best 1 of child 4"), ("max", "best 1.5 of child 0")):
        texts = children_texts(last, best, {"loss": direction})
        assert texts == [("loss", f"{spread}, {end}")]
    assert children_texts({"loss:3": 2.0}, {}, {}) == [("loss", "2, 2 to 2, of 1 child")]


def test_the_curves_of_children_share_a_chart() -> None:
    def curve(name: str, *values: float) -> Series:
        return Series(name, tuple(Sample(each, 0.0, n) for n, each in enumerate(values)))

    series = {each.name: each for each in (curve("loss:0", 3, 2), curve("loss:7", 5), curve("a"))}
    (chart,) = children_charts(series)
    assert (chart.title, chart.label, chart.legend) == ("loss", "step", ["child 0", "child 7"])
    assert [list(each.points) for each in chart.curves] == [[(0, 3), (1, 2)], [(0, 5)]]


def words(waited: WaitingRuns, clock: FakeClock) -> list[str]:
    now = clock.monotonic()
    return [part.text for part in parts(waited.board(now), now)]


def test_who_waits_for_one_run_sees_its_states_and_how_to_ask_why() -> None:
    clock = FakeClock()
    waited = WaitingRuns(clock, [run("RUNNABLE")])
    clock.sleep(12)
    assert words(waited, clock) == [
        "n 6b0e1234", "RUNNABLE 0:12", "why: batchml explain 6b0e1234", "Ctrl-C detaches",
    ]  # fmt: skip
    waited.see({run("RUNNABLE").job_id: run("RUNNING")})
    assert words(waited, clock)[1:3] == ["RUNNABLE 0:12", "RUNNING 0:00"]


def test_who_waits_for_several_sees_how_many_do_what() -> None:
    clock, other = FakeClock(), Run("o", "o", "q", JobStatus.RUNNABLE)
    waited = WaitingRuns(clock, [run("PENDING", children={"RUNNING": 2}), other])
    assert words(waited, clock)[:3] == ["2 runs", "waiting 0:00", "1 RUNNING, 1 RUNNABLE"]
    waited.see({"o": Run("o", "o", "q", JobStatus.SUCCEEDED)})
    assert words(waited, clock)[2] == "1 SUCCEEDED, 1 RUNNING"
