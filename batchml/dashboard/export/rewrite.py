"""Turn a page of the server into a file: panels are filled, links lead to other files. Pure.

What needs a server is left out: buttons that act, downloads, the choice of columns.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from msgspec import Struct

from batchml.dashboard.html import Html
from batchml.dashboard.markup import VOID, MarkupCopier

# Scripts and styles of the export only, and no connection: what a run printed can send nothing.
_POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file:; img-src 'self' data:; "
    "form-action 'none'; base-uri 'none'"
)
_OF_SERVER = ("data-panel", "data-live")
_CURVES = ("data-series", "data-lines")  # places that a script fills; it is filled for others, too

Attributes = dict[str, str | None]


class ExportedPages(Struct, frozen=True):
    """The files of the pages, by their paths: `/cost?since=30d` -> `cost-30d.html`."""

    files: Mapping[str, str]

    def address(self, href: str, root: str) -> str | None:
        """The address of a page from a file, of which `root` leads to the export's folder; None if
        the export does not have the page. `export.js` has the same rule."""
        whole, mark, fragment = href.partition("#")
        path, _, query = whole.partition("?")
        found = self.files.get(whole)
        if found is None and query and path in self.files and path not in ("/cost", "/cluster",
                                                                          "/compare"):  # fmt: skip
            found = f"{self.files[path]}?{query}"
        return None if found is None else f"{root}{found}{mark}{fragment}"


class PageFrame(Struct, frozen=True):
    """What a page is rewritten with.

    `path`: where the server has it. `fill`: the content of a panel or a place, by its path; None
    leaves the panel out, and the place as it is. `scripts`: files with data. `note`: for the head.
    """

    path: str
    root: str
    pages: ExportedPages
    fill: Callable[[str], Html | None]
    scripts: Sequence[str] = ()
    note: str = ""


def rewrite_page(source: str, frame: PageFrame) -> str:
    """The page, or a part of it, as it stands in its file."""
    return _Rewriter(frame).copied(source)


class _Rewriter(MarkupCopier):
    def __init__(self, frame: PageFrame) -> None:
        super().__init__()
        self._frame = frame
        self._keeps_end = False  # of that element

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skipped:
            self.skipped += name not in VOID
            return
        attributes, frame = dict(attrs), self._frame
        if _is_dropped(name, attributes):
            self._skip(name, keeps_end=False)
            return
        if "data-panel" in attributes:
            found = frame.fill(attributes["data-panel"] or "")
            if found is None:
                self._skip(name, keeps_end=False)
            else:
                self._fill(name, attributes, found)
            return
        for key in _CURVES:
            found = frame.fill(attributes.get(key) or "") if key in attributes else None
            if found is not None:
                self._fill(name, attributes, found)
                return
        if name == "span" and attributes.get("id") == "connection":
            self._fill(name, attributes, Html(escape(frame.note)))
            return
        changed = self._change(name, attributes)
        text = self.get_starttag_text() or ""
        self.made.append(_opening(name, changed) if changed != dict(attrs) else text)
        if name == "head":
            self.made.append(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')

    def handle_endtag(self, name: str) -> None:
        if self.skipped:
            self.skipped -= 1
            if self.skipped or not self._keeps_end:
                return
        elif name == "head":
            for each in self._frame.scripts:
                source = f"{self._frame.root}{each}"
                self.made.append(f'<script src="{escape(source)}" defer></script>')
        self.made.append(f"</{name}>")

    def _skip(self, name: str, *, keeps_end: bool) -> None:
        if name not in VOID:
            self.skipped, self._keeps_end = 1, keeps_end

    def _fill(self, name: str, attributes: Attributes, content: Html) -> None:
        kept = {key: value for key, value in attributes.items() if key not in _OF_SERVER}
        self.made.append(_opening(name, self._change(name, kept)))
        self.made.append(rewrite_page(content.source, self._frame))
        self._skip(name, keeps_end=True)

    def _change(self, name: str, given: Attributes) -> Attributes:
        attributes, frame = dict(given), self._frame
        if name == "body":
            attributes |= {"data-exported": None, "data-path": frame.path, "data-root": frame.root}
        if "data-series" in attributes:
            attributes["data-over"] = None  # nothing of it will change
        attributes.pop("style", None)  # of a plot that is made for notebooks, too
        if name == "form":
            attributes.pop("action", None)
        for key in ("href", "src"):
            value = attributes.get(key) or ""
            if value.startswith("/static/"):
                attributes[key] = f"{frame.root}{value[1:]}"
            elif value.startswith("/"):
                found = frame.pages.address(value, frame.root)
                attributes.pop("download", None)
                if found is None:
                    del attributes[key]
                else:
                    attributes[key] = found
        return attributes

    def handle_decl(self, decl: str) -> None:
        self.copy(f"<!{decl}>")


def _is_dropped(name: str, attributes: Attributes) -> bool:
    """Whether an element is of no use without a server."""
    href = attributes.get("href") or ""
    classes = (attributes.get("class") or "").split()
    if name == "a":
        return href == "/submit" or href.endswith("/log.txt") or "drop" in classes
    if name == "details":
        return attributes.get("id") == "columns"
    return "act" in classes


def _opening(name: str, attributes: Attributes) -> str:
    parts = [name, *(key if value is None else f'{key}="{escape(value)}"'
                     for key, value in attributes.items())]  # fmt: skip
    return f"<{' '.join(parts)}>"
