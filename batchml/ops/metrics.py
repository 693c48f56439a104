"""Metrics read from what a program prints; the program need not know."""

import re
from collections.abc import Iterable, Iterator, Mapping

from batchml.ops.watch import Happening, Line

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Metrics:
    """The last value of each of `[metrics]` in a job.toml: name -> pattern with one group.

    `values` holds numbers; what a pattern matches that is no number is passed over.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self.values: dict[str, float] = {}

    def feed(self, line: str) -> None:
        """Read one line, as a terminal would show it: without colours."""
        plain = _ANSI.sub("", line)
        for name, pattern in self._patterns.items():
            for found in pattern.finditer(plain):
                try:
                    self.values[name] = float(found[1])
                except (TypeError, ValueError):
                    continue

    def watch(self, happenings: Iterable[Happening]) -> Iterator[Happening]:
        """Pass on what happens to a run, reading its lines on the way."""
        for happening in happenings:
            if isinstance(happening, Line):
                self.feed(happening.text)
            yield happening
