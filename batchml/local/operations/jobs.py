"""Jobs: submit, cancel, terminate."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.local import lifecycle
from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import (
    check_between,
    check_chaos,
    check_name,
    check_tags,
    existing,
    refuse,
    refuse_not_served,
)
from batchml.local.operations.definitions import definition_of
from batchml.local.operations.policies import check_share_name
from batchml.local.operations.resources import queue_of
from batchml.local.operations.specs import container_spec, node_specs, spec_of
from batchml.local.state import Job, Queue, Spec, parent_of
from batchml.model.names import bare_name
from batchml.model.status import JobStatus

MAX_DEPENDENCIES = 20
MAX_SUBMIT = 30 * 1024  # bytes of a SubmitJob request
MAX_ARRAY = 10_000
MAX_REASON = 1024
MAX_STOPPED = 50  # jobs of one CancelJobs or TerminateJobs
MAX_ACTIVE_SHARES = 500

Stopping = Callable[[Draft, Job, str], None]


class Waits(Struct, frozen=True):
    """What a new job waits for."""

    jobs: tuple[str, ...] = ()  # not finished yet
    failed: bool = False  # one of them has failed already
    in_sequence: bool = False  # each child for the one before
    pairs: tuple[str, ...] = ()  # each child for the child of the same index of these arrays


def submit_job(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    check_name(params["jobName"], "Job name", request)
    check_tags(request)
    check_chaos(params.get("tags", {}), request)
    refuse_not_served(params, request)
    if len(msgspec.json.encode(params)) > MAX_SUBMIT:
        raise refuse(f"SubmitJob request must be at most {MAX_SUBMIT} bytes", request)
    queue = queue_of(draft, params["jobQueue"], request)
    if not queue.enabled:
        raise refuse(f"JobQueue {queue.name} is DISABLED and does not accept jobs", request)
    definition = definition_of(draft, params["jobDefinition"], request)
    spec = spec_of(definition, queue.name, request)
    _check_share(draft, queue, spec, request)
    size = params.get("arrayProperties", {}).get("size")
    if definition.detail["type"] == "multinode":
        spec, of_node = node_specs(spec, definition, request)
    else:
        spec, of_node = container_spec(spec, definition, request), {}
        if size is not None:
            check_between(size, 2, MAX_ARRAY, "Array size", request)
            spec = replace(spec, array_size=size)
    for name, _ in spec.consumables:
        existing(draft.state.consumables, name, "ConsumableResource", request)
    waits = _waits(draft, spec, request)
    job = Job(
        id=spec.id,
        spec=spec,
        sequence=draft.next_sequence(1 + (size or 0) + len(of_node)),
        waiting_for=waits.jobs,
        dependency_failed=waits.failed,
        tags=params.get("tags", {}),
    )
    children = _children(draft, job, waits, request) if size else _nodes(job, of_node)
    lifecycle.admit(draft, job, children)
    return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}


def _check_share(draft: Draft, queue: Queue, spec: Spec, request: Requested) -> None:
    if spec.share:
        check_share_name(spec.share, request)
    if bool(spec.share) != bool(queue.policy):
        needs = "must be provided for" if queue.policy else "can not be provided for"
        kind = "with" if queue.policy else "without"
        raise refuse(
            f"shareIdentifier {needs} a job queue {kind} a scheduling policy, {queue.name}", request
        )
    waiting = {line.share for line in draft.state.lines.get(queue.name, ())}
    if spec.share and spec.share not in waiting and len(waiting) >= MAX_ACTIVE_SHARES:
        raise refuse(f"At most {MAX_ACTIVE_SHARES} active share identifiers", request)


def _children(draft: Draft, job: Job, waits: Waits, request: Requested) -> list[Job]:
    """An array's children: PENDING, each with what it waits for itself."""
    made = []
    for index in range(job.spec.array_size or 0):
        asked = [f"{other}:{index}" for other in waits.pairs]
        if waits.in_sequence and index:
            asked.append(f"{job.id}:{index - 1}")
        live = tuple(
            other for other in asked if other in draft.state.jobs or parent_of(other) == job.id
        )
        made.append(
            Job(
                id=f"{job.id}:{index}",
                spec=job.spec,
                sequence=job.sequence + 1 + index,
                status=JobStatus.PENDING,
                waiting_for=live,
                dependency_failed=any(request.ended.get(other) == "FAILED" for other in asked),
                tags=job.tags,
                index=index,
            )
        )
    return made


