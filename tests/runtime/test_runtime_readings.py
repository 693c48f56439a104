"""Values of a trial's goals, as programs print them."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchml.runtime.protocol.log_marks import LineSplitter
from batchml.runtime.sweep.readings import Point, Readings, list_likely_names


def readings(*goals: str, step: str = "epoch", after: int = 0, **patterns: str) -> Readings:
    return Readings(goals or ("acc",), patterns, step, after)


def read(found: Readings, *lines: str) -> list[tuple[int, float]]:
    """(step, value of the first goal) of every point in the lines."""
    points = [point for line in lines for point in found.read_line(line.encode())]
    return [(point.step, point.values[0]) for point in points]


@pytest.mark.parametrize(
    "line",
    [
        "epoch=3 acc=0.5",
        "epoch: 3, acc: 0.5, loss: 0.1",
        "Epoch 3/27 acc=0.5",
        "Epoch [3/27] loss=1.0 acc=0.5.",
        "Epoch[3] acc=0.5",
        '{"epoch": 3, "acc": 0.5, "note": "fine", "nested": {"acc": 1}}',
        "{'acc': 0.5, 'loss': 0.1, 'epoch': 3.0}",
        "\x1b[1;32mepoch\x1b[0m=3 acc=\x1b[1m0.5\x1b[0m",
        "Epoch 3:  10%|#    | acc=0.1\rEpoch 3: 100%|#####| acc=0.5",
        "acc=0.2 acc=0.5 EPOCH=3",
        "acc =  5e-1 | epoch 3",
        "\x1b]0;a title\x07epoch=3 acc=0.5",
        "val.acc=0.9 acc_top5=0.9 train/acc=0.9 acc=0.5 epoch=3",
    ],
)
def test_a_line_tells_value_and_step(line: str) -> None:
    assert read(readings(), line) == [(3, 0.5)]


@pytest.mark.parametrize(
    "line",
    [
        "", "acc", "acc=", "acc=fine", "acc=1.2.3", "acc: 12ms", "my_acc=0.5", "acc_top5=0.5",
        '{"acc": "high"}', '{"acc": true}', '{"acc": [1]}', "[0.5]", "{", "\x00\xff=\x00",
    ],
)  # fmt: skip
def test_other_lines_tell_nothing(line: str) -> None:
    found = readings()
    assert read(found, line) == []
    assert found.missing == ["acc"]


def test_without_a_step_values_are_counted() -> None:
    assert read(readings(), "acc=0.1", "loss=3", "acc=0.2") == [(1, 0.1), (2, 0.2)]


def test_a_program_that_goes_on_from_a_checkpoint_is_counted_from_there() -> None:
    assert read(readings(after=9), "acc=0.1", "acc=0.2") == [(10, 0.1), (11, 0.2)]


def test_steps_are_steps_that_are_done() -> None:
    """A loop over range(3) is done with one step when it says 0."""
    found = read(readings(), *(f"Epoch[{epoch}] acc=0.{epoch}" for epoch in range(3)))
    assert found == [(1, 0.0), (2, 0.1), (3, 0.2)]
    assert read(readings(after=3), "epoch=3 acc=0.1", "epoch=4 acc=0.2") == [(4, 0.1), (5, 0.2)]
    assert read(readings(after=3), "epoch=4 acc=0.1") == [(4, 0.1)]


def test_parts_of_a_step_are_rounded_down() -> None:
    found = read(readings(), *(f"{{'acc': 0.5, 'epoch': {epoch}}}" for epoch in (0.5, 1.0, 1.5, 2)))
    assert [step for step, _ in found] == [1, 2]


def test_the_first_value_of_a_step_counts() -> None:
    assert read(readings(), "epoch=1 acc=0.1", "epoch=1 acc=0.9") == [(1, 0.1)]


def test_what_is_not_finite_is_told() -> None:
    [point] = readings().read_line(b"epoch=1 acc=nan")
    assert point.values[0] != point.values[0]
    assert read(readings(), "epoch=1 acc=-inf") == [(1, float("-inf"))]
    assert read(readings(), '{"acc": Infinity}') == [(1, float("inf"))]


def test_the_pattern_of_the_job_alone_finds_its_metric() -> None:
    found = readings("val_accuracy", val_accuracy="Validation-accuracy=([0-9.]+)")
    lines = ["Epoch[0] Train-accuracy=0.9", "Epoch[0] Validation-accuracy=0.5 val_accuracy=0.1"]
    assert read(found, *lines) == [(1, 0.5)]
    assert found.seen == {"Train-accuracy": 0.9, "Validation-accuracy": 0.5}


def test_a_pattern_named_step_holds_for_the_lines_after_it() -> None:
    patterns = {"step": "Round <([0-9]+)>", "acc": "is ([0-9.]+)"}
    found = Readings(["acc"], patterns, "round")
    lines = ["Round <4>", "the score is 0.5", "Round <8>", "the score is 0.6"]
    assert read(found, *lines) == [(4, 0.5), (8, 0.6)]


def test_a_point_has_all_goals() -> None:
    found = readings("acc", "latency")
    assert found.read_line(b"epoch=1 acc=0.5") == []
    assert found.read_line(b"epoch=1 latency=7") == [Point(1, (0.5, 7.0))]
    assert found.read_line(b"epoch=2 latency=8 acc=0.6") == [Point(2, (0.6, 8.0))]
    assert readings("acc", "latency").missing == ["acc", "latency"]


def test_what_is_reported_is_read_too() -> None:
    found = readings()
    assert found.read_report({"time": 1.0, "epoch": 2.0, "acc": 0.5}) == [Point(2, (0.5,))]
    assert found.read_report({"time": 1.0, "step": 900.0, "loss": 0.5}) == []
    assert found.seen["loss"] == 0.5


def test_what_is_reported_is_not_counted_again_when_it_is_printed() -> None:
    found = readings()
    assert found.read_report({"acc": 0.5}) == [Point(1, (0.5,))]
    assert read(found, "acc=0.5") == []
    assert found.read_report({"acc": 0.6}) == [Point(2, (0.6,))]


def test_what_looks_like_the_missing_metric_is_named_first() -> None:
    assert list_likely_names(["val_accuracy"], ["loss", "val_acc", "lr"]) == "val_acc, lr, loss"
    assert list_likely_names(["val_accuracy"], []) == ""


@settings(max_examples=50, deadline=None)
@given(st.floats(allow_nan=False), st.integers(1, 10**9))
def test_any_value_comes_back_as_it_was_printed(value: float, step: int) -> None:
    for line in (f"epoch={step} acc={value}", f'{{"acc": {value!r}, "epoch": {step}}}'):
        line = line.replace(": inf", ": Infinity").replace(": -inf", ": -Infinity")
        assert read(readings(), line) == [(step, value)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_it_does_not_matter_where_the_output_is_cut(junk: list[bytes], data: st.DataObject) -> None:
    lines = [line.replace(b"\n", b"") for line in junk]
    good = [b"epoch=%d acc=0.5" % number for number in range(1, len(lines) + 1)]
    text = b"".join(each + b"\n" for pair in zip(lines, good, strict=True) for each in pair)
    cut = data.draw(st.integers(0, len(text)))

    def points(*parts: bytes) -> list[Point]:
        splitter, found = LineSplitter(escape=True), readings()
        pieces = [line for part in parts for line in splitter.feed(part)]
        return [point for line in pieces for point in found.read_line(line)]

    assert points(text[:cut], text[cut:]) == points(text)


@pytest.mark.parametrize(
    "part", [b"a", b"a ", b"a:", b"=", b"\x1b[", b"\x1b]", b"\xff", b"1.", b"{", b"a.a-", b"e 1 "]
)
def test_long_lines_take_no_time_and_their_end_is_read(part: bytes) -> None:
    line = part * ((1 << 20) // len(part)) + b"\r epoch=1 acc=0.5"
    began = time.process_time()
    splitter = LineSplitter()
    points = [point for each in splitter.feed(line + b"\n") for point in readings().read_line(each)]
    assert time.process_time() - began < 20  # what backtracks takes minutes; this 0.1 s
    assert points == [Point(1, (0.5,))] or part in (b"\x1b]", b"{")


def test_binary_output_does_no_harm() -> None:
    found = readings()
    for line in os.urandom(200_000).split(b"\n"):
        found.read_line(line)
    assert len(found.seen) <= 100


def test_the_trials_own_parameters_are_no_metrics() -> None:
    found = Readings(["acc"], {}, "epoch", params={"lr": 0.07, "hidden-size": 9, "opt": "sgd"})
    assert found.read_line(b"Namespace(lr=0.07, hidden_size=9, opt='sgd', workers=4)") == []
    assert found.seen == {"workers": 4}
    found.read_line(b"lr=0.035 loss=0.5")
    assert found.seen == {"workers": 4, "lr": 0.035, "loss": 0.5}, "another value is news"
