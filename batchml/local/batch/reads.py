"""The API calls that change nothing, of Batch, ECS and STS."""

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from batchml.local.batch.lifecycle import network_interfaces
from batchml.local.batch.scheduling import front_of_queue
from batchml.local.batch.state import (
    CLUSTER,
    BatchState,
    Job,
    JobDefinition,
    arn,
    instance_arn,
)
from batchml.local.machine import MachineCapacity
from batchml.local.server.auth import identity
from batchml.local.server.protocol import ApiError, client_error
from batchml.local.store.journal import JobFilter, Journal
from batchml.model.names import bare_name, parse_arn
from batchml.model.run import JobStatus

# --- Pages ----------------------------------------------------------------------------------------
# A `nextToken` encodes a position, never a snapshot: it is small, and a restart keeps it valid.

_Position = Annotated[int, Meta(ge=0, le=2**62)]


def encode_token(value: Any) -> str:
    """The token of a position: any value that msgspec can write as JSON."""
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def decode_token(token: str, kind: Any) -> Any:
    """The position in `token`, of the type `kind`. Raises ValueError for an invalid token."""
    padded = token + "=" * (-len(token) % 4)
    try:
        return msgspec.json.decode(base64.b64decode(padded, b"-_", validate=True), type=kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _page(name: str, items: Sequence[Any], params: dict[str, Any]) -> dict[str, Any]:
    """The answer with the page of items that a request asks for, under `name`."""
    start = _read_token(params.get("nextToken")) or 0
    end = start + _limit(params, 100)
    more = {"nextToken": encode_token(end)} if end < len(items) else {}
    return {name: list(items[start:end]), **more}


def _limit(params: dict[str, Any], most: int) -> int:
    """The number of results of a page. A maxResults outside of AWS's range is clamped."""
    asked_for: int = params.get("maxResults", most)
    return max(1, min(asked_for, most))


def _read_token(token: str | None) -> int | None:
    if not token:
        return None
    try:
        return int(decode_token(token, _Position))
    except ValueError:
        raise client_error("Invalid nextToken") from None


# --- Batch ----------------------------------------------------------------------------------------

# Maxima of a queue's snapshot; AWS Batch API, FrontOfQueueDetail, FairshareUtilizationDetail
SNAPSHOT_JOBS, SNAPSHOT_SHARES = 100, 20


class ReadView(Struct, frozen=True):
    """The input of a read: the committed state, and the journal for finished jobs."""

    state: BatchState
    journal: Journal
    access_key_id: str
    now: int = 0  # ms
    held_back: str = ""  # the reason if this machine cannot start programs now


def describe_jobs(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    names = [bare_name(name) for name in params["jobs"]]
    if len(names) > 100:
        raise client_error("Maximum number of jobs supported is  100")
    finished = view.journal.jobs([job_id for job_id in names if job_id not in view.state.jobs])
    jobs = [view.state.jobs.get(job_id) or finished.get(job_id) for job_id in names]
    return {"jobs": [job_detail(view, job) for job in jobs if job is not None]}


def list_jobs(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    owners = [
        params[name] for name in ("jobQueue", "arrayJobId", "multiNodeJobId") if params.get(name)
    ]
    if len(owners) != 1:
        raise client_error("Give one of jobQueue, arrayJobId and multiNodeJobId")
    owner = bare_name(owners[0])
    if params.get("jobQueue") and owner not in view.state.queues:
        raise client_error(f"JobQueue {params['jobQueue']} not found")
    filters = params.get("filters", [])
    if len(filters) > 1:
        raise client_error("At most one filter")
    if not params.get("jobQueue"):
        filters = []  # AWS does not apply filters to children and nodes
    limit = _limit(params, 100 if filters else 1000)
    below = _read_token(params.get("nextToken"))
    page = view.journal.list_jobs(owner, _job_filter(params, filters), below, limit + 1)
    more = {"nextToken": encode_token(page[limit - 1].sequence)} if len(page) > limit else {}
    return {"jobSummaryList": [job_summary(view, job) for job in page[:limit]], **more}


def _job_filter(params: dict[str, Any], filters: Sequence[dict[str, Any]]) -> JobFilter:
    """The jobs to list. With a filter other than SHARE_IDENTIFIER AWS ignores jobStatus and lists
    all states; without a filter and a jobStatus it lists RUNNING jobs only.
    """
    if not filters:
        return JobFilter(status=params.get("jobStatus", "RUNNING"))
    name, values = filters[0].get("name"), filters[0].get("values", [])
    if not values:
        raise client_error("A filter needs a value")
    if name == "JOB_NAME":
        return JobFilter(names=values)
    if name == "JOB_DEFINITION":
        names = [bare_name(value) for value in values]
        # A name selects all of its revisions.
        return JobFilter(
            definitions=[n if n.endswith("*") or ":" in n else f"{n}:*" for n in names]
        )
    if name == "SHARE_IDENTIFIER":
        return JobFilter(status=params.get("jobStatus"), share=values[0])
    if name in ("BEFORE_CREATED_AT", "AFTER_CREATED_AT"):
        bound = _milliseconds(name, values[0])
        return JobFilter(before=bound) if name == "BEFORE_CREATED_AT" else JobFilter(after=bound)
    raise client_error(f"Filter {name} is not known")


def _milliseconds(name: str, value: str) -> int:
    try:
        time = int(value)
    except ValueError:
        time = -1
    if not 0 <= time < 2**63:
        raise client_error(f"{name} takes milliseconds since the epoch")
    return time


def job_summary(view: ReadView, job: Job) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "jobArn": job.arn,
        "jobId": job.id,
        "jobName": job.name,
        "createdAt": job.created_at,
        "status": job.status.value,
        "jobDefinition": _definition_arn(job),
    }
    container = _without_none({"exitCode": job.exit_code, "reason": job.reason or None})
    nodes = job.spec.nodes
    return summary | _without_none(
        {
            "statusReason": job.status_reason or None,
            "startedAt": job.started_at,
            "stoppedAt": job.stopped_at,
            "container": container or None,
            "arrayProperties": _array_properties(view, job),
            "nodeProperties": _node(job) | {"numNodes": nodes.count} if nodes is not None else None,
            "shareIdentifier": job.spec.share or None,
            "isCancelled": job.cancelled or None,
            "isTerminated": job.terminated or None,
        }
    )


def _array_properties(view: ReadView, job: Job) -> dict[str, Any] | None:
    if job.index is not None:
        return {"index": job.index}
    if not job.is_array:
        return None
    counts = job.summary or view.state.counts.get(job.id, {})
    return {
        "size": job.spec.array_size,
        "statusSummary": {status.value: counts.get(status.value, 0) for status in JobStatus},
        "statusSummaryLastUpdatedAt": job.stopped_at or job.created_at,
    }


def _node(job: Job) -> dict[str, Any]:
    if job.node is None:
        return {}
    return {"nodeIndex": job.node, "isMainNode": job.is_main_node}


def job_detail(view: ReadView, job: Job) -> dict[str, Any]:
    """AWS's JobDetail. Lists that AWS sends empty are present."""
    spec = job.spec
    detail: dict[str, Any] = {
        "jobArn": job.arn,
        "jobName": job.name,
        "jobId": job.id,
        "jobQueue": arn("job-queue", job.queue),
        "status": job.status.value,
        "attempts": list(job.attempts),
        "createdAt": job.created_at,
        "retryStrategy": {"attempts": 1, "evaluateOnExit": [], **spec.retry},
        "dependsOn": list(spec.depends_on),
        "jobDefinition": _definition_arn(job),
        "parameters": spec.parameters,
        "tags": job.tags,
        "propagateTags": spec.propagate_tags,
        "platformCapabilities": ["EC2"],
        "isCancelled": job.cancelled,
        "isTerminated": job.terminated,
        # The model requires startedAt. Like in AWS it is 0 or absent before the job runs.
        "startedAt": job.started_at or 0,
    }
    consumables = [
        {"consumableResource": arn("consumable-resource", name), "quantity": quantity}
        for name, quantity in spec.consumables
    ]
    return detail | _without_none(
        {
            "statusReason": job.status_reason or None,
            "stoppedAt": job.stopped_at,
            "timeout": {"attemptDurationSeconds": spec.timeout} if spec.timeout else None,
            "container": None if job.is_multinode else _container_detail(job),
            "arrayProperties": _array_properties(view, job),
            "nodeProperties": spec.node_properties or None,
            "nodeDetails": _node(job) or None,
            "shareIdentifier": spec.share or None,
            "schedulingPriority": spec.priority if spec.share else None,
            "consumableResourceProperties": {"consumableResourceList": consumables}
            if consumables
            else None,
        }
    )


def _container_detail(job: Job) -> dict[str, Any]:
    lists = ("volumes", "environment", "mountPoints", "ulimits", "networkInterfaces",
             "resourceRequirements", "secrets")  # fmt: skip
    detail = {**{name: [] for name in lists}, **job.container}
    if job.attempt is not None:
        detail["taskArn"] = job.attempt.task_arn
        detail["containerInstanceArn"] = instance_arn()
        detail["networkInterfaces"] = network_interfaces(job.attempt)
        # AWS sets the name from RUNNING on; here the stream exists from STARTING on.
        detail["logStreamName"] = job.attempt.log_stream
    elif job.attempts:
        last = job.attempts[-1]["container"]
        kept = ("taskArn", "containerInstanceArn", "logStreamName", "networkInterfaces")
        detail |= _without_none({key: last.get(key) for key in kept})
    return detail | _without_none({"exitCode": job.exit_code, "reason": job.reason or None})


def _definition_arn(job: Job) -> str:
    return arn("job-definition", job.definition)


def describe_compute_environments(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    names = {bare_name(name) for name in params.get("computeEnvironments", ())}
    records = sorted(view.state.environments.items())
    # As AWS shows an environment that cannot start hosts.
    status = {"status": "INVALID", "statusReason": view.held_back} if view.held_back else {}
    details = [
        {**record.detail, **status} for name, record in records if not names or name in names
    ]
    return _page("computeEnvironments", details, params)


def describe_job_queues(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    names = {bare_name(name) for name in params.get("jobQueues", ())}
    records = sorted(view.state.queues.items())
    details = [record.detail for name, record in records if not names or name in names]
    return _page("jobQueues", details, params)


def describe_job_definitions(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    names = {bare_name(name) for name in params.get("jobDefinitions", ())}

    def matches(record: JobDefinition) -> bool:
        if names:
            return record.key in names or record.name in names
        status = params.get("status")
        name = params.get("jobDefinitionName")
        return (status is None or record.detail["status"] == status) and (
            name is None or record.name == name
        )

    records: Iterable[JobDefinition] = sorted(
        view.state.definitions.values(), key=lambda record: (record.name, -record.revision)
    )
    return _page("jobDefinitions", [record.detail for record in records if matches(record)], params)


def describe_scheduling_policies(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    names = [bare_name(name) for name in params["arns"]]
    if len(names) > 100:
        raise client_error("The number of arns must be between 0 and 100")
    records = view.state.policies
    return {"schedulingPolicies": [records[name].detail for name in names if name in records]}


def list_scheduling_policies(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    arns = [{"arn": record.detail["arn"]} for _, record in sorted(view.state.policies.items())]
    return _page("schedulingPolicies", arns, params)


def describe_consumable_resource(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    record = view.state.consumables.get(bare_name(params["consumableResource"]))
    if record is None:
        raise client_error(f"ConsumableResource {params['consumableResource']} not found")
    in_use = view.state.quantity_in_use(record)
    return {
        **record.detail,
        "totalQuantity": record.total,
        "inUseQuantity": in_use,
        "availableQuantity": max(0, record.total - in_use),
    }


def list_consumable_resources(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    patterns = _filters(params, "CONSUMABLE_RESOURCE_NAME").get("CONSUMABLE_RESOURCE_NAME")
    resources = [
        {
            "consumableResourceArn": record.detail["consumableResourceArn"],
            "consumableResourceName": name,
            "totalQuantity": record.total,
            "inUseQuantity": view.state.quantity_in_use(record),
            "resourceType": record.detail["resourceType"],
        }
        for name, record in sorted(view.state.consumables.items())
        if _matches(patterns, name)
    ]
    return _page("consumableResources", resources, params)


def _filters(params: dict[str, Any], *allowed: str) -> dict[str, list[str]]:
    """The values of each filter in the request, in lower case. Raises ApiError for other
    filters.
    """
    filters: dict[str, list[str]] = {}
    for entry in params.get("filters", ()):
        name = entry.get("name")
        if name not in allowed or name in filters:
            raise client_error(f"The allowed filters, each at most once, are {', '.join(allowed)}")
        filters[name] = [value.lower() for value in entry.get("values", ())]
    return filters


def _matches(patterns: list[str] | None, name: str) -> bool:
    name = name.lower()
    return patterns is None or any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def list_jobs_by_consumable_resource(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    """Unfinished jobs that request a resource: AWS does not document which jobs it lists."""
    name = bare_name(params["consumableResource"])
    if name not in view.state.consumables:
        raise client_error(f"ConsumableResource {params['consumableResource']} not found")
    filters = _filters(params, "JOB_NAME", "JOB_STATUS")
    jobs = sorted(
        (
            job
            for job in view.state.jobs.values()
            if not job.parent
            and name in dict(job.spec.consumables)
            and _matches(filters.get("JOB_NAME"), job.name)
            and _matches(filters.get("JOB_STATUS"), job.status.value)
        ),
        key=lambda job: job.sequence,
    )
    page = _page("jobs", jobs, params)
    return page | {"jobs": [_consumer(view, job, name) for job in page["jobs"]]}


def _consumer(view: ReadView, job: Job, consumable: str) -> dict[str, Any]:
    detail = job_detail(view, job)
    detail = {
        "jobArn": job.arn,
        "jobQueueArn": detail["jobQueue"],
        "jobName": job.name,
        "jobDefinitionArn": detail["jobDefinition"],
        "jobStatus": job.status.value,
        "quantity": dict(job.spec.consumables)[consumable],
        "createdAt": job.created_at,
        "consumableResourceProperties": detail["consumableResourceProperties"],
    }
    return detail | _without_none(
        {
            "shareIdentifier": job.spec.share or None,
            "statusReason": job.status_reason or None,
            "startedAt": job.started_at,
        }
    )


def list_tags_for_resource(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    named = parse_arn(params["resourceArn"])
    if named is not None and named.kind == "job":
        job = view.state.jobs.get(named.name) or view.journal.jobs([named.name]).get(named.name)
        if job is not None:
            return {"tags": job.tags}
    elif named is not None:
        record = view.state.record(named.kind, named.name)
        if record is not None:
            return {"tags": record.detail.get("tags", {})}
    raise client_error(f"Resource not found: {params['resourceArn']}")


def get_job_queue_snapshot(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    """The first 100 RUNNABLE jobs, in the order in which they would start now, and the usage."""
    queue = view.state.queues.get(bare_name(params["jobQueue"]))
    if queue is None:
        raise client_error(f"JobQueue {params['jobQueue']} not found")
    front = [
        {"jobArn": job.arn, "earliestTimeAtPosition": since}
        for job, since in front_of_queue(view.state, queue, view.now, SNAPSHOT_JOBS)
    ]
    running: dict[str, int] = {}
    for job in view.state.jobs_with_attempt():
        if job.queue == queue.name and job.node is None:
            running[job.spec.share] = running.get(job.spec.share, 0) + job.needs.vcpus
    top = sorted(running.items(), key=lambda item: -item[1])
    utilization: dict[str, Any] = {
        "totalCapacityUsage": _capacity(sum(running.values())),
        "lastUpdatedAt": view.now,
    }
    if queue.policy:
        utilization["fairshareUtilization"] = {
            "activeShareCount": len(running),
            "topCapacityUtilization": [
                {"shareIdentifier": share, "capacityUsage": _capacity(vcpus)}
                for share, vcpus in top[:SNAPSHOT_SHARES]
            ],
        }
    return {
        "frontOfQueue": {"jobs": front, "lastUpdatedAt": view.now},
        "queueUtilization": utilization,
    }


def _capacity(vcpus: int) -> list[dict[str, Any]]:
    return [{"capacityUnit": "VCPU", "quantity": float(vcpus)}]


# --- ECS ------------------------------------------------------------------------------------------

# Source: ECS API Reference, ListContainerInstances and DescribeContainerInstances. This machine is
# the only instance of the only cluster. Its registered resources are those that the server gives to
# jobs; its remaining resources are those that no attempt holds.

THIS_MACHINE = "this-machine"
_CPU_UNITS = 1024  # of ECS, for one vCPU
_ACTIVE = ("", "ACTIVE")  # values of `status` that select this machine; empty: all


def list_container_instances(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    """This machine, unless the request selects hosts in another state."""
    _check_cluster(params)
    if params.get("filter"):
        text = "filter is not served by the embedded AWS Batch."
        raise ApiError("InvalidParameterException", text)
    is_selected = params.get("status", "") in _ACTIVE
    return {"containerInstanceArns": [instance_arn()] if is_selected else []}


def describe_container_instances(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    """This machine's total and free resources; other instances are failures, as in ECS."""
    _check_cluster(params)
    names = params["containerInstances"]
    if not 1 <= len(names) <= 100:
        raise ApiError("InvalidParameterException", "Give 1 to 100 container instances.")
    missing = [name for name in names if name not in (instance_arn(), THIS_MACHINE)]
    return {
        "containerInstances": [_container_instance(view.state)] if missing != names else [],
        "failures": [{"arn": name, "reason": "MISSING"} for name in missing],
    }


def _check_cluster(params: dict[str, Any]) -> None:
    if params.get("cluster", "").rpartition("/")[2] != CLUSTER:
        raise ApiError("ClusterNotFoundException", "Cluster not found.")


def _container_instance(state: BatchState) -> dict[str, Any]:
    tasks = [job for job in state.jobs_with_attempt() if not job.is_multinode]
    return {
        "containerInstanceArn": instance_arn(),
        "status": "ACTIVE",
        "agentConnected": True,
        "runningTasksCount": len(tasks),
        "pendingTasksCount": 0,
        "registeredResources": _ecs_resources(state.machine),
        "remainingResources": _ecs_resources(state.free),
        "attributes": [{"name": "ecs.instance-type", "value": THIS_MACHINE}],
    }


def _ecs_resources(machine: MachineCapacity) -> list[dict[str, Any]]:
    resources: list[dict[str, Any]] = [
        {"name": "CPU", "type": "INTEGER", "integerValue": machine.vcpus * _CPU_UNITS},
        {"name": "MEMORY", "type": "INTEGER", "integerValue": machine.memory},
    ]
    if machine.gpus:
        resources.append({"name": "GPU", "type": "STRINGSET", "stringSetValue": list(machine.gpus)})
    return resources


# --- STS ------------------------------------------------------------------------------------------


def get_caller_identity(view: ReadView, params: dict[str, Any]) -> dict[str, Any]:
    return {**identity(view.access_key_id, CLUSTER)}


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


READS: dict[tuple[str, str], Callable[[ReadView, dict[str, Any]], dict[str, Any]]] = {
    ("batch", "DescribeJobs"): describe_jobs,
    ("batch", "ListJobs"): list_jobs,
    ("batch", "DescribeComputeEnvironments"): describe_compute_environments,
    ("batch", "DescribeJobQueues"): describe_job_queues,
    ("batch", "DescribeJobDefinitions"): describe_job_definitions,
    ("batch", "DescribeSchedulingPolicies"): describe_scheduling_policies,
    ("batch", "ListSchedulingPolicies"): list_scheduling_policies,
    ("batch", "DescribeConsumableResource"): describe_consumable_resource,
    ("batch", "ListConsumableResources"): list_consumable_resources,
    ("batch", "ListJobsByConsumableResource"): list_jobs_by_consumable_resource,
    ("batch", "ListTagsForResource"): list_tags_for_resource,
    ("batch", "GetJobQueueSnapshot"): get_job_queue_snapshot,
    ("ecs", "ListContainerInstances"): list_container_instances,
    ("ecs", "DescribeContainerInstances"): describe_container_instances,
    ("sts", "GetCallerIdentity"): get_caller_identity,
}
