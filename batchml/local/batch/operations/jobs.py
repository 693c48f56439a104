"""Jobs: submit, cancel, terminate."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.batch import lifecycle
from batchml.local.batch.events import Requested
from batchml.local.batch.operations.checks import (
    MAX_TAGS,
    check_between,
    check_chaos,
    check_name,
    check_tags,
    existing,
    refuse,
    refuse_not_served,
)
from batchml.local.batch.operations.definitions import (
    Range,
    check_command,
    check_retry,
    check_timeout,
    definition_of,
    enum_case,
    layout,
    narrowest,
    needs_of,
    node_range,
    variables,
)
from batchml.local.batch.operations.resources import check_share_name, queue_of
from batchml.local.batch.state import Definition, Job, Needs, Nodes, Queue, Spec, parent_of
from batchml.local.batch.transaction import Draft
from batchml.model.names import bare_name
from batchml.model.run import JobStatus

# --- from a request to a job ----------------------------------------------------------------------
# What a SubmitJob call comes to: the definition and its overrides, merged into specs.


MAX_OVERRIDES = 8192  # characters of command and environment, as ECS gets them
TOO_LONG = f"Container Overrides length must be at most {MAX_OVERRIDES}"
TOO_MANY_TAGS = f"Tags propagated to the task exceed the limit of {MAX_TAGS}"

# What Batch adds to the environment: names and values of the usual length.
_BATCH_VARIABLES = 400


def spec_of(definition: Definition, queue: str, request: Requested) -> Spec:
    """The spec of a job of any kind but for its nodes. Raises Refused."""
    params, detail = request.params, definition.detail
    retry = params.get("retryStrategy", detail.get("retryStrategy", {}))
    timeout = params.get("timeout", detail.get("timeout", {}))
    check_retry(retry, request)
    check_timeout(timeout, request)
    priority = params.get("schedulingPriorityOverride", detail.get("schedulingPriority", 0))
    check_between(priority, 0, 9999, "schedulingPriority", request)
    propagate = params.get("propagateTags", detail.get("propagateTags", False))
    tags = {**detail.get("tags", {}), **params.get("tags", {})}
    return Spec(
        id=request.new_id,
        name=params["jobName"],
        queue=queue,
        definition=definition.key,
        created_at=request.now,
        retry=enum_case(retry),
        timeout=timeout.get("attemptDurationSeconds"),
        parameters={**detail.get("parameters", {}), **params.get("parameters", {})},
        depends_on=tuple(params.get("dependsOn", ())),
        propagate_tags=propagate,
        share=params.get("shareIdentifier", ""),
        priority=priority,
        consumables=_consumables(
            params.get(
                "consumableResourcePropertiesOverride", detail.get("consumableResourceProperties")
            ),
            request,
        ),
        flaw=TOO_MANY_TAGS if propagate and len(tags) > MAX_TAGS else "",
    )


def container_spec(base: Spec, definition: Definition, request: Requested) -> Spec:
    """The spec of a job with one container, or of an array's children."""
    if "nodeOverrides" in request.params:
        raise refuse("nodeOverrides are for multi-node parallel jobs", request)
    overrides = request.params.get("containerOverrides", {})
    given = definition.detail["containerProperties"]
    container = _merged(given, overrides, base.parameters, request)
    return replace(
        base,
        container=container,
        needs=needs_of(container, request),
        flaw=base.flaw or _flaw(container),
    )


def node_specs(
    base: Spec, definition: Definition, request: Requested
) -> tuple[Spec, dict[int, Spec]]:
    """The spec of a multi-node job, and that of each of its nodes."""
    params = request.params
    for name in ("containerOverrides", "arrayProperties"):
        if params.get(name):
            raise refuse(f"{name} are not for multi-node parallel jobs", request)
    properties = definition.detail["nodeProperties"]
    overrides = params.get("nodeOverrides", {})
    nodes, ranges = layout(properties, overrides, request)
    changed = [
        node_range(entry, nodes.count, request)
        for entry in overrides.get("nodePropertyOverrides", ())
    ]
    made: dict[tuple[Any, ...], Spec] = {}
    of_node: dict[int, Spec] = {}
    for node in range(nodes.count):
        common = narrowest(ranges, node)
        own = [entry for entry in changed if node in entry]
        key = (common.first, common.last, *((entry.first, entry.last) for entry in own))
        if key not in made:
            name = f"{base.id}#{len(made)}"
            made[key] = _node_spec(name, base, nodes, common.given, [e.given for e in own], request)
        of_node[node] = made[key]
    needs = [spec.needs for spec in of_node.values()]
    consumables: dict[str, int] = dict(base.consumables)
    for spec in of_node.values():
        for name, quantity in spec.consumables:
            consumables[name] = consumables.get(name, 0) + quantity
    whole = replace(
        base,
        nodes=nodes,
        needs=Needs(
            sum(need.vcpus for need in needs),
            sum(need.memory for need in needs),
            sum(need.gpus for need in needs),
        ),
        consumables=tuple(consumables.items()),
        node_properties=_node_properties(nodes, ranges, of_node),
        flaw=base.flaw or next((spec.flaw for spec in of_node.values() if spec.flaw), ""),
    )
    return whole, of_node


