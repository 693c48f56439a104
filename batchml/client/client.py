"""`batchml.Client`: submit runs, find them, wait for them; the commands do the same by it.

from batchml import Client

client = Client()
run = client.submit("lenet", params={"epochs": 2})
print(run.wait().status, run.metrics())
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from batchml.client.handle import RunHandle
from batchml.client.order import Order
from batchml.client.place import Place
from batchml.client.submission import Tell, prepare, send, shown
from batchml.clock import Clock, SystemClock
from batchml.errors import UsageError
from batchml.model.fallback import read_flag
from batchml.model.job import JobSpec, Scalar
from batchml.model.run import Run
from batchml.runtime.protocol.variables import text as param_text
from batchml.settings import load_settings

if TYPE_CHECKING:
    from batchml.client.sweeping.handle import SweepHandle

Words = str | RunHandle  # what names a run: a job id, a prefix of one, a name, a key, or "@last"


class Client:
    """One environment: `local`, the embedded AWS Batch of this machine, or one in AWS.

    A client holds no connection that must be closed, and nothing is asked before it is needed.
    Every method may raise AccessError (credentials, permissions), ServiceError (a refusal) and
    ServiceUnreachable; what it raises beside these is said with it. All of them are BatchmlErrors.
    """

    def __init__(
        self,
        env: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        tell: Tell | None = None,
    ) -> None:
        """Open the environment `env`; unless given, BATCHML_ENV's, or the file's default.

        `folder` is where `batchml.toml`, `jobs/` and `images/` are looked for, and the code of a
        command without a job: the current folder unless given. `environ` stands for `os.environ`,
        `clock` for the system's. `tell` is called with what a person should know, in words: what
        was fitted to this machine, what takes long.

        Raises ConfigError for a wrong `batchml.toml`, NotFound for an environment that it does not
        describe, UsageError for a folder that is not there.
        """
        here = Path(folder).absolute() if folder is not None else _current_folder()
        if not here.is_dir():
            raise UsageError(f"{here} is not a folder.")
        settings = load_settings(os.environ if environ is None else environ, here, env)
        self._tell = tell or _silently
        self._place = Place(settings, clock or SystemClock(), here, self._tell)

    def __repr__(self) -> str:
        return f"Client(env={self.env!r}, folder={str(self._place.here)!r})"

    @property
    def env(self) -> str:
        """The name of the environment."""
        return self._place.env

    # --- submitting -------------------------------------------------------------------------

    def submit(
        self,
        job: str | os.PathLike[str] | JobSpec | None = None,
        *,
        command: Sequence[str] | None = None,
        params: Mapping[str, Scalar] | None = None,
        name: str | None = None,
        queue: str | None = None,
        image: str | None = None,
        vcpus: int | None = None,
        memory: str | None = None,
        gpus: int | None = None,
        nodes: int | None = None,
        array: int | None = None,
        after: Sequence[Words] = (),
        attempts: int | None = None,
        retry_on: Sequence[str] | None = None,
        timeout: str | int | None = None,
        max_cost: float | None = None,
        set_env: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        share: str | None = None,
        fallback: str | None = None,
        strict_resources: bool = False,
        include_secrets: bool = False,
    ) -> RunHandle:
        """Submit a run, exactly once, and return it; the arguments are the flags of `submit`.

        job: a folder with a `job.toml`, the name of one below `jobs/`, or a JobSpec. Without it
            `command` runs in the client's folder.
        params: replace the job's `[params]`.
        nodes: hosts that the run has together, instead of the job's.
        memory: a size such as "8 GiB". timeout: of one attempt, such as "4h", or in seconds.
        array: so many runs at once, 2 to 10,000, that know their number by
            AWS_BATCH_JOB_ARRAY_INDEX.
        after: runs that have to succeed before this one starts.
        retry_on: the outcomes that are worth another attempt.
        max_cost: in USD; the run is told to save and is stopped before it costs more.
        share: of a queue with fair share.
        fallback: "QUEUE:30m": moves there when it finds no host for so long.
        strict_resources: refuse what this machine does not have instead of fitting the run to it.
        include_secrets: send files along whose names look like secrets (`.env`, `*.pem`).

        A call that is interrupted, or whose answer is lost, leaves no run or one run, never two.
        Raises ConfigError or UsageError, with every mistake of its input, and NotFound.
        """
        order = self.order(
            job, command=command, params=params, name=name, queue=queue, image=image, vcpus=vcpus,
            memory=memory, gpus=gpus, nodes=nodes, array=array, after=after, attempts=attempts,
            retry_on=retry_on, timeout=timeout, max_cost=max_cost, set_env=set_env, tags=tags,
            share=share, fallback=fallback, strict_resources=strict_resources,
            include_secrets=include_secrets,
        )  # fmt: skip
        prepared = prepare(self._place, order, dry_run=False)
        for notice in prepared.notices:
            self._tell(notice)
        job_id = send(self._place, prepared, self._tell)
        return RunHandle(self._place, job_id, prepared.name, tell=self._tell)

    def plan(
        self, job: str | os.PathLike[str] | JobSpec | None = None, **wanted: Any
    ) -> dict[str, Any]:
        """The AWS requests that `submit` with the same arguments would send; nothing is sent."""
        return shown(prepare(self._place, self.order(job, **wanted), dry_run=True))

    @staticmethod
    def order(
        job: str | os.PathLike[str] | JobSpec | None = None,
        *,
        command: Sequence[str] | None = None,
        params: Mapping[str, Scalar] | None = None,
        name: str | None = None,
        queue: str | None = None,
        image: str | None = None,
        vcpus: int | None = None,
        memory: str | None = None,
        gpus: int | None = None,
        nodes: int | None = None,
        array: int | None = None,
        after: Sequence[Words] = (),
        attempts: int | None = None,
        retry_on: Sequence[str] | None = None,
        timeout: str | int | None = None,
        max_cost: float | None = None,
        set_env: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        share: str | None = None,
        fallback: str | None = None,
        strict_resources: bool = False,
        include_secrets: bool = False,
    ) -> Order:
        """What is wanted of a run, as one value. The arguments are those of `submit`."""
        return Order(
            job=None if job is None or isinstance(job, JobSpec) else os.fspath(job),
            spec=job if isinstance(job, JobSpec) else None,
            command=tuple(command) if command else None,
            params={key: param_text(value) for key, value in (params or {}).items()},
            changes={
                "name": name,
                "queue": queue,
                "image": image,
                "timeout": timeout,
                "nodes": nodes,
                "resources": {"vcpus": vcpus, "memory": memory, "gpus": gpus},
                "retry": {"attempts": attempts, "on": list(retry_on) if retry_on else None},
                "env": dict(set_env or {}),
                "fallback": read_flag(fallback),
            },
            tags=dict(tags or {}),
            after=tuple(_word(each) for each in after),
            share=share or "",
            strict=strict_resources,
            array=array,
            max_cost=max_cost,
            include_secrets=include_secrets,
        )

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
    ) -> "SweepHandle":
        """Start a sweep and return it; the arguments are the flags of `batchml sweep`.

        file: a sweep file, a job that has a `sweep.toml`, or the table of such a file.
        job: stands for the job that the file names; a name, a folder, or one that is in no file.
        changes: of the file, such as "space.lr.log=[1e-5,1e-1]".
        trials, parallel: `limits.trials` and `limits.parallel`.

        Its trials begin when it is waited for (`wait`) or left to itself (`detach`).
        Raises ConfigError with every mistake of the file and of its job, and NotFound.
        """
        from batchml.client.sweeping.handle import SweepHandle
        from batchml.client.sweeping.reading import Wish, widths
        from batchml.client.sweeping.starting import make_ready, start

        wish = Wish(
            file="" if isinstance(file, Mapping) else os.fspath(file),
            table=file if isinstance(file, Mapping) else None,
            job=job if job is None or isinstance(job, JobSpec) else os.fspath(job),
            changes=(*changes, *widths(trials, parallel)),
            name=name or "",
            strict=strict_resources,
            include_secrets=include_secrets,
        )
        ready = make_ready(self._place, wish)
        for notice in ready.notices:
            self._tell(notice)
        start(self._place, ready, self._tell)
        return SweepHandle(self._place, ready.frozen.key, self._tell)

    @overload
    def sweeps(self, word: str) -> "SweepHandle": ...

    @overload
    def sweeps(self) -> "list[SweepHandle]": ...

    def sweeps(self, word: str | None = None) -> "SweepHandle | list[SweepHandle]":
        """The sweep that a word means: its key, a unique prefix of it, its name, or `@last`.
        Without a word all sweeps, the newest first.

        Raises NotFound, and UsageError for a prefix that means several.
        """
        from batchml.client.sweeping.boards import find_sweep, list_boards
        from batchml.client.sweeping.handle import SweepHandle

        if word is None:
            place = self._place
            listed = (each for each in list_boards(place) if each.name)  # the others are damaged
            return [SweepHandle(place, each.key, self._tell) for each in listed]
        return SweepHandle(self._place, find_sweep(self._place, word).key, self._tell)

    # --- finding and waiting ----------------------------------------------------------------

    def run(self, word: str) -> RunHandle:
        """The run that a word means: job id, unique prefix of one, name, key, or `@last`.

        Raises NotFound, and UsageError for a prefix that means several.
        """
        from batchml.client.runs import select

        (job_id,) = select(self._place, [word])
        return RunHandle(self._place, job_id, tell=self._tell)

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
        """The newest runs that match all that is given, the newest first; `seen` is what is known.

        Also those that AWS Batch has forgotten, if they were submitted from this machine. Runs of
        sweeps are left out unless `tags` has "batchml:sweep", or `job` names one; and workers of
        gangs unless `tags` has "batchml:gang".

        status: states ("RUNNING") and outcomes ("out-of-memory"); any of them.
        job: the run's name. metric: conditions such as "val_accuracy>0.98"; all of them.
        commit: the start of a git commit. since: seconds since the epoch.

        Raises UsageError for a state or a condition that cannot be read.
        """
        from batchml.client.finding import find
        from batchml.ops.search import Wanted, read_commit, read_condition, read_states

        wanted = Wanted(
            states=read_states(_several(status), "status"),
            queue=self._place.queue(queue) if queue else "",
            name=job,
            since=int(since * 1000) if since is not None else 0,
            tags=dict(tags or {}),
            params={name: param_text(value) for name, value in (params or {}).items()},
            metrics=tuple(read_condition(text, "metric") for text in _several(metric)),
            commit=read_commit(commit, "commit") if commit else "",
        )
        found = find(self._place, wanted, limit).runs
        return [RunHandle(self._place, each.job_id, each.name, each, self._tell) for each in found]

    def describe(self, runs: Iterable[Words]) -> list[Run]:
        """What the runs are now, in their order, a hundred a call. Raises NotFound."""
        from batchml.client.runs import described, select

        given = list(runs)
        found = iter(select(self._place, [each for each in given if isinstance(each, str)]))
        job_ids = [next(found) if isinstance(each, str) else each.job_id for each in given]
        known = described(self._place, job_ids)
        return [known[job_id] for job_id in job_ids]

    def wait(self, runs: Iterable[Words], *, timeout: float | None = None) -> Iterator[Run]:
        """Yield each run when it has ended, whatever came of it; one call a round for all.

        Raises NotFound, and TimeoutError after `timeout` seconds: the runs go on.
        """
        from batchml.client.waiting import wait_and_keep

        job_ids = [run.job_id for run in self.describe(runs)]
        yield from wait_and_keep(self._place, job_ids, timeout, self._tell, news=self._tell)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("The current folder does not exist any more: cd to another.") from None


def _silently(_words: str) -> None: ...


def _several(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _word(run: Words) -> str:
    return run if isinstance(run, str) else run.job_id
