"""The page: the document, the script that draws it and its style in one HTML file.

Nothing is fetched and nothing may be: the content security policy allows this script, by its hash,
and no other. The document stands in the page as JSON; the script puts what is in it into the page
as text. `SOURCES` are put together in this order.
"""

import base64
import hashlib
import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from batchml.sweep.report.sheet import SHOWN, sheet
from batchml.sweep.report.subject import Subject
from batchml.sweep.state import SweepState

MOST = 2_000_000  # bytes of a page; one that is larger shows fewer trials one by one
SOURCES = ("draw.js", "plots.js", "page.js")

_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>
{style}</style>
<header></header>
{files}
<main class="grid"></main>
<noscript>The plots are drawn by a script in this file; it fetches nothing. \
Without it, the CSV and JSON files hold the same.</noscript>
<footer></footer>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</html>
"""


def page(subject: Subject, state: SweepState, now: float, files: tuple[str, ...] = ()) -> str:
    """The report as HTML, at most `MOST` bytes of it. `files` lie beside it and are linked to."""
    most = SHOWN
    while True:
        found = _page(subject, sheet(subject, state, now, most), files)
        if len(found.encode()) <= MOST or most <= 500:
            return found
        most //= 2


def _page(subject: Subject, document: dict[str, Any], files: tuple[str, ...]) -> str:
    style, script = _sources()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    links = " ".join(f'<a href="{escape(_link(name))}">{escape(name)}</a>' for name in files)
    return _PAGE.format(
        digest=digest,
        title=escape(f"{subject.name}: sweep"),
        style=style,
        files=f'<p class="files">{links}</p>' if links else "",
        data=to_script(document),
        script=script,
    )


def _link(name: str) -> str:
    from urllib.parse import quote

    return f"./{quote(name)}"


def to_script(document: object) -> str:
    """JSON that no text in it can end the script by: every `<` is written as an escape."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


@cache
def _sources() -> tuple[str, str]:
    """The style and the script, which sees none of the page's own names."""
    folder = Path(__file__).parent
    parts = "".join((folder / name).read_text("utf-8") for name in SOURCES)
    return (folder / "page.css").read_text("utf-8"), f'"use strict";(() => {{\n{parts}}})();\n'
