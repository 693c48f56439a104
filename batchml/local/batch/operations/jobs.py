"""Submit, cancel and terminate jobs."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.local.batch import lifecycle
from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations.checks import (
    MAX_TAGS,
    check_between,
    check_chaos,
    check_name,
    check_served,
    check_tags,
    find_record,
    request_error,
)
from batchml.local.batch.operations.definitions import (
    NodeRange,
    check_command,
    check_retry,
    check_timeout,
    definition_of,
    narrowest_range,
    needs_of,
    node_layout,
    node_range,
    normalize_actions,
    variables,
)
from batchml.local.batch.operations.resources import check_share_name
from batchml.local.batch.state import (
    ConsumableResource,
    Job,
    JobDefinition,
    JobQueue,
    Nodes,
    SubmittedSpec,
    parent_of,
)
from batchml.local.batch.transaction import Transaction
from batchml.local.machine import Needs
from batchml.model.names import bare_name
from batchml.model.run import JobStatus

# --- Specs ----------------------------------------------------------------------------------------
# A spec is a job definition merged with the overrides of a SubmitJob call.

MAX_OVERRIDES = 8192  # characters of command and environment, as ECS receives them
TOO_LONG = f"Container Overrides length must be at most {MAX_OVERRIDES}"
TOO_MANY_TAGS = f"Tags propagated to the task exceed the limit of {MAX_TAGS}"

# Characters of the variables that Batch adds to the environment, at usual lengths.
_BATCH_VARIABLES = 400


def spec_of(definition: JobDefinition, queue: str, request: CallReceived) -> SubmittedSpec:
    """The spec of a job of any kind, without its containers. Raises ApiError."""
    params, detail = request.params, definition.detail
    retry = params.get("retryStrategy", detail.get("retryStrategy", {}))
    timeout = params.get("timeout", detail.get("timeout", {}))
    check_retry(retry, request)
    check_timeout(timeout, request)
    priority = params.get("schedulingPriorityOverride", detail.get("schedulingPriority", 0))
    check_between(priority, 0, 9999, "schedulingPriority", request)
    propagate = params.get("propagateTags", detail.get("propagateTags", False))
    tags = {**detail.get("tags", {}), **params.get("tags", {})}
    return SubmittedSpec(
        id=request.new_id,
        name=params["jobName"],
        queue=queue,
        definition=definition.key,
        created_at=request.now,
        retry=normalize_actions(retry),
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


def container_spec(
    base: SubmittedSpec, definition: JobDefinition, request: CallReceived
) -> SubmittedSpec:
    """The spec of a job with one container, or of an array's children."""
    if "nodeOverrides" in request.params:
        raise request_error("nodeOverrides are for multi-node parallel jobs", request)
    overrides = request.params.get("containerOverrides", {})
    properties = definition.detail["containerProperties"]
    container = _merge_overrides(properties, overrides, base.parameters, request)
    return replace(
        base,
        container=container,
        needs=needs_of(container, request),
        flaw=base.flaw or _find_flaw(container),
    )


def node_specs(
    base: SubmittedSpec, definition: JobDefinition, request: CallReceived
) -> tuple[SubmittedSpec, dict[int, SubmittedSpec]]:
    """The spec of a multi-node job, and the spec of each of its nodes."""
    params = request.params
    for name in ("containerOverrides", "arrayProperties"):
        if params.get(name):
            raise request_error(f"{name} are not for multi-node parallel jobs", request)
    properties = definition.detail["nodeProperties"]
    overrides = params.get("nodeOverrides", {})
    nodes, ranges = node_layout(properties, overrides, request)
    overridden = [
        node_range(entry, nodes.count, request)
        for entry in overrides.get("nodePropertyOverrides", ())
    ]
    specs: dict[tuple[tuple[int, int], ...], SubmittedSpec] = {}  # by the ranges of a node
    of_node: dict[int, SubmittedSpec] = {}
    for node in range(nodes.count):
        common = narrowest_range(ranges, node)
        own = [entry for entry in overridden if node in entry]
        key = tuple((entry.first, entry.last) for entry in (common, *own))
        if key not in specs:
            spec_id, changes = f"{base.id}#{len(specs)}", [entry.properties for entry in own]
            specs[key] = _node_spec(spec_id, base, nodes, common.properties, changes, request)
        of_node[node] = specs[key]
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
    base: SubmittedSpec,
    nodes: Nodes,
    properties: dict[str, Any],
    overrides: list[dict[str, Any]],
    request: CallReceived,
) -> SubmittedSpec:
    container = properties["container"]
    consumables = properties.get("consumableResourceProperties")
    for entry in overrides:
        check_served(entry, request)
        container = _merge_overrides(container, entry.get("containerOverrides", {}), {}, request)
        consumables = entry.get("consumableResourcePropertiesOverride", consumables)
    container = _merge_overrides(container, {}, base.parameters, request)
    return SubmittedSpec(
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
        flaw=_find_flaw(container),
    )


