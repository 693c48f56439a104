"""Make all requests of a run. Nothing is sent or stored here: `submit` does that.

`prepare` goes from a RunRequest (flags, arguments, lines of a script) to a PreparedRun: the AWS
Batch requests, the archive of the code, the record for the history, and notices for the user.
"""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.requests import (
    SubmissionContext,
    SubmissionRequests,
    make_submission,
    params_variable,
)
from batchml.aws.naming import make_platform, owner_tags
from batchml.config.project import PROJECT_VARIABLE
from batchml.context import Context, EnvironmentCache, open_cache
from batchml.errors import ConfigError, NoQueue
from batchml.jobs.code import CodeArchive, check_command_size
from batchml.jobs.find import ImageSource, find_source
from batchml.jobs.gpus import resolve_gpus, with_gpus_of
from batchml.jobs.neurons import take_whole_hosts
from batchml.jobs.placement import check_placement, idle_gpus_notice
from batchml.model.data import unlisted_data
from batchml.model.environment import DEFAULT_QUEUE
from batchml.model.fabric import describe_network
from batchml.model.group import GROUP_TAG, GroupJob
from batchml.model.job import JobSpec
from batchml.model.names import new_key, new_token, to_name
from batchml.model.run import DATA_VARIABLE, PROJECT_TAG, Record
from batchml.runs.fit import fit_to_machine
from batchml.runs.job_images import (
    check_image_runs,
    check_kept_image,
    image_reference,
    own_image_notices,
)
from batchml.runs.options import (
    ResolvedJob,
    RunRequest,
    resolve_job,
)
from batchml.runs.package import (
    CommitQuery,
    GitCommit,
    PackageStore,
    check_placeholders,
    code_folder,
    find_package_store,
    memory_of,
    pack_code,
)
from batchml.runs.scripts import apply_script, with_slurm_sizes
from batchml.runtime.protocol.variables import takes

if TYPE_CHECKING:
    from batchml.runs.fallback.move import FallbackPlan
    from batchml.runs.groups.submit import SubmitIntent


_QUEUES_AGE = 1.0  # seconds; SubmitJob refuses a queue that was deleted meanwhile


class PreparedRun(Struct, frozen=True):
    """The requests of a run, and notices for the user."""

    spec: JobSpec
    requests: SubmissionRequests
    record: Record
    archive: CodeArchive | None
    image_source: ImageSource | None
    store: PackageStore
    notices: tuple[str, ...] = ()
    cache: EnvironmentCache | None = None  # None on `local`
    workers: "tuple[SubmitIntent, ...]" = ()  # the other jobs of a group run
    plan: "FallbackPlan | None" = None  # for a run that may move to another queue
    queue_at: str = ""  # the line of a script that names the queue

    @property
    def name(self) -> str:
        """The name that commands show."""
        return to_name(self.spec.name)


