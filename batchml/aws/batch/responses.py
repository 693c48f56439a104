"""Convert AWS Batch's JobDetail and JobSummary to a `Run`. AWS may leave out any member.

Sources: AWS Batch API Reference, JobDetail, ContainerDetail, AttemptDetail, JobSummary.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchml.model.names import bare_name, split_key
from batchml.model.run import Attempt, JobStatus, Run
from batchml.runtime.protocol.launch import NEURON_DEVICE
from batchml.runtime.protocol.variables import read_params

_INSTANCE = r"Host EC2 \(instance ([^)\s]+)\)"


def to_run(detail: Mapping[str, Any]) -> Run:
    """Convert a JobDetail of DescribeJobs."""
    container = _container(detail)
    own = _own_container(detail)
    status = JobStatus(detail["status"])
    attempts = tuple(_attempt(entry) for entry in detail.get("attempts") or ())
    current = own.get("logStreamName", "")
    host = _host(own, detail.get("statusReason", ""))
    if not status.is_terminal and current and all(a.log_stream != current for a in attempts):
        began = detail.get("startedAt") or None
        if attempts and began == attempts[-1].started_at:  # it is being started again
            began = None
        attempts += (Attempt(started_at=began, log_stream=current, host=host),)
    name, key = split_key(detail.get("jobName", ""))
    tags = dict(detail.get("tags") or {})
    environment = _environment(container)
    last = attempts[-1] if attempts else Attempt()
    if not own and status.is_terminal:  # multi-node: only the attempt has the end
        own = {"exitCode": last.exit_code, "reason": last.reason}
    needs = _needs(container)
    depends_on = detail.get("dependsOn") or ()
    options = container.get("logConfiguration", {}).get("options", {})
    return Run(
        job_id=detail["jobId"],
        name=name,
        job_name=detail.get("jobName", ""),
        key=key or tags.get("batchml:key", ""),
        queue=bare_name(detail.get("jobQueue", "")),
        status=status,
        status_reason=detail.get("statusReason", ""),
        created_at=detail.get("createdAt"),
        started_at=detail.get("startedAt") or None,
        stopped_at=detail.get("stoppedAt"),
        exit_code=own.get("exitCode"),
        reason=own.get("reason", ""),
        attempts=attempts,
        log_group=options.get("awslogs-group", "/aws/batch/job"),
        is_cancelled=detail.get("isCancelled", False),
        is_terminated=detail.get("isTerminated", False),
        image=container.get("image", ""),
        command=tuple(container.get("command") or ()),
        vcpus=needs.get("VCPU", container.get("vcpus", 0)),
        memory_mib=needs.get("MEMORY", container.get("memory", 0)),
        gpus=needs.get("GPU", 0),
        neurons=_neurons(container),
        definition=bare_name(detail.get("jobDefinition", "")),
        children=_children(detail),
        tags=tags,
        params=read_params(environment) or dict(detail.get("parameters") or {}),
        environment=environment,
        array_size=_member(detail, "arrayProperties", "size") or 0,
        array_index=_member(detail, "arrayProperties", "index"),
        nodes=_member(detail, "nodeProperties", "numNodes") or 0,
        node_index=_member(detail, "nodeDetails", "nodeIndex"),
        depends_on=tuple(entry["jobId"] for entry in depends_on if entry.get("jobId")),
        is_sequential=any(entry.get("type") == "SEQUENTIAL" for entry in depends_on),
        share=detail.get("shareIdentifier", ""),
        consumables=_consumables(detail),
        max_attempts=_member(detail, "retryStrategy", "attempts") or 1,
        timeout=_member(detail, "timeout", "attemptDurationSeconds"),
        host=host or last.host,
    )


def to_summary(summary: Mapping[str, Any], queue: str) -> Run:
    """Convert a JobSummary of ListJobs. Fields that it does not have get their defaults."""
    container = summary.get("container") or {}
    name, key = split_key(summary.get("jobName", ""))
    return Run(
        job_id=summary["jobId"],
        name=name,
        job_name=summary.get("jobName", ""),
        key=key,
        queue=queue,
        status=JobStatus(summary["status"]),
        status_reason=summary.get("statusReason", ""),
        created_at=summary.get("createdAt"),
        started_at=summary.get("startedAt") or None,
        stopped_at=summary.get("stoppedAt"),
        exit_code=container.get("exitCode"),
        reason=container.get("reason", ""),
        is_cancelled=summary.get("isCancelled", False),
        is_terminated=summary.get("isTerminated", False),
        definition=bare_name(summary.get("jobDefinition", "")),
        children=_children(summary),
        array_size=_member(summary, "arrayProperties", "size") or 0,
        array_index=_member(summary, "arrayProperties", "index"),
        nodes=_member(summary, "nodeProperties", "numNodes") or 0,
        node_index=_member(summary, "nodeProperties", "nodeIndex"),
        share=summary.get("shareIdentifier", ""),
    )


def _container(detail: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of the run's container; for a multi-node run, of its first node group.

    If the definition has `ecsProperties`, they are in this member instead of in `container`.
    """
    nodes: Mapping[str, Any] = detail.get("nodeProperties") or {}
    groups: Sequence[Any] = nodes.get("nodeRangeProperties") or ({},)
    for holder in (detail, groups[0]):
        found: Mapping[str, Any] = holder.get("container") or _first_of_task(holder)
        if found:
            return found
    return {}


