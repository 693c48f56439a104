"""Sweeps in the dashboard, in a real browser: found, followed while they train, and managed."""

import pytest

from tests.support.browser import Browser, Page
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import running, wait_for

JOB = """
image = "python"
command = ["python", "train.py", "{lr}", "{kind}"]
[params]
lr = 0.1
kind = "a"
[resources]
vcpus = 1
memory = "64 MiB"
[checkpoint]
grace = "2s"
"""
# Waits for a file before its second epoch, so that the test decides when a trial ends.
TRAIN = """
import os, sys, time
lr = float(sys.argv[1])
print(f"epoch=1 acc={1 - (lr - 0.3) ** 2}", flush=True)
while not os.path.exists(os.path.join(os.environ["BATCHML_WORKSPACE"], "go")):
    time.sleep(0.1)
print(f"epoch=2 acc={2 - (lr - 0.3) ** 2}", flush=True)
"""
SWEEP = """
name = "tiny"
job = "tiny"
goal = { max = "acc" }
method = "random"
[space]
lr = { float = [0.0, 1.0] }
kind = { choice = ["</script><img src=x onerror=alert(1)>", "b"] }
[limits]
trials = 4
parallel = 2
"""
STATES = """[...document.querySelectorAll('#trials tbody tr')].map(
    row => row.children[1].textContent.trim().split(' ').pop())"""

BUTTONS = "[...document.querySelectorAll('#sweep-actions .open-action')]"
LABELS = f"{BUTTONS}.map(b => b.textContent).join()"
ROW_STOP = "document.querySelector('#trials tbody .open-action')"
# Point at a line of the parallel coordinates, and click; in one step, as plots are drawn anew.
CLICK_LINE = """(() => { const line = document.querySelector('#parallel svg g path');
    for (const kind of ['pointerover', 'pointerdown', 'click'])
        line?.dispatchEvent(new PointerEvent(kind, {bubbles: true, clientX: 9, clientY: 9}));
    return Boolean(line); })()"""


def act(page: Page, label: str, **fields: str) -> None:
    """Press a button, which has the focus then and afterwards; fill its fields, and confirm."""
    button = f"{BUTTONS}.find(b => b.textContent === {label!r})"
    wait_for(page, f"{button} && !{button}.hidden")
    page.evaluate(f"{{ const button = {button}; button.focus(); button.click(); }}")
    wait_for(page, "document.querySelector('dialog[open]')")
    for name, value in fields.items():
        page.evaluate(f"document.querySelector('dialog[open] [name={name}]').select()")
        page.type(value)
    page.evaluate("document.querySelector('dialog[open] [type=submit]').click()")
    wait_for(page, "!document.querySelector('dialog[open]')")


@pytest.mark.journey
def test_a_sweep_is_followed_stopped_resumed_and_topped_up(cli: Cli, chromium: Browser) -> None:
    write_job(cli.folder, "tiny", JOB, train__py=TRAIN)
    (cli.folder / "sweep.toml").write_text(SWEEP)
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        page.click("nav a[href='/sweeps']")
        wait_for(page, "location.pathname === '/sweeps' && document.body.innerText"
                       ".includes('batchml sweep sweep.toml')")  # fmt: skip
        assert cli("sweep", "--detach", "sweep.toml").code == 0
        wait_for(page, "document.querySelector('#sweeps').innerText.includes('running')")
        page.click("#sweeps tbody a")
        wait_for(page, f"{STATES}.filter(state => state === 'RUNNING').length === 2")
        wait_for(page, "document.querySelector('#summary .big').innerText.includes('trial')")
        assert page.evaluate("document.images.length") == 0
        # A trial's number leads to its run, with its log.
        page.click("#trials tbody a")
        wait_for(page, "document.querySelector('#log')?.textContent.includes('epoch=1')")
        page.back()
        wait_for(page, "document.querySelector('#trials tbody tr')")
        # One trial is stopped in the table; the sweep goes on with the next.
        wait_for(page, f"{ROW_STOP}?.checkVisibility()")
        page.evaluate(f"{ROW_STOP}.click()")
        wait_for(page, "document.querySelector('dialog[open]').innerText.includes('Stop trial')")
        page.evaluate("document.querySelector('dialog[open] [type=submit]').click()")
        wait_for(page, f"{STATES}.filter(state => state === 'KILLED').length === 1 && "
                       f"{STATES}.filter(state => state === 'RUNNING').length === 2")  # fmt: skip
        wait_for(page, "document.querySelector('#trials').innerText.includes('Cancelled in the')")
        # A click on a curve opens the run of its trial.
        wait_for(page, CLICK_LINE)
        wait_for(page, "location.pathname.startsWith('/run/')")
        page.back()
        wait_for(page, "document.querySelector('#trials tbody tr')")
        act(page, "Stop")
        wait_for(page, "document.querySelector('#summary .status').innerText.includes('ended')")
        assert page.evaluate(f"{STATES}.every(state => state === 'KILLED')")
        wait_for(page, f"{LABELS} === 'Resume,Top up,Confirm'")
        act(page, "Resume")
        wait_for(page, f"{LABELS} === 'Stop,Top up,Confirm'")
        go(cli)
        wait_for(page, f"{STATES}.join() === 'DONE,DONE,DONE,DONE'")
        wait_for(page, "document.querySelector('#summary .status').innerText.includes('all 4')")
        act(page, "Top up", trials="5")
        wait_for(page, f"{STATES}.join() === 'DONE,DONE,DONE,DONE,DONE'")
        act(page, "Confirm", top="1", seeds="1")
        wait_for(page, "document.querySelector('#summary').innerText.includes('over 2 runs')")


def go(cli: Cli) -> None:
    """Let the trials end."""
    (cli.home.root / "workspace" / "go").touch()
