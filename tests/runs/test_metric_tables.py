"""Series of metrics, and what is made of them: every file holds what the program said."""

import importlib.util
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.errors import UsageError
from batchml.history import History
from batchml.model.run import JobStatus, MetricRange, Record, Run
from batchml.runs.metrics.conditions import best_values
from batchml.runs.metrics.event_files import crc32c, write_events
from batchml.runs.metrics.plot import html, make_axis, thin_points, ticks, time_charts, write_plot
from batchml.runs.metrics.reading import RunMetrics
from batchml.runs.metrics.series import (
    MAX_SAMPLES,
    Metrics,
    Sample,
    SampleWindow,
    Series,
    describe_unmatched,
    last_values,
    metric_lines,
    metric_texts,
    read_series,
    shown_values,
)
from batchml.runs.watch.events import LogOpened, OutputLine, RunEvent
from batchml.runtime.protocol.log_marks import metrics_marks, read_points

PATTERNS = {"loss": r"loss=(\S+)", "acc": r"acc=([0-9.]+)"}


def series_of(*values: float, name: str = "loss", steps: bool = True) -> Series:
    samples = [
        Sample(value, 1000.0 + place, float(place) if steps else None)
        for place, value in enumerate(values)
    ]
    return Series(name, tuple(samples))


# --- series ---


def test_patterns_read_every_value_and_pass_over_what_is_no_number() -> None:
    metrics = Metrics(PATTERNS)
    metrics.feed("\x1b[1mloss=0.5\x1b[0m acc=0.1", 10.0)
    metrics.feed("loss=0.25 loss=low loss=nan")
    assert metrics.values["acc"] == 0.1
    assert "loss" not in metrics.values  # JSON has no NaN
    assert last_values(metrics.series) == metrics.values
    assert metrics.series["loss"].values[:2] == [0.5, 0.25]
    assert math.isnan(metrics.series["loss"].last)
    assert metrics.series["loss"].steps == [1.0, 2.0, 3.0]
    assert metrics.series["acc"].samples == (Sample(0.1, 10.0, None),)


def test_the_history_keeps_a_run_whose_metrics_are_no_numbers(tmp_path: Path) -> None:
    """JSON would have `null` there, and the whole line could not be read again."""
    history = History(tmp_path / "history.jsonl")
    history.add(Record(key="k", job_id="j", env="dev"))
    ended = Run("j", "n", "q", JobStatus.SUCCEEDED, key="k")
    last = {"loss": math.nan, "acc": 0.5, "norm": math.inf}
    history.add_end(ended, last)
    (record,) = history.newest_first("dev")
    assert record.metrics == {"acc": 0.5}
    series = {name: series_of(value, name=name) for name, value in last.items()}
    assert RunMetrics(series, is_whole=True).last == {"acc": 0.5}


def test_a_pattern_named_step_says_where_values_stand() -> None:
    metrics = Metrics({**PATTERNS, "step": r"step (\d+)"})
    for line in ("step 10", "loss=3", "step 20 loss=2"):
        metrics.feed(line)
    assert metrics.series["loss"].steps == [10.0, 20.0]
    assert "step" not in metrics.series


def test_places_that_are_no_numbers_spoil_no_picture(tmp_path: Path) -> None:
    metrics = Metrics({**PATTERNS, "step": r"step=(\S+)"})
    for line in ("step=nan loss=1", "step=7 loss=0.5", "step=inf loss=0.25"):
        metrics.feed(line)
    assert [sample.step for sample in metrics.series["loss"].samples] == [None, 7.0, 7.0]
    metrics.take(read_points('[{"step": "nan", "total": "inf", "time": "-inf", "acc": 1}]'), 5.0)
    assert metrics.series["acc"].samples == (Sample(1, 5.0, None),)
    write_events(tmp_path, metrics.series)
    assert html(metrics.series, "title")


def test_reported_points_bring_their_steps_and_their_times() -> None:
    metrics = Metrics()
    metrics.take([{"step": 3, "total": 10, "time": 5.0, "loss": 0.5}, {"acc": 0.9}], 7.0)
    assert metrics.series["loss"].samples == (Sample(0.5, 5.0, 3),)
    assert metrics.series["acc"].samples == (Sample(0.9, 7.0, None),)


