"""Curves of the dashboard, in a real browser, by mouse and by keyboard."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser
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


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


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
            page.evaluate(
                "document.activeElement.dispatchEvent(new KeyboardEvent('keydown',"
                f" {{key: '{key}', bubbles: true}}))"
            )
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
        assert page.evaluate("violations") == [] and page.complaints == []
