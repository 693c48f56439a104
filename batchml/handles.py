"""The handles of the Python API: a run, and the runs of `Client.map`."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from msgspec import Struct

from batchml.context import Context, Notify
from batchml.cost.bill import Bill, usual_duration
from batchml.cost.render import quote_lines
from batchml.cost.service import quote_of_job
from batchml.errors import LogDamaged, UsageError
from batchml.explain.ask import explain_run
from batchml.jobs.code_diff import CodeFile
from batchml.model.explanation import Explanation
from batchml.model.run import OutcomeClass, Run, classify
from batchml.rich_html import to_html
from batchml.runs.cancel import refuse_nodes
from batchml.runs.find import current_job_id, describe_runs, display_id, load_runs
from batchml.runs.functions.results import (
    ItemResult,
    check_is_function,
    in_order,
    read_result,
    read_results,
)
from batchml.runs.groups.members import find_worker_groups, group_bill, terminate_all
from batchml.runs.metrics.reading import RunMetrics, read_children, read_metrics
from batchml.runs.metrics.series import SampleWindow, Series
from batchml.runs.metrics.usage import (
    NodeRun,
    Restart,
    UnfitNotice,
    UsageSample,
    find_nodes,
    own_container,
    read_restarts,
    read_unfit_notices,
    read_usage,
)
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.outputs import OutputEntry, OutputSource, copy_outputs, open_outputs
from batchml.runs.package import read_files
from batchml.runs.prepare import PreparedRun, to_requests
from batchml.runs.rerun.resubmit import prepare_again
from batchml.runs.rerun.rules import CHANGEABLE, numbering
from batchml.runs.search import FoundRun
from batchml.runs.submit import submit_run
from batchml.runs.watch.events import DAMAGED, LogClosed, OutputLine, RunEvent
from batchml.runs.watch.logs import read_output
from batchml.runs.watch.wait import follow, wait_for_runs


class RunHandle:
    """One run. It holds the run's id and asks AWS Batch at each call, so no answer is stale.

    `seen` is the exception: it is the run as `Client.run` or `Client.runs` found it, or None for
    other handles.

    Every method may raise AccessError, ServiceError and ServiceUnreachable, and NotFound when the
    environment does not know the run (any more).
    """

    def __init__(
        self,
        context: Context,
        job_id: str,
        name: str = "",
        seen: FoundRun | None = None,
        tell: Notify | None = None,
    ) -> None:
        self._context = context
        self.job_id = job_id
        self.seen = seen
        self._name = name
        self._status = seen.run.status.value if seen and seen.run else ""  # at the last call
        self._tell = tell or (lambda _words: None)

    def __repr__(self) -> str:
        name = f"{self._name!r}, " if self._name else ""
        last = f", last seen {self._status}" if self._status else ""
        is_child = ":" in self.job_id
        shown = display_id(self._context, self.job_id) if is_child else self.job_id
        return f"RunHandle({name}{shown!r}, env={self._context.env!r}{last})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RunHandle):
            return NotImplemented
        return (self.job_id, self._context.env) == (other.job_id, other._context.env)

    def __hash__(self) -> int:
        return hash((self.job_id, self._context.env))

    # --- state -----------------------------------------------------------------------------

    def describe(self) -> Run:
        """The run as it is now: one call."""
        return self._remember(describe_runs(self._context, [self.job_id])[self.job_id])

    def find(self) -> FoundRun:
        """The run as it is now, with what this machine knows of it: `params`, `tags`, `code`."""
        return load_runs(self._context, [self._current()])[0]

    def _remember(self, run: Run) -> Run:
        self._name, self._status = run.name, run.status.value
        return run

    def _current(self) -> str:
        """The id of the run's present job, which differs if the run has moved to another queue."""
        return current_job_id(self._context, self.job_id)

    @property
    def name(self) -> str:
        """The name of the run, without the key that its job name in AWS ends in."""
        if not self._name:
            self._name = self.describe().name
        return self._name

    @property
    def outcome(self) -> OutcomeClass:
        """The outcome of the run; `unknown` while it has not ended. One call."""
        return classify(self.describe()).outcome

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run has ended, with any outcome, and return it.

        Raises TimeoutError after `timeout` seconds; the run continues.
        """
        (run,) = wait_for_runs(self._context, [self.job_id], timeout, on_move=self._tell)
        return self._remember(run)

    # --- output -----------------------------------------------------------------------------

    def watch(
        self, timeout: float | None = None, stop: threading.Event | None = None
    ) -> Iterator[RunEvent]:
        """Yield the events of the run until it has ended: changes of status, and lines of output.

        The events are those of `batchml.runs.watch.events`. Raises TimeoutError after `timeout`
        seconds. They end early when another thread sets `stop`.
        """
        yield from follow(self._context, self.job_id, timeout, stop=stop)

    def logs(self, follow: bool = False) -> Iterator[OutputLine]:
        """Yield the lines of all attempts, children and nodes; with `follow` until the run ends.

        A line has `timestamp` (milliseconds since the epoch), `text` and `child`: "" for the run
        itself, "3" for the child or node 3, "3/2" for its second attempt.

        Raises LogDamaged after the last line if a log differs from the output of the run.
        """
        problems: list[str] = []
        yield from self._followed_lines(problems) if follow else self._lines(problems)
        if problems:
            raise LogDamaged("\n".join(problems))

    def _followed_lines(self, problems: list[str]) -> Iterator[OutputLine]:
        for event in self.watch():
            if isinstance(event, OutputLine):
                yield event
            elif isinstance(event, LogClosed) and event.proof == DAMAGED:
                assert event.check is not None
                problems.append(event.check.describe(event.child))

    def _lines(self, problems: list[str]) -> Iterator[OutputLine]:
        context = self._context
        run = self.describe()
        parts = read_output(
            context.describe, context.open_log, run, clock=context.clock, pace=context.pace
        )
        for part in numbering(context, self.job_id, run).renumber_output(parts):
            for line in part.lines:
                yield OutputLine(line.timestamp, line.message, part.child)
            if part.is_damaged:
                problems.append(part.note)

    def metrics(self) -> dict[str, float]:
        """The last value of each metric, as the program reported it or a pattern found it."""
        (found,) = load_runs(self._context, [self._current()])
        if found.run is not None and found.run.array_size and found.metrics:
            return dict(found.metrics)  # of all children, not of the first ones only
        return self._measure(found).last or dict(found.metrics)

    def series(self, window: SampleWindow | None = None) -> dict[str, Series]:
        """Every value of each metric, with its step where the program gave one.

        Of an array, those of its first 32 children: `loss:3` is of child 3. Of more than 8,192
        values some are left out; with a window only of those in it, so it has finer ones.
        """
        (found,) = load_runs(self._context, [self._current()])
        return self._measure(found, window).series

    def _measure(self, found: FoundRun, window: SampleWindow | None = None) -> RunMetrics:
        if found.run is None:  # AWS has forgotten it; the last values may be in the history
            return RunMetrics({}, False)
        if found.run.array_size:
            return read_children(self._context, found, window)
        return read_metrics(self._context, found.run, found.record, window=window)

    def usage(self, *, whole: bool = False) -> list[UsageSample]:
        """The use of CPU, memory, GPU and network, by node: the last values, and `series` of them.

        The series have the last ten minutes, or all of the run if `whole` is true. An array has
        none: ask its children. Empty without access to the logs. `usage` of an item has `cpu` (in
        CPUs), `memory` and `gpu_memory` (MiB), `gpu` (percent), `net_in` and `net_out` (bytes a
        second), `staging` and `io_wait` (seconds in which it waited for data sets and disks) and
        `data_wait` (their percentage), as far as they are known.
        """
        found, nodes = self._nodes()
        return read_usage(self._context, nodes or own_container(found.run), whole=whole)

    def restarts(self) -> list[Restart]:
        """The restarts of a run's ranks within its attempts, and the causes."""
        found, nodes = self._nodes()
        return read_restarts(self._context, found.run, nodes)[0]

    def unfit_hosts(self) -> list[UnfitNotice]:
        """The hosts that the run has left because a health check failed there, and why."""
        found, nodes = self._nodes()
        return read_unfit_notices(self._context, found.run, nodes)

    def _nodes(self) -> tuple[FoundRun, list[NodeRun]]:
        (found,) = load_runs(self._context, [self._current()])
        return found, find_nodes(self._context, found, find_worker_groups(self._context, found))

    def outputs(self, dest: str | os.PathLike[str]) -> Path:
        """Copy the files of BATCHML_OUTPUT_DIR into the folder `dest`, and return its path.

        Each child of an array has a folder named by its number. Raises NotFound if no files were
        kept.
        """
        (found,) = load_runs(self._context, [self._current()])
        for _ in copy_outputs(self._context, found, Path(dest)):
            pass
        return Path(dest)

    def list_outputs(self) -> list[OutputEntry]:
        """The files that `outputs` would copy: name, size, time. Raises NotFound without any."""
        return list(self._open_outputs().entries())

    def fetch_output(self, entry: OutputEntry, path: str | os.PathLike[str]) -> None:
        """Copy one file of `list_outputs` to `path`, which does not exist.

        Raises `batchml.runs.outputs.Unreadable` if the run has deleted it.
        """
        self._open_outputs().fetch(entry, Path(path))

    def _open_outputs(self) -> OutputSource:
        (found,) = load_runs(self._context, [self._current()])
        return open_outputs(self._context, found)

    def code(self) -> dict[str, CodeFile]:
        """The files of the run's code as they were sent, by name: `content`, `is_executable`.

        Empty for a run without code of its own. Raises NotFound for code that was deleted.
        """
        (found,) = load_runs(self._context, [self._current()])
        return read_files(self._context, found.code)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for a run that calls a function, and return the function's result.

        For an array it is the list of its children's results. The result is unpickled here: see
        docs/security.md. Raises the exception that the function raised, RunFailed if the run ended
        without a result, UsageError for the run of a command, and TimeoutError after `timeout`
        seconds.
        """
        (found,) = load_runs(self._context, [self._current()])
        check_is_function(found)
        if found.run is not None and found.run.array_size:
            return in_order(read_results(self._context, found.job_id, timeout))
        run = self.wait(timeout)
        return read_result(self._context, FoundRun(run, found.record))

    def _results(self, timeout: float | None) -> Iterator[ItemResult]:
        yield from read_results(self._context, self._current(), timeout)

    def _child(self, number: int) -> "RunHandle":
        return RunHandle(self._context, f"{self.job_id}:{number}", self._name, tell=self._tell)

    # --- actions ----------------------------------------------------------------------------

    def cancel(self, reason: str = "Cancelled by the user") -> None:
        """Stop the run in any state, for a group run all its jobs. An ended run stays as it is.

        Raises UsageError for one node of a run: the nodes can only stop together.
        """
        refuse_nodes([self.job_id])
        terminate_all(self._context, [self._current()], reason)

    def explain(self) -> Explanation:
        """Explain why the run waits or why it failed, in at most 6 calls."""
        return explain_run(self._context, self._current()).explanation

    def cost(self) -> Bill:
        """The cost of the run so far: `usd.low` to `usd.high`, and by attempt.

        For a group run, the cost of all its jobs. It works also for a run that AWS Batch has
        forgotten, if the history has its cost.
        """
        return group_bill(self._context, self._current())[1].round()

    def rerun(
        self,
        *,
        failed: bool = False,
        resume: bool = False,
        code: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> "RunHandle | None":
        """Submit the run again: the same code, image and command, with the changes in `options`.

        options: the flags of `batchml rerun`, such as `params={"lr": 0.1}` or `memory="8 GiB"`.

        With `failed`, submit only the children of an array that failed; return None if none failed.
        With `resume`, the new run continues from the checkpoint of this run, which has ended. With
        `code`, it gets the files that the folder of its code has now.
        Raises NotFound if the code of the run is gone, or if the run has no checkpoint; UsageError
        if `code` is true and the folder of the code is not known or gone, and for an option that
        `batchml rerun` does not have.
        """
        prepared = self._prepare_again(failed, resume, code, options, dry_run=False)
        if prepared is None:
            return None
        return submit_prepared(self._context, prepared, self._tell)

    def preview_rerun(
        self,
        *,
        failed: bool = False,
        resume: bool = False,
        code: bool = False,
        **options: Unpack[SubmitOptions],
    ) -> "RunPreview | None":
        """Return what `rerun` would do with the same arguments: notices, price, AWS requests."""
        prepared = self._prepare_again(failed, resume, code, options, dry_run=True)
        return None if prepared is None else preview_prepared(self._context, prepared)

    def _prepare_again(
        self, failed: bool, resume: bool, code: bool, options: SubmitOptions, *, dry_run: bool
    ) -> PreparedRun | None:
        for name in options:
            if name not in CHANGEABLE:
                raise UsageError(
                    f"rerun: {name} cannot be changed. Options: {', '.join(CHANGEABLE)}. For "
                    "another change submit the job."
                )
        (found,) = load_runs(self._context, [self._current()])
        return prepare_again(
            self._context, found, failed=failed, resume=resume, code=code,
            request=to_request(options=options), dry_run=dry_run,
        )  # fmt: skip

    # --- notebooks --------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """The run in a notebook as it is now: its state, why it failed, its metrics as curves."""
        return to_html(self)

    def _ipython_display_(self) -> None:
        """Show a table in a notebook, current until the run has ended; then what it was."""
        from batchml.runs.watch.live_table import LiveTable, kernel_display, show_live_table

        display = kernel_display()
        if display is None:
            raise NotImplementedError  # a terminal: IPython shows the text instead
        found = self.find()
        if found.run is None or found.run.status.is_terminal:
            raise NotImplementedError  # IPython asks for `_repr_html_`
        patterns = found.record.patterns if found.record else {}
        table = LiveTable(self._context.clock, patterns)
        show_live_table(self.watch(), table, display, repr(self), self._repr_html_)


class RunList(list[RunHandle]):
    """Runs that were found: a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return to_html(self)


