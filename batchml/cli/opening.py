"""A URL with a token, opened in the user's browser."""

import html
import json
from typing import TYPE_CHECKING

from batchml.cli.output import say

if TYPE_CHECKING:
    from batchml.client.place import Place


def open_browser(place: "Place", url: str, title: str) -> None:
    """Through a page that only the user can read: every user can read the browser's arguments."""
    import webbrowser

    from batchml.runtime.storage.files import write_atomically

    path = place.home.root / f"{title.lower()}.html"
    write_atomically(str(path), page(url, title))
    if not webbrowser.open(path.as_uri()):
        say("No browser was found on this machine. Open the URL by hand.")


def page(url: str, title: str) -> bytes:
    """A page that leads to `url`."""
    return (
        f'<!DOCTYPE html><meta charset="utf-8"><title>{title}</title>'
        f"<script>location.replace({json.dumps(url)})</script>"
        f'<a href="{html.escape(url)}">{title}</a>\n'
    ).encode()