def prepare(
    context: Context, request: RunRequest, *, dry_run: bool, images: Mapping[str, str] = {}
) -> PreparedRun:
    """Make the requests of a run.

    `images` maps names of groups to image references that replace the job's image.
    Raises ConfigError, NotFound or UsageError, each with all the mistakes of its input.
    """
    context.check_system()
    notices: list[str] = []
    request = apply_script(context, request, notices)
    check_image_runs(context, request)
    job = resolve_job(context, request)
    query = CommitQuery(job.folder, memory=memory_of(context).commits)
    cache = None if context.settings.is_local else open_cache(context)
    requested = job.spec
    source = find_source(requested.image, context.image_folders, job.folder)
    if context.settings.is_local:
        fitted = fit_to_machine(context, requested, request.strict_resources, notices)
    else:
        fitted = resolve_gpus(context, requested, source, cache, notices)
        fitted = check_placement(context, take_whole_hosts(context, fitted, cache, notices))
    job = replace(job, spec=with_slurm_sizes(fitted), original=with_gpus_of(job.original, fitted))
    spec = job.spec
    context.forget_queues(_QUEUES_AGE)
    if context.settings.is_local and spec.queue:  # in AWS, SubmitJob refuses it
        check_queue(context, spec.queue, request.queue_at)
    notices += own_image_notices(job)
    store = find_package_store(context, cache, spec.image, source)
    _check_nodes(context, spec, store, dry_run=dry_run)
    archive = pack_code(context, request, job, store, notices)
    check_placeholders(spec, store)
    notices += [
        *_launcher_notice(job),
        *_attempts_notice(spec, request, store),
        *_network_notice(context, spec),
        *idle_gpus_notice(context, spec),
        *_unused_params_notice(spec, request.params),
    ]
    is_whole = archive is not None and code_folder(job) == job.folder
    commit = query.read(archive.name if archive and is_whole else "")
    submission = _submission_context(
        context, request, job, store, archive, commit, notices, dry_run=dry_run
    )
    outputs = cache.outputs() if cache else {}
    notices += _data_notice(context, spec, outputs.get("BucketName", ""))
    platform = make_platform(context.env, context.settings.environment, outputs)
    workers: list[tuple[GroupJob, SubmissionContext]] = []
    run = spec
    if spec.groups:
        from batchml.runs.groups.submit import split_into_jobs

        (head, submission), *workers = split_into_jobs(
            context, request, spec, submission, store, platform
        )
        run = head.spec

    def make(spec: JobSpec, submission: SubmissionContext) -> tuple[SubmissionRequests, str]:
        image = images.get(submission.tags.get(GROUP_TAG, ""), "")
        image = image or image_reference(context, spec, source, cache)
        queue = context.queue(context.choose_queue(spec.queue, spec.resources.gpu_count))
        made = make_submission(
            spec, image=image, queue=queue, submission=submission, platform=platform
        )
        return made, image

    requests, image = make(run, submission)
    if requests.document is not None:
        variables = {name: str(each) for name, each in spec.env.items()}
        check_command_size(spec.name, spec.argv(), {**params_variable(spec), **variables})
    record = _record(context, request, job, run, requests, submission, image, commit)
    record = replace(record, files=archive.files if archive else None)
    intents: list[SubmitIntent] = []
    if workers:
        from batchml.runs.groups.submit import with_workers

        record, intents = with_workers(record, workers, make)
    plan: FallbackPlan | None = None
    if spec.fallback.queue:
        from batchml.runs.fallback.watch import check_target, make_plan

        if source is None:
            queue = context.choose_queue(spec.queue, spec.resources.gpu_count)
            check_kept_image(context, spec.image, queue, spec.fallback.queue)
        if context.settings.is_local or not dry_run:
            check_target(context, spec.fallback.queue)
        moved = replace(spec, queue=spec.fallback.queue)
        if not context.settings.is_local:  # "auto" may be another number there
            asked = replace(requested, queue=spec.fallback.queue)
            moved = resolve_gpus(context, asked, source, cache, [])
            moved = take_whole_hosts(context, moved, cache, [])
            moved = with_slurm_sizes(check_placement(context, moved))
        budget = _cost_limit_variables(context, moved, request, [])
        record, plan = make_plan(moved, submission, budget, record, make, notices)
    return PreparedRun(
        spec, requests, record, archive, source, store, tuple(notices), cache, tuple(intents), plan,
        request.queue_at,
    )  # fmt: skip


def _check_nodes(context: Context, spec: JobSpec, store: PackageStore, *, dry_run: bool) -> None:
    if not store.is_read:
        mistakes = [
            f"{key}: needs the runtime of an image that batchml built, and {spec.image} is none. "
            f"{instead}"
            for key, instead, is_set in (
                ("idle_after", "Set timeout instead.", spec.idle_seconds),
                ("data", "Build an image on top of it (docs/images.md).", spec.data),
            )
            if is_set
        ]
        if mistakes:
            raise ConfigError(spec.name, mistakes)
    if spec.nodes > 1 or spec.launch.kind != "plain":
        from batchml.runs.groups.submit import check_nodes

        queue = context.choose_queue(spec.queue, spec.resources.gpu_count)
        asks = not (dry_run or context.settings.is_local)
        check_nodes(context, spec, queue, has_runtime=store.is_read, asks=asks)


def _launcher_notice(job: ResolvedJob) -> list[str]:
    if not job.launcher:
        return []
    return [
        f"{job.launcher}: the {job.spec.nodes} nodes work together, as with --launch "
        f"{job.spec.launch.kind}. --launch plain starts it on each node by itself."
    ]


