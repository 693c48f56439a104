"""Curves of the dashboard, in a real browser, by mouse and by keyboard."""

from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

JOB = """
image = "python"
command = ["python", "train.py", "{lr}"]
[params]
lr = 0.1
[metrics]
step = 'step (\\d+)'
loss = 'loss=(\\S+)'
acc = 'acc=(\\S+)'
[resources]
vcpus = 1
memory = "128 MiB"
"""
TRAIN = """
import sys
lr = float(sys.argv[1])
for i in range(200):
    print(f"step {i} loss={'nan' if i == 100 else lr * (200 - i) - 1} acc={i / 200}")
"""
CHARTS = "document.querySelectorAll('.curve canvas').length"


def train(cli: Cli, *rates: str) -> list[str]:
    """Runs that have trained, by their job ids."""
    (cli.folder / "job.toml").write_text(JOB)
    (cli.folder / "train.py").write_text(TRAIN)
    ids = []
    for rate in rates:
        made = cli("submit", ".", "-p", f"lr={rate}", "--json")
        assert made.code == 0, made.err
        ids.append(made.json["jobId"])
        assert cli("wait", ids[-1]).code == 0
    return ids


def test_the_curves_of_a_run_by_mouse_and_by_keyboard(cli: Cli, chromium: Browser) -> None:
    (job_id,) = train(cli, "0.1")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/run/{job_id}?smooth=0.5")
        wait_for(page, f"{CHARTS} === 2")
        words = "document.querySelector('.curve .small').textContent"
        assert "200 values" in page.evaluate(words) and "1 not finite" in page.evaluate(words)
        assert "smoothed by 0.5 (exponential moving average)" in page.evaluate(words)
        # By keyboard: the last value, the one before it, spoken; then the whole as a table.
        page.evaluate("document.querySelector('.curve .frame').focus()")
        for key in ("End", "ArrowLeft"):
            page.key(key)
        wait_for(page, "document.querySelector('.curve [role=status]').textContent"
                       ".startsWith('Step 198: ')")  # fmt: skip
        page.click(".curve .buttons button:last-child")
        wait_for(page, "document.querySelectorAll('.values tbody tr').length === 50")
        page.click(".values .bar button:last-child")
        wait_for(page, "document.querySelector('.values tbody th').textContent === '50'")
        # A logarithmic axis shows no value of 0 or less, and says so.
        page.evaluate("document.querySelector('.curves .bar input[type=checkbox]').click()")
        wait_for(page, f"{words}.includes('of 0 or less')")
        assert page.evaluate("location.search") == "?smooth=0.5&log=1"


def test_curves_grow_while_a_run_trains(cli: Cli, chromium: Browser, tmp_path: Path) -> None:
    go = tmp_path / "go"
    (cli.folder / "job.toml").write_text(JOB)
    (cli.folder / "train.py").write_text(
        "import os, time\n"
        "for i in range(20):\n"
        f"    while i == 10 and not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "    print(f'step {i} loss={i}', flush=True)\n"
    )
    job_id = cli("submit", ".", "--json").json["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/run/{job_id}")
        words = "document.querySelector('.curve .small').textContent"
        wait_for(page, f"{words}.includes('10 values')")
        # What was zoomed in to stays so.
        page.click(".curve .buttons button")
        go.touch()
        wait_for(page, f"{words}.includes('last 19') && {words}.includes('20 values')")
        wait_for(page, "document.querySelector('[data-metric=loss]').textContent === '19'")


def test_children_of_an_array_are_curves_of_one_chart(cli: Cli, chromium: Browser) -> None:
    (cli.folder / "job.toml").write_text(JOB)
    (cli.folder / "train.py").write_text("for i in range(9): print(f'step {i} loss={i}')")
    job_id = cli("submit", ".", "--array", "3", "--json").json["jobId"]
    assert cli("wait", job_id).code == 0
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/run/{job_id}")
        wait_for(page, f"{CHARTS} === 1")
        page.click(".curve .buttons button:last-child")
        heads = "[...document.querySelectorAll('.values thead th')].map(each => each.textContent)"
        wait_for(page, f"{heads}.join() === 'Step,child 0,child 1,child 2'")


OVER = """(() => { const found = document.querySelector('#curves .u-over');
    found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();
    return [box.x, box.y, box.width, box.height]; })()"""


def test_charts_and_timeline_share_a_cursor_and_a_zoom_with_finer_points(
    cli: Cli, chromium: Browser
) -> None:
    (cli.folder / "job.toml").write_text(JOB)
    (cli.folder / "train.py").write_text(
        "for i in range(20_000): print(f'step {i} loss={i % 9 + 1}')\n"
    )
    job_id = cli("submit", ".", "--json").json["jobId"]
    assert cli("wait", job_id).code == 0
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/run/{job_id}")
        words = "document.querySelector('#curves .curve .small').textContent"
        wait_for(page, f"document.querySelector('svg.spans') && {words}.includes(' of 20,000 ')")
        x, y, width, height = page.evaluate(OVER)
        page.move(x + width / 2, y + height / 2)
        wait_for(page, "document.querySelector('line.moment').getAttribute('x1')?.endsWith('%')")
        page.drag((x + width * 0.5, y + 9), (x + width * 0.6, y + 9))
        wait_for(page, f"{words}.match(/(1,9|2,0)\\d\\d values in this part/)")
        # By the time of day the timeline shows what the charts are zoomed in to.
        page.evaluate("""(() => { const axis = document.querySelector('#curves select');
            axis.value = 'clock'; axis.dispatchEvent(new Event('change')); })()""")
        zoomed = "document.querySelector('rect.zoomed').getAttribute('width')"
        assert page.evaluate(zoomed) == "0"
        wait_for(page, f"!{words}.includes('in this part')")
        x, y, width, height = page.evaluate(OVER)
        page.drag((x + width * 0.2, y + 9), (x + width * 0.7, y + 9))
        wait_for(page, f"parseFloat({zoomed}) > 30")