class MapHandle(Sequence[RunHandle]):
    """The runs of `Client.map`, one for each item: a sequence of handles, in the items' order.

    `run` is the array that they are children of; None if there were no items.
    """

    def __init__(self, run: RunHandle | None, size: int) -> None:
        self.run = run
        self._size = size

    def __repr__(self) -> str:
        return f"MapHandle({self._size} items, {self.run!r})"

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> RunHandle: ...

    @overload
    def __getitem__(self, index: slice) -> list[RunHandle]: ...

    def __getitem__(self, index: int | slice) -> RunHandle | list[RunHandle]:
        if isinstance(index, slice):
            return [self[each] for each in range(self._size)[index]]
        number = range(self._size)[index]
        if self.run is None:
            raise IndexError(index)
        return self.run if self._size == 1 else self.run._child(number)

    def result(self, timeout: float | None = None) -> list[Any]:
        """Wait for all items, and return their results in order.

        Raises the first item's error if items failed; `results` has the others' values.
        """
        return in_order(self.results(timeout))

    def results(self, timeout: float | None = None) -> Iterator[ItemResult]:
        """Yield the result of each item soon after it ended: `index`, `value`, `error`.

        `error` is the exception that the function raised, or RunFailed; None if it returned.
        Raises TimeoutError after `timeout` seconds; the run continues.
        """
        if self.run is not None:
            yield from self.run._results(timeout)

    def cancel(self, reason: str = "Cancelled by the user") -> None:
        """Stop all items that have not ended."""
        if self.run is not None:
            self.run.cancel(reason)

    def _repr_html_(self) -> str:
        return self.run._repr_html_() if self.run else "<p>No items.</p>"

    def _ipython_display_(self) -> None:
        if self.run is None:
            raise NotImplementedError
        self.run._ipython_display_()


