"""Open a URL with a token in the user's browser."""

import html
import json
import webbrowser
from typing import TYPE_CHECKING

from batchml.cli.output import say
from batchml.runtime.storage.files import write_atomically

if TYPE_CHECKING:
    from batchml.context import Context


def open_browser(context: "Context", url: str, title: str) -> None:
    """Open a local page that leads to `url`: every user can read the browser's arguments."""
    path = context.home.root / f"{title.lower()}.html"
    write_atomically(str(path), redirect_page(url, title))
    if not webbrowser.open(path.as_uri()):
        say("No browser was found on this machine. Open the URL by hand.")


def redirect_page(url: str, title: str) -> bytes:
    return (
        f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title>'
        f"<script>location.replace({json.dumps(url)})</script>"
        f'<a href="{html.escape(url)}">{title}</a>\n'
    ).encode()
