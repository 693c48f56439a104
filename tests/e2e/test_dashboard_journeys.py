"""A person who knows no command finds out why a run failed, and starts it again corrected."""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.test_dashboard_act import OPEN, fill, open_run
from tests.support.browser import Browser, Page, browser
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import running, wait_for

RESOURCES = '\n[resources]\nvcpus = 1\nmemory = "128 MiB"\n'
EXAMPLES = Path(__file__).parents[1] / "dashboard" / "search.json"
WHY = "document.querySelector('[data-panel$=explanation]')"
STATE = "document.querySelector('[data-panel$=state]')"


def fail(cli: Cli, name: str, command: str, params: str = "", **files: str) -> str:
    """A run of a job that fails: its job id."""
    text = f'image = "python"\ncommand = {command}\n[params]\n{params}{RESOURCES}'
    write_job(cli.folder, name, text, **files)
    assert cli("submit", "--wait", name).code != 0
    return str(cli("ls", "--json").json[0]["jobId"])


def repair(page: Page, job: str, verdict: str, label: str, **fields: str) -> str:
    """Read why a run failed, press the button below that, change fields; how the next run ends."""
    open_run(page, job)
    wait_for(page, f"{WHY}?.innerText.includes({verdict!r})")
    button = f"{WHY}.querySelector('.open-action')"
    wait_for(page, f"{button}?.checkVisibility() && {button}.textContent === {label!r}")
    page.evaluate(f"{button}.click()")
    # The price stands there before anything is sent.
    wait_for(page, f"{OPEN}?.querySelector('[data-preview]').textContent")
    assert page.evaluate("document.activeElement.matches('[data-first], [name]')")
    for name, value in fields.items():
        fill(page, name, value, "dialog[open]")
    page.evaluate(f"{OPEN}.querySelector('[type=submit]').click()")
    wait_for(page, f"location.pathname.startsWith('/run/') && location.pathname !== '/run/{job}'")
    wait_for(page, f"{STATE}?.innerText.match(/SUCCEEDED|FAILED|CANCELLED/)")
    return str(page.evaluate(f"{STATE}.innerText.match(/SUCCEEDED|FAILED|CANCELLED/)[0]"))


@pytest.mark.journey
def test_who_knows_no_command_starts_failed_runs_again_corrected(
    cli: Cli, chromium: Browser
) -> None:
    check = "import sys\nif sys.argv[1] != 'sgd': raise ValueError(f'unknown: {sys.argv[1]!r}')\n"
    wrong = fail(cli, "wrong", '["python", "train.py", "{optimizer}"]', 'optimizer = "sdg"\n',
                 train__py=check)  # fmt: skip
    misspelt = fail(cli, "misspelt", '["pyhton", "train.py"]', train__py="print(1)\n")
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        ended = repair(page, wrong, "unknown: 'sdg'", "Run again with another optimizer",
                       optimizer="sgd")  # fmt: skip
        assert ended == "SUCCEEDED"
        ended = repair(page, misspelt, "There is no command pyhton",
                       "Submit it with the command python train.py")  # fmt: skip
        assert ended == "SUCCEEDED"


def test_memory_modules_and_code_are_corrected_from_the_page(cli: Cli, chromium: Browser) -> None:
    killed = fail(cli, "killed", '["sh", "-c", "test -e $BATCHML_WORKSPACE/big || kill -9 $$"]')
    module = fail(cli, "module", '["python", "train.py"]', train__py="import not_there_at_all\n")
    broken = fail(cli, "broken", '["python", "train.py"]', train__py="def f(:\n")
    (cli.folder / "jobs" / "broken" / "train.py").write_text("print(1)\n")
    assert cli("submit", "--wait", "--", "sh", "-c", "touch $BATCHML_WORKSPACE/big").code == 0
    with running(cli) as dashboard:
        dashboard.expect("status of 400")  # a preview of what is not possible yet
        page = dashboard.enter(chromium)
        ended = repair(page, killed, "memory", "Run again with 256 MiB of memory")
        assert ended == "SUCCEEDED"
        ended = repair(page, broken, "SyntaxError", "Run again with the code as it is now")
        assert ended == "SUCCEEDED"
        # The form says at once what is still missing: a requirements.txt.
        open_run(page, module)
        label = "Submit it with the image made of the job's files"
        button = f"{WHY}.querySelector('.open-action')"
        wait_for(page, f"{button}?.checkVisibility() && {button}.textContent === {label!r}")
        page.evaluate(f"{button}.click()")
        wait_for(page, f"{OPEN}?.querySelector('.problem').innerText.includes('requirements.txt')")
        assert "not_there_at_all" in page.evaluate(f"{WHY}.textContent")