def _node_properties(
    nodes: Nodes, ranges: list[NodeRange], of_node: dict[int, SubmittedSpec]
) -> dict[str, Any]:
    """AWS's NodeProperties of the job as it will run, overrides included."""

    def container(found: NodeRange) -> dict[str, Any]:
        """The container of the first node that the range applies to; nested ranges may leave
        none.
        """
        own = (node for node in of_node if narrowest_range(ranges, node) is found)
        node = next(own, None)
        return found.properties["container"] if node is None else of_node[node].container

    return {
        "numNodes": nodes.count,
        "mainNode": nodes.main,
        "nodeRangeProperties": [
            {
                **found.properties,
                "targetNodes": f"{found.first}:{found.last}",
                "container": container(found),
            }
            for found in ranges
        ],
    }


def _merge_overrides(
    base: dict[str, Any],
    overrides: dict[str, Any],
    parameters: dict[str, str],
    request: CallReceived,
) -> dict[str, Any]:
    """The container as it will run: with overrides, and with `Ref::name` replaced in the command.

    Environments merge by name. The command stays a list of elements; none is split.
    """
    check_command(overrides, request)
    container = dict(base)
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


def _find_flaw(container: dict[str, Any]) -> str:
    """The reason why ECS would refuse the container, or "": its command and environment, with
    Batch's variables, are too long.
    """
    sent = {"command": container["command"], "environment": container["environment"]}
    return TOO_LONG if len(json.dumps(sent)) + _BATCH_VARIABLES > MAX_OVERRIDES else ""


def _consumables(
    properties: dict[str, Any] | None, request: CallReceived
) -> tuple[tuple[str, int], ...]:
    """Consumable resources by name, with the quantity for one attempt. Raises ApiError."""
    quantities: dict[str, int] = {}
    for entry in (properties or {}).get("consumableResourceList", ()):
        name, quantity = bare_name(entry.get("consumableResource", "")), entry.get("quantity", 1)
        if not name or quantity < 1:
            raise request_error(
                "A consumable resource needs a name and a quantity of 1 or more", request
            )
        quantities[name] = quantities.get(name, 0) + quantity
    return tuple(quantities.items())


# --- Submission -----------------------------------------------------------------------------------

MAX_DEPENDENCIES = 20
MAX_SUBMIT = 30 * 1024  # bytes of a SubmitJob request
MAX_ARRAY = 10_000
MAX_REASON = 1024
MAX_STOPPED = 50  # jobs of one CancelJobs or TerminateJobs call
MAX_ACTIVE_SHARES = 500

Stopping = Callable[[Transaction, Job, str], None]


class JobDependencies(Struct, frozen=True):
    """The jobs that a new job waits for."""

    jobs: tuple[str, ...] = ()  # ids of unfinished jobs
    failed: bool = False  # a dependency has failed
    in_sequence: bool = False  # each child waits for the child before it
    # ids of arrays: each child waits for the child with the same index in each of them
    pairs: tuple[str, ...] = ()


