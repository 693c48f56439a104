"""Submit the jobs of a group run, each exactly once, and all of them or none.

The whole intent is on disk before the first call: keys and names in the history, and beside it the
requests that are not sent yet. So the next client finishes a group run that a killed client has
left between two jobs.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import fetch_host_pools
from batchml.aws.batch.jobs import JobApi
from batchml.aws.batch.requests import SubmissionContext, SubmissionRequests
from batchml.clock import Clock
from batchml.errors import AccessError, BatchmlError, ConfigError, SubmissionUnknown
from batchml.history import History
from batchml.model.group import GroupJob, group_jobs
from batchml.model.names import new_key, to_name
from batchml.model.run import Record, Run, RunName
from batchml.runs.cancel import is_stopping
from batchml.runs.in_flight import InFlight, RateBucket, UnsentRequests
from batchml.runs.options import DEFAULT_QUEUE, RunRequest
from batchml.runs.send import Interrupted, send_intent, user_share
from batchml.runtime.protocol.launch import TORCHRUN, BadCommand, rank_command

if TYPE_CHECKING:
    from batchml.aws.naming import Platform
    from batchml.context import Context, Notify
    from batchml.model.job import JobSpec
    from batchml.runs.package import PackageStore

NO_HEAD = "the head of its gang was not submitted"
OVER = "its gang was over before it was submitted"
INCOMPLETE = "batchml: the gang could not be submitted whole"

Tell = Callable[[str], None]


class SubmitIntent(Struct, frozen=True):
    """The requests of a job that will be submitted, and its record."""

    requests: SubmissionRequests
    record: Record


def submit_group_run(
    api: JobApi,
    head: SubmitIntent,
    workers: Sequence[SubmitIntent],
    history: History,
    *,
    clock: Clock,
    bucket: RateBucket | None = None,
    share: str = "",
    tell: Tell = lambda _: None,
) -> str:
    """Send the jobs of a group run, each exactly once, the head first; the head's job id.

    After a refused head nothing is left. Refused workers end the jobs that were sent before them.
    Raises as `submit` does; Interrupted and SubmissionUnknown are about the head. For workers whose
    submission is unknown there is only a message: the head waits for them.
    """
    everyone = [*workers, head]  # the head is the newest: @last
    flights = InFlight.beside(history, head.record.env)
    sending = _GroupSubmission(api, head, workers, history, clock, bucket, share, tell)
    with ExitStack() as stack:
        for each in everyone:
            stack.enter_context(flights.flight(each.record.key))
        sending.unsent.keep(head.record.key, {each.record.key: each.requests for each in workers})
        history.intend(*(each.record for each in everyone))
        head_id = sending.head()
        try:
            sending.workers(head_id)
        except KeyboardInterrupt as stop:
            tell("Its workers are not all submitted yet: batchml reconcile does that.")
            raise Interrupted(head.record.key, head_id) from stop
        finally:
            sending.clean()
        return head_id


class _GroupSubmission:
    """A group run that is being sent; all of it is on disk."""

    def __init__(
        self,
        api: JobApi,
        head: SubmitIntent,
        workers: Sequence[SubmitIntent],
        history: History,
        clock: Clock,
        bucket: RateBucket | None,
        share: str,
        tell: Tell,
    ) -> None:
        self._api = api
        self._head = head
        self._workers = workers
        self._history = history
        self._clock = clock
        self._bucket = bucket
        self._share = share
        self._tell = tell
        self.unsent = UnsentRequests.beside(history, head.record.env)

    def head(self) -> str:
        """Send the head; workers are sent only after it."""
        try:
            return self._send(self._head)
        except SubmissionUnknown:
            raise
        except BatchmlError:
            self._give_up(self._workers, NO_HEAD)
            raise
        except Interrupted as stop:
            if not stop.job_id and not stop.is_open:
                self._give_up(self._workers, NO_HEAD)
            raise

    def workers(self, head_id: str) -> None:
        """Send the workers. If some are refused, terminate the jobs sent before."""
        sent = [head_id]
        for number, each in enumerate(self._workers):
            try:
                sent.append(self._send(each))
            except SubmissionUnknown as error:
                self._tell(f"{error} The head waits for them.")
            except BatchmlError as error:
                self._give_up(self._workers[number + 1 :], str(error))
                terminate_jobs(self._api, sent, INCOMPLETE, self._tell)
                raise

    def clean(self) -> None:
        """Delete the kept requests once nobody will send them any more."""
        record = self._head.record
        with suppress(OSError):
            if not any(each.gang == record.key for each in self._history.unconfirmed(record.env)):
                self.unsent.drop(record.key)

    def _send(self, each: SubmitIntent) -> str:
        return send_intent(
            self._api, each.requests, self._history, each.record,
            clock=self._clock, bucket=self._bucket, share=self._share, tell=self._tell,
        )  # fmt: skip

    def _give_up(self, left: Iterable[SubmitIntent], why: str) -> None:
        record = self._head.record
        flights = InFlight.beside(self._history, record.env)
        with suppress(OSError):  # a full disk: they stay open, and `reconcile` says the same
            for each in left:
                self._history.add_refusal(each.record.key, why)
                flights.remove(each.record.key)
            self.unsent.drop(record.key)


def submit_unsent_workers(
    api: JobApi, history: History, record: Record, clock: Clock, tell: Tell
) -> str:
    """Send workers that a killed client has left, after AWS Batch does not list them.

    The job's id; empty where the group run does not need them any more. `record` is theirs. A
    second process that does the same finds it done. Refused workers end the group run, with a
    message. Raises SubmissionUnknown, and the errors of AWS Batch about the head.
    """
    flights, unsent = (
        InFlight.beside(history, record.env),
        UnsentRequests.beside(history, record.env),
    )
    with flights.flight(record.key):
        own = next((each for each in _jobs_of(history, record) if each.key == record.key), None)
        if own is not None and (own.job_id or own.refused):
            return own.job_id
        head = _find_head(api, history, record)
        requests = unsent.find(record.gang, record.key)
        if head is None or is_stopping(head):
            history.add_refusal(record.key, OVER if head else NO_HEAD)
            return ""
        if requests is None:
            history.add_refusal(record.key, INCOMPLETE)
            _end_group_run(api, history, record, tell)
            return ""
        try:
            return send_intent(
                api, requests, history, record, clock=clock, share=head.share, tell=tell
            )
        except SubmissionUnknown:
            raise
        except BatchmlError as error:
            tell(f"{record.name}: {error}")
            _end_group_run(api, history, record, tell)
            return ""


def end_late_workers(
    api: JobApi, history: History, record: Record, job_id: str, tell: Tell
) -> None:
    """Terminate workers that were found late, if their group run was given up meanwhile."""
    head = _find_head(api, history, record)
    if head is None or is_stopping(head):
        terminate_jobs(api, [job_id], OVER, tell)


def _jobs_of(history: History, record: Record) -> list[RunName]:
    """The jobs of the group run that these workers belong to, as the history knows them."""
    names = history.names(record.env)
    return [each for each in names if record.gang in (each.key, each.gang)]


def _find_head(api: JobApi, history: History, record: Record) -> Run | None:
    jobs = _jobs_of(history, record)
    job_id = next((each.job_id for each in jobs if each.key == record.gang), "")
    return api.describe([job_id]).get(job_id) if job_id else None


def _end_group_run(api: JobApi, history: History, record: Record, tell: Tell) -> None:
    known = [each.job_id for each in _jobs_of(history, record) if each.job_id]
    terminate_jobs(api, known, INCOMPLETE, tell)


def terminate_jobs(api: JobApi, job_ids: Iterable[str], reason: str, tell: Tell) -> None:
    """Terminate jobs in any state; a failure is a message."""
    for job_id in job_ids:
        try:
            api.terminate(job_id, reason)
        except BatchmlError as error:
            tell(f"It could not be stopped: batchml cancel {job_id}\n  {error}")


# --- prepare --------------------------------------------------------------------------------------
# The requests and records of a job with `[[groups]]`, and checks of runs with several nodes.


Request = Callable[
    ["JobSpec", SubmissionContext], "tuple[SubmissionRequests, str]"
]  # and the image


def split_into_jobs(
    context: "Context",
    order: RunRequest,
    spec: "JobSpec",
    submission: SubmissionContext,
    depot: "PackageStore",
    platform: "Platform",
    random: Callable[[int], bytes] = os.urandom,
) -> list[tuple[GroupJob, SubmissionContext]]:
    """The jobs of a job with groups, the head first, each with its own part of the requests.

    `submission` is the head's. Raises ConfigError where its jobs could not find each other.
    """
    if order.array is not None:
        raise ConfigError(spec.name, ["--array: a job with groups cannot be an array."])
    rendezvous = depot.store(submission.key)
    if not (context.settings.is_local or rendezvous or platform.workspace):
        raise ConfigError(
            spec.name,
            [
                f"groups: head and workers find each other in the bucket or the workspace of "
                f"{context.env}, and it has neither. Make them: batchml setup --env {context.env}."
            ],
        )
    keys = [submission.key, *(new_key(random) for _ in spec.groups[1:])]
    found = group_jobs(
        spec,
        keys,
        submission.token,
        queue=lambda name: context.queue(name or DEFAULT_QUEUE),
        rendezvous=rendezvous,
    )
    return [(member, _submission_context(submission, member, depot)) for member in found]


def _submission_context(
    submission: SubmissionContext, member: GroupJob, depot: "PackageStore"
) -> SubmissionContext:
    return replace(
        submission,
        key=member.key,
        store=depot.store(member.key),
        env={**submission.env, **member.env},
        tags={**submission.tags, **member.tags, "batchml:key": member.key},
        array=member.array,
    )


def with_workers(
    head: Record, workers: list[tuple[GroupJob, SubmissionContext]], make: Request
) -> tuple[Record, list[SubmitIntent]]:
    """The head's record, which knows the other jobs, and the intents of these."""
    groups = {member.group: member.key for member, _ in workers}
    intents = [_intent(head, member, submission, make) for member, submission in workers]
    return replace(head, groups=groups), intents


