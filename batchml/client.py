"""The Python API: submit runs, find them, wait for them.

Example: `Client().submit("lenet", params={"epochs": 2}).wait()` returns the run once it has ended.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from batchml.clock import Clock, SystemClock
from batchml.config.settings import load_settings
from batchml.context import Context, Notify, current_folder
from batchml.cost.bill import Bill
from batchml.errors import LogDamaged, UsageError
from batchml.explain.ask import explain_run
from batchml.model.explanation import Explanation
from batchml.model.job import JobSpec, Scalar
from batchml.model.run import OutcomeClass, Run, classify
from batchml.runs.cancel import refuse_nodes
from batchml.runs.find import (
    RunMetrics,
    current_job_id,
    describe_runs,
    find,
    load_runs,
    read_metrics,
    select,
)
from batchml.runs.groups.members import group_bill, terminate_all
from batchml.runs.metrics.series import Series
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.outputs import copy_outputs
from batchml.runs.prepare import PreparedRun, prepare, to_requests
from batchml.runs.rerun.resubmit import prepare_again
from batchml.runs.rerun.rules import numbering
from batchml.runs.search import FoundRun, RunFilter, read_commit, read_condition, read_states
from batchml.runs.submit import submit_run
from batchml.runs.watch.events import DAMAGED, LogClosed, OutputLine, RunEvent
from batchml.runs.watch.logs import read_output
from batchml.runs.watch.wait import follow, wait_for_runs
from batchml.runtime.protocol.variables import format_value as param_text
from batchml.sweeps.handle import SweepHandle
from batchml.sweeps.start import SweepOptions, limit_changes, prepare_sweep, start_sweep
from batchml.sweeps.stores import find_sweep_store, list_sweeps

# --- A run ----------------------------------------------------------------------------------------


class RunHandle:
    """One run. It holds the run's id and asks AWS Batch at each call, so no answer is stale.

    `seen` is the exception: it is the run as `Client.runs` found it, or None for other handles.

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
        return f"RunHandle({name}{self.job_id!r}, env={self._context.env!r}{last})"

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

    def watch(self, timeout: float | None = None) -> Iterator[RunEvent]:
        """Yield the events of the run until it has ended: changes of status, and lines of output.

        The events are those of `batchml.runs.watch.events`. Raises TimeoutError after `timeout`
        seconds.
        """
        yield from follow(self._context, self.job_id, timeout)

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
        found, measured = self._measure()
        return measured.last or dict(found.metrics)

    def series(self) -> dict[str, Series]:
        """Every value of each metric, with its step where the program gave one."""
        return self._measure()[1].series

    def _measure(self) -> tuple[FoundRun, RunMetrics]:
        (found,) = load_runs(self._context, [self._current()])
        if found.run is None:  # AWS has forgotten it; the last values may be in the history
            return found, RunMetrics({}, False)
        return found, read_metrics(self._context, found.run, found.record)

    def outputs(self, dest: str | os.PathLike[str]) -> Path:
        """Copy the files of BATCHML_OUTPUT_DIR into the folder `dest`, and return its path.

        Each child of an array has a folder named by its number. Raises NotFound if no files were
        kept.
        """
        (found,) = load_runs(self._context, [self._current()])
        for _ in copy_outputs(self._context, found, Path(dest)):
            pass
        return Path(dest)

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
        return group_bill(self._context, self._current())[1]

    def rerun(
        self,
        *,
        failed: bool = False,
        resume: bool = False,
        code: bool = False,
        params: Mapping[str, Scalar] | None = None,
    ) -> "RunHandle | None":
        """Submit the run again: the same code, image and command, with other `params` if given.

        With `failed`, submit only the children of an array that failed; return None if none failed.
        With `resume`, the new run continues from the checkpoint of this run, which has ended. With
        `code`, it gets the files that the folder of its code has now.
        Raises NotFound if the code of the run is gone, or if the run has no checkpoint; UsageError
        if `code` is true and the folder of the code is not known or gone.
        """
        (found,) = load_runs(self._context, [self._current()])
        request = to_request(options=SubmitOptions(params=params))
        prepared = prepare_again(
            self._context, found, failed=failed, resume=resume, code=code, request=request
        )
        if prepared is None:
            return None
        return _submit(self._context, prepared, self._tell)


