"""The API calls that change nothing, for Batch, ECS and STS: from the state and the store."""

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from batchml.local.batch.lifecycle import network_interfaces
from batchml.local.batch.scheduling import front_of_queue
from batchml.local.batch.state import CLUSTER, Consumable, Definition, Job, State, arn, instance_arn
from batchml.local.ecs import describe_container_instances, list_container_instances
from batchml.local.server.auth import identity
from batchml.local.server.protocol import client_error
from batchml.local.store.journal import Store, Wanted
from batchml.model.names import bare_name, parse_arn
from batchml.model.run import JobStatus

# --- page tokens ----------------------------------------------------------------------------------
# `nextToken`: where the next page goes on, as a text that clients hand back unread.
#
# A position, never a snapshot: a token is small, lives as long as what it points into, and means
# the same to a restarted server.


def encode(value: Any) -> str:
    """The token of a position: anything that msgspec can write as JSON."""
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")


def decode(token: str, kind: Any) -> Any:
    """The position in `token`, of the type `kind`. Raises ValueError for what is none."""
    padded = token + "=" * (-len(token) % 4)
    try:
        return msgspec.json.decode(base64.b64decode(padded, b"-_", validate=True), type=kind)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# --- reads ----------------------------------------------------------------------------------------


# At most, in a snapshot of a queue; AWS Batch API, FrontOfQueueDetail, FairshareUtilizationDetail
SNAPSHOT_JOBS, SNAPSHOT_SHARES = 100, 20
_Position = Annotated[int, Meta(ge=0, le=2**62)]

T = TypeVar("T")


class View(Struct, frozen=True):
    """What a read may look at: the committed state, and the store for finished jobs."""

    state: State
    store: Store
    access_key_id: str
    now: int = 0  # ms
    held_back: str = ""  # why programs cannot be started on this machine now