def submit_job(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    params = request.params
    check_name(params["jobName"], "Job name", request)
    check_tags(request)
    check_chaos(params.get("tags", {}), request)
    check_served(params, request)
    if len(msgspec.json.encode(params)) > MAX_SUBMIT:
        raise request_error(f"SubmitJob request must be at most {MAX_SUBMIT} bytes", request)
    queue = find_record(tx, JobQueue, params["jobQueue"], request)
    if not queue.enabled:
        raise request_error(f"JobQueue {queue.name} is DISABLED and does not accept jobs", request)
    definition = definition_of(tx, params["jobDefinition"], request)
    spec = spec_of(definition, queue.name, request)
    _check_share(tx, queue, spec, request)
    size = params.get("arrayProperties", {}).get("size")
    if definition.detail["type"] == "multinode":
        spec, of_node = node_specs(spec, definition, request)
    else:
        spec, of_node = container_spec(spec, definition, request), {}
        if size is not None:
            check_between(size, 2, MAX_ARRAY, "Array size", request)
            spec = replace(spec, array_size=size)
    for name, _ in spec.consumables:
        find_record(tx, ConsumableResource, name, request)
    dependencies = _dependencies(tx, spec, request)
    job = Job(
        id=spec.id,
        spec=spec,
        sequence=tx.next_sequence(1 + (size or 0) + len(of_node)),
        waiting_for=dependencies.jobs,
        dependency_failed=dependencies.failed,
        tags=params.get("tags", {}),
    )
    children = _children(tx, job, dependencies, request) if size else _nodes(job, of_node)
    lifecycle.admit(tx, job, children)
    return {"jobArn": job.arn, "jobName": job.name, "jobId": job.id}


def _check_share(
    tx: Transaction, queue: JobQueue, spec: SubmittedSpec, request: CallReceived
) -> None:
    if spec.share:
        check_share_name(spec.share, request)
    if bool(spec.share) != bool(queue.policy):
        rule = "must be provided for" if queue.policy else "can not be provided for"
        kind = "with" if queue.policy else "without"
        raise request_error(
            f"shareIdentifier {rule} a job queue {kind} a scheduling policy, {queue.name}", request
        )
    waiting = {line.share for line in tx.state.lines.get(queue.name, ())}
    if spec.share and spec.share not in waiting and len(waiting) >= MAX_ACTIVE_SHARES:
        raise request_error(f"At most {MAX_ACTIVE_SHARES} active share identifiers", request)


def _children(
    tx: Transaction, job: Job, dependencies: JobDependencies, request: CallReceived
) -> list[Job]:
    """The children of an array: PENDING, each with its own dependencies."""
    children = []
    for index in range(job.spec.array_size or 0):
        needed = [f"{other}:{index}" for other in dependencies.pairs]
        if dependencies.in_sequence and index:
            needed.append(f"{job.id}:{index - 1}")
        live = tuple(
            other for other in needed if other in tx.state.jobs or parent_of(other) == job.id
        )
        children.append(
            Job(
                id=f"{job.id}:{index}",
                spec=job.spec,
                sequence=job.sequence + 1 + index,
                status=JobStatus.PENDING,
                waiting_for=live,
                dependency_failed=any(request.ended.get(other) == "FAILED" for other in needed),
                tags=job.tags,
                index=index,
            )
        )
    return children


def _nodes(job: Job, of_node: dict[int, SubmittedSpec]) -> list[Job]:
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


def _dependencies(tx: Transaction, spec: SubmittedSpec, request: CallReceived) -> JobDependencies:
    if len(spec.depends_on) > MAX_DEPENDENCIES:
        raise request_error(f"At most {MAX_DEPENDENCIES} dependencies", request)
    waiting: list[str] = []
    pairs: list[str] = []
    failed = in_sequence = False
    for entry in spec.depends_on:
        kind, job_id = entry.get("type", ""), bare_name(entry.get("jobId", ""))
        if kind == "SEQUENTIAL":
            in_sequence = True  # has no effect on a job that is not an array
            if not job_id:
                continue
        if job_id not in tx.state.jobs and job_id not in request.ended:
            raise request_error(f"Dependency job {job_id!r} does not exist", request)
        if kind == "N_TO_N" and spec.array_size is not None:
            _check_pair(tx, spec, job_id, request)
            pairs.append(job_id)
        elif job_id in tx.state.jobs:
            waiting.append(job_id)
        else:
            failed = failed or request.ended[job_id] == "FAILED"
    return JobDependencies(
        tuple(dict.fromkeys(waiting)), failed, in_sequence, tuple(dict.fromkeys(pairs))
    )


def _check_pair(tx: Transaction, spec: SubmittedSpec, other: str, request: CallReceived) -> None:
    live = tx.state.jobs.get(other)
    if live is not None:
        size = live.spec.array_size or 0 if live.is_array else 0
    else:
        size = sum(parent_of(job_id) == other and job_id != other for job_id in request.ended)
    if size != spec.array_size:
        raise request_error(
            f"N_TO_N needs two array jobs of the same size: {other} has {size} children, "
            f"this one {spec.array_size}",
            request,
        )


# --- Stopping -------------------------------------------------------------------------------------


def cancel_job(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    return _stop(tx, request, [request.params["jobId"]], lifecycle.cancel)


def terminate_job(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    return _stop(tx, request, [request.params["jobId"]], lifecycle.terminate)


def cancel_jobs(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    return _stop_many(tx, request, lifecycle.cancel)


def terminate_jobs(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    return _stop_many(tx, request, lifecycle.terminate)


def _stop_many(tx: Transaction, request: CallReceived, how: Stopping) -> dict[str, Any]:
    """Stop several jobs. A job that does not exist counts as successful."""
    job_ids = request.params["jobs"]
    check_between(len(job_ids), 0, MAX_STOPPED, "The number of jobs", request)
    _stop(tx, request, job_ids, how)
    return {"successful": job_ids, "errors": []}


def _stop(
    tx: Transaction, request: CallReceived, job_ids: Sequence[str], how: Stopping
) -> dict[str, Any]:
    """Stop the jobs that have not finished. The id of a node stops its whole job. Raises
    ApiError.
    """
    reason = request.params["reason"]
    if not all((reason, *job_ids)):
        raise request_error("jobId and reason must not be empty", request)
    if len(reason) > MAX_REASON:
        raise request_error(f"reason must have at most {MAX_REASON} characters", request)
    for job_id in job_ids:
        job = tx.state.jobs.get(bare_name(job_id).partition("#")[0])
        if job is not None:
            how(tx, job, reason)
    return {}
