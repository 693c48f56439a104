"""Markup of the dashboard without its style sheet: classes become styles of the elements. Pure.

So nothing of it changes the rest of a notebook. Colours are read on white and on black: at least
3:1 on both (WCAG 2.2, 1.4.11), and each state has its glyph and its word, too.
"""

from html import escape

from batchml.dashboard.html import Html
from batchml.dashboard.markup import VOID, MarkupCopier

COLOURS = {
    "succeeded": "#1a8f84", "running": "#4a7dff", "failed": "#d9552b", "cancelled": "#a657c9",
    "starting": "#a8791f", "waiting": "#7d838c", "unknown": "#7d838c", "pruned": "#7d838c",
    "diverged": "#d0459b", "lost": "#a8791f", "warning": "#b3731a", "star": "#a8791f",
    "added": "#1a8f84", "removed": "#d9552b",
}  # fmt: skip
LINES = ("#4a7dff", "#d9552b", "#1a8f84", "#a657c9", "#a8791f", "#d0459b", "#8c6d4f", "#7d838c")
_STYLES = {
    "dim": "opacity:.75", "number": "text-align:right",
    "state": "font-weight:600;white-space:nowrap",
    "big": "font-size:1.15em;margin:2px 0", "best": "font-size:1.5em;font-weight:700",
    "chip": "border:1px solid #8886;border-radius:6px;display:inline-block;padding:0 6px",
    "share": "display:inline-block;height:9px;width:120px", "part": "opacity:.75",
    "unseen": "display:none", "within": "overflow-x:auto",
    "params": "display:grid;gap:2px 20px;grid-template-columns:repeat(auto-fill,minmax(180px,1fr))",
    "first": "font-weight:700",
}  # fmt: skip
_TAGS = {
    "table": "border-collapse:collapse;margin:4px 0", "th": "padding:2px 10px;text-align:left",
    "td": "padding:2px 10px;text-align:left", "p": "margin:4px 0",
    "dl": "display:grid;gap:1px 14px;grid-template-columns:max-content minmax(0,1fr);margin:4px 0",
    "dt": "opacity:.75", "dd": "margin:0", "caption": "text-align:left",
    "pre": "margin:2px 0;white-space:pre-wrap",
}  # fmt: skip
_DROPPED = frozenset(("button", "dialog", "form", "input", "nav", "noscript", "script", "select"))
_KEPT = frozenset((
    "colspan", "cx", "cy", "d", "datetime", "fill", "height", "open", "points",
    "preserveaspectratio",
    "r", "role", "aria-label", "aria-hidden", "rx", "scope", "stroke", "stroke-dasharray",
    "stroke-opacity", "stroke-width", "style", "text-anchor", "title", "font-size", "viewbox",
    "width", "x", "x1", "x2", "y", "y1", "y2",
))  # fmt: skip
_CASED = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}


def inline(source: Html) -> str:
    """The markup for a page that is not ours; what only the dashboard can do is left out."""
    return _Inliner().copied(source.source)


class _Inliner(MarkupCopier):
    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        classes = (given.get("class") or "").split()
        if self.skipped or name in _DROPPED or "act" in classes:
            self.skipped += name not in VOID
            return
        kept = {key: value for key, value in attrs if key in _KEPT}
        styles = [_TAGS.get(name, ""), *(_STYLES.get(each, "") for each in classes)]
        colour = next((COLOURS[each] for each in classes if each in COLOURS), "")
        if colour:
            styles.append(f"{'fill' if name in ('rect', 'circle') else 'color'}:{colour}")
        swatch = next((each for each in classes if len(each) == 2 and each[0] == "c"), "")
        if "swatch" in classes and swatch:
            styles.append("border-radius:2px;display:inline-block;height:10px;margin-right:6px;"
                          f"width:10px;background:{LINES[int(swatch[1]) - 1]}")  # fmt: skip
        style = ";".join(filter(None, (*styles, kept.pop("style", None))))
        if style:
            kept["style"] = style
        parts = [name if name != "a" else "span"]
        parts += [_CASED.get(key, key) if value is None
                  else f'{_CASED.get(key, key)}="{escape(value)}"'
                  for key, value in kept.items()]  # fmt: skip
        self.made.append(f"<{' '.join(parts)}>")

    def handle_endtag(self, name: str) -> None:
        if self.skipped:
            self.skipped -= 1
        else:
            self.made.append(f"</{name if name != 'a' else 'span'}>")
