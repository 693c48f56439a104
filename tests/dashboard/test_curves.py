"""The values of curves, and the libraries that draw them."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from batchml.dashboard import layout
from batchml.dashboard.curves import (
    MOST_LINES,
    MOST_POINTS,
    RunSeries,
    curves_document,
    read_window,
)
from batchml.errors import UsageError
from batchml.runs.metrics.series import MAX_SAMPLES, Metrics, Sample, SampleWindow, Series

AXE = Path(__file__).parents[1] / "support" / "axe"
VENDOR = Path(layout.__file__).parent / "static" / "vendor"


def series(name: str, values: list[float], **more: Any) -> Series:
    samples = tuple(Sample(v, 100.0 + i, float(i)) for i, v in enumerate(values))
    return Series(name, samples, **more)


def run(job_id: str, *found: Series, **more: Any) -> RunSeries:
    return RunSeries(job_id, more.pop("label", job_id), {each.name: each for each in found}, **more)


@pytest.mark.parametrize("folder", [VENDOR, AXE])
def test_every_vendored_file_is_listed_with_its_digest_and_its_licence(folder: Path) -> None:
    (package,) = json.loads((folder / "manifest.json").read_text())["packages"]
    listed = {each["name"]: each["sha256"] for each in package["files"]}
    present = {each.name for each in folder.iterdir()} - {"manifest.json"}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert any("LICENSE" in name for name in listed) and package["licence"] in ("MIT", "MPL-2.0")
    (script,) = (each for each in present if each.endswith(".js"))
    assert package["version"].encode() in (folder / script).read_bytes()[:80]


def test_the_vendored_scripts_and_styles_are_served() -> None:
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        kind, content = layout.static_file(layout.static_name(name).removeprefix("/static/"))
        assert content == (VENDOR / name).read_bytes() and kind.startswith("text/")


def test_a_chart_has_the_lines_of_all_runs_with_times_since_their_starts() -> None:
    document = curves_document([
        run("a", series("loss", [3.0, 2.0]), started=98_000, directions={"loss": "min"}),
        run("b", series("loss", [4.0]), series("acc", [0.5])),
    ])  # fmt: skip
    loss, acc = document["charts"]
    assert (loss["name"], loss["direction"], acc["name"]) == ("loss", "min", "acc")
    assert [line["run"] for line in loss["lines"]] == ["a", "b"]
    assert loss["lines"][0]["times"] == [2, 3], "since the start of its first attempt"
    assert loss["lines"][1]["times"] == [0], "since its first value: the start is not known"
    assert loss["lines"][0]["steps"] == [0, 1] and loss["lines"][0]["values"] == [3.0, 2.0]


def test_a_window_is_of_steps_of_times_or_of_times_since_the_start() -> None:
    step = read_window({"from": "1", "to": "2"})
    clock = read_window({"x": "clock", "from": "100.5", "to": "200"})
    time = read_window({"x": "time", "from": "1", "to": "2"})
    assert step and step.samples_of(5_000) == SampleWindow("step", 1, 2)
    assert clock and clock.samples_of(5_000) == SampleWindow("time", 100.5, 200)
    assert time and time.samples_of(5_000) == SampleWindow("time", 6, 7)
    assert time.samples_of(None) is None and read_window({"runs": "a"}) is None


@pytest.mark.parametrize(
    "given", [{"from": "1"}, {"from": "a", "to": "2"}, {"from": "nan", "to": "2"},
              {"from": "1", "to": "inf"}, {"from": "1", "to": "2", "x": "y"}],
)  # fmt: skip
def test_a_window_that_is_none_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        read_window(given)


def test_values_that_are_not_finite_are_gaps_in_valid_json() -> None:
    document = curves_document([run("a", series("loss", [1.0, math.nan, math.inf]))])
    json.dumps(document, allow_nan=False)
    (line,) = document["charts"][0]["lines"]
    assert line["values"] == [1.0, None, None] and line["last"] is None


def test_many_values_are_thinned_out_with_their_extremes_and_it_is_said() -> None:
    values = [math.sin(i / 1000) for i in range(100_000)]
    values[77_777], values[33_333] = 50.0, -50.0
    (line,) = curves_document([run("a", series("loss", values))])["charts"][0]["lines"]
    assert len(line["values"]) <= MOST_POINTS < line["total"] == 100_000
    assert max(line["values"]) == 50.0 and min(line["values"]) == -50.0
    assert line["steps"] == sorted(line["steps"])


def test_several_runs_share_the_points_of_a_chart() -> None:
    runs = [run(str(i), series("loss", [float(v % 7) for v in range(10_000)])) for i in range(8)]
    lines = curves_document(runs)["charts"][0]["lines"]
    assert sum(len(line["values"]) for line in lines) <= MOST_POINTS


def test_values_that_were_dropped_while_reading_count_too() -> None:
    metrics = Metrics({"loss": r"loss=(\S+)"})
    for number in range(2 * MAX_SAMPLES):
        metrics.feed(f"loss={number}")
    (line,) = curves_document([run("a", *metrics.series.values())])["charts"][0]["lines"]
    assert line["total"] == 2 * MAX_SAMPLES > len(line["values"])


def test_children_of_an_array_are_lines_of_one_chart() -> None:
    found = [series(f"loss:{child}", [1.0, 2.0]) for child in range(100)]
    (chart,) = curves_document([run("a", *found)])["charts"]
    assert [line["child"] for line in chart["lines"]] == list(range(MOST_LINES))
    assert chart["leftOut"] == 100 - MOST_LINES


def test_texts_of_others_have_no_invisible_characters() -> None:
    document = curves_document([run("a", series("lo\u202ess", [1.0]), label="\x1b[31mred")])
    assert "\u202e" not in document["charts"][0]["name"]
    assert "\x1b" not in document["runs"][0]["label"]