def _submit(context: Context, prepared: PreparedRun, tell: Notify) -> RunHandle:
    for notice in prepared.notices:
        tell(notice)
    return RunHandle(context, submit_run(context, prepared, tell), prepared.name, tell=tell)


# --- The client -----------------------------------------------------------------------------------


# A handle, or a text that names a run: its job id or a prefix of it, its name, its key, or "@last".
RunReference = str | RunHandle


class Client:
    """One environment: `local`, the embedded AWS Batch of this machine, or one in AWS.

    A client holds no connection that must be closed, and calls AWS only when a method needs it.
    Every method may raise AccessError (credentials, permissions), ServiceError (a refusal) and
    ServiceUnreachable; its own description lists the other errors. All are BatchmlErrors.
    """

    def __init__(
        self,
        env: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        tell: Notify | None = None,
    ) -> None:
        """Open the environment `env`, or by default that of BATCHML_ENV or of batchml.toml.

        `folder`, by default the current folder, is searched for `batchml.toml`, `jobs/` and
        `images/`, and holds the code of a command without a job. `environ` replaces `os.environ`,
        `clock` the system's clock. `tell` gets messages for the user, such as resources that were
        fitted to this machine, and steps that take long.

        Raises ConfigError for a wrong `batchml.toml`, NotFound for an environment that it does not
        have, UsageError for a folder that does not exist.
        """
        here = Path(folder).absolute() if folder is not None else current_folder()
        if not here.is_dir():
            raise UsageError(f"{here} is not a folder.")
        settings = load_settings(os.environ if environ is None else environ, here, env)
        self._tell = tell or _ignore
        self._context = Context(settings, clock or SystemClock(), here, self._tell)

    def __repr__(self) -> str:
        return f"Client(env={self.env!r}, folder={str(self._context.folder)!r})"

    @property
    def env(self) -> str:
        """The name of the environment."""
        return self._context.env

    # --- submitting -------------------------------------------------------------------------

    def submit(
        self, job: str | os.PathLike[str] | JobSpec | None = None, **options: Unpack[SubmitOptions]
    ) -> RunHandle:
        """Submit a run, exactly once, and return it; the options are the flags of `submit`.

        job: a folder with a `job.toml`, the name of such a folder below `jobs/`, or a JobSpec. By
            default the option `command` runs in the client's folder.
        options: see `SubmitOptions`, for example `gpus=1, params={"lr": 0.1}`.

        A call that is interrupted, or whose answer is lost, leaves no run or one run, never two.
        Raises ConfigError or UsageError, with every mistake of its input, and NotFound.
        """
        prepared = prepare(self._context, to_request(job, options), dry_run=False)
        return _submit(self._context, prepared, self._tell)

    def plan(
        self, job: str | os.PathLike[str] | JobSpec | None = None, **options: Unpack[SubmitOptions]
    ) -> dict[str, Any]:
        """Return the AWS requests that `submit` would send for the same arguments."""
        return to_requests(prepare(self._context, to_request(job, options), dry_run=True))

    # --- sweeps -----------------------------------------------------------------------------

    def sweep(
        self,
        file: str | os.PathLike[str] | Mapping[str, Any],
        *,
        job: JobSpec | str | os.PathLike[str] | None = None,
        changes: Sequence[str] = (),
        trials: int | None = None,
        parallel: int | None = None,
        name: str | None = None,
        strict_resources: bool = False,
        include_secrets: bool = False,
    ) -> SweepHandle:
        """Start a sweep and return it; the arguments are the flags of `batchml sweep`.

        file: a sweep file, a job that has a `sweep.toml`, or the table of such a file.
        job: the job to use instead of the one that the file names: a name, a folder or a JobSpec.
        changes: changes of the file, such as "space.lr.log=[1e-5,1e-1]".
        trials, parallel: `limits.trials` and `limits.parallel` of the file.

        The trials begin when you call `wait` or `detach` of the result.
        Raises ConfigError with every mistake of the file and of its job, and NotFound.
        """
        sweep_options = SweepOptions(
            file="" if isinstance(file, Mapping) else os.fspath(file),
            table=file if isinstance(file, Mapping) else None,
            job=job if job is None or isinstance(job, JobSpec) else os.fspath(job),
            changes=(*changes, *limit_changes(trials, parallel)),
            name=name or "",
            strict=strict_resources,
            include_secrets=include_secrets,
        )
        ready = prepare_sweep(self._context, sweep_options)
        for notice in ready.notices:
            self._tell(notice)
        start_sweep(self._context, ready, self._tell)
        return SweepHandle(self._context, ready.sweep.key, self._tell)

    @overload
    def sweeps(self, word: str) -> SweepHandle: ...

    @overload
    def sweeps(self) -> list[SweepHandle]: ...

    def sweeps(self, word: str | None = None) -> SweepHandle | list[SweepHandle]:
        """Return the sweep that a word means: its key, a unique prefix of it, its name, or `@last`.
        Without a word, return all sweeps, the newest first.

        Raises NotFound, and UsageError for a prefix of several keys.
        """
        if word is None:
            context = self._context
            listed = (each for each in list_sweeps(context) if each.name)  # the others are damaged
            return [SweepHandle(context, each.key, self._tell) for each in listed]
        return SweepHandle(self._context, find_sweep_store(self._context, word).key, self._tell)

    # --- finding and waiting ----------------------------------------------------------------

    def run(self, word: str) -> RunHandle:
        """Return the run that a word means: job id, unique prefix of it, name, key, or `@last`.

        Raises NotFound, and UsageError for a prefix of several job ids.
        """
        (job_id,) = select(self._context, [word])
        return RunHandle(self._context, job_id, tell=self._tell)

    def runs(
        self,
        *,
        status: str | Sequence[str] = (),
        queue: str | None = None,
        job: str = "",
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Scalar] | None = None,
        metric: str | Sequence[str] = (),
        commit: str = "",
        since: float | None = None,
        limit: int = 30,
    ) -> list[RunHandle]:
        """Return the newest `limit` runs that match all filters, the newest first.

        The attribute `seen` of each handle has the run as it was found. Runs that AWS Batch has
        forgotten are included if they were submitted from this machine. Runs of sweeps are left out
        unless `tags` has "batchml:sweep" or `job` names one of them, and workers of group runs
        unless `tags` has "batchml:gang" or "batchml:group", or `job` names them.

        status: states ("RUNNING") and outcomes ("out-of-memory"), of which a run has one.
        job: the run's name.
        metric: conditions such as "val_accuracy>0.98", all of which a run meets.
        commit: the start of a git commit.
        since: the earliest time of creation, in seconds since the epoch.

        Raises UsageError for a state or a condition that cannot be read.
        """
        run_filter = RunFilter(
            states=read_states(_as_list(status), "status"),
            queue=self._context.queue(queue) if queue else "",
            name=job,
            since=int(since * 1000) if since is not None else 0,
            tags=dict(tags or {}),
            params={name: param_text(value) for name, value in (params or {}).items()},
            metrics=tuple(read_condition(text, "metric") for text in _as_list(metric)),
            commit=read_commit(commit, "commit") if commit else "",
        )
        found = find(self._context, run_filter, limit).runs
        return [
            RunHandle(self._context, each.job_id, each.name, each, self._tell) for each in found
        ]

    def describe(self, runs: Iterable[RunReference]) -> list[Run]:
        """Return the runs as they are now, in the given order, with one call for each 100 runs.

        Raises NotFound.
        """
        references = list(runs)
        found = iter(select(self._context, [each for each in references if isinstance(each, str)]))
        job_ids = [next(found) if isinstance(each, str) else each.job_id for each in references]
        known = describe_runs(self._context, job_ids)
        return [known[job_id] for job_id in job_ids]

    def wait(self, runs: Iterable[RunReference], *, timeout: float | None = None) -> Iterator[Run]:
        """Yield each run when it has ended, with any outcome. One call polls all runs.

        Raises NotFound, and TimeoutError after `timeout` seconds; the runs continue.
        """
        job_ids = [run.job_id for run in self.describe(runs)]
        yield from wait_for_runs(self._context, job_ids, timeout, self._tell, on_move=self._tell)


def _ignore(_words: str) -> None: ...


def _as_list(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given
