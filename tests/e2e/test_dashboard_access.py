"""Everybody can use each page: readers, keyboards, narrow windows, terminals; no text is markup."""

from collections.abc import Iterator

import pytest
from msgspec import Struct

from batchml.local.home import Home
from tests.e2e.test_dashboard import TOO_WIDE
from tests.support.accessibility import inspect, poor_contrasts
from tests.support.browser import Browser, Page
from tests.support.cli import Cli
from tests.support.dashboard_rig import RunningDashboard, running, settle, wait_for
from tests.support.hostile_world import HOSTILE, HostileWorld, make_hostile_world

PAGES = {
    "runs": "/",
    "failed run": "/run/{failed}",
    "run": "/run/{passed}",
    "running run": "/run/{running}",
    "waiting run": "/run/{waiting}",
    "cancelled run": "/run/{cancelled}",
    "array": "/run/{array}",
    "child": "/run/{array}:0",
    "sweeps": "/sweeps",
    "sweep": "/sweep/{sweep}",
    "comparison": "/compare?runs={failed},{passed},{running}",
    "choice to compare": "/compare",
    "cluster": "/cluster",
    "costs": "/cost",
    "jobs": "/submit",
    "form": "/submit/hostile",
    "mistaken job": "/submit/mistaken",
    "page that is not there": "/no-such-page",
}
# Every part that a person can unfold, so that it is looked at, too.
UNFOLD = """for (const each of document.querySelectorAll("main details")) each.open = true;
for (const each of document.querySelectorAll("button[aria-expanded=false]")) each.click();"""


class Access(Struct):
    page: Page
    dashboard: RunningDashboard
    world: HostileWorld

    def go(self, name: str) -> Page:
        """The page of this name, with all of its panels."""
        path = PAGES[name].format(**{each: getattr(self.world, each)
                                     for each in self.world.__struct_fields__})  # fmt: skip
        self.page.resize(1400)
        self.page.go(self.dashboard.base + path)
        settle(self.page, path)
        return self.page


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    folder = tmp_path_factory.mktemp("access")
    home = Home(folder / "home")
    home.prepare()
    (folder / "work").mkdir()
    return Cli(folder / "work", home)


@pytest.fixture(scope="module")
def access(cli: Cli, session_browser: Browser) -> Iterator[Access]:
    world = make_hostile_world(cli)
    try:
        with running(cli) as dashboard:
            dashboard.expect("status of 400", "status of 404")
            yield Access(dashboard.enter(session_browser), dashboard, world)
        session_browser.close_pages()
    finally:
        cli("cancel", world.running)


@pytest.fixture(scope="module", params=PAGES)
def shown(access: Access, request: pytest.FixtureRequest) -> Page:
    """Each page, for all tests that ask something of each; everything on it is unfolded."""
    page = access.go(request.param)
    page.evaluate(UNFOLD)
    return page


# No colour depends on the width, and nothing but contrasts on the colours.
LOOKS = [(1400, "light", "all"), (1400, "dark", "contrast"), (400, "dark", "all but contrast")]


def found_by_axe(page: Page) -> Iterator[str]:
    """What is wrong in any width and in any colours."""
    for width, scheme, rules in LOOKS:
        page.resize(width)
        page.scheme(scheme)
        page.wait_for_frame()
        found = inspect(page, rules)
        for text in (*found.violations, *poor_contrasts(page, found)):
            yield f"{width} px, {scheme}: {text}"


def test_axe_finds_nothing_on_a_page(shown: Page) -> None:
    assert list(found_by_axe(shown)) == []


DIALOGS = "[...document.querySelectorAll('dialog')]"


@pytest.mark.parametrize("name", ["running run", "failed run", "sweep", "jobs"])
def test_axe_finds_nothing_in_a_confirmation(access: Access, name: str) -> None:
    page = access.go(name)
    count = page.evaluate(f"{DIALOGS}.length")
    assert count
    for number in range(count):
        page.evaluate(f"{DIALOGS}[{number}].closest('.act').querySelector('.open-action').click()")
        page.evaluate(
            f"{DIALOGS}[{number}].querySelectorAll('details').forEach(d => d.open = true)"
        )
        assert list(found_by_axe(page)) == [], number
        for width in (1400, 400):
            page.resize(width)
            assert too_wide(page) == [], (number, width)
        page.evaluate(f"{DIALOGS}[{number}].close()")