def test_the_view_of_the_list_survives_the_visit_of_a_run(cli: Cli, chromium: Browser) -> None:
    for name, rate in (("first", "0.1"), ("second", "0.2"), ("third", "0.2")):
        assert cli("submit", "--wait", "--name", name, "-p", f"lr={rate}", "--", "true").code == 0
    names = "[...document.querySelectorAll('#runs tbody a')].map(a => a.textContent).join()"
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        # The server and the page split a search in the same way.
        examples = json.loads(EXAMPLES.read_text())
        for text, words in examples:
            assert page.evaluate(f"batchml.searchWords({json.dumps(text)})") == words
        page.go(f"{dashboard.base}/?cols=name,lr,status&sort=name:desc")
        wait_for(page, f"{names} === 'third,second,first'")
        page.click("#search")
        page.type("lr=0.2")
        wait_for(page, f"{names} === 'third,second'")
        view = page.evaluate("location.search")
        page.click("#runs tbody a")
        wait_for(page, "location.pathname.startsWith('/run/') && document.querySelector('#log')")
        page.back()
        wait_for(page, f"location.pathname === '/' && {names} === 'third,second'")
        heads = "[...document.querySelectorAll('#runs th')].map(th => th.textContent)"
        assert page.evaluate(heads) == ["Name", "lr", "Status"]
        page.click("#runs tbody a")
        wait_for(page, "location.pathname.startsWith('/run/') && document.querySelector('#log')")
        wait_for(page, f"document.querySelector('nav a').search === {view!r}")
        page.click("nav a")
        wait_for(page, f"location.pathname === '/' && {names} === 'third,second'")
        assert page.evaluate("location.search") == view
        page.click("nav a")
        wait_for(page, f"location.search === '' && {names} === 'third,second,first'")


def test_two_people_see_the_same_queue_and_what_the_other_does(
    cli: Cli, chromium: Browser, tmp_path: Path
) -> None:
    cpus = str(os.cpu_count())
    busy = ("--vcpus", cpus, "--memory", "64 MiB")
    holds = cli("submit", "--json", "--name", "holds", *busy, "--", "sleep", "600").json["jobId"]
    jobs = [cli("submit", "--json", "--name", f"waits-{number}", *busy, "--", "true").json["jobId"]
            for number in range(3)]  # fmt: skip
    with running(cli) as dashboard, browser(tmp_path / "other") as other:
        mine = dashboard.enter(chromium)
        theirs = dashboard.enter(other, link=dashboard.plain_link)
        for page in (mine, theirs):
            open_run(page, jobs[2])
            wait_for(page, f"{STATE}?.innerText.includes('3 of 3 in the queue')")
            text = page.evaluate(f"{STATE}.innerText")
            assert "1. waits-0" in text and "2. waits-1" in text and "Waits because" in text
        # The other person cancels the first of the queue; this page learns of it by itself.
        said = theirs.evaluate(f"batchml.act('/act/cancel', {{run: {jobs[0]!r}}})")
        assert "stopping" in said["text"]
        wait_for(mine, f"{STATE}.innerText.includes('2 of 2 in the queue')")
        for page in (theirs, mine):  # both cancel the same run: the second is told
            said = page.evaluate(f"batchml.act('/act/cancel', {{run: {jobs[2]!r}}})")
        assert "stopping" in said["text"] or "ended already" in said["text"]
        wait_for(mine, f"{STATE}.innerText.includes('cancelled')")
        for job in (jobs[1], holds):
            assert cli("cancel", job).code == 0
