"""The report in a real browser: all plots are drawn, nothing is asked for, nothing complains.

One browser, started once, for all of it.
"""

import re
from pathlib import Path

import pytest

from batchml.sweeps.control.state import SweepState
from batchml.sweeps.report.page import write_report
from tests.support.browser import Browser, Page
from tests.support.fakes import FakeClock
from tests.support.sweep_story import BEGAN, PARETO, SPEC, started, told

PLOTS = (
    "history", "curves", "rungs", "parallel", "importances", "slices", "timeline", "failures",
    "cost",
)  # fmt: skip
MARKS = """Object.fromEntries([...document.querySelectorAll('.card')].map(
    card => [card.id, card.querySelectorAll('.mark').length]))"""


def opened(chromium: Browser, folder: Path, state: SweepState, several: bool = False) -> Page:
    spec = PARETO if several else SPEC
    path = write_report(started(spec), state, folder / "report.html", FakeClock(BEGAN + 1e5))
    page = chromium.open(path)
    assert page.evaluate("document.body.dataset.drawn") == "yes"
    return page


def is_quiet(page: Page, folder: Path) -> bool:
    """It asked for nothing but itself, and the console has nothing to say."""
    assert page.complaints == []
    assert page.requests == [(folder / "report.html").as_uri()]
    return True


@pytest.mark.parametrize("count", [100, 10_000])
def test_all_nine_plots_are_drawn(chromium: Browser, tmp_path: Path, count: int) -> None:
    page = opened(chromium, tmp_path, told(count))
    marks = page.evaluate(MARKS)
    assert all(marks[plot] for plot in PLOTS), marks
    assert (marks["curves"], marks["parallel"]) == ((97, 97) if count == 100 else (265, 500))
    assert page.evaluate("document.querySelectorAll('.nothing').length") == 0
    assert page.evaluate("document.querySelectorAll('*').length") < 6000
    assert is_quiet(page, tmp_path)


def test_what_is_drawn_lies_inside_and_no_number_is_missing(
    chromium: Browser, tmp_path: Path
) -> None:
    page = opened(chromium, tmp_path, told(100))
    wrong = page.evaluate(
        "[...document.querySelectorAll('svg *')].filter(node => [...node.attributes].some("
        "a => /NaN|undefined|Infinity/.test(a.value))).length"
    )
    assert wrong == 0
    words = page.evaluate("document.querySelector('main').innerText")
    assert not re.search(r"NaN|undefined|\[object", words)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Clipped things may reach out of their frame; words may not.
    assert page.evaluate(
        "[...document.querySelectorAll('svg text')].every(text => {"
        " const box = text.getBoundingClientRect(), svg = text.ownerSVGElement"
        ".getBoundingClientRect(); return box.left >= svg.left - 8 && box.right <= svg.right + 8 })"
    )


def test_text_of_others_stays_text(chromium: Browser, tmp_path: Path) -> None:
    page = opened(chromium, tmp_path, told(300))
    assert "<img src=x onerror=alert(1)>" in page.evaluate("document.body.innerText")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert is_quiet(page, tmp_path)


def test_history_can_be_seen_by_time_and_of_trained_trials_alone(
    chromium: Browser, tmp_path: Path
) -> None:
    page = opened(chromium, tmp_path, told(100))
    words = "document.querySelector('#history svg').textContent"
    assert "trials that ended" in page.evaluate(words)
    page.evaluate(
        "[...document.querySelectorAll('#history button')].forEach("
        "b => ['time', 'trained'].includes(b.textContent) && b.click())"
    )
    assert "minutes" in page.evaluate(words)
    pressed = (
        "[...document.querySelectorAll('#history [aria-pressed=true]')].map(b => b.textContent)"
    )
    assert page.evaluate(pressed) == ["trained", "time"]
    assert is_quiet(page, tmp_path)


def test_a_pointer_over_a_dot_says_which_trial_it_is(chromium: Browser, tmp_path: Path) -> None:
    page = opened(chromium, tmp_path, told(100))
    left, top = page.evaluate(
        "(() => { document.querySelector('#history').scrollIntoView();"
        " const line = document.querySelector('#history .incumbent');"
        " const p = line.getPointAtLength(0).matrixTransform(line.getScreenCTM());"
        " return [p.x, p.y] })()"
    )
    page.move(left, top)
    assert page.evaluate("tip.textContent.startsWith('Trial ')")
    assert is_quiet(page, tmp_path)


def test_a_drag_along_an_axis_keeps_what_passes_there(chromium: Browser, tmp_path: Path) -> None:
    page = opened(chromium, tmp_path, told(100))
    hidden = "document.querySelectorAll('#parallel .line.off').length"
    assert page.evaluate(hidden) == 0
    page.evaluate(
        "(() => { const hit = document.querySelector('#parallel .brush'),"
        " box = hit.getBoundingClientRect(), x = box.left + box.width / 2;"
        " const go = (kind, y) => hit.dispatchEvent(new PointerEvent(kind,"
        " {clientX: x, clientY: y, pointerId: 1, bubbles: true}));"
        " hit.setPointerCapture = () => {};"
        " const top = box.top; go('pointerdown', top + 10);"
        " go('pointermove', top + 60); go('pointerup', top + 60) })()"
    )
    assert 0 < page.evaluate(hidden) < 97


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_in_dark(
    chromium: Browser, tmp_path: Path, scheme: str
) -> None:
    """Contrast of text and of the dots' colours with what they stand on (WCAG 2.2: 4.5 and 3)."""
    page = opened(chromium, tmp_path, told(3))
    page.scheme(scheme)
    colours = page.evaluate(
        "Object.fromEntries(['--card', '--fore', '--dim', '--best', '--DONE', '--PRUNED',"
        " '--FAILED', '--DIVERGED', '--RUNNING', '--KILLED', '--LOST', '--PAUSED'].map(name =>"
        " [name, getComputedStyle(document.documentElement).getPropertyValue(name).trim()]))"
    )
    ground = luminance(colours.pop("--card"))
    for name, colour in colours.items():
        light, dark = sorted((ground, luminance(colour)), reverse=True)
        least = 4.5 if name in ("--fore", "--dim", "--best") else 2.9
        assert (light + 0.05) / (dark + 0.05) >= least, (name, colour)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_sweeps_that_have_little_to_show_say_so(chromium: Browser, tmp_path: Path) -> None:
    page = opened(chromium, tmp_path, SweepState())
    assert page.evaluate("document.querySelectorAll('.nothing').length") >= 8
    assert is_quiet(page, tmp_path)


def test_one_that_runs_and_one_of_two_goals(chromium: Browser, tmp_path: Path) -> None:
    state = told(100, until=60.0)
    state.ended = None
    page = opened(chromium, tmp_path, state)
    marks = page.evaluate(MARKS)
    assert marks["timeline"] and marks["history"]
    assert is_quiet(page, tmp_path)

    page = opened(chromium, tmp_path, told(200, PARETO), several=True)
    assert page.evaluate(MARKS)["pareto"] == 3
    assert is_quiet(page, tmp_path)
