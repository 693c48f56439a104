"""The numbers of the children of a partial rerun of an array.

AWS Batch numbers the children of each array from 0. After a partial rerun people go on to use the
numbers of the first array; only this module converts between the two.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from batchml.runs.rerun.rules import first_id, first_numbers
from batchml.runs.watch.events import RunEvent, WaitingProgress
from batchml.runs.watch.logs import Printed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from batchml.context import Context
    from batchml.model.run import Run

_NAMED = re.compile(r"^(Child |\[)(\d+)\b")  # how a message about a child begins


class Numbering:
    """The numbers of one run's children, from the history or from what AWS Batch returns."""

    def __init__(self, first: "Sequence[int]" = ()) -> None:
        self._first = tuple(first)

    def learn(self, run: "Run | None") -> None:
        if run is not None and not self._first:
            self._first = first_numbers(run, None)

    def named(self, child: str) -> str:
        """`"4"` for `"1"`, and `"4/2"` for `"1/2"`, where the second child was number 4."""
        index, slash, attempt = child.partition("/")
        return f"{self._number(index)}{slash}{attempt}" if index else ""

    def renumber(self, happenings: "Iterable[RunEvent]") -> Iterator[RunEvent]:
        """The same events, each child under its first number."""
        for each in happenings:
            if not self._first:
                yield each
            elif isinstance(each, WaitingProgress):
                text = _NAMED.sub(lambda it: it[1] + self._number(it[2]), each.text)
                yield replace(each, text=text)
            else:
                yield self._renamed(each)

    def printed(self, parts: "Iterable[Printed]") -> Iterator[Printed]:
        """The same output, each child under its first number."""
        for part in parts:
            yield self._renamed(part) if self._first else part

    def _renamed(self, what: Any) -> Any:
        child = getattr(what, "child", "")
        return replace(what, child=self.named(child)) if child else what

    def _number(self, index: str) -> str:
        at = int(index)
        return str(self._first[at]) if at < len(self._first) else index


def numbering(context: "Context", job_id: str, run: "Run | None" = None) -> Numbering:
    """The numbering of a run of this machine, or of `run`; for others AWS Batch is asked."""
    known = context.history.recent(context.env)
    record = next((each for each in known if each.job_id == job_id), None)
    return Numbering(first_numbers(run, record))


def typed(context: "Context", job_id: str) -> str:
    """The id of a child as `select` takes it: with its first number, if it has one."""
    record = context.history.remembered(context.env).get(job_id.partition(":")[0])
    return first_id(job_id, first_numbers(None, record))