def describe_jobs(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = [bare_name(name) for name in params["jobs"]]
    if len(asked) > 100:
        raise client_error("Maximum number of jobs supported is  100")
    finished = view.store.jobs([job_id for job_id in asked if job_id not in view.state.jobs])
    found = [view.state.jobs.get(job_id) or finished.get(job_id) for job_id in asked]
    return {"jobs": [job_detail(view, job) for job in found if job is not None]}


def list_jobs(view: View, params: dict[str, Any]) -> dict[str, Any]:
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
        filters = []  # AWS does not apply them to children and nodes
    limit = _limit(params, 100 if filters else 1000)
    below = _read_token(params.get("nextToken"))
    page = view.store.listed(owner, _wanted(params, filters), below, limit + 1)
    more = {"nextToken": encode(page[limit - 1].sequence)} if len(page) > limit else {}
    return {"jobSummaryList": [job_summary(view, job) for job in page[:limit]], **more}


def _wanted(params: dict[str, Any], filters: Sequence[dict[str, Any]]) -> Wanted:
    """With a filter AWS ignores jobStatus and lists all states; without either, RUNNING only."""
    if not filters:
        return Wanted(status=params.get("jobStatus", "RUNNING"))
    name, values = filters[0].get("name"), filters[0].get("values", [])
    if not values:
        raise client_error("A filter needs a value")
    if name == "JOB_NAME":
        return Wanted(names=values)
    if name == "JOB_DEFINITION":
        names = [bare_name(value) for value in values]
        # A name stands for all of its revisions.
        return Wanted(definitions=[n if n.endswith("*") or ":" in n else f"{n}:*" for n in names])
    if name == "SHARE_IDENTIFIER":
        return Wanted(status=params.get("jobStatus"), share=values[0])
    if name in ("BEFORE_CREATED_AT", "AFTER_CREATED_AT"):
        bound = _milliseconds(name, values[0])
        return Wanted(before=bound) if name == "BEFORE_CREATED_AT" else Wanted(after=bound)
    raise client_error(f"Filter {name} is not known")


def _milliseconds(name: str, value: str) -> int:
    try:
        found = int(value)
    except ValueError:
        found = -1
    if not 0 <= found < 2**63:
        raise client_error(f"{name} takes milliseconds since the epoch")
    return found


def job_summary(view: View, job: Job) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "jobArn": job.arn,
        "jobId": job.id,
        "jobName": job.name,
        "createdAt": job.created_at,
        "status": job.status.value,
        "jobDefinition": _definition_arn(job),
    }
    container = _present({"exitCode": job.exit_code, "reason": job.reason or None})
    nodes = job.spec.nodes
    return summary | _present(
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


def _array_properties(view: View, job: Job) -> dict[str, Any] | None:
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


def job_detail(view: View, job: Job) -> dict[str, Any]:
    """AWS's JobDetail. Empty lists are sent where AWS sends them."""
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
        # The model marks it required; like AWS's own it is 0 or absent before the job runs.
        "startedAt": job.started_at or 0,
    }
    consumables = [
        {"consumableResource": arn("consumable-resource", name), "quantity": quantity}
        for name, quantity in spec.consumables
    ]
    return detail | _present(
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
    shown = {**{name: [] for name in lists}, **job.container}
    if job.attempt is not None:
        shown["taskArn"] = job.attempt.task_arn
        shown["containerInstanceArn"] = instance_arn()
        shown["networkInterfaces"] = network_interfaces(job.attempt)
        # AWS gives the name from RUNNING on. Here already from STARTING: the stream is there.
        shown["logStreamName"] = job.attempt.log_stream
    elif job.attempts:
        last = job.attempts[-1]["container"]
        kept = ("taskArn", "containerInstanceArn", "logStreamName", "networkInterfaces")
        shown |= _present({key: last.get(key) for key in kept})
    return shown | _present({"exitCode": job.exit_code, "reason": job.reason or None})


def _definition_arn(job: Job) -> str:
    return arn("job-definition", job.definition)


def describe_compute_environments(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = {bare_name(name) for name in params.get("computeEnvironments", ())}
    records = sorted(view.state.environments.items())
    # As AWS shows an environment that cannot start hosts.
    held = {"status": "INVALID", "statusReason": view.held_back} if view.held_back else {}
    found = [{**record.detail, **held} for name, record in records if not asked or name in asked]
    page, token = _page(found, params)
    return {"computeEnvironments": page, **token}


def describe_job_queues(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = {bare_name(name) for name in params.get("jobQueues", ())}
    records = sorted(view.state.queues.items())
    found = [record.detail for name, record in records if not asked or name in asked]
    page, token = _page(found, params)
    return {"jobQueues": page, **token}


def describe_job_definitions(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = {bare_name(name) for name in params.get("jobDefinitions", ())}

    def wanted(record: Definition) -> bool:
        if asked:
            return record.key in asked or record.name in asked
        status = params.get("status")
        name = params.get("jobDefinitionName")
        return (status is None or record.detail["status"] == status) and (
            name is None or record.name == name
        )

    records: Iterable[Definition] = sorted(
        view.state.definitions.values(), key=lambda record: (record.name, -record.revision)
    )
    page, token = _page([record.detail for record in records if wanted(record)], params)
    return {"jobDefinitions": page, **token}


def describe_scheduling_policies(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = [bare_name(name) for name in params["arns"]]
    check_between(len(asked), 0, 100, "The number of arns")
    records = view.state.policies
    return {"schedulingPolicies": [records[name].detail for name in asked if name in records]}


def list_scheduling_policies(view: View, params: dict[str, Any]) -> dict[str, Any]:
    found = [{"arn": record.detail["arn"]} for _, record in sorted(view.state.policies.items())]
    page, token = _page(found, params)
    return {"schedulingPolicies": page, **token}


def describe_consumable_resource(view: View, params: dict[str, Any]) -> dict[str, Any]:
    record = view.state.consumables.get(bare_name(params["consumableResource"]))
    if record is None:
        raise client_error(f"ConsumableResource {params['consumableResource']} not found")
    held = _held(view, record)
    return {
        **record.detail,
        "totalQuantity": record.total,
        "inUseQuantity": held,
        "availableQuantity": max(0, record.total - held),
    }


def _held(view: View, record: Consumable) -> int:
    return record.spent + view.state.in_use.get(record.name, 0)


def list_consumable_resources(view: View, params: dict[str, Any]) -> dict[str, Any]:
    wanted = _filters(params, "CONSUMABLE_RESOURCE_NAME").get("CONSUMABLE_RESOURCE_NAME")
    found = [
        {
            "consumableResourceArn": record.detail["consumableResourceArn"],
            "consumableResourceName": name,
            "totalQuantity": record.total,
            "inUseQuantity": _held(view, record),
            "resourceType": record.detail["resourceType"],
        }
        for name, record in sorted(view.state.consumables.items())
        if _matches(wanted, name)
    ]
    page, token = _page(found, params)
    return {"consumableResources": page, **token}


def _filters(params: dict[str, Any], *known: str) -> dict[str, list[str]]:
    """The values of each filter that is given, in lower case. Raises Refused for others."""
    found: dict[str, list[str]] = {}
    for entry in params.get("filters", ()):
        name = entry.get("name")
        if name not in known or name in found:
            raise client_error(f"The filters here, each once, are {', '.join(known)}")
        found[name] = [value.lower() for value in entry.get("values", ())]
    return found


def _matches(patterns: list[str] | None, name: str) -> bool:
    name = name.lower()
    return patterns is None or any(
        name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
        for pattern in patterns
    )


def list_jobs_by_consumable_resource(view: View, params: dict[str, Any]) -> dict[str, Any]:
    """Unfinished jobs that ask for a resource. AWS does not say which; these are what it is for."""
    name = bare_name(params["consumableResource"])
    if name not in view.state.consumables:
        raise client_error(f"ConsumableResource {params['consumableResource']} not found")
    wanted = _filters(params, "JOB_NAME", "JOB_STATUS")
    jobs = sorted(
        (
            job
            for job in view.state.jobs.values()
            if not job.parent
            and name in dict(job.spec.consumables)
            and _matches(wanted.get("JOB_NAME"), job.name)
            and _matches(wanted.get("JOB_STATUS"), job.status.value)
        ),
        key=lambda job: job.sequence,
    )
    page, token = _page(jobs, params)
    return {"jobs": [_consumer(view, job, name) for job in page], **token}


def _consumer(view: View, job: Job, consumable: str) -> dict[str, Any]:
    detail = job_detail(view, job)
    shown = {
        "jobArn": job.arn,
        "jobQueueArn": detail["jobQueue"],
        "jobName": job.name,
        "jobDefinitionArn": detail["jobDefinition"],
        "jobStatus": job.status.value,
        "quantity": dict(job.spec.consumables)[consumable],
        "createdAt": job.created_at,
        "consumableResourceProperties": detail["consumableResourceProperties"],
    }
    return shown | _present(
        {
            "shareIdentifier": job.spec.share or None,
            "statusReason": job.status_reason or None,
            "startedAt": job.started_at,
        }
    )


def list_tags_for_resource(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = parse_arn(params["resourceArn"])
    if asked is not None and asked.kind == "job":
        job = view.state.jobs.get(asked.name) or view.store.jobs([asked.name]).get(asked.name)
        if job is not None:
            return {"tags": job.tags}
    elif asked is not None:
        record = view.state.record(asked.kind, asked.name)
        if record is not None:
            return {"tags": record.detail.get("tags", {})}
    raise client_error(f"Resource not found: {params['resourceArn']}")


def get_job_queue_snapshot(view: View, params: dict[str, Any]) -> dict[str, Any]:
    """The first 100 RUNNABLE jobs, in the order in which they would start now, and the usage."""
    queue = view.state.queues.get(bare_name(params["jobQueue"]))
    if queue is None:
        raise client_error(f"JobQueue {params['jobQueue']} not found")
    front = [
        {"jobArn": job.arn, "earliestTimeAtPosition": since}
        for job, since in front_of_queue(view.state, queue, view.now, SNAPSHOT_JOBS)
    ]
    running: dict[str, int] = {}
    for job in view.state.jobs.values():
        if job.queue == queue.name and job.attempt is not None and job.node is None:
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


def get_caller_identity(view: View, params: dict[str, Any]) -> dict[str, Any]:
    return {**identity(view.access_key_id, CLUSTER)}


def _page(found: Sequence[T], params: dict[str, Any]) -> tuple[list[T], dict[str, str]]:
    start = _read_token(params.get("nextToken")) or 0
    limit = _limit(params, 100)
    page = list(found[start : start + limit])
    more = start + limit < len(found)
    return page, {"nextToken": encode(start + limit)} if more else {}


def _limit(params: dict[str, Any], most: int) -> int:
    """The number of results of a page. A maxResults outside of AWS's range is taken into it."""
    asked: int = params.get("maxResults", most)
    return max(1, min(asked, most))


def _read_token(token: str | None) -> int | None:
    if not token:
        return None
    try:
        return int(decode(token, _Position))
    except ValueError:
        raise client_error("Invalid nextToken") from None


def check_between(value: int, low: int, high: int, what: str) -> None:
    if not low <= value <= high:
        raise client_error(f"{what} must be between {low} and {high}")


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


READS: dict[tuple[str, str], Callable[[View, dict[str, Any]], dict[str, Any]]] = {
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
    ("ecs", "ListContainerInstances"): lambda view, params: list_container_instances(
        view.state, params
    ),
    ("ecs", "DescribeContainerInstances"): lambda view, params: describe_container_instances(
        view.state, params
    ),
    ("sts", "GetCallerIdentity"): get_caller_identity,
}
