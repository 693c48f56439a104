"""Submit the jobs of a group run, each exactly once, and all of them or none.

Before the first call everything is on disk: the records in the history, and the requests that are
not sent yet beside it. So the next client completes a group run that a killed client has left
between two jobs.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.hosts import fetch_host_pools
from batchml.aws.batch.requests import SubmissionContext, SubmissionRequests
from batchml.errors import AccessError, BatchmlError, ConfigError, SubmissionUnknown
from batchml.history import History
from batchml.model.group import GroupJob, group_jobs
from batchml.model.names import new_key, to_name
from batchml.model.run import Record, Run, RunName
from batchml.runs.cancel import is_stopping
from batchml.runs.in_flight import InFlight, UnsentRequests
from batchml.runs.options import RunRequest
from batchml.runs.send import Interrupted, Submitter, send_intent
from batchml.runtime.protocol.launch import TORCHRUN, BadCommand, rank_command

if TYPE_CHECKING:
    from batchml.aws.naming import Platform
    from batchml.context import Context
    from batchml.model.job import JobSpec
    from batchml.runs.package import PackageStore

NO_HEAD = "the head of its group run was not submitted"
GROUP_OVER = "its group run was over before it was submitted"
INCOMPLETE = "batchml: the group run could not be submitted whole"


class SubmitIntent(Struct, frozen=True):
    """The requests and the record of a job that will be submitted."""

    requests: SubmissionRequests
    record: Record


def submit_group_run(
    submitter: Submitter, head: SubmitIntent, workers: Sequence[SubmitIntent]
) -> str:
    """Send the jobs of a group run, each exactly once, the head first; the head's job id.

    If the head is refused, there is no job. If workers are refused, the jobs that were sent before
    them are terminated. Raises what `submit` raises; Interrupted and SubmissionUnknown are about
    the head. If the submission of workers is unknown, there is only a message: the head waits for
    them.
    """
    history, key = submitter.history, head.record.key
    everyone = [*workers, head]  # the head is the newest: @last
    in_flight = InFlight.beside(history, head.record.env)
    submission = _GroupSubmission(submitter, head, workers)
    with ExitStack() as stack:
        for each in everyone:
            stack.enter_context(in_flight.mark(each.record.key))
        submission.unsent.keep(key, {each.record.key: each.requests for each in workers})
        history.intend(*(each.record for each in everyone))
        head_id = submission.send_head()
        try:
            submission.send_workers(head_id)
        except KeyboardInterrupt as interruption:
            submitter.tell("Its workers are not all submitted yet: batchml reconcile does that.")
            raise Interrupted(key, head_id) from interruption
        finally:
            submission.clean()
        return head_id


class _GroupSubmission:
    """A group run that is being sent; all of it is on disk."""

    def __init__(
        self, submitter: Submitter, head: SubmitIntent, workers: Sequence[SubmitIntent]
    ) -> None:
        self._submitter = submitter
        self._head = head
        self._workers = workers
        self.unsent = UnsentRequests.beside(submitter.history, head.record.env)

    def send_head(self) -> str:
        """Send the head; workers are sent only after it."""
        try:
            return self._send(self._head)
        except SubmissionUnknown:
            raise
        except BatchmlError:
            self._give_up(self._workers, NO_HEAD)
            raise
        except Interrupted as interruption:
            if not interruption.job_id and not interruption.is_open:
                self._give_up(self._workers, NO_HEAD)
            raise

    def send_workers(self, head_id: str) -> None:
        """Send the workers. If some are refused, terminate the jobs sent before."""
        sent = [head_id]
        for number, each in enumerate(self._workers):
            try:
                sent.append(self._send(each))
            except SubmissionUnknown as error:
                self._submitter.tell(f"{error} The head waits for them.")
            except BatchmlError as error:
                self._give_up(self._workers[number + 1 :], str(error))
                terminate_jobs(self._submitter, sent, INCOMPLETE)
                raise

    def clean(self) -> None:
        """Delete the kept requests once nobody will send them any more."""
        record = self._head.record
        with suppress(OSError):
            if not any(
                each.gang == record.key for each in self._submitter.history.unconfirmed(record.env)
            ):
                self.unsent.drop(record.key)

    def _send(self, each: SubmitIntent) -> str:
        return send_intent(self._submitter, each.requests, each.record)

    def _give_up(self, left: Iterable[SubmitIntent], reason: str) -> None:
        record = self._head.record
        in_flight = InFlight.beside(self._submitter.history, record.env)
        with suppress(OSError):  # a full disk: they stay open, and `reconcile` says the same
            for each in left:
                self._submitter.history.add_refusal(each.record.key, reason)
                in_flight.remove(each.record.key)
            self.unsent.drop(record.key)


def submit_unsent_workers(submitter: Submitter, record: Record) -> str:
    """Send the workers of `record`, which a killed client has left and AWS Batch does not list.

    Their job id; "" if the group run does not need them any more. A second process that does the
    same finds it done. If the workers are refused, the group run is ended, with a message. Raises
    SubmissionUnknown, and the errors of AWS Batch about the head.
    """
    history = submitter.history
    with InFlight.beside(history, record.env).mark(record.key):
        known = next((each for each in _jobs_of(history, record) if each.key == record.key), None)
        if known is not None and (known.job_id or known.refused):
            return known.job_id
        head = _find_head(submitter, record)
        requests = UnsentRequests.beside(history, record.env).find(record.gang, record.key)
        if head is None or is_stopping(head):
            history.add_refusal(record.key, GROUP_OVER if head else NO_HEAD)
            return ""
        if requests is None:
            history.add_refusal(record.key, INCOMPLETE)
        else:
            try:
                return send_intent(replace(submitter, share=head.share), requests, record)
            except SubmissionUnknown:
                raise
            except BatchmlError as error:
                submitter.tell(f"{record.name}: {error}")
        sent = [each.job_id for each in _jobs_of(history, record) if each.job_id]
        terminate_jobs(submitter, sent, INCOMPLETE)
        return ""


def end_late_workers(submitter: Submitter, record: Record, job_id: str) -> None:
    """Terminate workers that were found late, if their group run has been given up."""
    head = _find_head(submitter, record)
    if head is None or is_stopping(head):
        terminate_jobs(submitter, [job_id], GROUP_OVER)


def _jobs_of(history: History, record: Record) -> list[RunName]:
    """The jobs in the history of the group run that the workers of `record` belong to."""
    return history.group(record.env, record.gang)


def _find_head(submitter: Submitter, record: Record) -> Run | None:
    jobs = _jobs_of(submitter.history, record)
    job_id = next((each.job_id for each in jobs if each.key == record.gang), "")
    return submitter.api.describe([job_id]).get(job_id) if job_id else None


def terminate_jobs(submitter: Submitter, job_ids: Iterable[str], reason: str) -> None:
    """Terminate jobs in any state; a failure is a message."""
    for job_id in job_ids:
        try:
            submitter.api.terminate(job_id, reason)
        except BatchmlError as error:
            submitter.tell(f"A job could not be stopped: batchml cancel {job_id}\n  {error}")


# --- prepare --------------------------------------------------------------------------------------
# The requests and records of a job with `[[groups]]`, and checks of multi-node runs.


# Makes the requests of a job, and the reference of its image.
Request = Callable[["JobSpec", SubmissionContext], "tuple[SubmissionRequests, str]"]


def split_into_jobs(
    context: "Context",
    request: RunRequest,
    spec: "JobSpec",
    submission: SubmissionContext,
    store: "PackageStore",
    platform: "Platform",
    random: Callable[[int], bytes] = os.urandom,
) -> list[tuple[GroupJob, SubmissionContext]]:
    """Split a job with groups: the head first, then the workers, each with a submission context.

    `submission` is the context of the head. Raises ConfigError if the jobs could not find each
    other.
    """
    if request.array is not None:
        raise ConfigError(spec.name, ["--array: a job with groups cannot be an array."])
    rendezvous = store.store(submission.key)
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
        queue=lambda name, gpus: context.queue(context.choose_queue(name, gpus)),
        rendezvous=rendezvous,
    )
    return [(member, _submission_context(submission, member, store)) for member in found]


def _submission_context(
    submission: SubmissionContext, member: GroupJob, store: "PackageStore"
) -> SubmissionContext:
    return replace(
        submission,
        key=member.key,
        store=store.store(member.key),
        env={**submission.env, **member.env},
        tags={**submission.tags, **member.tags, "batchml:key": member.key},
        array=member.array,
    )


def with_workers(
    head: Record, workers: list[tuple[GroupJob, SubmissionContext]], make: Request
) -> tuple[Record, list[SubmitIntent]]:
    """The head's record with the keys of the other jobs, and the intents of the workers."""
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
        gpus=resources.gpu_count,
        neurons=resources.neurons,
        array_size=member.array or 0,
        patterns={},
        max_cost=None,
        spec={},  # the head's record has it
    )
    return SubmitIntent(requests, record)


# --- Multi-node runs need on-demand hosts, and batchml's runtime in the image ---------------------


def check_nodes(
    context: "Context", spec: "JobSpec", queue: str, *, has_runtime: bool, asks: bool
) -> None:
    """Raise ConfigError with all reasons why a multi-node run would not work.

    `has_runtime`: batchml built its image. `asks`: a queue that batchml.toml does not describe may
    be looked up in AWS, in two calls.
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
    on_demand = [
        name
        for name, each in environment.queues.items()
        if not any(environment.compute[part].spot for part in each.compute)
    ]
    other = (
        f"Take --queue {' or --queue '.join(on_demand)}"
        if on_demand
        else "Make a queue of only on-demand compute environments in batchml.toml, then batchml "
        "setup"
    )
    return (
        f"nodes: {spec.nodes} on the queue {queue}, which uses spot instances ({', '.join(spot)}): "
        f"AWS Batch runs multi-node jobs only on on-demand instances. {other}. If the job can lose "
        f'some of its nodes, [[groups]] with launch.kind = "ray" run a head on-demand and workers '
        f"on spot."
    )