def test_a_click_on_a_line_opens_its_run(cli: Cli, chromium: Browser) -> None:
    ids = train(cli, "0.1", "0.4")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/compare?runs={','.join(ids)}")
        wait_for(page, f"location.pathname === '/compare' && {CHARTS} === 2")
        links = "[...document.querySelectorAll('.legend a')].map(a => a.pathname)"
        assert page.evaluate(links) == [f"/run/{each}" for each in ids]
        # The loss of the second begins highest, in the corner of its chart.
        over = OVER.replace("#curves", ".curve[data-name=loss]")
        x, y, *_ = page.evaluate(over)
        top = "document.querySelector('.curve[data-name=loss]').classList.contains('pointed')"
        for away in range(2, 60, 2):
            page.move(x + 3, y + away)
            if page.evaluate(top):
                break
        page.press(x + 3, y + away)
        wait_for(page, f"location.pathname === '/run/{ids[1]}'")


@pytest.mark.journey
def test_a_person_compares_two_runs_of_the_list(cli: Cli, chromium: Browser) -> None:
    first, second = train(cli, "0.1", "0.2")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        for job_id in (first, second):
            page.click(f"#runs tr[data-id='{job_id}'] td:nth-child(3)")
        wait_for(page, "document.querySelector('#actions a')?.textContent === 'Compare 2 runs'")
        page.click("#actions a")
        wait_for(page, f"location.pathname === '/compare' && {CHARTS} === 2")
        row = "document.querySelector('#differences tr[data-name=lr]').innerText"
        assert page.evaluate(row).split() == ["lr", "0.1", "0.2"]
        wait_for(page, "document.querySelector('#results').innerText.includes('loss')")
        wait_for(page, "document.body.innerText.includes('The code is the same.')")
        # A run is left out of the curves by its name.
        page.click(".legend input")
        wait_for(page, "document.querySelector('.curve .small').textContent.includes('last ')")


def test_plots_of_many_runs_by_mouse_and_by_keyboard(cli: Cli, chromium: Browser) -> None:
    ids = train(cli, "0.1", "0.2", "0.4")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.go(f"{dashboard.base}/compare?runs={','.join(ids)}")
        count = "document.querySelector('#parallel [role=status]').textContent"
        wait_for(page, f"location.pathname === '/compare' && {CHARTS} === 2")
        # The values have the metrics once the logs have been read.
        wait_for(page, "document.querySelector('#values thead').innerText.includes('loss')")
        rows = "[...document.querySelectorAll('#values tbody tr')].filter(r => !r.hidden).length"
        assert (page.evaluate(count), page.evaluate(rows)) == ("3 runs", 3)
        # Drag along the first axis, lr, over its upper half; then a click on it shows all.
        place = (
            "(() => { const found = document.querySelector('#parallel canvas');"
            " found.scrollIntoView({block: 'center'}); const box = found.getBoundingClientRect();"
            " return [box.x, box.y]; })()"
        )
        x, y = page.evaluate(place)
        page.drag((x + 64, y + 40), (x + 64, y + 150))
        wait_for(page, f"{count} === '1 of 3 runs' && {rows} === 1")
        page.press(x + 64, y + 60)
        wait_for(page, f"{count} === '3 runs'")
        # The same by typing a range.
        page.evaluate("document.querySelector('#parallel details').open = true")
        page.click("#parallel input[aria-label='At most: lr']")
        page.type("0.3")
        page.evaluate("document.activeElement.blur()")
        wait_for(page, f"{count} === '2 of 3 runs' && {rows} === 2")
        assert "Compare only these 2 runs" in page.evaluate("document.body.innerText")
        # By keyboard: from point to point, and to the page of a run.
        page.evaluate("document.querySelector('#scatter .frame').focus()")
        page.key("End")
        wait_for(page, "document.querySelector('#scatter p.unseen').textContent.includes('0.4')")
        page.key("Enter")
        wait_for(page, f"location.pathname === '/run/{ids[2]}'")


def test_a_comparison_fits_a_narrow_window(cli: Cli, chromium: Browser) -> None:
    ids = train(cli, "0.1", "0.2")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium, 400)
        page.go(f"{dashboard.base}/compare?runs={','.join(ids)}")
        wait_for(page, f"location.pathname === '/compare' && {CHARTS} === 2")
        wait_for(page, "document.querySelector('#results table')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
