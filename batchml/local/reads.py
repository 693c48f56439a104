"""The API calls that change nothing, for Batch and STS: answers from the state and the store."""

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from batchml.local.state import ACCOUNT, CLUSTER, Definition, Job, State
from batchml.local.store import Store
from batchml.local.wire import client_error
from batchml.model.names import bare_name

T = TypeVar("T")


class View(Struct, frozen=True):
    """What a read may look at: the committed state, and the store for finished jobs."""

    state: State
    store: Store
    access_key_id: str


def describe_jobs(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = [bare_name(name) for name in params["jobs"]]
    if len(asked) > 100:
        raise client_error("Maximum number of jobs supported is  100")
    finished = view.store.jobs([job_id for job_id in asked if job_id not in view.state.jobs])
    found = [view.state.jobs.get(job_id) or finished.get(job_id) for job_id in asked]
    return {"jobs": [job_detail(job) for job in found if job is not None]}


def list_jobs(view: View, params: dict[str, Any]) -> dict[str, Any]:
    if len({"jobQueue", "arrayJobId", "multiNodeJobId"} & set(params)) > 1:
        raise client_error("Give one of jobQueue, arrayJobId and multiNodeJobId")
    if "jobQueue" not in params:
        raise client_error("jobQueue must be given; arrays and nodes are not served yet")
    queue = bare_name(params["jobQueue"])
    if queue not in view.state.queues:
        raise client_error(f"JobQueue {params['jobQueue']} not found")
    filters = params.get("filters", [])
    if len(filters) > 1:
        raise client_error("At most one filter")
    # With a filter AWS ignores jobStatus and lists all states; without either, RUNNING only.
    status = None if filters else params.get("jobStatus", "RUNNING")
    limit = min(params.get("maxResults", 1000), 100 if filters else 1000)
    if limit < 1:
        raise client_error("maxResults must be at least 1")
    keep = _filter(filters[0]) if filters else lambda job: True
    below = _read_token(params.get("nextToken"))
    page: list[Job] = []
    for job in view.store.listed(queue, status, below, 2**31):
        if keep(job):
            if len(page) == limit:
                break
            page.append(job)
    else:
        return {"jobSummaryList": [job_summary(job) for job in page]}
    return {
        "jobSummaryList": [job_summary(job) for job in page],
        "nextToken": _token(page[-1].sequence),
    }


def _filter(given: dict[str, Any]) -> Callable[[Job], bool]:
    name, values = given.get("name"), given.get("values", [])
    if not values:
        raise client_error("A filter needs a value")
    if name == "JOB_NAME":
        patterns = [value.lower() for value in values]
        return lambda job: any(_like(pattern, job.name.lower()) for pattern in patterns)
    if name == "JOB_DEFINITION":
        patterns = [bare_name(value) for value in values]
        return lambda job: any(
            _like(pattern, job.definition) or _like(pattern, job.definition.rpartition(":")[0])
            for pattern in patterns
        )
    if name in ("BEFORE_CREATED_AT", "AFTER_CREATED_AT"):
        try:
            bound = int(values[0])
        except ValueError:
            raise client_error(f"{name} takes milliseconds since the epoch") from None
        if name == "BEFORE_CREATED_AT":
            return lambda job: job.created_at < bound
        return lambda job: job.created_at > bound
    raise client_error(f"Filter {name} is not served")


def _like(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern


def job_summary(job: Job) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "jobArn": job.arn,
        "jobId": job.id,
        "jobName": job.name,
        "createdAt": job.created_at,
        "status": job.status.value,
        "jobDefinition": _definition_arn(job),
    }
    container = _present({"exitCode": job.exit_code, "reason": job.reason or None})
    return summary | _present(
        {
            "statusReason": job.status_reason or None,
            "startedAt": job.started_at,
            "stoppedAt": job.stopped_at,
            "container": container or None,
        }
    )


def job_detail(job: Job) -> dict[str, Any]:
    """AWS's JobDetail. Empty lists are sent where AWS sends them."""
    detail: dict[str, Any] = {
        "jobArn": job.arn,
        "jobName": job.name,
        "jobId": job.id,
        "jobQueue": job.arn.replace(f"job/{job.id}", f"job-queue/{job.queue}"),
        "status": job.status.value,
        "attempts": list(job.attempts),
        "createdAt": job.created_at,
        "retryStrategy": {"attempts": 1, "evaluateOnExit": [], **job.retry},
        "dependsOn": list(job.depends_on),
        "jobDefinition": _definition_arn(job),
        "parameters": job.parameters,
        "container": _container_detail(job),
        "tags": job.tags,
        "propagateTags": job.propagate_tags,
        "platformCapabilities": ["EC2"],
        "isCancelled": job.cancelled,
        "isTerminated": job.terminated,
        # The model marks it required; like AWS's own it is 0 or absent before the job runs.
        "startedAt": job.started_at or 0,
    }
    return detail | _present(
        {
            "statusReason": job.status_reason or None,
            "stoppedAt": job.stopped_at,
            "timeout": {"attemptDurationSeconds": job.timeout} if job.timeout else None,
        }
    )


def _container_detail(job: Job) -> dict[str, Any]:
    lists = ("volumes", "environment", "mountPoints", "ulimits", "networkInterfaces",
             "resourceRequirements", "secrets")  # fmt: skip
    shown = {**{name: [] for name in lists}, **job.container}
    if job.attempt is not None:
        shown["taskArn"] = job.attempt.task_arn
        # AWS gives the name from RUNNING on. Here already from STARTING: the stream is there.
        shown["logStreamName"] = job.attempt.log_stream
    elif job.attempts:
        last = job.attempts[-1]["container"]
        shown |= _present({key: last.get(key) for key in ("taskArn", "logStreamName")})
    return shown | _present({"exitCode": job.exit_code, "reason": job.reason or None})


def _definition_arn(job: Job) -> str:
    return job.arn.replace(f"job/{job.id}", f"job-definition/{job.definition}")


def describe_compute_environments(view: View, params: dict[str, Any]) -> dict[str, Any]:
    asked = {bare_name(name) for name in params.get("computeEnvironments", ())}
    records = sorted(view.state.environments.items())
    found = [record.detail for name, record in records if not asked or name in asked]
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


def get_caller_identity(view: View, params: dict[str, Any]) -> dict[str, Any]:
    return {
        "Arn": f"arn:aws:iam::{ACCOUNT}:user/{CLUSTER}",
        "UserId": view.access_key_id,
        "Account": ACCOUNT,
    }


def _page(found: Sequence[T], params: dict[str, Any]) -> tuple[list[T], dict[str, str]]:
    start = _read_token(params.get("nextToken")) or 0
    limit = params.get("maxResults", 100)
    if not 1 <= limit <= 100:
        raise client_error("maxResults must be between 1 and 100")
    page = list(found[start : start + limit])
    more = start + limit < len(found)
    return page, {"nextToken": _token(start + limit)} if more else {}


def _token(position: int) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode()


def _read_token(token: str | None) -> int | None:
    if not token:
        return None
    try:
        position = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (ValueError, RecursionError):
        position = None
    if type(position) is not int or not 0 <= position < 2**63:
        raise client_error("Invalid nextToken")
    return position


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


READS: dict[tuple[str, str], Callable[[View, dict[str, Any]], dict[str, Any]]] = {
    ("batch", "DescribeJobs"): describe_jobs,
    ("batch", "ListJobs"): list_jobs,
    ("batch", "DescribeComputeEnvironments"): describe_compute_environments,
    ("batch", "DescribeJobQueues"): describe_job_queues,
    ("batch", "DescribeJobDefinitions"): describe_job_definitions,
    ("sts", "GetCallerIdentity"): get_caller_identity,
}