def _attempts_notice(spec: JobSpec, request: RunRequest, store: PackageStore) -> list[str]:
    if request.auto_resume:
        checks = f"on hosts that pass the {spec.health.checks} checks"
        rest = f"each goes on from what the run has saved, {checks}"
        if not store.is_read:
            rest = f"each begins anew, on hosts not checked: batchml did not build {spec.image}"
        after = ", ".join(spec.retry.on)
        return [f"--auto-resume: up to {spec.retry.attempts} attempts, after: {after}; {rest}."]
    if spec.retry.attempts > 1:
        return [f"Up to {spec.retry.attempts} attempts, after: {', '.join(spec.retry.on)}."]
    if spec.nodes > 1:
        return ["One attempt: a lost node ends the run. [retry] attempts = 5 lets it go on."]
    return []


def _network_notice(context: Context, spec: JobSpec) -> list[str]:
    """The network between the nodes of a run in AWS, as far as batchml.toml tells."""
    if spec.nodes == 1 or context.settings.is_local:
        return []
    gpus = spec.resources.gpu_count
    queue = context.bare(context.queue(context.choose_queue(spec.queue, gpus)))
    text = describe_network(context.settings.environment, queue, gpus)
    return [text] if text else []


def _data_notice(context: Context, spec: JobSpec, bucket: str) -> list[str]:
    """Say if hosts keep no copies of data sets, or the jobs' role has no right to read some."""
    environment, env = context.settings.environment, context.env
    if context.settings.is_local or not spec.data:
        return []
    folders = [f"{name} = {each}" for name, each in spec.data.items() if each.startswith("/")]
    notices = []
    if folders:
        notices.append(
            f"data: {', '.join(folders)}: in AWS this is a folder of the container, not of this "
            "machine. Copy a folder of this machine with `batchml workspace push`, and name it as "
            "{workspace}/FOLDER."
        )
    where = f"under [env.{env}] of batchml.toml"
    if not environment.data_cache:
        notices.append(
            f"data: hosts of {env} keep no copies of data sets, so each run copies its own. Write "
            f"data_cache = true {where}, then: batchml setup --env {env}"
        )
    has_keys = "AWS_ACCESS_KEY_ID" in {**spec.env, **spec.secrets}
    unlisted = {} if has_keys else unlisted_data(spec.data, environment.data, bucket)
    if unlisted:
        prefixes = dict.fromkeys([*environment.data, *unlisted.values()])
        listed = ", ".join(f'"{each}"' for each in prefixes)
        notices.append(
            f"data: jobs of {env} may read {', '.join(unlisted.values())} only if the bucket's own "
            f"policy lets their role. Otherwise write {where}: data = [{listed}], then: batchml "
            f"setup --env {env}"
        )
    return notices


def _unused_params_notice(spec: JobSpec, given: Iterable[str]) -> list[str]:
    """Name the parameters of the command line that no word of the command uses."""
    unused = [name for name in given if not takes(spec.command, name, spec.params)]
    if not unused:
        return []
    names = ", ".join(f"{{{name}}}" for name in unused)
    return [
        f"-p: no word of the command uses {names}. The program finds it in the variable "
        "BATCHML_PARAMS only."
    ]


def _submission_context(
    context: Context,
    request: RunRequest,
    job: ResolvedJob,
    store: PackageStore,
    archive: CodeArchive | None,
    commit: GitCommit,
    notices: list[str],
    *,
    dry_run: bool,
) -> SubmissionContext:
    """The parts of the requests that differ from run to run, with a new key."""
    spec, key = job.spec, new_key(os.urandom)
    depends_on = request.after
    if depends_on and not dry_run:
        from batchml.runs.dependencies import resolve_dependencies

        depends_on = resolve_dependencies(context, request.after, notices)
    submission = SubmissionContext(
        key=key,
        code=store.address(archive),
        store=store.store(key),
        documents=store.documents,
        env=environment_variables(context) | _cost_limit_variables(context, spec, request, notices),
        tags=_tags(context, request, job, key, commit.id),
        share=request.share,
        depends_on=depends_on,
        array=request.array,
        token=new_token(os.urandom),
    )
    if spec.fallback.queue:
        from batchml.runs.fallback.watch import with_fallback_tag

        submission = with_fallback_tag(context, request, spec, submission)
    return submission


def _cost_limit_variables(
    context: Context, spec: JobSpec, request: RunRequest, notices: list[str]
) -> dict[str, str]:
    """The environment variables that tell the runtime the limit of `--max-cost`."""
    if request.max_cost is None:
        return {}
    from batchml.cost.service import limit_cost

    variables, words = limit_cost(context, spec, request.max_cost, request.array or 0)
    notices.append(words)
    return variables


