"""Start a sweep: find its file and its job, prepare and check it, and write it to its store.

`resolve_sweep` reads the file and the job, and reports all mistakes of both at once.
`prepare_sweep` prepares all that the sweep needs; nothing is sent. `start_sweep` sends code and
image, and writes the documents of the sweep; no trial is submitted yet. `check_sweep` makes the
output of `sweep check`.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.naming import make_platform, owner_tags
from batchml.context import Context, EnvironmentCache, Notify, drop_cache, open_cache
from batchml.cost.quote import need_of_job
from batchml.cost.service import quote_of
from batchml.errors import BatchmlError, ConfigError, InputNotFound, NotFound
from batchml.jobs.code import CodeArchive
from batchml.jobs.find import ImageSource, find_job, find_source
from batchml.jobs.gpus import resolve_gpus
from batchml.jobs.neurons import take_whole_hosts
from batchml.jobs.placement import check_placement
from batchml.jobs.source import read_flags
from batchml.local import machine
from batchml.model.job import JobSpec, Retry
from batchml.model.names import is_valid_name, new_key, to_name
from batchml.model.run import MAX_ARRAY, PROJECT_TAG, SWEEP_TAG
from batchml.model.sweep import SweepSpec
from batchml.runs.fit import fit_to_machine
from batchml.runs.job_images import image_reference, own_image_notices, publish_image
from batchml.runs.options import (
    ResolvedJob,
    RunRequest,
    name_of,
    resolve_job,
)
from batchml.runs.package import (
    CommitQuery,
    PackageStore,
    code_folder,
    find_package_store,
    pack_code,
    store_package,
)
from batchml.runs.prepare import environment_variables
from batchml.runs.send import user_name
from batchml.runtime.protocol.sweep import CONTRACT, EVERY, POLL_EVERY, TrialContract
from batchml.sweeps.control.plan import ChosenMode, SubmitMode, count_trials
from batchml.sweeps.forecast import Forecast, describe, make_forecast
from batchml.sweeps.jobs import first_requests
from batchml.sweeps.run import needs_controller
from batchml.sweeps.samplers.optuna import missing_package_mistakes
from batchml.sweeps.spec.file import MAX_NAME, read_sweep
from batchml.sweeps.spec.rules import (
    as_mistake_of_space,
    check_with_job,
    new_names,
    with_full_length,
)
from batchml.sweeps.started import StartedSweep, write_started
from batchml.sweeps.stores import SweepStore, open_sweep_store

FILE = "sweep.toml"  # the name of a sweep file that is found by its job's name
_ATTEMPTS = 3  # attempts at a trial whose host is lost, unless job.toml sets a number


# --- The file and the job -------------------------------------------------------------------------


class SweepOptions(Struct, frozen=True, kw_only=True):
    """The options of `sweep`.

    `changes` are the values of `--set`. `table` replaces the content of the file. `job` replaces
    the job that the file names: a JobSpec, or the name or folder of a job.
    """

    file: str = ""
    table: Mapping[str, Any] | None = None
    job: JobSpec | str | None = None
    changes: tuple[str, ...] = ()
    name: str = ""
    include_secrets: bool = False
    strict: bool = False


class ResolvedSweep(Struct, frozen=True):
    """A sweep and its job, as their files define them."""

    where: str  # the name of the sweep file in messages
    text: str  # its content
    spec: SweepSpec
    job: ResolvedJob


def limit_changes(trials: int | None, parallel: int | None) -> tuple[str, ...]:
    """`--trials` and `--parallel` as changes of the file."""
    limits = (("limits.trials", trials), ("limits.parallel", parallel))
    return tuple(f"{key}={value}" for key, value in limits if value is not None)


def resolve_sweep(context: Context, options: SweepOptions) -> ResolvedSweep:
    """Read the sweep and its job. Raises ConfigError with every mistake of both, and NotFound for a
    file that does not exist."""
    path = None if options.table is not None else find_sweep_file(context, options.file)
    where, text = ("The sweep", "") if path is None else (_relative(context, path), _read(path))
    table = dict(options.table) if options.table is not None else _parse(where, text)
    if options.name:
        table["name"] = options.name
    if path is not None and path.name == FILE:
        table.setdefault("job", str(path.parent))
    if isinstance(options.job, JobSpec):
        table["job"] = options.job.name or name_of(options.job.command)
    elif options.job is not None:
        table["job"] = options.job
    file_folder = path.parent if path else context.folder
    _name_after_folder(table, file_folder)
    mistakes: list[str] = []
    spec, job = None, None
    try:
        spec = read_sweep(table, where, text=text, changes=options.changes)
    except ConfigError as error:
        mistakes += error.mistakes
    job_name = spec.job if spec is not None else table.get("job")
    if isinstance(job_name, str) and job_name:
        try:
            provided = _set_by_every_trial(spec, table)
            job = _resolve_job(context, options, job_name, file_folder, provided)
        except ConfigError as error:
            mistakes += [f"{error.where}: {mistake}" for mistake in error.mistakes]
        except NotFound as error:
            mistakes.append(f"job: {error}")
    method = spec.method if spec is not None else table.get("method")
    mistakes += missing_package_mistakes(method) if isinstance(method, str) else []
    if spec is not None and job is not None:
        mistakes += _mistakes_with_job(spec, job)
    if mistakes:
        raise ConfigError(where, mistakes)
    assert spec is not None and job is not None
    return ResolvedSweep(where, text, spec, job)


def _mistakes_with_job(spec: SweepSpec, job: ResolvedJob) -> list[str]:
    """The mistakes of a sweep together with its job, and with the source of the job's program."""
    new, command = new_names(spec, job.spec), job.spec.template
    if not new:
        return check_with_job(spec, job.spec)
    code = job.spec.code
    folder = job.folder / code if isinstance(code, str) else job.folder
    program = read_flags(command, folder)
    mistakes = check_with_job(spec, job.spec, program.known(new))
    of_flags = program.mistakes(new, job.spec.params)
    return [*mistakes, *map(as_mistake_of_space, of_flags)]