# What markup, a control character or a link of a run would leave in a document.
INJECTED = """(() => {
    const found = [];
    const bad = /[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u2028-\\u202e\\u2066-\\u2069]/;
    const own = /^([/#?]|data:,|http:\\/\\/(127\\.0\\.0\\.1|[^/]+\\.localhost)[:/])/;
    const links = ["href", "src", "action", "formaction", "xlink:href"];
    for (const each of document.querySelectorAll("*")) {
        const {localName} = each;
        for (const {name, value} of each.attributes) {
            const isStrange = links.includes(name) && !own.test(value);
            if (name.startsWith("on") || isStrange || bad.test(value))
                found.push(`${localName} ${name}=${JSON.stringify(value)}`);
        }
        const isScript = localName === "script" && !/^\\/static\\//.test(each.getAttribute("src"));
        if (isScript || ["img", "iframe", "object", "embed", "base"].includes(localName))
            found.push(each.outerHTML);
    }
    for (const text of [document.body.textContent, document.title])
        if (bad.test(text)) found.push(JSON.stringify(text.slice(text.search(bad)).slice(0, 40)));
    return found;
})()"""
SHOWN = "document.documentElement.outerHTML.includes('onerror=alert(1)')"


def test_hostile_texts_are_texts_on_a_page(shown: Page) -> None:
    assert shown.evaluate(INJECTED) == []
    if shown.evaluate("location.pathname + location.search") not in ("/compare", "/no-such-page"):
        assert shown.evaluate(SHOWN), "what attacks is there, as a text"
    assert "ended" not in shown.evaluate("document.querySelector('#connection').textContent")


def test_a_forged_event_in_a_new_run_is_no_event(access: Access, cli: Cli) -> None:
    page = access.go("runs")
    for name in ("forged", "next"):  # the second one: the stream goes on
        words = ("--name", name, "-p", f"word={HOSTILE}", "--vcpus", "1", "--memory", "64 MiB")
        assert cli("submit", *words, "--", "true").code == 0
        wait_for(page, f"[...document.querySelectorAll('#runs a')].some(a => a.text === '{name}')")
    assert page.evaluate("document.querySelector('#connection').textContent") == ""
    assert page.evaluate(INJECTED) == []


def test_a_page_has_no_sideways_scrolling(shown: Page) -> None:
    for width in (320, 400, 3840):
        shown.resize(width)
        assert too_wide(shown) == [], width


def too_wide(page: Page) -> list[str]:
    """The elements that reach out of the window, once pictures have followed its width."""
    found: list[str] = []
    for _ in range(50):
        found = page.evaluate(TOO_WIDE)
        if not found:
            break
        page.wait_for_frame()
    return found


SHIFTS = """window.shifts = []; new PerformanceObserver(list => {
    for (const each of list.getEntries()) shifts.push(each.value);
}).observe({type: "layout-shift", buffered: true});"""


def test_what_comes_later_moves_little_on_a_page(access: Access) -> None:
    access.page.run_first(SHIFTS)
    for name in ("runs", "run", "failed run", "waiting run", "cluster", "jobs"):
        page = access.go(name)
        # Web Vitals calls less than 0.1 good.
        assert page.evaluate("shifts.reduce((sum, each) => sum + each, 0)") < 0.1, name


def test_print_is_dark_on_white_and_whole(access: Access) -> None:
    page = access.go("run")
    page.media("print", prefers_color_scheme="dark")
    colours = "[getComputedStyle(document.body).color, getComputedStyle(document.body).background]"
    text, back = page.evaluate(colours)
    assert text == "rgb(27, 31, 36)" and back.startswith("rgb(255, 255, 255)")
    shown = "[...document.querySelectorAll('header, button')].some(e => e.checkVisibility())"
    assert not page.evaluate(shown)
    page.media()


def test_forced_colours_and_reduced_motion_are_obeyed(access: Access) -> None:
    for name in ("runs", "failed run", "cluster"):
        page = access.go(name)
        page.media(forced_colors="active", prefers_reduced_motion="reduce")
        assert page.evaluate("document.getAnimations().length") == 0
        assert poor_contrasts(page, inspect(page)) == []
        page.key("Tab")
        style = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(style) != "none", "the focus can be seen"
        page.media()
