"""An array that was run again in part, explained by the first numbers of its children."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.diagnosis import Diagnosis
from batchml.ops.rerun import first_id, first_numbers
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from batchml.aws.session import Session
    from batchml.model.explanation import Explanation
    from batchml.model.record import Record
    from batchml.model.run import Run


class Renumbered(Diagnosis):
    """Tells the children of `whole` by their first numbers; their ids stay those of AWS Batch."""

    def __init__(self, session: "Session", whole: str, record: "Record | None") -> None:
        super().__init__(session)
        self._whole = whole
        self._first = first_numbers(None, record)

    def runs(self, job_ids: Sequence[str]) -> "tuple[Run, ...]":
        found = super().runs(job_ids)
        for run in found:
            if bare_id(run.job_id) == self._whole:
                self._first = self._first or first_numbers(run, None)
        return tuple(map(self._numbered, found))

    def children(self, array: "Run", status: str) -> "tuple[Run, ...]":
        return tuple(map(self._numbered, super().children(array, status)))

    def named(self, found: "Explanation") -> "Explanation":
        """With ids of children as people type them: `batchml logs ID:4`."""
        if not self._first:
            return found
        return replace(
            found,
            verdict=self._named(found.verdict),
            evidence=tuple(map(self._named, found.evidence)),
            fix=self._named(found.fix),
            command=self._named(found.command),
        )

    def _named(self, text: str) -> str:
        text = re.sub(
            rf"{re.escape(self._whole)}:\d+", lambda it: first_id(it[0], self._first), text
        )
        # "child 4 of 2" would be one of neither array
        return re.sub(r"^(child \d+) of \d+(?=$| stands)", r"\1", text)

    def _numbered(self, run: "Run") -> "Run":
        index = run.array_index
        if bare_id(run.job_id) != self._whole or index is None or index >= len(self._first):
            return run
        return replace(run, array_index=self._first[index])