def _own_container(detail: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run's own container, which has the log, the end and the host of the last attempt."""
    found: Mapping[str, Any] = detail.get("container") or _first_of_task(detail)
    return found


def _first_of_task(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    tasks: Sequence[Any] = (holder.get("ecsProperties") or {}).get("taskProperties") or ()
    if not tasks:
        return {}
    containers: Sequence[Any] = tasks[0].get("containers") or ({},)
    host = {name: tasks[0][name] for name in ("containerInstanceArn",) if name in tasks[0]}
    return {**host, **containers[0]}


def _attempt(entry: Mapping[str, Any]) -> Attempt:
    container = entry.get("container") or {}
    if not container and entry.get("taskProperties"):
        task = entry["taskProperties"][0]
        container = {**task, **(task.get("containers") or ({},))[0]}
    status_reason = entry.get("statusReason", "")
    return Attempt(
        started_at=entry.get("startedAt") or None,
        stopped_at=entry.get("stoppedAt"),
        exit_code=container.get("exitCode"),
        reason=container.get("reason", ""),
        status_reason=status_reason,
        log_stream=container.get("logStreamName", ""),
        host=_host(container, status_reason),
    )


def _host(container: Mapping[str, Any], status_reason: str) -> str:
    lost = re.search(_INSTANCE, status_reason)
    if lost:
        return lost[1]
    # arn:aws:ecs:REGION:ACCOUNT:container-instance/CLUSTER/ID
    return str(container.get("containerInstanceArn", "")).rpartition("/")[2]


def _children(entry: Mapping[str, Any]) -> dict[str, int]:
    """The number of an array's children by state; empty for other jobs."""
    counts = (entry.get("arrayProperties") or {}).get("statusSummary") or {}
    return {status: count for status, count in counts.items() if count}


def _member(entry: Mapping[str, Any], holder: str, name: str) -> int | None:
    found = (entry.get(holder) or {}).get(name)
    return None if found is None else int(found)


def _needs(container: Mapping[str, Any]) -> dict[str, int]:
    entries = container.get("resourceRequirements") or ()
    return {entry["type"]: int(float(entry["value"])) for entry in entries}


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    entries = container.get("environment") or ()
    return {entry.get("name", ""): entry.get("value", "") for entry in entries}


def _neurons(container: Mapping[str, Any]) -> int:
    """The Neuron chips of a container: AWS Batch knows them only as devices."""
    devices = (container.get("linuxParameters") or {}).get("devices") or ()
    return sum(str(each.get("hostPath", "")).startswith(NEURON_DEVICE) for each in devices)


def _consumables(detail: Mapping[str, Any]) -> dict[str, int]:
    held = detail.get("consumableResourceProperties") or {}
    entries = held.get("consumableResourceList") or ()
    return {
        bare_name(entry["consumableResource"]): int(entry.get("quantity", 1)) for entry in entries
    }
