"""Which children of an array, or nodes, to ask about. Pure."""

from itertools import islice

from batchml.model.run import JobStatus, Run

_FEW = 99  # ids of one call, beside the run's own
_BEGUN = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.SUCCEEDED, JobStatus.FAILED)


class Family:
    """The parts of a run by number: `ID:3` of an array, `ID#3` of a multi-node run.

    Their ids are known, so nobody has to list them. While few are left, all are asked about.
    Of many, those that run are, and as long as the array counts more that have begun than were
    seen, the rest in turn.
    """

    def __init__(self, parent: Run) -> None:
        self.is_array = parent.array_size > 0
        self.size = parent.array_size or parent.nodes
        self._parent_id = parent.job_id
        self._active: dict[int, int] = {}  # number -> when it was asked about last, counted
        self._round = 0
        self._ended: set[int] = set()
        self._missed: dict[int, int] = {}  # how often in a row
        self._turn = 0

    def job_id(self, number: int) -> str:
        return f"{self._parent_id}{':' if self.is_array else '#'}{number}"

    def number(self, job_id: str) -> int:
        return int(job_id[len(self._parent_id) + 1 :])

    @property
    def all_ended(self) -> bool:
        return len(self._ended) == self.size

    def seen(self, number: int, run: Run) -> None:
        self._missed.pop(number, None)
        self._active.pop(number, None)
        if run.status.is_terminal:
            self._ended.add(number)
        elif run.status in _BEGUN:
            self._active[number] = self._round

    def missing(self, number: int, parent: Run) -> None:
        """Nothing is known of one: it never was, if its parent has ended and it stays away."""
        self._missed[number] = self._missed.get(number, 0) + 1
        if parent.status.is_terminal and self._missed[number] >= 2:
            self.leave(number)

    def leave(self, number: int) -> None:
        """Ask no more about one."""
        self._active.pop(number, None)
        self._ended.add(number)

    def chosen(self, parent: Run, most: int) -> list[int]:
        """Whom to ask about next; at most `most`, a multiple of a hundred."""
        if not self._has_begun(parent):
            return []
        self._round += 1
        if self.size - len(self._ended) <= _FEW:
            return [number for number in range(self.size) if number not in self._ended]
        by_age = sorted(self._active, key=lambda number: (self._active[number], number))
        chosen = by_age[: most // 2]
        if self._hidden(parent) > 0:
            chosen += self._others(most - len(chosen))
        return chosen

    def _others(self, most: int) -> list[int]:
        """The next ones of which nothing is known."""
        turn = (number % self.size for number in range(self._turn, self._turn + self.size))
        unknown = (n for n in turn if n not in self._ended and n not in self._active)
        found = list(islice(unknown, most))
        if found:
            self._turn = (found[-1] + 1) % self.size
        return found

    def _has_begun(self, parent: Run) -> bool:
        if self.is_array and not parent.status.is_terminal:
            return self._begun(parent) > 0
        return parent.status in _BEGUN

    def _begun(self, parent: Run) -> int:
        return sum(parent.children.get(status, 0) for status in _BEGUN)

    def _hidden(self, parent: Run) -> int:
        """How many have begun that were not seen to; all that are left, once the parent ended."""
        if parent.status.is_terminal:
            return self.size - len(self._ended)
        return self._begun(parent) - len(self._ended) - len(self._active)
