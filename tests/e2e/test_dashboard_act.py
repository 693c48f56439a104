"""Acting from the dashboard's pages, in a real browser."""

import pytest

from tests.support.browser import Browser, Page
from tests.support.cli import Cli
from tests.support.dashboard_rig import running, wait_for

OPEN = "document.querySelector('dialog[open]')"


def press(page: Page, label: str, within: str = "main") -> None:
    """Click on the button with this label, once it can be seen."""
    found = (
        f"[...document.querySelectorAll('{within} button')].find(each => "
        f"each.textContent === {label!r} && each.checkVisibility() && !each.disabled)"
    )
    # In one step: a panel may be drawn anew between two.
    wait_for(page, f"(() => {{ const it = {found}; it?.click(); return it !== undefined; }})()")


def open_run(page: Page, job: str) -> None:
    page.evaluate(f"location.assign('/run/{job}')")
    wait_for(page, f"location.pathname === '/run/{job}' && document.querySelector('.open-action')")


def test_a_run_is_cancelled_after_a_confirmation_that_names_it_and_its_cost(
    cli: Cli, chromium: Browser
) -> None:
    job = cli("submit", "--json", "--name", "long", "--", "sleep", "600").json["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        open_run(page, job)
        press(page, "Cancel")
        wait_for(page, f"{OPEN}.innerText.includes('so far')")
        text = page.evaluate(f"{OPEN}.innerText")
        assert f"Cancel long {job[:8]}?" in text and f"batchml cancel {job[:8]}" in text
        assert page.evaluate("document.activeElement.textContent") == "Leave it"
        press(page, "Leave it")
        assert page.evaluate(OPEN) is None and cli("ls", "--json").json[0]["status"] != "FAILED"
        press(page, "Cancel")
        press(page, "Cancel the run")
        wait_for(page, "document.querySelector('#done').textContent.includes('is stopping')")
        wait_for(page, "document.querySelector('main').innerText.includes('cancelled')")
        wait_for(page, "![...document.querySelectorAll('.open-action')].some(each => "
                       "each.textContent === 'Cancel')")  # fmt: skip


def test_read_only_shows_the_command_line_and_refuses(cli: Cli, chromium: Browser) -> None:
    job = cli("submit", "--json", "--name", "kept", "--", "sleep", "600").json["jobId"]
    with running(cli, "--read-only") as dashboard:
        dashboard.expect("status of 403")
        page = dashboard.enter(chromium)
        open_run(page, job)
        press(page, "Cancel")
        wait_for(page, f"{OPEN}.innerText.includes('batchml cancel')")
        assert "--read-only" in page.evaluate(f"{OPEN}.innerText")
        assert page.evaluate(f"{OPEN}.querySelector('[type=submit]').disabled")
        refusal = page.evaluate(
            f"batchml.act('/act/cancel', {{run: {job!r}}}).catch(error => error.message)"
        )
        assert "--read-only" in refusal
    assert cli("show", job, "--json").json["status"] != "FAILED"
    assert cli("cancel", job).code == 0


JOB = """\
image = "python"
command = ["sh", "-c", "echo lr is {lr}; test {lr} = 0.5"]
[params]
lr = 0.1
note = "plain"
"""


def fill(page: Page, name: str, value: str, within: str = "main") -> None:
    """Replace the text of a field, as typing does."""
    page.evaluate(
        f"(() => {{ const field = [...document.querySelectorAll('{within} [name={name}]')]"
        f".find(each => each.checkVisibility()); field.value = {value!r};"
        " field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


@pytest.mark.journey
def test_a_job_is_submitted_by_its_form_fails_and_runs_again_corrected(
    cli: Cli, chromium: Browser
) -> None:
    folder = cli.folder / "jobs" / "half"
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(JOB)
    with running(cli) as dashboard:
        dashboard.expect("status of 400")
        page = dashboard.enter(chromium)
        page.click("nav a[href='/submit']")
        wait_for(page, "document.querySelector('a[href=\"/submit/half\"]')")
        page.click("a[href='/submit/half']")
        command = "document.querySelector('form .command code').textContent"
        wait_for(page, f"{command} === 'batchml submit half'")
        wait_for(page, "document.querySelector('[data-preview]').innerText.includes('an hour')")
        fill(page, "lr", "abc")
        wait_for(page, "document.querySelector('[data-preview]').innerText.includes('a number')")
        fill(page, "lr", "0.2")
        fill(page, "note", "it's")
        assert page.evaluate(command) == """batchml submit half -p lr=0.2 -p 'note=it'"'"'s'"""
        wait_for(page, "document.querySelector('[data-preview]').innerText.includes('an hour')")
        press(page, "Submit")
        wait_for(page, "location.pathname.startsWith('/run/')")
        wait_for(page, "document.querySelector('#log').textContent.includes('lr is 0.2')")
        press(page, "Run again")
        wait_for(page, f"{OPEN}.innerText.includes('an hour')")
        fill(page, "lr", "0.5", "dialog[open]")
        before = page.evaluate("location.pathname")
        assert "-p lr=0.5" in page.evaluate(f"{OPEN}.querySelector('.command code').textContent")
        press(page, "Submit", "dialog[open]")
        wait_for(page, f"location.pathname !== '{before}'")
        wait_for(page, "document.querySelector('main').innerText.includes('succeeded')")
    newest = cli("ls", "--json").json
    assert [each["params"]["note"] for each in newest] == ["it's"] * 2
    assert [each["params"]["lr"] for each in newest] == [0.5, 0.2]


def test_a_command_that_the_program_refused_is_corrected_on_the_page(
    cli: Cli, chromium: Browser
) -> None:
    check = 'test "$1" = 0.1 || { echo "sh: error: argument --lr: no number: \'$1\'"; exit 2; }'
    job = cli("submit", "--json", "--", "sh", "-c", check, "--lr", "O.1").json["jobId"]
    assert cli("wait", job).code == 2
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        open_run(page, job)
        press(page, "Run again corrected")
        chosen = "(it => it.value.slice(it.selectionStart, it.selectionEnd))"
        wait_for(page, f"document.activeElement.name === 'command' && {OPEN}")
        assert page.evaluate(f"{chosen}(document.activeElement)") == "O.1"
        page.evaluate("document.execCommand('insertText', false, '0.1')")
        shown = page.evaluate(f"{OPEN}.querySelector('.command code').textContent")
        assert shown.startswith(f"batchml rerun {job[:8]} -- sh -c ") and shown.endswith(" 0.1")
        press(page, "Submit", "dialog[open]")
        wait_for(page, f"location.pathname !== '/run/{job}'")
        wait_for(page, "document.querySelector('main').innerText.includes('succeeded')")
        press(page, "Run again")
        wait_for(page, f"{OPEN}.innerText.includes('an hour')")


def test_the_repair_that_explain_recommends_is_a_button(cli: Cli, chromium: Browser) -> None:
    assert cli("submit", "--wait", "--name", "big", "--", "sh", "-c", "kill -9 $$").code == 137
    job = cli("ls", "--json").json[0]["jobId"]
    with running(cli) as dashboard:
        page = dashboard.enter(chromium)
        open_run(page, job)
        button = (
            "[...document.querySelectorAll('.open-action')].find(each => "
            "each.textContent.endsWith(' of memory'))"
        )
        wait_for(page, button)
        page.evaluate(f"{button}.click()")
        wait_for(page, f"{OPEN}.querySelector('.command code').textContent.includes('--memory')")
        page.evaluate(f"{OPEN}.querySelector('[type=submit]').click()")
        wait_for(
            page, f"location.pathname.startsWith('/run/') && !location.pathname.endsWith('{job}')"
        )
    first, again = (cli("show", each["jobId"], "--json").json["resources"]["memory"]
                    for each in reversed(cli("ls", "--json").json))  # fmt: skip
    assert again > first


def test_no_path_of_a_request_reaches_the_file_system(cli: Cli, chromium: Browser) -> None:
    folder = cli.folder / "hidden" / "deep"
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(JOB)
    with running(cli) as dashboard:
        dashboard.expect("status of 404", "status of 400")
        page = dashboard.enter(chromium)
        for name in (str(folder), "hidden/deep", "../" + cli.folder.name + "/hidden/deep", ""):
            said = page.evaluate(
                f"batchml.act('/act/submit', {{job: {name!r}}}).catch(error => error.message)"
            )
            assert "does not exist" in said or "missing" in said, said
        said = page.evaluate(
            "batchml.act('/act/submit', {job: 'lenet', image: '/tmp'})"
            ".catch(error => error.message)"
        )
        assert "give the name of an image" in said
    assert cli("ls", "--json").json == []


WRITES = """\
cd "$BATCHML_OUTPUT_DIR"; mkdir -p sub; printf '<script>alert(1)</script>' > 'sub/a"b.html'
ln -s /etc/passwd link; echo 'batchml: this host (i-1) is unfit: GPU 3; another one is tried'
"""


def test_outputs_are_downloaded_as_attachments_and_code_is_shown(
    cli: Cli, chromium: Browser
) -> None:
    (cli.folder / "train.sh").write_text("echo '<b>hello</b>'\n")
    assert cli("submit", "--wait", "--name", "writer", "--", "sh", "-c", WRITES).code == 0
    job = cli("ls", "--json").json[0]["jobId"]
    with running(cli) as dashboard:
        dashboard.expect("status of 404")
        page = dashboard.enter(chromium)
        page.evaluate(f"location.assign('/run/{job}')")
        link = "document.querySelector('[data-panel$=outputs] a')"
        wait_for(page, f"location.pathname === '/run/{job}' && {link}")
        assert page.evaluate("document.querySelectorAll('[data-panel$=outputs] a').length") == 1
        assert page.evaluate(f"{link}.textContent") == 'sub/a"b.html'
        kind, where, text = page.evaluate(
            f"fetch({link}.href).then(async answer => [answer.headers.get('content-type'),"
            " answer.headers.get('content-disposition'), await answer.text()])"
        )
        assert kind == "application/octet-stream" and text == "<script>alert(1)</script>"
        assert where.startswith('attachment; filename="a_b.html"')
        for name in ("link", "..%2F..%2Fetc%2Fpasswd", "sub%2Fa%22b.html"):
            status = f"fetch('/run/{job}/output/{name}').then(answer => answer.status)"
            assert page.evaluate(status) == 404
        wait_for(page, "document.querySelector('[data-panel$=timeline] svg rect.succeeded')")
        mark = "document.querySelector('[data-panel$=timeline] svg circle.unfit title').textContent"
        assert "GPU 3" in page.evaluate(mark)
        wait_for(page, "document.querySelector('[data-panel$=\"/code\"] a')")
        page.evaluate(
            "[...document.querySelectorAll('[data-panel$=\"/code\"] a')]"
            ".find(each => each.textContent === 'train.sh').click()"
        )
        wait_for(page, "document.querySelector('pre.code')?.textContent.includes('<b>hello</b>')")
