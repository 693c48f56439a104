"""`--fallback`: a run that may move to another queue, from its submission to its watcher.

Commands that wait for it (`submit --wait`, `wait`, `logs -f`) follow it there. While no command
waits, a small run in the queue of controllers watches it: on `local` a process of this
installation, in AWS a container of images/controller.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from batchml.aws.batch.requests import (
    SubmissionContext,
    SubmissionRequests,
    dated_registration,
    make_submission,
)
from batchml.aws.errors import ErrorClass, classify_error
from batchml.aws.naming import Platform, qualified
from batchml.context import Context, open_cache
from batchml.errors import (
    AccessError,
    BatchmlError,
    ConfigError,
    NoQueue,
    NotFound,
    ServiceError,
    ServiceUnreachable,
)
from batchml.jobs.find import find_image
from batchml.jobs.images import pinned, read_recipe
from batchml.model.fallback import FALLBACK_TAG, WATCHES_TAG, describe_move_done, moved_to
from batchml.model.job import JobSpec, Resources
from batchml.model.names import new_key, short_duration, to_name
from batchml.model.run import JobStatus, Record, Run, RunName
from batchml.runs.controllers import IMAGE, controller_platform, ensure_queue
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
from batchml.runs.job_images import read_platform
from batchml.runs.names import bare_id
from batchml.runs.options import DEFAULT_QUEUE, RunRequest
from batchml.runs.send import keep_one_job, listing_delay, look_up, user_share
from batchml.runs.watch.events import RunEnded, RunEvent, RunMessage, StatusChanged

Make = Callable[["JobSpec", "SubmissionContext"], "tuple[SubmissionRequests, str]"]
Tell = Callable[[str], None]
Describe = Callable[[Sequence[str]], "dict[str, Run]"]

_LOCAL_POLL = 1.0  # seconds between two polls of a waiting run
_AWS_POLL = 30.0
_MAX_OUTAGE = 3600.0  # seconds without an answer after which AWS Batch may start another watcher


# --- Submitting -----------------------------------------------------------------------------------


def with_fallback_tag(
    context: Context, order: RunRequest, spec: JobSpec, submission: SubmissionContext
) -> SubmissionContext:
    """The requests' own part for a run that may move: with a tag. Raises ConfigError."""
    if order.array is not None:
        raise ConfigError(
            spec.name,
            [
                "fallback: with --array. Children of an array begin one by one, and only a whole "
                "job can move: submit without --fallback, into a queue whose `compute` names both "
                "(docs/capacity.md)."
            ],
        )
    goal = context.queue(spec.fallback.queue)
    if goal == context.queue(spec.queue or DEFAULT_QUEUE):
        raise ConfigError(spec.name, [f"fallback.queue: {goal} is the run's own queue."])
    return replace(
        submission, tags={**submission.tags, FALLBACK_TAG: f"{goal}:{spec.fallback.seconds}"}
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

    `budget` are the variables of `--max-cost` at the prices of the other queue.
    """
    fallback = spec.fallback
    # Its dependencies have succeeded by then, and AWS Batch may have forgotten them.
    there = replace(submission, depends_on=(), env={**submission.env, **budget})
    requests, lent = leave_out_values(make(replace(spec, queue=fallback.queue), there)[0], spec.env)
    goal = requests.submit["jobQueue"]
    record = replace(record, fallback=f"{goal}:{fallback.seconds}")
    notices.append(
        f"Moves to the queue {fallback.queue} when it finds no host within "
        f"{short_duration(fallback.seconds)}."
    )
    plan = FallbackPlan(
        submission.key, fallback.seconds, requests, record, bool(submission.store), lent
    )
    return record, plan.about(record)


def check_target(context: Context, given: str) -> None:
    """Check the other queue before anything is sent, so that a typing error is found early."""
    if context.batch.takes_jobs(context.queue(given)):
        return
    hint = "The fallback goes to a queue that is there and takes jobs: batchml queue list."
    known = context.batch.queues()
    if context.queue(given) in known:
        raise ConfigError("fallback", [f"queue: {given} takes no jobs now. {hint}"])
    raise NoQueue(given, known, hint)


def start_watching(context: Context, plan: FallbackPlan, job_id: str, tell: Tell) -> None:
    """Start the run that watches `job_id` while no command waits.

    A failure is a message: then only a command that waits moves the run.
    """
    try:
        watcher = start_watcher(context, plan, job_id)
    except BatchmlError as error:
        tell(
            f"It moves only while a command of this machine waits for it (batchml wait {job_id}): "
            f"{error}"
        )
        return
    plans_of(context).save_watcher(plan.key, watcher)


def plans_of(context: Context) -> FallbackPlans:
    return FallbackPlans.beside(context.history, context.env)


# --- Watching -------------------------------------------------------------------------------------


def watch_until_moved(context: Context, plan: FallbackPlan, job_id: str, tell: Tell) -> str:
    """Watch a run until it has moved, or can move no more; the id of the final job.

    Raises the errors of the calls; the next watcher completes a move that has begun.
    """
    mover = Mover(lambda: context.batch, context.history, plan, context.clock, tell, user_share())
    most = _LOCAL_POLL if context.settings.is_local else _AWS_POLL
    seen = context.clock.monotonic()
    while True:
        try:
            run = context.describe([job_id]).get(job_id)
            now = mover.step(run) if run is not None else ""
            seen = context.clock.monotonic()
        except BatchmlError as error:
            is_lost = isinstance(error, ServiceUnreachable) or getattr(error, "status", 0) >= 500
            if not is_lost or context.clock.monotonic() - seen > _MAX_OUTAGE:
                raise
            tell(f"Trying again: {error}")
            now = ""
        if now:
            plans_of(context).drop(plan.key)
            return now
        context.clock.sleep(most)


class QueueMoves:
    """A `describe` function that follows runs to the queue where they have moved.

    It returns a run under the id that was asked for; `true` gives the run its own id. A run of this
    machine that no other process watches is moved on the way.
    """

    def __init__(self, context: Context, describe: Describe) -> None:
        self._context = context
        self._describe = describe
        self._now: dict[str, str] = {}  # asked for -> the job that goes on
        self._movers: dict[str, Mover | None] = {}
        self.news: list[str] = []

    def __call__(self, job_ids: Sequence[str]) -> dict[str, Run]:
        told = self._describe([self._own(each) for each in job_ids])
        found = {}
        for asked in job_ids:
            run = told.get(self._own(asked))
            if run is not None:
                whole = asked == bare_id(asked)
                found[asked] = self._seen(asked, run) if whole else run
        return found

    def with_own_id(self, run: Run) -> Run:
        now = self._now.get(run.job_id)
        return replace(run, job_id=now) if now else run

    def _own(self, asked: str) -> str:
        whole = bare_id(asked)
        return self._now.get(whole, whole) + asked.removeprefix(whole)

    def _seen(self, asked: str, run: Run) -> Run:

        goal = moved_to(run)
        mover = self._mover(run) if goal or not run.status.is_terminal else None
        age = self._context.clock.now() - (run.stopped_at or 0) / 1000
        step = mover.see(run, self._patience(run.key)).step if mover else MoveStep.WAIT
        if goal:
            now = successor(self._context.batch, run)
            if now:
                self.news.append(describe_move_done(goal, now))
            elif mover and age >= self._patience(run.key):
                now = self._moved(mover, run)
            if now and now != run.job_id:
                return self._follow(asked, run, now)
            if age < WATCHER_GRACE:  # the process that cancelled it is about to submit it again
                return replace(run, job_id=asked, status=JobStatus.RUNNABLE, stopped_at=None)
        elif step is MoveStep.LEAVE and mover:
            now = self._moved(mover, run)
            if now != run.job_id:
                return self._follow(asked, run, now)
        elif run.status.is_terminal and run.key:
            plans_of(self._context).drop(run.key)
        return replace(run, job_id=asked)

    def _moved(self, mover: Mover, run: Run) -> str:
        """The job that the run is now. A move that AWS refuses is a message, and not tried again:
        the run is waited for where it is.
        """
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

    def _follow(self, asked: str, run: Run, now: str) -> Run:

        self._now[asked] = now
        record_move(self._context, run, now)
        told = self._describe([now]).get(now)
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
        """Seconds that the watcher still has; 0 where there is none."""
        return WATCHER_GRACE if plans_of(self._context).watcher(key) else 0


def follow_moves(moves: QueueMoves, events: Iterable[RunEvent]) -> Iterator[RunEvent]:
    """The events of a run, wherever it goes on, with its own job id there."""
    last: Run | None = None
    for event in events:
        if isinstance(event, RunEnded | StatusChanged | RunMessage):
            last = moves.with_own_id(event.run)
            event = replace(event, run=last)
        while last is not None and moves.news:
            yield RunMessage(last, moves.news.pop(0))
        yield event


# --- Finding the job that a run is now ------------------------------------------------------------


def record_move(context: Context, run: Run, now: str) -> None:
    """Keep in the history where a run of this machine has gone on. A full disk does not stop
    following it.
    """
    history = context.history
    plans_of(context).drop(run.key)
    known = history.records(context.env).get(run.job_id)
    if known is None:
        return
    with suppress(OSError):
        if known.moved != run.job_id:
            history.intend(record_after_move(known, run.job_id, moved_to(run) or known.queue))
        history.add_job_id(known.key, now)


def follow_move(context: Context, names: Sequence[RunName], job_id: str) -> str:
    """The job that a run is now: another one, where it has moved.

    AWS is asked only about runs that may move and whose move is not known.
    """
    whole = bare_id(job_id)
    for name in names:
        if whole == name.moved != name.job_id:
            return name.job_id + job_id.removeprefix(whole)
        if whole == name.job_id and name.fallback and name.moved in ("", whole):
            run = context.describe([whole]).get(whole)
            if run is None or not moved_to(run):
                return job_id
            now = successor(context.batch, run)
            if now:
                record_move(context, run, now)
            return (now or whole) + job_id.removeprefix(whole)
    return job_id


def find_successors(context: Context, runs: Iterable[Run]) -> dict[str, str]:
    """For jobs that left for another queue: the jobs that go on there.

    They are looked for as long as AWS Batch may hide a new submission. A caller that stops a run
    has to stop these; none is submitted.
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
    """The same runs; a run that has moved is replaced by the job that it is now."""
    for asked, run in told.items():
        if moved_to(run):
            now = successor(context.batch, run)
            if now:
                told = {**told, asked: context.describe([now]).get(now, run)}
    return told


# --- The run that watches -------------------------------------------------------------------------


ATTEND = "attend"  # and the run's key: local/executors/spec.py knows this
PLAN = "fallback.json"  # in the run's store

# AWS Batch starts the next one after any end, except for errors of policies and files.
_RETRY = {
    "attempts": 10,
    "evaluateOnExit": [
        {"onExitCode": "77", "action": "EXIT"},
        {"onExitCode": "78", "action": "EXIT"},
        {"onReason": "*", "action": "RETRY"},
    ],
}


def start_watcher(context: Context, plan: FallbackPlan, job_id: str) -> str:
    """Submit the watcher; its id. It is not in the history, and a second watcher does no harm.

    Raises ConfigError where the environment has no queue or no role for it, and the errors of the
    calls.
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


def watcher_requests(
    plan: FallbackPlan,
    key: str,
    command: tuple[str, ...],
    image: str,
    queue: str,
    platform: Platform,
) -> SubmissionRequests:
    """The watcher's requests. Pure."""
    spec = JobSpec(
        name=to_name(f"{plan.record.name}-fallback"),
        image=image,
        command=command,
        code=False,
        resources=Resources(vcpus=1, memory="512 MiB"),
    )
    tags = {WATCHES_TAG: plan.key, "batchml:key": key}
    owner = plan.record.tags.get("batchml:env")
    submission = SubmissionContext(key=key, tags={**tags, "batchml:env": owner} if owner else tags)
    made = make_submission(spec, image=image, queue=queue, submission=submission, platform=platform)
    return replace(made, submit={**made.submit, "retryStrategy": _RETRY})


def _local_requests(context: Context, plan: FallbackPlan) -> SubmissionRequests:
    # The image is a name: the server runs its own Python there.
    return watcher_requests(
        plan, new_key(os.urandom), (ATTEND, plan.key), f"batchml/{IMAGE}", ensure_queue(context),
        Platform(),
    )  # fmt: skip


def _aws_requests(context: Context, plan: FallbackPlan, job_id: str) -> SubmissionRequests:
    from batchml.aws.s3 import BucketStore

    environment, known = context.settings.environment, open_cache(context)
    if not environment.controller_queue:
        raise ConfigError(
            context.env,
            [
                "controller_queue: missing. A queue of cheap hosts, such as controller_queue = "
                '"cpu", in which a small run looks after those that may move.'
            ],
        )
    if not plan.queue.startswith(qualified(context.env, "")):
        raise ConfigError(
            context.env,
            [
                f"fallback.queue: {plan.queue} is no queue of this environment, and the role of "
                "who looks after runs submits to no other."
            ],
        )
    bucket = known.outputs().get("BucketName", "")
    folder = find_image(IMAGE, context.image_folders)
    if folder is None:
        raise NotFound("Image", IMAGE, [], "It comes with batchml: install that again.")
    platform = controller_platform(read_platform(context), known.outputs(), context.env)
    image = known.image(read_recipe(folder).reference, lambda: pinned(context.connect(), folder))
    data = encode_plan(plan)
    BucketStore(context.connect(), bucket).put(f"runs/{plan.key}/{PLAN}", data)
    told = {
        "env": context.env, "region": environment.region, "job": job_id,
        "plan": f"s3://{bucket}/runs/{plan.key}/{PLAN}", "digest": digest_of(data),
    }  # fmt: skip
    words = [word for name, value in told.items() for word in (f"--{name}", value)]
    command = ("python", "-m", "batchml", ATTEND, plan.key, *words)
    queue = context.queue(environment.controller_queue)
    return watcher_requests(plan, new_key(os.urandom), command, image, queue, platform)


def fetch_plan(context: Context, address: str, digest: str) -> FallbackPlan:
    """The plan that a watcher in AWS was submitted for. Raises ConfigError for another one."""
    from batchml.aws.s3 import BucketStore

    bucket, _, key = address.removeprefix("s3://").partition("/")
    data = BucketStore(context.connect(), bucket).get(key)
    if data is None or digest_of(data) != digest:
        raise ConfigError(address, ["it is gone, or not what it was when the run was submitted."])
    return read_plan(data)


def job_id_of(context: Context, key: str) -> str:
    """The job that a run of this machine is now; "" where it was never submitted."""
    names = context.history.names(context.env)
    return next((name.job_id for name in names if name.key == key), "")
