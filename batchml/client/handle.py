"""RunHandle: one run, as `batchml.Client` gives it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchml.client.finding import Measured
    from batchml.client.place import Place
    from batchml.client.submission import Tell
    from batchml.model.explanation import Explanation
    from batchml.model.job import Scalar
    from batchml.model.run import OutcomeClass, Run
    from batchml.ops.bill import Bill
    from batchml.ops.metrics import Series
    from batchml.ops.search import Found
    from batchml.ops.watch import Happening, Line


class RunHandle:
    """One run. It holds the run's id and asks anew each time: nothing of it gets old.

    Only `seen` does: it is what `Client.runs` knew of the run, or None.

    Every method may raise AccessError, ServiceError and ServiceUnreachable, and NotFound when the
    environment does not know the run (any more).
    """

    def __init__(
        self,
        place: "Place",
        job_id: str,
        name: str = "",
        seen: "Found | None" = None,
        tell: "Tell | None" = None,
    ) -> None:
        self._place = place
        self.job_id = job_id
        self.seen = seen
        self._name = name
        self._status = seen.run.status.value if seen and seen.run else ""  # for people
        self._tell = tell or (lambda _words: None)

    def __repr__(self) -> str:
        name = f"{self._name!r}, " if self._name else ""
        last = f", last seen {self._status}" if self._status else ""
        return f"RunHandle({name}{self.job_id!r}, env={self._place.env!r}{last})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunHandle):
            return NotImplemented
        return (self.job_id, self._place.env) == (other.job_id, other._place.env)

    def __hash__(self) -> int:
        return hash((self.job_id, self._place.env))

    # --- how it is --------------------------------------------------------------------------

    def describe(self) -> "Run":
        """The run as it is now: one call."""
        from batchml.client.runs import described

        return self._told(described(self._place, [self.job_id])[self.job_id])

    def _told(self, run: "Run") -> "Run":
        self._name, self._status = run.name, run.status.value
        return run

    def _current(self) -> str:
        """The job that it is now, where it may have moved to another queue."""
        from batchml.client.runs import current

        return current(self._place, self.job_id)

    @property
    def name(self) -> str:
        """The name that people see."""
        if not self._name:
            self._name = self.describe().name
        return self._name

    @property
    def outcome(self) -> "OutcomeClass":
        """What the run came to; `unknown` while it has not ended. One call."""
        from batchml.model.run import classify

        return classify(self.describe()).outcome

    def wait(self, timeout: float | None = None) -> "Run":
        """The run once it has ended, whatever came of it.

        Raises TimeoutError after `timeout` seconds: the run goes on.
        """
        from batchml.client.waiting import wait_and_keep

        (run,) = wait_and_keep(self._place, [self.job_id], timeout, news=self._tell)
        return self._told(run)

    # --- what it prints ---------------------------------------------------------------------

    def watch(self, timeout: float | None = None) -> "Iterator[Happening]":
        """Yield what happens to the run until it has ended: changes of status, and its lines.

        The values are those of `batchml.ops.watch`. Raises TimeoutError after `timeout` seconds.
        """
        from batchml.client.waiting import follow

        yield from follow(self._place, self.job_id, timeout)

    def logs(self, follow: bool = False) -> "Iterator[Line]":
        """Yield the lines of all attempts, children and nodes; with `follow` until the run ends.

        A line has `timestamp` (milliseconds since the epoch), `text` and `child`: "" for the run
        itself, "3" for the child or node 3, "3/2" for its second attempt.

        Raises LogDamaged after the last line where a log is not what the run wrote.
        """
        from batchml.errors import LogDamaged

        problems: list[str] = []
        yield from self._followed_lines(problems) if follow else self._lines(problems)
        if problems:
            raise LogDamaged("\n".join(problems))

    def _followed_lines(self, problems: list[str]) -> "Iterator[Line]":
        from batchml.ops import watch

        for happening in self.watch():
            if isinstance(happening, watch.Line):
                yield happening
            elif isinstance(happening, watch.Closed) and happening.proof == watch.DAMAGED:
                assert happening.check is not None
                problems.append(happening.check.describe(happening.child))

    def _lines(self, problems: list[str]) -> "Iterator[Line]":
        from batchml.client.numbering import numbering
        from batchml.ops import watch

        place = self._place
        run = self.describe()
        parts = watch.printed(
            place.describe, place.open_log, run, clock=place.clock, pace=place.pace
        )
        for part in numbering(place, self.job_id, run).printed(parts):
            for line in part.lines:
                yield watch.Line(line.timestamp, line.message, part.child)
            if part.is_damaged:
                problems.append(part.note)

    def metrics(self) -> dict[str, float]:
        """The last value of each metric: what the program reported, or `[metrics]` matched."""
        found, measured = self._measure()
        return measured.last or dict(found.metrics)

    def series(self) -> "dict[str, Series]":
        """Every value of each metric, with its step where the program told one."""
        return self._measure()[1].series

    def _measure(self) -> "tuple[Found, Measured]":
        from batchml.client.finding import Measured, measure, recall

        (found,) = recall(self._place, [self._current()])
        if found.run is None:  # AWS has forgotten it; the last values may be in the history
            return found, Measured({}, False)
        return found, measure(self._place, found.run, found.record)

    def outputs(self, dest: str | os.PathLike[str]) -> Path:
        """Copy what the run left in BATCHML_OUTPUT_DIR into the folder `dest`, which is returned.

        Of an array, each child's lie in a folder named by its number. Raises NotFound where
        nothing was kept.
        """
        from batchml.client.fetching import outputs
        from batchml.client.finding import recall

        (found,) = recall(self._place, [self._current()])
        for _ in outputs(self._place, found, Path(dest)):
            pass
        return Path(dest)

    # --- what to do about it ----------------------------------------------------------------

    def cancel(self, reason: str = "Cancelled by the user") -> None:
        """Stop the run, whatever state it is in; has no effect on one that has ended.

        Of a gang all its jobs.

        Raises UsageError for one node of a run: all of them stop together.
        """
        from batchml.client.gang_parts import stop_all
        from batchml.ops.cancel import refuse_nodes

        refuse_nodes([self.job_id])
        stop_all(self._place, [self._current()], reason)

    def explain(self) -> "Explanation":
        """Why it waits, or why it failed: one verdict with its evidence. At most 6 calls."""
        from batchml.client.explaining import explain_run

        return explain_run(self._place, self._current()).explanation

    def cost(self) -> "Bill":
        """What the run costs so far, or has cost: `usd.low` to `usd.high`, and by attempt.

        Of a gang that is what all its jobs cost.

        Also of a run that AWS Batch has forgotten, where its cost is kept here.
        """
        from batchml.client.gang_parts import gang_bill

        return gang_bill(self._place, self._current())[1]

    def rerun(
        self,
        *,
        failed: bool = False,
        resume: bool = False,
        params: "Mapping[str, Scalar] | None" = None,
    ) -> "RunHandle | None":
        """Submit the same again: the same code, image and command, with other `params` if given.

        With `failed`, of an array only the children that failed; None if nothing failed. With
        `resume` it goes on from the checkpoint of this run, which has ended. Raises NotFound when
        the code of the run is gone, or where it saved no checkpoint.
        """
        from batchml.client.finding import recall
        from batchml.client.reruns import prepare_again
        from batchml.client.submission import send
        from batchml.runtime.protocol.variables import text as param_text

        (found,) = recall(self._place, [self._current()])
        given = {name: param_text(value) for name, value in (params or {}).items()}
        prepared = prepare_again(self._place, found, failed=failed, resume=resume, params=given)
        if prepared is None:
            return None
        for notice in prepared.notices:
            self._tell(notice)
        job_id = send(self._place, prepared, self._tell)
        return RunHandle(self._place, job_id, prepared.name, tell=self._tell)