def _intent(
    head: Record, member: GroupJob, submission: SubmissionContext, make: Request
) -> SubmitIntent:
    requests, image = make(member.spec, submission)
    resources = member.spec.resources
    record = replace(
        head,
        gang=head.key,
        key=member.key,
        name=to_name(member.spec.name),
        job_name=requests.submit["jobName"],
        queue=requests.submit["jobQueue"],
        tags=submission.tags,
        image=image,
        vcpus=resources.vcpus,
        memory_mib=resources.memory_mib,
        gpus=resources.gpus,
        array_size=member.array or 0,
        patterns={},
        max_cost=None,
        spec={},  # the head's record has it
    )
    return SubmitIntent(requests, record)


def send_group_run(
    context: "Context",
    requests: SubmissionRequests,
    record: Record,
    workers: Sequence[SubmitIntent],
    bucket: RateBucket | None,
    tell: "Notify",
) -> str:
    """Submit the jobs of a run with groups; the head's id.

    `record` is the head's, with the time of submission.
    """
    return submit_group_run(
        context.batch,
        SubmitIntent(requests, record),
        [SubmitIntent(each.requests, replace(each.record, at=record.at)) for each in workers],
        context.history,
        clock=context.clock,
        bucket=bucket,
        share=user_share(),
        tell=tell,
    )


