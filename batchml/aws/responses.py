"""AWS JSON -> our nouns. Pure. AWS leaves members out freely, so every one is optional here."""

from collections.abc import Mapping
from typing import Any

from batchml.model.names import bare_name
from batchml.model.run import Attempt, Run
from batchml.model.status import JobStatus


def to_run(detail: Mapping[str, Any]) -> Run:
    """A Run from a JobDetail of DescribeJobs."""
    container = detail.get("container", {})
    status = JobStatus(detail["status"])
    attempts = tuple(_attempt(entry) for entry in detail.get("attempts", ()))
    current = container.get("logStreamName", "")
    if not status.is_terminal and current and all(a.log_stream != current for a in attempts):
        attempts += (Attempt(started_at=detail.get("startedAt") or None, log_stream=current),)
    needs = {
        entry["type"]: int(float(entry["value"]))
        for entry in container.get("resourceRequirements", ())
    }
    options = container.get("logConfiguration", {}).get("options", {})
    return Run(
        job_id=detail["jobId"],
        name=detail.get("jobName", ""),
        queue=bare_name(detail.get("jobQueue", "")),
        status=status,
        status_reason=detail.get("statusReason", ""),
        created_at=detail.get("createdAt"),
        started_at=detail.get("startedAt") or None,
        stopped_at=detail.get("stoppedAt"),
        exit_code=container.get("exitCode"),
        reason=container.get("reason", ""),
        attempts=attempts,
        log_group=options.get("awslogs-group", "/aws/batch/job"),
        is_cancelled=detail.get("isCancelled", False),
        is_terminated=detail.get("isTerminated", False),
        image=container.get("image", ""),
        command=tuple(container.get("command", ())),
        vcpus=needs.get("VCPU", container.get("vcpus", 0)),
        memory_mib=needs.get("MEMORY", container.get("memory", 0)),
        gpus=needs.get("GPU", 0),
        definition=bare_name(detail.get("jobDefinition", "")),
        children=_children(detail),
    )


def _children(entry: Mapping[str, Any]) -> dict[str, int]:
    """How many children of an array are in which state; nothing for any other job."""
    counts = entry.get("arrayProperties", {}).get("statusSummary", {})
    return {status: count for status, count in counts.items() if count}


def to_summary(summary: Mapping[str, Any], queue: str) -> Run:
    """A Run from a JobSummary of ListJobs; what that leaves out stays at its default."""
    container = summary.get("container", {})
    return Run(
        job_id=summary["jobId"],
        name=summary.get("jobName", ""),
        queue=queue,
        status=JobStatus(summary["status"]),
        status_reason=summary.get("statusReason", ""),
        created_at=summary.get("createdAt"),
        started_at=summary.get("startedAt"),
        stopped_at=summary.get("stoppedAt"),
        exit_code=container.get("exitCode"),
        reason=container.get("reason", ""),
        definition=bare_name(summary.get("jobDefinition", "")),
        children=_children(summary),
    )


def _attempt(entry: Mapping[str, Any]) -> Attempt:
    container = entry.get("container", {})
    return Attempt(
        started_at=entry.get("startedAt"),
        stopped_at=entry.get("stoppedAt"),
        exit_code=container.get("exitCode"),
        reason=container.get("reason", ""),
        status_reason=entry.get("statusReason", ""),
        log_stream=container.get("logStreamName", ""),
    )
