"""The children of an array that was run again in part, by the numbers that people know.

AWS Batch numbers the children of each array from 0. Where only some of an array run again, people
go on to call them by their first numbers; only here the two are told apart.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchml.ops.rerun import first_id, first_numbers
from batchml.ops.watch import Happening, Printed, Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchml.client.place import Place
    from batchml.model.run import Run

_NAMED = re.compile(r"^(Child |\[)(\d+)\b")  # how what is told of a child begins


class Numbering:
    """Of one run. It is learnt from what is kept of the run here, or from what AWS tells of it."""

    def __init__(self, first: "Sequence[int]" = ()) -> None:
        self._first = tuple(first)

    def learn(self, run: "Run | None") -> None:
        if run is not None and not self._first:
            self._first = first_numbers(run, None)

    def named(self, child: str) -> str:
        """`"4"` for `"1"`, and `"4/2"` for `"1/2"`, where the second child was number 4."""
        index, slash, attempt = child.partition("/")
        return f"{self._number(index)}{slash}{attempt}" if index else ""

    def told(self, happenings: "Iterable[Happening]") -> Iterator[Happening]:
        """The same, each child under its number."""
        for each in happenings:
            if not self._first:
                yield each
            elif isinstance(each, Progress):
                text = _NAMED.sub(lambda it: it[1] + self._number(it[2]), each.text)
                yield replace(each, text=text)
            else:
                yield self._renamed(each)

    def printed(self, parts: "Iterable[Printed]") -> Iterator[Printed]:
        """The same, each child under its number."""
        for part in parts:
            yield self._renamed(part) if self._first else part

    def _renamed(self, what: Any) -> Any:
        child = getattr(what, "child", "")
        return replace(what, child=self.named(child)) if child else what

    def _number(self, index: str) -> str:
        at = int(index)
        return str(self._first[at]) if at < len(self._first) else index


def numbering(place: "Place", job_id: str, run: "Run | None" = None) -> Numbering:
    """That of a run of this machine, or of `run`; for others it is learnt from what AWS tells."""
    known = place.history.recent(place.env)
    record = next((each for each in known if each.job_id == job_id), None)
    return Numbering(first_numbers(run, record))


def typed(place: "Place", job_id: str) -> str:
    """The id of a child as `select` takes it: with its first number, where it has one."""
    record = place.history.remembered(place.env).get(job_id.partition(":")[0])
    return first_id(job_id, first_numbers(None, record))
