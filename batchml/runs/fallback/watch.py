"""Runs with `--fallback`, which may move to another queue: submit, watch and find them.

Commands that wait for the run (`submit --wait`, `wait`, `logs -f`) follow it to the other queue.
While no command waits, another run watches it: a controller (`runs/controllers`).
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from batchml.aws.batch.requests import (
    SubmissionContext,
    SubmissionRequests,
    dated_registration,
)
from batchml.aws.errors import ErrorClass, classify_error
from batchml.aws.naming import Platform, qualified
from batchml.context import Context, open_cache
from batchml.errors import (
    AccessError,
    BatchmlError,
    ConfigError,
    NoQueue,
    ServiceError,
    ServiceUnreachable,
)
from batchml.jobs.find import ImageSource
from batchml.model.fallback import FALLBACK_TAG, WATCHES_TAG, describe_move_done, moved_to
from batchml.model.job import JobSpec
from batchml.model.names import new_key, short_duration, to_name
from batchml.model.run import PROJECT_TAG, JobStatus, Record, Run, RunName
from batchml.runs.controllers import (
    IMAGE,
    ControllerRun,
    controller_platform,
    controller_requests,
    ensure_queue,
    find_controller_folder,
)
from batchml.runs.fallback.move import (
    WATCHER_GRACE,
    FallbackPlan,
    FallbackPlans,
    Mover,
    MoveStep,
    digest_of,
    encode_plan,
    leave_out_values,
    read_plan,
    record_after_move,
    successor,
)
from batchml.runs.job_images import pinned_image, read_platform
from batchml.runs.names import bare_id
from batchml.runs.options import RunRequest
from batchml.runs.send import keep_one_job, listing_delay, look_up, user_share
from batchml.runs.watch.events import RunEnded, RunEvent, RunMessage, StatusChanged

Make = Callable[["JobSpec", "SubmissionContext"], "tuple[SubmissionRequests, str]"]
Tell = Callable[[str], None]
Describe = Callable[[Sequence[str]], "dict[str, Run]"]

_LOCAL_POLL = 1.0  # seconds between two polls of the watcher
_AWS_POLL = 30.0
_MAX_OUTAGE = 3600.0  # seconds without an answer, after which the watcher fails and is restarted


# --- Submitting -----------------------------------------------------------------------------------


def with_fallback_tag(
    context: Context, request: RunRequest, spec: JobSpec, submission: SubmissionContext
) -> SubmissionContext:
    """The submission context with the tag of a run that may move. Raises ConfigError."""
    if request.array is not None:
        raise ConfigError(
            spec.name,
            [
                "fallback: with --array. Children of an array begin one by one, and only a whole "
                "job can move: submit without --fallback, into a queue whose `compute` names the "
                "compute environments of both queues (docs/capacity.md)."
            ],
        )
    target = context.queue(spec.fallback.queue)
    if target == context.queue(context.choose_queue(spec.queue, spec.resources.gpu_count)):
        raise ConfigError(spec.name, [f"fallback.queue: {target} is the run's own queue."])
    return replace(
        submission, tags={**submission.tags, FALLBACK_TAG: f"{target}:{spec.fallback.seconds}"}
    )


def make_plan(
    spec: JobSpec,
    submission: SubmissionContext,
    budget: Mapping[str, str],
    record: Record,
    make: Make,
    notices: list[str],
) -> tuple[Record, FallbackPlan]:
    """The record of a run that may move, and the plan of its move.

    `spec` is the job as it runs in the other queue: there `gpus = "auto"` may be another number.
    `budget` are the environment variables of `--max-cost` at the prices of the other queue.
    """
    fallback = spec.fallback
    # Without dependencies: they have succeeded by then, and AWS Batch may have forgotten them.
    moved = replace(submission, depends_on=(), env={**submission.env, **budget})
    requests, lent = leave_out_values(make(spec, moved)[0], spec.env)
    target = requests.submit["jobQueue"]
    record = replace(record, fallback=f"{target}:{fallback.seconds}")
    there = replace(record, gpus=spec.resources.gpu_count, vcpus=spec.resources.vcpus)
    gpus = "" if there.gpus == record.gpus else f" There it has {there.gpus or 'no'} GPU."
    notices.append(
        f"Moves to the queue {fallback.queue} when it finds no host within "
        f"{short_duration(fallback.seconds)}.{gpus}"
    )
    plan = FallbackPlan(
        submission.key, fallback.seconds, requests, there, bool(submission.store), lent
    )
    return record, plan.about(record)


def check_target(context: Context, queue: str) -> None:
    """Check the other queue before anything is sent. Raises NoQueue, ConfigError."""
    name = context.queue(queue)
    if context.batch.takes_jobs(name):
        return
    hint = "The fallback needs a queue that exists and takes jobs: batchml queue list."
    known = context.queues()
    if name in known:
        raise ConfigError("fallback", [f"queue: {queue} takes no jobs now. {hint}"])
    raise NoQueue(queue, known, hint)


def start_watching(context: Context, plan: FallbackPlan, job_id: str, tell: Tell) -> None:
    """Submit the run that watches `job_id` while no command waits.

    A failure is a message: then only a command that waits can move the run.
    """
    try:
        watcher = start_watcher(context, plan, job_id)
    except BatchmlError as error:
        reason = " ".join(error.mistakes) if isinstance(error, ConfigError) else error
        tell(
            f"It moves only while a command of this machine waits for it (batchml wait {job_id}): "
            f"{reason}"
        )
        return
    plans_of(context).save_watcher(plan.key, watcher)


def plans_of(context: Context) -> FallbackPlans:
    return FallbackPlans.beside(context.history, context.env)


# --- Watching -------------------------------------------------------------------------------------


def watch_until_moved(context: Context, plan: FallbackPlan, job_id: str, tell: Tell) -> str:
    """Watch a run until it has moved, or cannot move any more; the id of the final job.

    Raises the errors of the calls; the next watcher completes a move that has begun.
    """
    mover = Mover(lambda: context.batch, context.history, plan, context.clock, tell, user_share())
    pause = _LOCAL_POLL if context.settings.is_local else _AWS_POLL
    answered_at = context.clock.monotonic()
    while True:
        try:
            run = context.describe([job_id]).get(job_id)
            current_id = mover.step(run) if run is not None else ""
            answered_at = context.clock.monotonic()
        except BatchmlError as error:
            is_lost = isinstance(error, ServiceUnreachable) or getattr(error, "status", 0) >= 500
            if not is_lost or context.clock.monotonic() - answered_at > _MAX_OUTAGE:
                raise
            tell(f"Trying again: {error}")
            current_id = ""
        if current_id:
            plans_of(context).drop(plan.key)
            return current_id
        context.clock.sleep(pause)


class QueueMoves:
    """A `describe` function that follows runs to the queue to which they have moved.

    It returns a run under the requested id; `with_own_id` gives the run its own id. It moves runs
    of this machine whose time is over and that no other process moves. `news` are messages.
    """

    def __init__(self, context: Context, describe: Describe) -> None:
        self._context = context
        self._describe = describe
        self._current_ids: dict[str, str] = {}  # requested id -> id of the job that goes on
        self._movers: dict[str, Mover | None] = {}
        self.news: list[str] = []

    def __call__(self, job_ids: Sequence[str]) -> dict[str, Run]:
        told = self._describe([self._own(each) for each in job_ids])
        found = {}
        for asked in job_ids:
            run = told.get(self._own(asked))
            if run is not None:
                whole = asked == bare_id(asked)
                found[asked] = self._move_if_due(asked, run) if whole else run
        return found

    def with_own_id(self, run: Run) -> Run:
        current_id = self._current_ids.get(run.job_id)
        return replace(run, job_id=current_id) if current_id else run

    def _own(self, asked: str) -> str:
        whole = bare_id(asked)
        return self._current_ids.get(whole, whole) + asked.removeprefix(whole)

    def _move_if_due(self, asked: str, run: Run) -> Run:
        """Move the run if that is due; the run as it is now, under the requested id."""
        target = moved_to(run)
        mover = self._mover(run) if target or not run.status.is_terminal else None
        age = self._context.clock.now() - (run.stopped_at or 0) / 1000
        step = mover.see(run, self._patience(run.key)).step if mover else MoveStep.WAIT
        if target:
            current_id = successor(self._context.batch, run)
            if current_id:
                self.news.append(describe_move_done(target, current_id))
            elif mover and age >= self._patience(run.key):
                current_id = self._try_to_move(mover, run)
            if current_id and current_id != run.job_id:
                return self._follow(asked, run, current_id)
            # The process that cancelled it is about to submit it in the other queue.
            if age < WATCHER_GRACE:
                return replace(run, job_id=asked, status=JobStatus.RUNNABLE, stopped_at=None)
        elif step is MoveStep.LEAVE and mover:
            current_id = self._try_to_move(mover, run)
            if current_id != run.job_id:
                return self._follow(asked, run, current_id)
        elif run.status.is_terminal and run.key:
            plans_of(self._context).drop(run.key)
        return replace(run, job_id=asked)

    def _try_to_move(self, mover: Mover, run: Run) -> str:
        """Move the run; the id of its job. A refused move is a message, and is not tried again."""
        try:
            return mover.move(run)
        except AccessError as error:
            refused: BatchmlError = error
        except ServiceError as error:
            if classify_error(error) is not ErrorClass.REFUSED:
                raise
            refused = error
        self._movers[run.key] = None
        self.news.append(f"It is not moved: {refused}")
        return run.job_id

    def _follow(self, asked: str, run: Run, current_id: str) -> Run:
        self._current_ids[asked] = current_id
        record_move(self._context, run, current_id)
        told = self._describe([current_id]).get(current_id)
        waiting = replace(run, status=JobStatus.SUBMITTED, status_reason="", stopped_at=None)
        return replace(told or waiting, job_id=asked)

    def _mover(self, run: Run) -> Mover | None:
        if run.key not in self._movers:
            plan, context = plans_of(self._context).find(run.key), self._context
            self._movers[run.key] = None
            if plan is not None:
                self._movers[run.key] = Mover(
                    lambda: context.batch, context.history, plan, context.clock, self.news.append,
                    user_share(),
                )  # fmt: skip
        return self._movers[run.key]

    def _patience(self, key: str) -> int:
        """The seconds by which the watcher may be late; 0 without a watcher."""
        return WATCHER_GRACE if plans_of(self._context).watcher(key) else 0


def follow_moves(moves: QueueMoves, events: Iterable[RunEvent]) -> Iterator[RunEvent]:
    """The events of a run with the id of its current job, and the messages of its moves."""
    last: Run | None = None
    for event in events:
        if isinstance(event, RunEnded | StatusChanged | RunMessage):
            last = moves.with_own_id(event.run)
            event = replace(event, run=last)
        while last is not None and moves.news:
            yield RunMessage(last, moves.news.pop(0))
        yield event


# --- Finding the job that a run is now ------------------------------------------------------------


def record_move(context: Context, run: Run, current_id: str) -> None:
    """Keep in the history to which job a run of this machine has moved, unless the disk is full."""
    history = context.history
    plans_of(context).drop(run.key)
    known = history.records(context.env).get(run.job_id)
    if known is None:
        return
    with suppress(OSError):
        if known.moved != run.job_id:
            history.intend(record_after_move(known, run.job_id, moved_to(run) or known.queue))
        history.add_job_id(known.key, current_id)


def follow_move(context: Context, names: Sequence[RunName], job_id: str) -> str:
    """The id of the current job of a run, also after it has moved.

    AWS is called only for runs that may move and whose move is not in the history.
    """
    whole = bare_id(job_id)
    for name in names:
        if whole == name.moved != name.job_id:
            return name.job_id + job_id.removeprefix(whole)
        if whole == name.job_id and name.fallback and name.moved in ("", whole):
            run = context.describe([whole]).get(whole)
            if run is None or not moved_to(run):
                return job_id
            current_id = successor(context.batch, run)
            if current_id:
                record_move(context, run, current_id)
            return (current_id or whole) + job_id.removeprefix(whole)
    return job_id


def find_successors(context: Context, runs: Iterable[Run]) -> dict[str, str]:
    """The jobs that continue moved jobs in the other queue: old id -> new id.

    They are looked for as long as AWS Batch may not list a new job. A caller that stops a run has
    to stop these, too; nothing is submitted.
    """
    found = {}
    for run in runs:
        queue = moved_to(run)
        if not queue or not run.key:
            continue
        plans_of(context).drop(run.key)
        age = context.clock.now() - (run.stopped_at or 0) / 1000
        seconds = listing_delay(context.batch) if age < WATCHER_GRACE else 0.0
        wanted = Record(job_name=run.job_name, queue=queue)
        jobs = look_up(context.batch, wanted, context.clock, seconds)
        if jobs:
            found[run.job_id] = keep_one_job(context.batch, jobs, lambda _: None)
            record_move(context, run, found[run.job_id])
    return found


def with_moves(context: Context, told: dict[str, Run]) -> dict[str, Run]:
    """The same runs; a run that has moved is replaced by its current job."""
    for asked, run in told.items():
        if moved_to(run):
            current_id = successor(context.batch, run)
            if current_id:
                told = {**told, asked: context.describe([current_id]).get(current_id, run)}
    return told


# --- The run that watches -------------------------------------------------------------------------


ATTEND = "attend"  # the command of a watcher on `local`: local/executors/spec.py
PLAN = "fallback.json"  # the name of the plan in the run's store


def start_watcher(context: Context, plan: FallbackPlan, job_id: str) -> str:
    """Submit the watcher; its id. It is not in the history; a second watcher does no harm.

    Raises ConfigError if the environment has no queue or no role for controllers, and the errors of
    the calls.
    """
    requests = (
        _local_requests(context, plan)
        if context.settings.is_local
        else _aws_requests(context, plan, job_id)
    )
    api, request = context.batch, requests.submit
    try:
        return api.submit(request)
    except ServiceError as error:
        if error.code != "ClientException":
            raise
        if api.has_definition(requests.register["jobDefinitionName"]):
            raise
        api.register(dated_registration(requests.register, context.clock.now()))
        return api.submit(request)


def _watcher_requests(
    plan: FallbackPlan, command: tuple[str, ...], image: str, queue: str, platform: Platform
) -> SubmissionRequests:
    inherited = ("batchml:env", PROJECT_TAG)
    tags = {each: value for each in inherited if (value := plan.record.tags.get(each))}
    watcher = ControllerRun(
        name=to_name(f"{plan.record.name}-fallback"),
        command=command,
        image=image,
        queue=queue,
        platform=platform,
        memory="512 MiB",
        tags={WATCHES_TAG: plan.key, **tags},
    )
    return controller_requests(watcher, new_key(os.urandom))


def _local_requests(context: Context, plan: FallbackPlan) -> SubmissionRequests:
    # The image is only a name: the embedded server runs its own Python.
    image = f"batchml/{IMAGE}"
    return _watcher_requests(plan, (ATTEND, plan.key), image, ensure_queue(context), Platform())


def _aws_requests(context: Context, plan: FallbackPlan, job_id: str) -> SubmissionRequests:
    from batchml.aws.s3 import BucketStore

    environment, known = context.settings.environment, open_cache(context)
    if not environment.controller_queue:
        raise ConfigError(
            context.env,
            [
                "controller_queue: missing. Name a queue of cheap hosts for the watchers of runs "
                'with --fallback, such as controller_queue = "cpu".'
            ],
        )
    if not plan.queue.startswith(qualified(context.env, "")):
        raise ConfigError(
            context.env,
            [
                f"fallback.queue: {plan.queue} is not a queue of this environment, and the role "
                "of controllers may submit to no other."
            ],
        )
    bucket = known.outputs().get("BucketName", "")
    folder = find_controller_folder(context)
    platform = controller_platform(read_platform(context), known.outputs(), context.env)
    image = pinned_image(context, ImageSource(folder), environment.controller_queue, known)
    data = encode_plan(plan)
    BucketStore(context.connect(), bucket).put(f"runs/{plan.key}/{PLAN}", data)
    flags = {
        "env": context.env, "region": environment.region, "job": job_id,
        "plan": f"s3://{bucket}/runs/{plan.key}/{PLAN}", "digest": digest_of(data),
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = ("python", "-m", "batchml", ATTEND, plan.key, *words)
    queue = context.queue(environment.controller_queue)
    return _watcher_requests(plan, command, image, queue, platform)


def fetch_plan(context: Context, address: str, digest: str) -> FallbackPlan:
    """Read the plan of a watcher in AWS. Raises ConfigError if it has changed."""
    from batchml.aws.s3 import BucketStore

    bucket, _, key = address.removeprefix("s3://").partition("/")
    data = BucketStore(context.connect(), bucket).get(key)
    if data is None or digest_of(data) != digest:
        raise ConfigError(
            address, ["the plan was deleted, or has changed since the run was submitted."]
        )
    return read_plan(data)


def job_id_of(context: Context, key: str) -> str:
    """The current job id of a run of this machine; "" if it was never submitted."""
    names = context.history.names(context.env).named(key)
    return next((name.job_id for name in names if name.key == key), "")
