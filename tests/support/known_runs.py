"""The runs that this machine submitted, as a list: what `HistoryNames` finds in the index."""

from collections.abc import Iterable, Iterator

from batchml.model.group import is_listed
from batchml.model.run import RunName


class KnownList:
    """Runs, the newest first."""

    def __init__(self, runs: Iterable[RunName]) -> None:
        self._runs = list(runs)

    def __iter__(self) -> Iterator[RunName]:
        return iter(self._runs)

    def named(self, word: str, project: str = "") -> list[RunName]:
        start = word.lower()
        return [
            each
            for each in self._runs
            if word in (each.key, each.name, each.job_name)
            or each.job_id.startswith(start)
            or each.moved.startswith(start)
        ]

    def newest(self, project: str, count: int) -> list[RunName]:
        found = [
            each
            for each in self._runs
            if is_listed(each)
            and (each.job_id or not each.refused)
            and project in ("", each.project)
        ]
        return found[:count]
