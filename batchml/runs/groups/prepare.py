"""The requests and records of a job with `[[groups]]`, and checks of runs with several nodes."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.hosts import fetch_host_pools
from batchml.aws.batch.requests import SubmissionContext
from batchml.errors import AccessError, ConfigError
from batchml.model.group import GroupJob, group_jobs
from batchml.model.names import new_key, to_name
from batchml.runs.groups.submit import SubmitIntent, submit_group_run
from batchml.runs.options import DEFAULT_QUEUE
from batchml.runs.send import own_share
from batchml.runtime.protocol.launch import TORCHRUN
from batchml.runtime.protocol.torchrun_command import BadCommand, rank_command

if TYPE_CHECKING:
    from batchml.aws.batch.requests import SubmissionRequests
    from batchml.aws.naming import Platform
    from batchml.context import Context, Notify
    from batchml.model.job import JobSpec
    from batchml.model.record import Record
    from batchml.runs.in_flight import RateBucket
    from batchml.runs.options import RunRequest
    from batchml.runs.package import PackageStore

Request = Callable[
    ["JobSpec", SubmissionContext], "tuple[SubmissionRequests, str]"
]  # and the image


def split(
    context: "Context",
    order: "RunRequest",
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
    return [(member, _travel(submission, member, depot)) for member in found]


def _travel(
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
    head: "Record", workers: "list[tuple[GroupJob, SubmissionContext]]", make: Request
) -> "tuple[Record, list[SubmitIntent]]":
    """The head's record, which knows the other jobs, and the intents of these."""
    groups = {member.group: member.key for member, _ in workers}
    intents = [_intent(head, member, submission, make) for member, submission in workers]
    return replace(head, groups=groups), intents


def _intent(
    head: "Record", member: GroupJob, submission: SubmissionContext, make: Request
) -> "SubmitIntent":
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
    requests: "SubmissionRequests",
    record: "Record",
    workers: "Sequence[SubmitIntent]",
    bucket: "RateBucket | None",
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
        share=own_share(),
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
        mistakes += _bad_command(spec)
    if spec.nodes > 1:
        spot = _spot_pools(context, queue, asks)
        if spot:
            mistakes.append(_refusal(context, spec, queue, spot))
    if mistakes:
        raise ConfigError(spec.name, mistakes)


def _bad_command(spec: "JobSpec") -> list[str]:
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


def _refusal(context: "Context", spec: "JobSpec", queue: str, spot: list[str]) -> str:
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
