"""Build HTML from Python values: every text is escaped, so no run can put markup into a page."""

from collections.abc import Iterable
from html import escape

from msgspec import Struct

_VOID = frozenset(("br", "col", "hr", "img", "input", "link", "meta"))


class Html(Struct, frozen=True):
    """Markup. Only `tag`, `text` and `join` make it, from escaped texts."""

    source: str

    def __str__(self) -> str:
        return self.source


Child = Html | str | int | float | None
Attribute = str | int | bool | None


def visible(text: str) -> str:
    """The text with a mark for each character that would be invisible or reorder other text."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or char.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def text(value: object) -> Html:
    """A text as markup."""
    return Html(escape(visible(str(value))))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element. `class_` is the attribute `class`, `data_id` is `data-id`.

    None and False leave an attribute out, True gives it no value.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        parts.append(label if value is True else f'{label}="{text(value)}"')
    opening = f"<{' '.join(parts)}>"
    if name in _VOID:
        return Html(opening)
    return Html(f"{opening}{join(children)}</{name}>")


def join(children: Iterable[Child], between: str = "") -> Html:
    """Several children one after the other."""
    found = (
        each if isinstance(each, Html) else text(each) for each in children if each is not None
    )
    return Html(str(text(between)).join(each.source for each in found))
