"""The Python API: submit runs, find them, wait for them.

Example: `Client().submit("lenet", params={"epochs": 2}).wait()` returns the run once it has ended.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from batchml.clock import Clock, SystemClock
from batchml.cluster.service import ClusterPoller, HostPrices, narrow, open_poller
from batchml.cluster.snapshot import ClusterSnapshot
from batchml.config.settings import load_settings
from batchml.context import Context, Notify, current_folder
from batchml.cost.bill import RunCost
from batchml.cost.service import list_spending
from batchml.errors import UsageError
from batchml.handles import (
    MapHandle,
    RunHandle,
    RunList,
    RunPreview,
    preview_prepared,
    submit_prepared,
)
from batchml.jobs.find import KnownJob, list_jobs
from batchml.model.job import JobSpec, Scalar
from batchml.model.run import Run
from batchml.runs.compare.newest import find
from batchml.runs.compare.service import (
    ComparedRuns,
    RunComparison,
    compare_requests,
    compare_results,
)
from batchml.runs.find import check_queues, describe_runs, load_runs, select
from batchml.runs.functions.submit import Function, prepare_function
from batchml.runs.metrics.conditions import read_condition
from batchml.runs.options import SubmitOptions, to_request
from batchml.runs.prepare import PreparedRun, prepare, to_requests
from batchml.runs.search import FoundRun, RunFilter, read_commit, read_states
from batchml.runs.watch.wait import wait_for_runs
from batchml.runtime.protocol.variables import format_value as param_text
from batchml.sweeps.handle import SweepHandle
from batchml.sweeps.start import SweepOptions, limit_changes, prepare_sweep, start_sweep
from batchml.sweeps.stores import find_sweep_store, list_sweeps

_WEEK = 7 * 86_400.0  # seconds

# What `submit` takes besides a function: a folder, a job's name, a JobSpec, or nothing.
Job = str | os.PathLike[str] | JobSpec | None

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
        project: str | None = None,
    ) -> None:
        """Open the environment `env`, or by default that of BATCHML_ENV or of batchml.toml.

        `project` is the project to which runs and sweeps belong, and in which names and `@last` are
        looked up; by default that of BATCHML_PROJECT, of batchml.toml, or the folder's.

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
        environ = os.environ if environ is None else environ
        settings = load_settings(environ, here, env, project)
        self._tell = tell or _ignore
        self._context = Context(settings, clock or SystemClock(), here, self._tell)
        self._cluster: tuple[ClusterPoller, HostPrices] | None = None

    def __repr__(self) -> str:
        return f"Client(env={self.env!r}, folder={str(self._context.folder)!r})"

    @property
    def env(self) -> str:
        """The name of the environment."""
        return self._context.env

    @property
    def folder(self) -> Path:
        """The folder with the client's jobs and code."""
        return self._context.folder

    @property
    def env_option(self) -> str:
        """The option of a command line for this environment: ` --env dev`; "" for `local`."""
        return self._context.env_option

    def resource_label(self, name: str) -> str:
        """The name of a queue for people: on `local` without the project that made it."""
        return self._context.resource_label(name)

    @property
    def project(self) -> str:
        """The project: its name, or NAME.1a2b3c4d for a folder without a name in batchml.toml."""
        return self._context.project

    # --- submitting -------------------------------------------------------------------------

    @overload
    def submit(
        self, job: Function, /, *arguments: Any, **options: Unpack[SubmitOptions]
    ) -> RunHandle: ...

    @overload
    def submit(self, job: Job = None, **options: Unpack[SubmitOptions]) -> RunHandle: ...

    def submit(
        self, job: Job | Function = None, *arguments: Any, **options: Unpack[SubmitOptions]
    ) -> RunHandle:
        """Submit a run, exactly once, and return it; the options are the flags of `submit`.

        job: a folder with a `job.toml`, the name of such a folder below `jobs/`, a JobSpec, or a
            function. By default the option `command` runs in the client's folder.
        arguments: of the function, which may also be a `functools.partial`. `run.result()` returns
            what the function returns, or raises what it raises.
        options: see `SubmitOptions`, for example `gpus=1, params={"lr": 0.1}`.

        A call that is interrupted, or whose answer is lost, leaves no run or one run, never two.
        Raises ConfigError or UsageError, with every mistake of its input, and NotFound. Before
        anything is sent, a ConfigError names each part of a function or of its arguments that
        cannot be pickled.
        """
        prepared = self._prepare(job, arguments, options, dry_run=False)
        return submit_prepared(self._context, prepared, self._tell)

    def map(
        self, function: Function, items: Iterable[Any], **options: Unpack[SubmitOptions]
    ) -> MapHandle:
        """Submit an array that calls `function(item)` for each item: 10,000 items at most.

        One item is a single run; without items nothing is sent. Raises what `submit` raises.
        """
        calls = [(item,) for item in items]
        if not callable(function):
            raise UsageError(f"map: {function!r} is not a function.")
        if not calls:
            return MapHandle(None, 0)
        prepared = prepare_function(self._context, function, calls, options, is_map=True)
        run = submit_prepared(self._context, prepared, self._tell)
        return MapHandle(run, len(calls))

    def plan(
        self, job: Job | Function = None, *arguments: Any, **options: Unpack[SubmitOptions]
    ) -> dict[str, Any]:
        """Return the AWS requests that `submit` would send for the same arguments."""
        return to_requests(self._prepare(job, arguments, options, dry_run=True))

    def preview(self, job: Job = None, **options: Unpack[SubmitOptions]) -> RunPreview:
        """Return what `submit` would do with the same arguments: notices, price, AWS requests."""
        return preview_prepared(self._context, self._prepare(job, (), options, dry_run=True))

    def jobs(self) -> list[KnownJob]:
        """Return the jobs of the client's folder, and those that ship with batchml.

        Each has the `name` that `submit` takes, its `folder`, and its `spec`, or `mistakes`.
        """
        return list_jobs(self._context.job_folders, self._context.folder)

    def _prepare(
        self,
        job: Job | Function,
        arguments: tuple[Any, ...],
        options: SubmitOptions,
        *,
        dry_run: bool,
    ) -> PreparedRun:
        if callable(job):
            return prepare_function(self._context, job, [arguments], options, dry_run=dry_run)
        if arguments:
            raise UsageError(
                f"submit: {len(arguments)} arguments after the job, which only a function takes. "
                "Options have names, such as vcpus=2."
            )
        command = options.get("command")
        if command is not None and not isinstance(command, str) and not list(command):
            raise UsageError(
                "command: is empty. Give a list of words, or leave it out for the job's own."
            )
        return prepare(self._context, to_request(job, options), dry_run=dry_run)

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
    def sweeps(self, *, all_projects: bool = False) -> list[SweepHandle]: ...

    def sweeps(
        self, word: str | None = None, *, all_projects: bool = False
    ) -> SweepHandle | list[SweepHandle]:
        """Return the sweep that a word means: its key, a unique prefix of it, its name, or `@last`.
        Without a word, return the sweeps of the project or of all projects, the newest first.

        Raises NotFound, and UsageError for a prefix of several keys.
        """
        if word is None:
            context = self._context
            listed = list_sweeps(context, "" if all_projects else self.project)
            # A sweep without a name is damaged.
            return [SweepHandle(context, each.key, self._tell) for each in listed if each.name]
        return SweepHandle(self._context, find_sweep_store(self._context, word).key, self._tell)

    # --- finding and waiting ----------------------------------------------------------------

    def run(self, word: str) -> RunHandle:
        """Return the run that a word means: job id, unique prefix of it, name, key, or `@last`.

        The attribute `seen` of the handle has the run as it was found. Raises NotFound, and
        UsageError for a prefix of several job ids and for what is no text.
        """
        (job_id,) = select(self._context, [_as_text(word)])
        (found,) = load_runs(self._context, [job_id])
        return RunHandle(self._context, job_id, found.name, found, self._tell)

    @property
    def history_size(self) -> int:
        """Bytes of this machine's history, which grows when a run is submitted or has ended."""
        return self._context.history.size

    def handle(self, found: FoundRun) -> RunHandle:
        """The handle of a run that is known, such as `seen` of another handle: no call is made."""
        return RunHandle(self._context, found.job_id, found.name, found, self._tell)

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
        all_projects: bool = False,
    ) -> RunList:
        """Return the project's newest `limit` runs that match all filters, the newest first.

        The attribute `seen` of each handle has the run as it was found. Runs that AWS Batch has
        forgotten are included if they were submitted from this machine. Runs of sweeps are left out
        unless `tags` has "batchml:sweep" or `job` names one of them, and workers of group runs
        unless `tags` has "batchml:gang" or "batchml:group", or `job` names them.

        status: states ("RUNNING") and outcomes ("out-of-memory"), of which a run has one.
        job: the run's name.
        metric: conditions such as "val_accuracy>0.98", all of which a run meets.
        commit: the start of a git commit.
        since: the earliest time of creation, in seconds since the epoch.
        all_projects: whether to return the runs of all projects.

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
            project="" if all_projects else self.project,
        )
        found = find(self._context, run_filter, limit).runs
        return RunList(
            RunHandle(self._context, each.job_id, each.name, each, self._tell) for each in found
        )

    def describe(self, runs: Iterable[RunReference]) -> list[Run]:
        """Return the runs as they are now, in the given order, with one call for each 100 runs.

        Raises NotFound.
        """
        job_ids = self._ids(runs)
        known = describe_runs(self._context, job_ids)
        return [known[job_id] for job_id in job_ids]

    def wait(self, runs: Iterable[RunReference], *, timeout: float | None = None) -> Iterator[Run]:
        """Yield each run when it has ended, with any outcome. One call polls all runs.

        Raises NotFound, and TimeoutError after `timeout` seconds; the runs continue.
        """
        job_ids = [run.job_id for run in self.describe(runs)]
        yield from wait_for_runs(self._context, job_ids, timeout, self._tell, on_move=self._tell)

    def diff(self, left: RunReference, right: RunReference) -> RunComparison:
        """Compare the requests and the code of two runs: `facts` and `files` of the result.

        Raises NotFound, and UsageError for a prefix of several job ids.
        """
        return compare_requests(self._context, *self._ids([left, right]))

    def _ids(self, runs: Iterable[RunReference]) -> list[str]:
        """The job ids of runs, in the given order."""
        references = list(runs)
        found = iter(select(self._context, [each for each in references if isinstance(each, str)]))
        return [next(found) if isinstance(each, str) else each.job_id for each in references]

    def compare(self, runs: Iterable[RunReference]) -> ComparedRuns:
        """Measure runs side by side: `groups` with metrics, speed, use and cost, `conclusions`.

        Runs that differ only in a seed are one group, and so are the children of an array. Reads
        the logs of all runs, 200 at most. Raises NotFound, and UsageError for too many runs.
        """
        return compare_results(self._context, self._ids(runs))

    # --- the environment as a whole -----------------------------------------------------------

    def cluster(self, queues: Sequence[str] = (), *, all_projects: bool = False) -> ClusterSnapshot:
        """Queues, unfinished runs, compute environments and hosts as they are now.

        A run has its position in its queue or the reason why it waits, its hosts, and the last
        usage of CPU, memory, GPU and network of each node. A host has the runs that it holds, and
        its price an hour. `queues`: all queues unless given.

        AWS is asked for what changes only, if the method is called again; for hosts at most every
        15 seconds. Raises NotFound for a queue that does not exist.
        """
        names = [self._context.queue(each) for each in queues]
        check_queues(self._context.batch, names)
        if self._cluster is None:
            self._cluster = (open_poller(self._context), HostPrices(self._context))
        poller, prices = self._cluster
        snapshot = poller.poll(names)
        if not all_projects:
            snapshot = narrow(self._context, snapshot, self.project, names)
        return prices.add_to(snapshot)

    def costs(
        self, *, since: float | None = None, queue: str | None = None, all_projects: bool = False
    ) -> list[RunCost]:
        """The cost of each of the project's runs, the newest first: `usd.low` to `usd.high`.

        since: the earliest time of creation, in seconds since the epoch; by default a week ago.
        queue: only runs of this queue.

        Runs come from AWS Batch; runs that it has forgotten come from this machine's history.
        """
        start = self._context.clock.now() - _WEEK if since is None else since
        name = self._context.queue(queue) if queue else ""
        project = "" if all_projects else self.project
        return list_spending(self._context, int(start * 1000), name, project)[0]


def _ignore(_words: str) -> None: ...


def _as_list(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _as_text(word: object) -> str:
    if not isinstance(word, str):
        raise UsageError(f"run({word!r}): give a job id, a name, a key or @last as a text.")
    return word
