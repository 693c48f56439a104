"""Copying markup that `html.tag` made, tag by tag, with changes. Pure."""

from html.parser import HTMLParser

VOID = frozenset(("br", "col", "hr", "img", "input", "link", "meta"))  # elements without an end


class MarkupCopier(HTMLParser):
    """Copies texts into `made`, but nothing of an element that is skipped.

    Subclasses copy tags. Every tag but a void one has an end.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.made: list[str] = []
        self.skipped = 0  # depth of open tags within an element whose content is left out

    def copied(self, source: str) -> str:
        self.feed(source)
        self.close()
        return "".join(self.made)

    def handle_data(self, data: str) -> None:
        self.copy(data)

    def handle_entityref(self, name: str) -> None:
        self.copy(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.copy(f"&#{name};")

    def copy(self, text: str) -> None:
        if not self.skipped:
            self.made.append(text)
