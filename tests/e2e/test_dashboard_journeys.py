"""A person who knows no command finds out why a run failed, and starts it again corrected."""

from collections.abc import Iterator

import pytest

from tests.e2e.test_dashboard_act import OPEN, fill, open_run
from tests.support.browser import Browser, Page, browser
from tests.support.cli import Cli, write_job
from tests.support.dashboard_rig import running, wait_for

RESOURCES = '\n[resources]\nvcpus = 1\nmemory = "128 MiB"\n'
WHY = "document.querySelector('[data-panel$=explanation]')"
STATE = "document.querySelector('[data-panel$=state]')"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


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
    wait_for(page, f"{STATE}?.innerText.match(/SUCCEEDED|FAILED/)")
    return str(page.evaluate(f"{STATE}.innerText.match(/SUCCEEDED|FAILED/)[0]"))


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
