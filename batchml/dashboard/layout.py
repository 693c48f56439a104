"""The frame of every page, and the scripts and styles that pages name."""

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

from batchml.dashboard.html import Child, Html, join, tag
from batchml.errors import NotFound
from batchml.sweeps.report.page import plot_sources

_FOLDER = Path(__file__).parent / "static"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
PAGES = (
    ("Runs", "/"),
    ("Sweeps", "/sweeps"),
    ("Compare", "/compare"),
    ("Cluster", "/cluster"),
    ("Cost", "/cost"),
    ("Submit", "/submit"),
)
SCRIPTS = ("theme.js", "app.js")
STYLES = ("page.css",)


@cache
def static_files() -> dict[str, tuple[str, bytes]]:
    """Name with digest -> media type and content: `app.1a2b3c4d5e6f.js`. A changed file is new."""
    paths = sorted((*_FOLDER.iterdir(), *(_FOLDER / "vendor").iterdir()))
    contents = {path.name: path.read_bytes() for path in paths if path.suffix in _KINDS}
    found = {}
    for name, content in {**contents, **_plots()}.items():
        stem, _, suffix = name.rpartition(".")
        digest = hashlib.sha256(content).hexdigest()[:12]
        found[f"{stem}.{digest}.{suffix}"] = (_KINDS[f".{suffix}"], content)
    return found


def _plots() -> dict[str, bytes]:
    """The plots of the sweep report, as the function `batchml.sweepPlots` of a page."""
    style, script = plot_sources()
    names = "history, curves, parallel, slices, timeline, cost, pareto"
    function = f"(D, GRID, KEPT) => {{\n{script}return {{{names}}};\n}}"
    text = f'"use strict";\nbatchml.sweepPlots = {function};\n'
    return {"sweep_plots.css": style.encode(), "sweep_plots.js": text.encode()}


def static_file(name: str) -> tuple[str, bytes]:
    """The media type and the content of a file by its name with digest. Raises NotFound."""
    found = static_files().get(name)
    if found is None:
        raise NotFound("File", name, [], "")
    return found


@cache
def static_name(name: str) -> str:
    """`app.js` -> `/static/app.1a2b3c4d5e6f.js`."""
    stem, _, suffix = name.rpartition(".")
    for each in static_files():
        if (
            each.startswith(f"{stem}.")
            and each.endswith(f".{suffix}")
            and (len(each) == len(name) + 13)
        ):
            return f"/static/{each}"
    raise NotFound("File", name, [], "")


def page(
    title: str,
    *content: Child,
    env: str = "",
    current: str = "",
    view: str = "",
    scripts: tuple[str, ...] = SCRIPTS,
    styles: tuple[str, ...] = STYLES,
) -> Html:
    """A page. `current`: the path of its entry in the navigation; `view`: its name for scripts."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - batchml"),
        tag("link", rel="icon", href="data:,"),
        *(tag("link", rel="stylesheet", href=static_name(each)) for each in styles),
        *(tag("script", src=static_name(each), defer=each != "theme.js") for each in scripts),
    )
    links = (
        tag("a", name, href=path, aria_current="page" if path == current else None)
        for name, path in PAGES
    )
    header = tag(
        "header",
        tag("a", "Skip to the content", class_="skip", href="#content"),
        tag("a", "batchml", class_="brand", href="/"),
        tag("nav", *links, aria_label="Pages"),
        tag("span", env, class_="env", title="Environment"),
        tag("span", "", id="connection", role="status"),
        tag("button", "Theme", id="theme", type="button", title="Light, dark or as the system"),
    )
    body = tag(
        "body", header, tag("main", *content, id="content", tabindex="-1"), data_view=view or None
    )
    return Html(f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}")


# --- Browsers without scripts, such as those of terminals -----------------------------------------

WHOLE = "wait"  # the parameter of a page that waits for all of its parts
_EMPTY_PANEL = re.compile(r'(<div [^>]*?data-panel="([^"]+)"[^>]*>)(?=</div>)')
_MAIN = re.compile(r"<main [^>]*>")


def empty_panels(made: Html) -> list[str]:
    """The paths of the parts of a page that its script asks for."""
    return [unescape(found[1]) for found in _EMPTY_PANEL.findall(made.source)]


def fill_panels(made: Html, contents: Mapping[str, Html]) -> Html:
    """The page with these contents, by the paths of its empty parts."""

    def fill(found: "re.Match[str]") -> str:
        return found[1] + str(contents.get(unescape(found[2]), ""))

    return Html(_EMPTY_PANEL.sub(fill, made.source))


def offer_whole(made: Html, path: str, params: Mapping[str, str]) -> Html:
    """The page with a link, for browsers without scripts, to itself with all of its parts."""
    address = f"{path}?{urlencode({**params, WHOLE: '1'})}"
    link = tag("noscript", tag("p", tag("a", "Show all parts of this page", href=address)))
    return Html(_MAIN.sub(lambda found: f"{found[0]}{link}", made.source, count=1))


def error_page(text: str, *more: Child, script: str = "") -> Html:
    """A page with one sentence, for a request that is not answered."""
    scripts = ("theme.js", script) if script else ("theme.js",)
    return page("batchml", tag("h1", "batchml"), tag("p", text), *more, scripts=scripts)


def command_line(command: str, label: str = "The same in a terminal") -> Html:
    """A command with a button that copies it."""
    return tag(
        "div",
        tag("span", f"{label}:", class_="dim"),
        " ",
        tag("code", command),
        " ",
        tag("button", "Copy", type="button", class_="copy", data_copy=command),
        class_="command",
    )


def nothing() -> Html:
    """The content of a panel that has nothing to say: its card is not shown."""
    return tag("p", class_="nothing", hidden=True)


def facts(rows: list[tuple[str, Child]]) -> Html:
    """Names and values, one pair a line; pairs without a value are left out."""
    cells = (join((tag("dt", name), tag("dd", value))) for name, value in rows if value)
    return tag("dl", *cells)