def test_an_attempt_that_goes_on_from_a_checkpoint_goes_on_with_the_curve() -> None:
    def log(*steps: int) -> Iterator[tuple[int, str]]:
        return ((0, mark) for step in steps for mark in metrics_marks([{"step": step, "a": step}]))

    found = read_series([log(1, 2, 3, 4), log(3, 4, 5)], {})
    assert found["a"].steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        (SampleWindow("step", 3, 5), [2, 3, 4, 5, 6]),
        (SampleWindow("time", 4.0, 4.5), [3, 4, 5]),
        (SampleWindow("step", -5, 1), [0, 1, 2]),
        (SampleWindow("step", 8, 99), [7, 8, 9]),
        (SampleWindow("step", 4.2, 4.8), []),
    ],
)
def test_a_part_of_a_curve_is_read_with_the_samples_beside_it(
    window: SampleWindow, steps: list[float]
) -> None:
    metrics = Metrics(window=window)
    metrics.take([{"step": n, "time": float(n), "loss": 1.0 / (n + 1)} for n in range(10)], 0.0)
    assert (metrics.series["loss"].steps if metrics.series else []) == steps
    assert metrics.values["loss"] == 0.1, "the last value is that of the run"


def test_a_part_of_a_curve_is_finer_than_the_whole() -> None:
    points = [{"step": n, "loss": float(n % 7)} for n in range(5 * MAX_SAMPLES)]
    whole, part = Metrics(), Metrics(window=SampleWindow("step", 100, 199))
    whole.take(points, 0.0)
    part.take(points, 0.0)
    assert len(part.series["loss"].samples) == 102
    assert sum(100 <= step <= 199 for step in whole.series["loss"].steps) < 30


def test_values_without_steps_of_two_attempts_are_all_kept() -> None:
    found = read_series([[(0, "loss=3"), (1, "loss=2")], [(2000, "loss=2.5")]], PATTERNS)
    assert found["loss"].values == [3.0, 2.0, 2.5]
    assert found["loss"].samples[-1].time == 2.0


def test_a_child_has_metrics_of_its_own() -> None:
    metrics = Metrics(PATTERNS)
    metrics.feed("loss=1", 0.0, "3")
    metrics.feed("loss=2", 0.0, "4")
    assert metrics.values == {"loss:3": 1.0, "loss:4": 2.0}


def test_children_are_at_steps_and_attempts_of_their_own() -> None:
    metrics = Metrics({"step": r"step=(\d+)", "loss": r"loss=(\S+)"})
    lines: list[RunEvent] = [
        OutputLine(1, "step=7", "3"), OutputLine(2, "step=2", "4"), OutputLine(3, "loss=0.7", "3"),
        OutputLine(4, "loss=0.2", "4"), LogOpened("s", 1, "3"), LogOpened("t", 2, "3/2"),
        OutputLine(5, "loss=0.1", "4"), OutputLine(6, "step=7 loss=0.6", "3/2"),
    ]  # fmt: skip
    list(metrics.watch(lines))
    shown = {name: list(zip(each.steps, each.values, strict=True))
             for name, each in metrics.series.items()}  # fmt: skip
    assert shown == {"loss:3": [(7, 0.6)], "loss:4": [(2, 0.2), (2, 0.1)]}


def test_a_run_of_weeks_is_thinned_and_ends_with_its_last_value() -> None:
    metrics = Metrics()
    metrics.take(({"step": step, "loss": float(step)} for step in range(100_001)), 0.0)
    found = metrics.series["loss"]
    assert len(found.samples) <= MAX_SAMPLES + 2
    assert found.last == 100_000.0
    assert found.steps == sorted(found.steps)
    inner = found.steps[1:-1]  # the first and the last are always kept
    gaps = {b - a for a, b in pairwise(inner)}
    assert len(gaps) == 1


