"""What runs, sweeps and comparisons show in a notebook: HTML without scripts and style sheets."""

import math
import re
from xml.etree import ElementTree

import pytest

from batchml.dashboard.curves import RunSeries
from batchml.dashboard.html import tag
from batchml.dashboard.notebook.cells import to_html
from batchml.dashboard.notebook.inline import COLOURS, LINES, inline
from batchml.dashboard.notebook.plots import PlotLine, curves, plot, ticks
from batchml.handles import RunList
from batchml.runs.metrics.series import Sample, Series

NASTY = "</script><img src=x onerror=alert(1)> \" ' & \u202e"


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", sorted({*COLOURS.values(), *LINES}))
def test_colours_are_seen_on_white_and_on_black(colour: str) -> None:
    assert 1.05 / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / 0.05 >= 3


def test_classes_become_styles_and_links_texts() -> None:
    source = tag("div", tag("a", NASTY, href="/run/a", title=NASTY, onclick="x"),
                 tag("span", "failed", class_="state failed"), tag("button", "Copy"),
                 tag("input"), tag("div", tag("dialog", "x"), class_="act"), class_="card", id="x",
                 data_panel="/x")  # fmt: skip
    made = inline(source)
    assert not re.search(r"class=|id=|href=|data-|onclick|<button|<input|<dialog|<img", made)
    assert f"color:{COLOURS['failed']}" in made
    text = ElementTree.fromstring(made).findtext("span")
    assert text == NASTY.replace("\u202e", "\ufffd")


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 1, [0, 0.5, 1]), (-3, 12, [0, 5, 10]), (5, 5, [5]), 
     (0.98, 1, [0.98, 0.985, 0.99, 0.995, 1])],
)  # fmt: skip
def test_axes_have_round_numbers(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


def test_a_value_that_is_not_finite_is_a_gap() -> None:
    made = plot("loss", [PlotLine("loss", (1, 2, 3, 4, 5), (3, 2, None, 1, 0.5))])
    assert str(made).count("<polyline") == 2
    assert "no finite values" in str(plot("loss", [PlotLine("loss", (1,), (None,))]))


def test_each_metric_is_a_chart_and_each_run_a_line() -> None:
    def series(*values: float) -> Series:
        return Series("m", tuple(Sample(value, float(n), n) for n, value in enumerate(values)))

    runs = [
        RunSeries("a", NASTY, {"loss": series(3, 2, 1), "acc": series(0, math.nan)}, 0, 0),
        RunSeries("b", "b", {"loss": series(4, 3, 2)}, 0, 1),
    ]
    made = curves(runs)
    assert made is not None
    text = inline(made)
    assert text.count("<svg") == 2 and text.count("<polyline") == 2
    assert LINES[0] in text and LINES[1] in text and "<img" not in text
    ElementTree.fromstring(f"<div>{text}</div>")
    assert curves([RunSeries("a", "", {})]) is None


def test_an_empty_list_says_so() -> None:
    assert "No runs." in to_html(RunList())
    with pytest.raises(TypeError):
        to_html(3)