# --- Runs of several nodes: they need on-demand hosts, and our runtime in the image ---------------


def check_nodes(
    context: "Context", spec: "JobSpec", queue: str, *, has_runtime: bool, asks: bool
) -> None:
    """Raise ConfigError, with all mistakes, for a run of several nodes that could not work.

    `has_runtime`: batchml built its image. `asks`: AWS may be asked about a queue that batchml.toml
    does not describe, in two calls.
    """
    mistakes = []
    if spec.launch.kind != "plain" and not has_runtime:
        mistakes.append(
            f'launch.kind: "{spec.launch.kind}" needs the runtime of an image that batchml built, '
            f"and {spec.image} is none. Name a folder below images/ whose Dockerfile builds on one."
        )
    if spec.launch.kind == TORCHRUN:
        mistakes += _command_mistakes(spec)
    if spec.nodes > 1:
        spot = _spot_pools(context, queue, asks)
        if spot:
            mistakes.append(_spot_mistake(context, spec, queue, spot))
    if mistakes:
        raise ConfigError(spec.name, mistakes)


def _command_mistakes(spec: "JobSpec") -> list[str]:
    """Mistakes in a torchrun command, which the ranks' supervisor would refuse on every node."""
    try:
        rank_command(spec.argv(), spec.nodes, lambda name: name)
    except BadCommand as error:
        return [f"command: {error}."]
    return []


def _spot_pools(context: "Context", queue: str, asks: bool) -> list[str]:
    """The spot compute environments of a queue, by their names in batchml.toml.

    One is enough for a refusal: AWS Batch may choose it, and never places nodes of one job there.
    Source: AWS Batch User Guide, "Multi-node parallel jobs".
    """
    environment = context.settings.environment
    if queue in environment.queues:
        names = environment.queues[queue].compute
        return [name for name in names if environment.compute[name].spot]
    if not asks:
        return []

    try:
        found = fetch_host_pools(context.connect()).get(context.queue(queue), ())
    except AccessError:  # a user who may submit may lack the permission to describe queues
        return []
    return [pool.name for pool in found if pool.spot]


def _spot_mistake(context: "Context", spec: "JobSpec", queue: str, spot: list[str]) -> str:
    environment = context.settings.environment
    steady = [
        name
        for name, each in environment.queues.items()
        if not any(environment.compute[part].spot for part in each.compute)
    ]
    other = (
        f"Take --queue {' or --queue '.join(steady)}"
        if steady
        else "Make a queue of on-demand compute environments alone in batchml.toml, then batchml "
        "setup"
    )
    return (
        f"nodes: {spec.nodes} on the queue {queue}, whose {', '.join(spot)} is of spot instances: "
        f"AWS Batch runs multi-node jobs on on-demand instances alone. {other}. Where only part of "
        f'the work may be lost at any time, [[groups]] with launch.kind = "ray" keep a head '
        f"on-demand and its workers on spot."
    )