def _nodes(job: Job, of_node: dict[int, Spec]) -> list[Job]:
    return [
        Job(
            id=f"{job.id}#{node}",
            spec=spec,
            sequence=job.sequence + 1 + node,
            status=JobStatus.PENDING,
            tags=job.tags,
            node=node,
        )
        for node, spec in of_node.items()
    ]


def _waits(draft: Draft, spec: Spec, request: Requested) -> Waits:
    if len(spec.depends_on) > MAX_DEPENDENCIES:
        raise refuse(f"At most {MAX_DEPENDENCIES} dependencies", request)
    waiting: list[str] = []
    pairs: list[str] = []
    failed = in_sequence = False
    for entry in spec.depends_on:
        kind, job_id = entry.get("type", ""), bare_name(entry.get("jobId", ""))
        if kind == "SEQUENTIAL":
            in_sequence = True  # of no effect for a job that is no array
            if not job_id:
                continue
        if job_id not in draft.state.jobs and job_id not in request.ended:
            raise refuse(f"Dependency job {job_id!r} does not exist", request)
        if kind == "N_TO_N" and spec.array_size is not None:
            _check_pair(draft, spec, job_id, request)
            pairs.append(job_id)
        elif job_id in draft.state.jobs:
            waiting.append(job_id)
        else:
            failed = failed or request.ended[job_id] == "FAILED"
    return Waits(tuple(dict.fromkeys(waiting)), failed, in_sequence, tuple(dict.fromkeys(pairs)))


def _check_pair(draft: Draft, spec: Spec, other: str, request: Requested) -> None:
    live = draft.state.jobs.get(other)
    if live is not None:
        size = live.spec.array_size or 0 if live.is_array else 0
    else:
        size = sum(parent_of(job_id) == other and job_id != other for job_id in request.ended)
    if size != spec.array_size:
        raise refuse(
            f"N_TO_N needs two array jobs of the same size: {other} has {size} children, "
            f"this one {spec.array_size}",
            request,
        )


# --- stopping -------------------------------------------------------------------------------


def cancel_job(draft: Draft, request: Requested) -> dict[str, Any]:
    return _stop(draft, request, [request.params["jobId"]], lifecycle.cancel)


def terminate_job(draft: Draft, request: Requested) -> dict[str, Any]:
    return _stop(draft, request, [request.params["jobId"]], lifecycle.terminate)


def cancel_jobs(draft: Draft, request: Requested) -> dict[str, Any]:
    return _stop_many(draft, request, lifecycle.cancel)


def terminate_jobs(draft: Draft, request: Requested) -> dict[str, Any]:
    return _stop_many(draft, request, lifecycle.terminate)


def _stop_many(draft: Draft, request: Requested, how: Stopping) -> dict[str, Any]:
    """AWS reports each job by itself; one that can not be found counts as done."""
    asked = request.params["jobs"]
    check_between(len(asked), 0, MAX_STOPPED, "The number of jobs", request)
    _stop(draft, request, asked, how)
    return {"successful": asked, "errors": []}


def _stop(draft: Draft, request: Requested, asked: Sequence[str], how: Stopping) -> dict[str, Any]:
    """Stop those that are unfinished; a node is stopped with its whole job. Raises Refused."""
    reason = request.params["reason"]
    if not all((reason, *asked)):
        raise refuse("jobId and reason must not be empty", request)
    if len(reason) > MAX_REASON:
        raise refuse(f"reason must have at most {MAX_REASON} characters", request)
    for job_id in asked:
        job = draft.state.jobs.get(bare_name(job_id).partition("#")[0])
        if job is not None:
            how(draft, job, reason)
    return {}