def _name_after_folder(table: dict[str, Any], file_folder: Path) -> None:
    """Name the sweep after the job's folder if `job` is a path without a name, such as "."."""
    job = table.get("job")
    if isinstance(job, str) and job and "name" not in table and not job.strip("./"):
        name = to_name((file_folder / job).resolve().name)[:MAX_NAME]
        if is_valid_name(name):
            table["name"] = name


def _set_by_every_trial(spec: SweepSpec | None, table: dict[str, Any]) -> frozenset[str]:
    """The parameters for which every trial has a value: the job needs no default for them."""
    if spec is not None:
        return frozenset(name for name, each in spec.space.items() if not each.when)
    space = table.get("space")
    return frozenset(map(str, space)) if isinstance(space, dict) else frozenset()


def find_sweep_file(context: Context, word: str) -> Path:
    """The sweep file that a word names: its path, or a job's folder or name with a `sweep.toml`.

    Raises NotFound.
    """
    named = context.folder / word
    if named.is_file():
        return named
    for folder in (named, *(jobs / word for jobs in context.job_folders)):
        if (folder / FILE).is_file():
            return folder / FILE
    if named.is_dir():
        hint = "That file defines the sweep: docs/sweep-file.md."
        raise InputNotFound("File", str(Path(word) / FILE), [], hint)
    known = [path.name for path in context.folder.glob("*.toml") if path.name != "batchml.toml"]
    known += [path.parent.name for jobs in context.job_folders for path in jobs.glob(f"*/{FILE}")]
    hint = f"Give a sweep file, or a job that has a {FILE}. How to write one: docs/sweep-file.md."
    raise InputNotFound("Sweep file", word, known, hint)


def _relative(context: Context, path: Path) -> str:
    try:
        return str(path.relative_to(context.folder))
    except ValueError:
        return str(path)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"not UTF-8: {error.reason}."]) from error


