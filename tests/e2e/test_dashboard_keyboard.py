"""The dashboard without a mouse."""

from typing import Any

import pytest

from tests.support.browser import Browser, Page
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import running, settle, wait_for

JOB = """
image = "python"
command = ["python", "train.py"]
[metrics]
step = 'step (\\d+)'
loss = 'loss=(\\S+)'
"""
TRAIN = "for i in range(50): print(f'step {i} loss={i / 50}')"
# The element with the focus: its words, whether it can be seen, and whether its outline can.
FOCUSED = """(() => {
    const found = document.activeElement;
    if (!found || found === document.body) return null;
    const box = found.getBoundingClientRect(), style = getComputedStyle(found);
    const header = document.querySelector("header").getBoundingClientRect();
    const inHeader = Boolean(found.closest("header")), inDialog = Boolean(found.closest("dialog"));
    const isSeen = box.width > 0 && box.height > 0 && box.left < innerWidth && box.right > 0
        && box.top < innerHeight && box.bottom > (inHeader || inDialog ? 0 : header.bottom);
    return {
        name: (found.getAttribute("aria-label") || found.textContent || found.id).trim(),
        tag: found.localName, seen: isSeen, outlined: parseFloat(style.outlineWidth) >= 1
            && style.outlineStyle !== "none",
    };
})()"""


def tab_to(page: Page, name: str, most: int = 60) -> None:
    """Press Tab until the element with these words has the focus; each on the way must be seen."""
    passed: list[Any] = []
    for _ in range(most):
        page.key("Tab")
        now = page.evaluate(FOCUSED)
        passed.append(now)
        if now is not None:
            assert now["seen"] and now["outlined"], now
            if now["name"] == name:
                return
    raise AssertionError(f"{name!r} is not among {passed}")


def focused(page: Page) -> str:
    return str((page.evaluate(FOCUSED) or {"name": ""})["name"])


@pytest.mark.journey
def test_a_run_is_found_opened_and_cancelled_by_the_keyboard_alone(
    cli: Cli, chromium: Browser
) -> None:
    for name in ("first", "second"):
        assert cli("submit", "--wait", "--name", name, "--", "true").code == 0
    job = cli("submit", "--json", "--name", "long", "--", "sleep", "600").json["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.key("Tab")
        assert focused(page) == "Skip to the content"
        page.key("Enter")
        assert page.evaluate("document.activeElement.id") == "content"
        # Sort by the name: the heading keeps the focus, and says how the table is sorted.
        tab_to(page, "Name")
        page.key("Enter")
        wait_for(page, "document.querySelector('th').getAttribute('aria-sort') === 'ascending'")
        assert focused(page) == "Name"
        names = "[...document.querySelectorAll('#runs tbody a')].map(each => each.textContent)"
        assert page.evaluate(names) == ["first", "long", "second"]
        # Find it, go through the rows, and open it.
        page.key("/")
        page.type("on")
        wait_for(page, f"{names}.length === 2")
        page.key("ArrowDown")
        assert focused(page) == "long"
        page.key("ArrowDown")
        assert focused(page) == "second"
        page.key("ArrowUp")
        page.key("Space")
        wait_for(page, "document.querySelector('#actions a')?.textContent === 'Compare 1 runs'")
        assert focused(page) == "long"
        page.key("Enter")
        settle(page, f"/run/{job}")
        # Its confirmation begins on the button that changes nothing; Escape returns to the page.
        tab_to(page, "Cancel")
        page.key("Enter")
        wait_for(page, "document.querySelector('dialog[open]')")
        assert focused(page) == "Leave it"
        page.key("Escape")
        wait_for(page, "!document.querySelector('dialog[open]')")
        assert focused(page) == "Cancel"
        page.key("Enter")
        wait_for(page, "document.querySelector('dialog[open]')")
        tab_to(page, "Cancel the run")
        page.key("Enter")
        wait_for(page, "document.querySelector('#done').textContent.includes('is stopping')")
        # The button goes; the keyboard goes on where it was.
        wait_for(page, "![...document.querySelectorAll('.open-action')].some(each => "
                       "each.textContent === 'Cancel')")  # fmt: skip
        assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
    assert cli("show", job, "--json").json["status"] in ("RUNNING", "FAILED")


def test_curves_are_zoomed_and_read_by_the_keyboard_alone(cli: Cli, chromium: Browser) -> None:
    write_job(cli.folder, "curve", JOB, train__py=TRAIN)
    assert cli("submit", "--wait", "curve").code == 0
    job = cli("ls", "--json").json[0]["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/run/{job}")
        settle(page, f"/run/{job}")
        wait_for(page, "document.querySelector('.curve canvas')")
        tab_to(page, "Zoom in: loss")
        page.key("Enter")
        assert focused(page) == "Zoom in: loss"
        tab_to(page, "Show as a table: loss")
        page.key("Space")
        wait_for(page, "document.querySelectorAll('.values tbody tr').length === 50")
        page.key("Tab")
        assert page.evaluate("document.activeElement.classList.contains('frame')")
        page.key("End")
        wait_for(page, "document.querySelector('.curve [role=status]').textContent"
                       ".startsWith('Step 49: ')")  # fmt: skip
        page.key("Escape")
        page.key("Tab")
        assert focused(page) == "Values of loss"


PATHS = ("/", "/run/{job}", "/sweeps", "/compare?runs={job},{other}", "/cluster", "/cost",
         "/submit", "/submit/curve")  # fmt: skip


def test_each_stop_of_the_tab_key_is_seen_on_each_page(cli: Cli, chromium: Browser) -> None:
    write_job(cli.folder, "curve", JOB, train__py=TRAIN)
    for _ in range(2):
        assert cli("submit", "--wait", "curve").code == 0
    job, other = (each["jobId"] for each in cli("ls", "--json").json)
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        for path in PATHS:
            address = path.format(job=job, other=other)
            for width in (1400, 400):
                page.resize(width)
                page.go(dashboard.base + address)
                settle(page, address)
                go_round(page)


def go_round(page: Page) -> None:
    """Press Tab until all stops were seen; each must be in view, with its outline."""
    stops: list[Any] = []
    for _ in range(150):
        page.key("Tab")
        now = page.evaluate(FOCUSED)
        if now is None and stops:
            assert len(stops) > 8, stops
            return
        stops.append(now)
        assert now is None or (now["seen"] and now["outlined"]), now
    raise AssertionError(f"the keyboard is caught among {stops[-10:]}")