def _node_spec(
    spec_id: str,
    base: Spec,
    nodes: Nodes,
    given: dict[str, Any],
    overrides: list[dict[str, Any]],
    request: Requested,
) -> Spec:
    container = given["container"]
    consumables = given.get("consumableResourceProperties")
    for entry in overrides:
        refuse_not_served(entry, request)
        container = _merged(container, entry.get("containerOverrides", {}), {}, request)
        consumables = entry.get("consumableResourcePropertiesOverride", consumables)
    container = _merged(container, {}, base.parameters, request)
    return Spec(
        id=spec_id,
        name=base.name,
        queue=base.queue,
        definition=base.definition,
        created_at=base.created_at,
        container=container,
        needs=needs_of(container, request),
        parameters=base.parameters,
        consumables=_consumables(consumables, request),
        nodes=nodes,
        flaw=_flaw(container),
    )


def _node_properties(nodes: Nodes, ranges: list[Range], of_node: dict[int, Spec]) -> dict[str, Any]:
    """AWS's NodeProperties of the job as it runs, overrides included."""

    def container(found: Range) -> dict[str, Any]:
        """That of the first node for which the range decides; a nested one may leave it none."""
        own = (node for node in of_node if narrowest(ranges, node) is found)
        node = next(own, None)
        return found.given["container"] if node is None else of_node[node].container

    return {
        "numNodes": nodes.count,
        "mainNode": nodes.main,
        "nodeRangeProperties": [
            {
                **found.given,
                "targetNodes": f"{found.first}:{found.last}",
                "container": container(found),
            }
            for found in ranges
        ],
    }


def _merged(
    given: dict[str, Any],
    overrides: dict[str, Any],
    parameters: dict[str, str],
    request: Requested,
) -> dict[str, Any]:
    """The container as it will run: overrides applied, `Ref::name` replaced in the command.

    Environments merge by name. A command is a list of elements before and after: nothing is split.
    """
    check_command(overrides, request)
    container = dict(given)
    environment = variables(container) | variables(overrides)
    container["environment"] = [{"name": k, "value": v} for k, v in environment.items()]
    command = overrides.get("command") or container.get("command", [])
    container["command"] = [
        parameters.get(part.removeprefix("Ref::"), part) if part.startswith("Ref::") else part
        for part in command
    ]
    requirements = {entry["type"]: entry for entry in container.get("resourceRequirements", ())}
    requirements |= {entry["type"]: entry for entry in overrides.get("resourceRequirements", ())}
    container["resourceRequirements"] = list(requirements.values())
    for key in ("vcpus", "memory", "instanceType"):
        if key in overrides:
            container[key] = overrides[key]
    return container


def _flaw(container: dict[str, Any]) -> str:
    """Why ECS would not take it: command and environment, Batch's own variables included."""
    sent = {"command": container["command"], "environment": container["environment"]}
    return TOO_LONG if len(json.dumps(sent)) + _BATCH_VARIABLES > MAX_OVERRIDES else ""


def _consumables(
    properties: dict[str, Any] | None, request: Requested
) -> tuple[tuple[str, int], ...]:
    """Consumable resources by name, with the quantity of one attempt. Raises Refused."""
    found: dict[str, int] = {}
    for entry in (properties or {}).get("consumableResourceList", ()):
        name, quantity = bare_name(entry.get("consumableResource", "")), entry.get("quantity", 1)
        if not name or quantity < 1:
            raise refuse("A consumable resource needs a name and a quantity of 1 or more", request)
        found[name] = found.get(name, 0) + quantity
    return tuple(found.items())


# --- jobs -----------------------------------------------------------------------------------------


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