def submit_prepared(context: Context, prepared: PreparedRun, tell: Notify) -> RunHandle:
    """Submit a run exactly once; `tell` gets its notices first."""
    for notice in prepared.notices:
        tell(notice)
    return RunHandle(context, submit_run(context, prepared, tell), prepared.name, tell=tell)


class RunPreview(Struct, frozen=True):
    """What a submission would do: notices for the user, its price, and the requests to AWS.

    `price` is in sentences: an hour, and as much time as the last runs of the job took.
    """

    notices: tuple[str, ...]
    price: tuple[str, ...]
    requests: dict[str, Any]


def preview_prepared(context: Context, prepared: PreparedRun) -> RunPreview:
    """Describe a run that was prepared with `dry_run`. AWS is not asked, not even for prices."""
    return RunPreview(prepared.notices, tuple(_price(context, prepared)), to_requests(prepared))


def _price(context: Context, prepared: PreparedRun) -> list[str]:
    spec, children = prepared.spec, prepared.record.array_size
    if not context.settings.is_local:
        queue = context.bare(str(prepared.requests.submit["jobQueue"]))
        if queue not in context.settings.environment.queues:
            return [f"Its price is unknown: batchml.toml does not describe the queue {queue}."]
        context = context.without_aws("A preview")
    known = context.history.recent(context.env)
    before = None if children else usual_duration(known, prepared.name)
    return quote_lines(quote_of_job(context, spec, children=children), before)