def _parse(where: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(where, [f"not TOML: {error}."]) from error


def _resolve_job(
    context: Context,
    options: SweepOptions,
    name: str,
    file_folder: Path,
    provided_params: frozenset[str],
) -> ResolvedJob:
    """The job; it is looked for beside the sweep file first."""
    request = RunRequest(include_secrets=options.include_secrets, provided_params=provided_params)
    if isinstance(options.job, JobSpec):
        job = resolve_job(context, replace(request, spec=options.job))
        has_rule = options.job.retry != Retry()
    else:
        folder = _find_job(name, context.job_folders, (file_folder, context.folder))
        job = resolve_job(context, replace(request, job=str(folder)))
        has_rule = "retry" in _parse(str(folder), (folder / "job.toml").read_text("utf-8"))
    if has_rule:
        return job
    # A lost host is not the trial's fault: retry then, unless the job sets its own rule.
    retry = Retry(attempts=_ATTEMPTS, on=("host-lost", "image-error"))
    original = replace(job.original, retry=retry)
    return replace(job, spec=replace(job.spec, retry=retry), original=original)


def _find_job(name: str, folders: Sequence[Path], starts: Sequence[Path]) -> Path:
    """Find a job as `submit` does, from each folder of `starts` in turn. Raises NotFound."""
    *others, last = dict.fromkeys(starts)
    for start in others:
        with suppress(NotFound):
            return find_job(name, folders, start)
    return find_job(name, folders, last)


# --- Preparing and starting -----------------------------------------------------------------------


class PreparedSweep(Struct, frozen=True):
    """A sweep that can be started, and notices for the user.

    `archive` is None for a job without code of its own, `cache` is None on `local`.
    """

    sweep: StartedSweep
    archive: CodeArchive | None
    packages: PackageStore
    image_source: ImageSource | None
    notices: tuple[str, ...] = ()
    cache: EnvironmentCache | None = None


def prepare_sweep(context: Context, options: SweepOptions) -> PreparedSweep:
    """Prepare a sweep. Nothing is sent and nothing is stored.

    Raises ConfigError with all the mistakes of the file and of its job, NotFound, UsageError.
    """
    context.check_system()
    resolved = resolve_sweep(context, options)
    folder = resolved.job.folder
    commit_query = CommitQuery(folder)
    spec = resolved.spec
    job, notices = with_full_length(spec, resolved.job.spec)
    cache = None if context.settings.is_local else open_cache(context)
    source = find_source(job.image, context.image_folders, folder)
    if context.settings.is_local:
        job = fit_to_machine(context, job, options.strict, notices)
        spec = _fit_parallel(spec, job, notices)
    else:
        job = resolve_gpus(context, job, source, cache, notices)
        job = check_placement(context, take_whole_hosts(context, job, cache, notices))
    notices += own_image_notices(resolved.job)
    packages = find_package_store(context, cache, job.image, source)
    mistakes = _environment_mistakes(context, job, packages)
    if mistakes:
        raise ConfigError(resolved.where, mistakes)
    request = RunRequest(include_secrets=options.include_secrets)
    archive = pack_code(context, request, resolved.job, packages, notices)
    key = new_key()
    commit = commit_query.read().id
    tags = {
        SWEEP_TAG: key,
        "batchml:job": resolved.job.job,
        "batchml:commit": commit,
        PROJECT_TAG: context.project,
    }
    if not context.settings.is_local:
        tags |= owner_tags(context.env)
    sweep = StartedSweep(
        key=key,
        name=spec.name,
        env=context.env,
        project=context.project,
        spec=spec,
        job=msgspec.json.decode(msgspec.json.encode(job)),  # as it will be read from the store
        queue=context.queue(context.choose_queue(job.queue, job.resources.gpu_count)),
        image=image_reference(context, job, source, cache),
        created_at=context.clock.now(),
        user=user_name(),
        commit=commit,
        text=resolved.text,
        hourly=_hourly_cost(context, spec, job, notices),
        tags={name: value for name, value in tags.items() if value},
        store=packages.store(key) or str(context.home.root / "sweeps" / key),
        runs=packages.store(key).removesuffix(f"/{key}"),
        documents=packages.documents,
        environ=environment_variables(context),
        folder=str(code_folder(resolved.job) or ""),
    )
    if archive is not None:
        sweep = replace(sweep, code=packages.address(archive))
    if cache is not None:
        platform = make_platform(context.env, context.settings.environment, cache.outputs())
        sweep = replace(sweep, platform=platform)
    return PreparedSweep(sweep, archive, packages, source, tuple(notices), cache)


def start_sweep(
    context: Context,
    prepared: PreparedSweep,
    tell: Notify = lambda _: None,
    before_spec: Callable[[], None] = lambda: None,
) -> SweepStore:
    """Write the code, the image and the documents of the sweep; its store. No trial runs yet.

    A process that is killed meanwhile leaves no sweep, or a complete one: `spec.json` is written
    last. `before_spec` is called right before it is written.
    """
    sweep = prepared.sweep
    context.connect()
    if not context.settings.is_local:
        context.home.prepare()
    publish_image(context, prepared.image_source, sweep.image)
    try:
        store_package(context, prepared.packages, prepared.archive, None, tell)
        store = open_sweep_store(context, sweep.key)
        store.put(CONTRACT, make_contract(sweep, is_local=context.settings.is_local).to_json())
        before_spec()
        write_started(store, sweep)
    except BatchmlError:
        if prepared.cache is not None:  # the error may come from an outdated cache
            drop_cache(context)
        raise
    if prepared.cache is not None:
        prepared.cache.save()
    return store


def _environment_mistakes(context: Context, job: JobSpec, packages: PackageStore) -> list[str]:
    """Why trials cannot run in an environment in AWS: they need batchml's runtime, and a bucket."""
    if context.settings.is_local:
        return []
    if not packages.is_read:
        return [
            f"job: {job.image} was not built by batchml, so it lacks the program that runs a "
            f"trial. Name a folder below images/ whose Dockerfile builds on it."
        ]
    if not packages.codes:
        return [
            f"env: {context.env} has no bucket, in which a sweep keeps its state. Make one with "
            f"`batchml setup --env {context.env}`."
        ]
    return []


def _fit_parallel(spec: SweepSpec, job: JobSpec, notices: list[str]) -> SweepSpec:
    """Reduce `limits.parallel` to the trials that fit this machine at once.

    A method that learns from results would otherwise choose parameters for trials that only wait.
    """
    room = [
        machine.count_vcpus() // job.resources.vcpus,
        machine.memory_mib() // max(1, job.resources.memory_mib),
    ]
    if job.resources.gpu_count:
        room.append(len(machine.find_gpus()) // job.resources.gpu_count)
    parallel = max(1, min(spec.limits.parallel, *room))
    if parallel == spec.limits.parallel:
        return spec
    trials = "1 trial" if parallel == 1 else f"{parallel} trials"
    notices.append(f"Fitted to this machine: {trials} at once instead of {spec.limits.parallel}.")
    return replace(spec, limits=replace(spec.limits, parallel=parallel))


def _hourly_cost(
    context: Context, spec: SweepSpec, job: JobSpec, notices: list[str]
) -> float | None:
    """The most that an hour of one trial costs, in USD; None where it is free or unknown.

    Raises ConfigError where it is unknown and `limits.cost` needs it.
    """
    queue, why = context.choose_queue(job.queue, job.resources.gpu_count), ""
    try:
        quote = quote_of(context, need_of_job(job), queue)
        if quote.is_free:
            return None
        if quote.hour is not None:
            return float(quote.hour.high)
        why = "; ".join(f"{what}: {reason}" for what, reason in quote.unknown.items())
    except BatchmlError as error:
        why = str(error)
    if spec.limits.cost is not None:
        raise ConfigError(
            "limits.cost", [f"the price of a trial in queue {queue} is unknown: {why}"]
        )
    notices.append(f"The cost is unknown: {why}")
    return None


# --- The contract with the trials -----------------------------------------------------------------


# Seconds on `local` between two messages of a trial, and between two polls of the stop signal: the
# store is a folder, and to read it costs nothing.
LOCAL_EVERY, LOCAL_POLL = 2.0, 1.0

# In AWS the trials of a wide sweep report less often: one controller reads all messages, and a
# prefix of a bucket takes 3,500 PUT and 5,500 GET requests a second. These are the most messages
# and polls a second of all trials together.
_MESSAGES, _POLLS = 20, 100


def make_contract(sweep: StartedSweep, *, is_local: bool) -> TrialContract:
    """The contract with all trials of a sweep: what they run, report and obey. Written once."""
    spec, job, width = sweep.spec, sweep.job_spec, sweep.spec.limits.parallel
    stop = spec.early_stop
    return TrialContract(
        key=sweep.key,
        goals=tuple((goal.metric, goal.direction) for goal in spec.goals),
        command=job.template,
        params=dict(job.params),
        patterns=job.patterns,
        step=stop.step,
        is_step_given=stop.is_step_given,
        method=stop.method,
        rungs=stop.rungs,
        max=stop.max,
        eta=stop.eta,
        resume=stop.resume,
        shape=sweep.mode.value,
        grace=float(job.checkpoint.grace_seconds),
        every=LOCAL_EVERY if is_local else max(EVERY, width / _MESSAGES),
        look=LOCAL_POLL if is_local else max(POLL_EVERY, width / _POLLS),
        attempts=job.retry.attempts,
        retries=tuple(job.retry.on),
    )


# --- sweep check ----------------------------------------------------------------------------------


class SweepCheck(Struct, frozen=True):
    """A sweep, its forecast, and the requests that would start it."""

    sweep: StartedSweep
    chosen_mode: ChosenMode
    forecast: Forecast
    requests: dict[str, Any]

    @property
    def lines(self) -> list[str]:
        """The forecast as text."""
        sweep = self.sweep
        return [
            f"Sweep {sweep.name} of job {sweep.job_spec.name}, in {sweep.env}: nothing was sent.",
            *describe(self.forecast),
            *(["Free: it runs on this machine, without a usd_per_hour."] if sweep.is_free else []),
            f"How it runs: {self.chosen_mode.why}.",
            *self._terminal_line(),
        ]

    def _terminal_line(self) -> list[str]:
        """A line if the sweep needs this terminal or a controller that is a run."""
        if self.chosen_mode.mode is SubmitMode.BATCHES:
            return ["It needs a controller: this terminal, and after Ctrl-C or --detach a run."]
        if needs_controller(self.sweep):
            return [
                "Early stopping, a target, a cost limit and confirming runs need a controller: "
                "this terminal, and after Ctrl-C or --detach a run."
            ]
        return []

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.sweep.name,
            "env": self.sweep.env,
            "shape": self.chosen_mode.mode.value,
            "why": self.chosen_mode.why,
            "forecast": msgspec.to_builtins(self.forecast),
            "requests": self.requests,
        }


def check_sweep(sweep: StartedSweep) -> SweepCheck:
    """Forecast a sweep and make its first requests. Nothing is sent."""
    forecast = make_forecast(sweep.spec, sweep.job_spec, hourly=sweep.hourly)
    if sweep.is_free:
        forecast = replace(forecast, cost=0.0)
    requests = first_requests(sweep, _first_size(sweep))
    return SweepCheck(sweep, sweep.chosen_mode, forecast, requests)


def _first_size(sweep: StartedSweep) -> int:
    """The number of children of the first batch of trials."""
    trials = count_trials(sweep.spec)
    if sweep.mode is SubmitMode.BATCHES:
        parallel = sweep.spec.limits.parallel
        return min(parallel, trials or parallel)
    return min(trials or 1, MAX_ARRAY)