def environment_variables(context: Context) -> dict[str, str]:
    """The environment variables of every run of this environment."""
    data = context.settings.data_dir
    variables = {PROJECT_VARIABLE: context.project} if context.project else {}
    if data and context.settings.is_local:
        variables[DATA_VARIABLE] = data.value
    return variables


def _tags(
    context: Context, request: RunRequest, job: ResolvedJob, key: str, commit: str
) -> dict[str, str]:
    """The user's tags, and the tags by which batchml finds a run."""
    ours = {
        "batchml:key": key,
        "batchml:commit": commit,
        "batchml:job": job.job,
        PROJECT_TAG: context.project,
    }
    if not context.settings.is_local:
        ours |= owner_tags(context.env)
    ours |= request.own_tags
    return {**request.tags, **{name: value for name, value in ours.items() if value}}


def _record(
    context: Context,
    request: RunRequest,
    job: ResolvedJob,
    spec: JobSpec,
    requests: SubmissionRequests,
    submission: SubmissionContext,
    image: str,
    commit: GitCommit,
) -> Record:
    """The record for the history, as it is before the run is sent."""
    sent, original = requests.submit, job.original
    if DATA_VARIABLE in submission.env:  # of this shell: a rerun in another one needs it
        data = {DATA_VARIABLE: submission.env[DATA_VARIABLE]}
        original = replace(original, env={**data, **original.env})
    return Record(
        key=submission.key,
        name=to_name(spec.name),
        job_name=sent["jobName"],
        project=submission.tags.get(PROJECT_TAG, ""),
        env=context.env,
        queue=sent["jobQueue"],
        job=str(job.folder) if job.job else "",
        folder=str(code_folder(job) or ""),
        command=tuple(spec.argv()),
        params=dict(spec.params),
        tags=submission.tags,
        commit=commit.id,
        dirty=commit.is_dirty,
        image=image,
        vcpus=spec.resources.vcpus,
        memory_mib=spec.resources.memory_mib,
        gpus=spec.resources.gpu_count,
        neurons=spec.resources.neurons,
        array_size=submission.array or 0,
        patterns=spec.patterns,
        directions=spec.directions,
        max_cost=request.max_cost,
        code=submission.code,
        spec=msgspec.to_builtins(original),
        other=job.has_other_command,
    )


def to_requests(prepared: PreparedRun) -> dict[str, Any]:
    """The requests for `--dry-run`, with the document that SubmitJob names, if there is one."""
    requests = prepared.requests
    found = {"RegisterJobDefinition": requests.register, "SubmitJob": requests.submit}
    if requests.document is not None:
        found["order"] = msgspec.json.decode(requests.document.data)
    if prepared.plan is not None:
        plan = prepared.plan
        found["fallback"] = {
            "after": plan.after,
            "SubmitJob": plan.requests.submit,
            "variablesOfTheFirstJob": list(plan.lent),
        }
    if prepared.workers:
        found["groups"] = {
            each.record.tags[GROUP_TAG]: {
                "RegisterJobDefinition": each.requests.register,
                "SubmitJob": each.requests.submit,
            }
            for each in prepared.workers
        }
    return found


# --- Queues that do not exist ---------------------------------------------------------------------


def check_queue(context: Context, queue: str, where: str = "") -> None:
    """Raise NoQueue for a queue that does not exist: one call.

    `where` is the line of a script that names it.
    """
    name, existing = context.queue(queue), context.queues()
    if name not in existing:
        raise no_queue(context, queue, existing, where)


def no_queue(context: Context, queue: str, existing: Iterable[str], where: str = "") -> NoQueue:
    """The error for a queue that does not exist, with the names of batchml.toml."""
    names = [context.bare(each) for each in existing]
    name = context.bare(queue)
    return NoQueue(name, names, _no_queue_hint(context, name, names), where=where)


def _no_queue_hint(context: Context, name: str, names: list[str]) -> str:
    if name in context.settings.environment.queues:
        return f"batchml.toml describes it: batchml setup --env {context.env} makes it."
    if not names:
        return "Make one: batchml queue create."
    best = DEFAULT_QUEUE if DEFAULT_QUEUE in names else names[0]
    return f"--queue {best} runs it {'here' if context.settings.is_local else 'there'}."