@pytest.mark.parametrize("count", [10, 3 * MAX_SAMPLES + 5])
def test_the_first_the_best_and_the_last_value_are_kept_however_many_come(count: int) -> None:
    """A thinned curve of a long run must not lose its best value."""
    values = [0.5 + 0.1 * math.sin(place) for place in range(count)]
    values[count // 2], values[count // 3] = 0.97, 0.01
    metrics = Metrics()
    metrics.take(({"step": place, "acc": value} for place, value in enumerate(values)), 0.0)
    assert metrics.ranges == {"acc": MetricRange(values[0], 0.01, 0.97)}
    assert best_values(metrics.ranges, {"acc": "max"}) == {"acc": 0.97}
    assert best_values(metrics.ranges, {"acc": "min"}) == {"acc": 0.01}
    assert best_values(metrics.ranges, {}) == {}
    assert metrics.series["acc"].steps == sorted(metrics.series["acc"].steps)


def test_a_loss_that_diverges_is_shown_as_its_last_value() -> None:
    metrics = Metrics({"loss": "loss=(nan|-?inf|[0-9.eE+-]+)", "acc": r"acc=(\S+)"})
    for line in ("loss=0.5 acc=0.7", "loss=inf acc=-inf", "loss=nan acc=0.9"):
        metrics.feed(line, 0.0)
    best = best_values(metrics.ranges, {"loss": "min"})
    assert metric_texts(shown_values(metrics.series), best) == [
        ("loss", "nan (best 0.5)"), ("acc", "0.9"),
    ]  # fmt: skip
    assert metrics.values == {"acc": 0.9}  # for JSON, which has no NaN


def test_values_that_a_later_attempt_replaced_are_not_the_best() -> None:
    metrics = Metrics()
    metrics.take([{"step": 1, "acc": 0.5}, {"step": 2, "acc": 0.9}], 0.0)
    metrics.new_attempt()
    metrics.take([{"step": 2, "acc": 0.6}], 0.0)
    assert metrics.ranges["acc"].greatest == 0.6


def test_a_curve_without_steps_has_bars_between_attempts() -> None:
    metrics = Metrics({"acc": r"acc=(\S+)"})
    for line in ("acc=1", "acc=4", "", "acc=1", "acc=4"):
        metrics.feed(line) if line else metrics.new_attempt()
    assert metrics.series["acc"].breaks == (2,)
    assert "\N{LOWER ONE EIGHTH BLOCK}\N{FULL BLOCK}|" in metric_lines(metrics.series)[0]


def test_the_best_value_of_a_child_has_the_direction_of_its_metric() -> None:
    ranges = {"acc:3": MetricRange(0.1, 0.1, 0.7)}
    assert best_values(ranges, {"acc": "max"}) == {"acc:3": 0.7}


def test_values_that_are_no_numbers_are_in_no_range() -> None:
    assert series_of(math.nan, 2.0, math.inf).range == MetricRange(2.0, 2.0, 2.0)
    assert series_of(math.nan).range is None


# --- plots ---


@given(st.lists(st.floats(), min_size=1, max_size=30), st.booleans())
def test_any_values_can_be_drawn_and_the_drawing_is_well_formed(
    values: list[float], steps: bool
) -> None:
    text = html({"loss": series_of(*values, steps=steps)}, '<run> & "co"')
    assert "<run>" not in text
    for svg in text.split("<svg")[1:]:
        tree = ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
        for node in tree.iter():
            for place in [*node.get("points", "").split(), node.get("cx", ""), node.get("cy", "")]:
                assert all(0 <= float(part) <= 560 for part in place.split(",") if part)


ODD = st.text(st.sampled_from([*map(chr, range(160)), "\ud800", "\udfff", "\u202e", "\u2028"]))


@given(ODD, ODD)
def test_any_name_is_drawn_as_text_without_control_characters(name: str, title: str) -> None:
    name, title = name + "</script><b>\x00\ud83d", title + "</title>\x1b]0;x\x07"
    curve = series_of(1, 2, name=name)
    text = html({name: curve}, title, time_charts({title: {name: curve}})).encode().decode()
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    tree = ElementTree.fromstring(
        "<main>" + text.partition("<main>")[2].partition("</main>")[0] + "</main>"
    )
    captions = ["".join(each.itertext()) for each in tree.iter("figcaption")]
    assert "</script><b>\ufffd\ufffd" in captions[0]
    tags = "main figure figcaption span svg line text polyline circle title"
    assert {node.tag for node in tree.iter()} == set(tags.split())


def test_a_plot_is_one_file_that_fetches_nothing(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.html", {"a<b": series_of(1, 2, 3, name="a<b")}, "lenet")
    text = (tmp_path / "a.html").read_text()
    assert "a&lt;b" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<script" not in text


def test_a_name_of_another_kind_and_a_run_without_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.html or \.png"):
        write_plot(tmp_path / "a.pdf", {"a": series_of(1)}, "t")
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        write_plot(tmp_path / "gone" / "a.html", {"a": series_of(1)}, "t")
    with pytest.raises(UsageError, match=r"No metrics: .*batchml adopt SCRIPT"):
        write_plot(tmp_path / "a.html", {}, "t")


def test_png_is_drawn_or_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(UsageError, match="pip install matplotlib"):
            write_plot(path, {"a": series_of(1, 2)}, "t")
    else:
        write_plot(path, {"a": series_of(1, 2)}, "t")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    points[77_777] = (77_777.0, math.nan)
    shown = thin_points(points, 600)
    assert len(shown) <= 901
    assert (54_321.0, 9.0) in shown
    assert any(math.isnan(y) for _, y in shown)


@given(st.floats(-1e299, 1e299, allow_nan=False), st.floats(-1e299, 1e299, allow_nan=False))
def test_ticks_are_few_and_enclose_the_values(a: float, b: float) -> None:
    low, high = sorted((a, b))
    found = ticks(low, high)
    room = 1e-6 * (found[-1] - found[0])
    assert found[0] <= low + room
    assert found[-1] >= high - room
    assert 2 <= len(found) <= 12


def test_without_steps_a_curve_lies_over_time() -> None:
    slow = Series("a", tuple(Sample(1.0, 600.0 * place, None) for place in range(10)))
    assert make_axis(slow).label == "minutes"
    assert make_axis(slow).positions[-1] == 90.0
    assert make_axis(series_of(1, 2, 3)).label == "step"


# --- TensorBoard ---


def records(path: Path) -> list[bytes]:
    """The events in a file, with their sums checked by hand."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        body = data[12 : 12 + length]
        sums = struct.unpack("<I", data[8:12]) + struct.unpack_from("<I", data, 12 + length)
        assert sums == (masked(data[:8]), masked(body))
        found.append(body)
        data = data[16 + length :]
    return found


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def test_the_sum_is_that_of_the_standard() -> None:
    """RFC 3720, B.4."""
    assert crc32c(b"\x00" * 32) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_an_event_is_the_bytes_that_tensorboard_writes(tmp_path: Path) -> None:
    """The bytes are of tensorboard 2.21's own `Event(...).SerializeToString()`."""
    path = write_events(tmp_path, {"loss": Series("loss", (Sample(0.5, 2.0, 300),))})
    version, event = records(path)
    assert version == bytes.fromhex("090000000000000040") + b"\x1a\x0dbrain.Event:2"
    assert event == bytes.fromhex("09000000000000004010ac022a0d0a0b0a046c6f7373150000003f")


def test_writing_again_replaces_the_file_and_extremes_can_be_written(tmp_path: Path) -> None:
    series = {"a": series_of(1e300, -1e300, math.nan, math.inf)}
    first = write_events(tmp_path / "x", series, "lenet")
    assert write_events(tmp_path / "x", series, "lenet") == first
    assert [path.name for path in (tmp_path / "x").iterdir()] == [first.name]
    assert len(records(first)) == 5


def test_tensorboard_itself_reads_the_file(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path = write_events(tmp_path, {"loss": series_of(0.5, 0.25)})
    events = list(loader.EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    found = [(e.step, v.tag, v.tensor.float_val[0]) for e in events[1:] for v in e.summary.value]
    assert found == [(0, "loss", 0.5), (1, "loss", 0.25)]


def test_patterns_that_found_nothing_are_named() -> None:
    patterns = {"loss": "l=(.)", "acc": "a=(.)", "b:c": "x(.)", "step": "s=(.)"}
    words = describe_unmatched(patterns, ["loss:3", "other"])
    assert words.endswith("of [metrics]: acc (a=(.)), b:c (x(.))")
    assert describe_unmatched(patterns, ["loss", "acc:0", "b:c"]) == ""
