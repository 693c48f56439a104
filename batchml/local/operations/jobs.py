"""Jobs: submit, cancel, terminate."""

from typing import Any

import msgspec

from batchml.local import lifecycle
from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import check_name, check_tags, refuse, refuse_not_yet
from batchml.local.operations.definitions import (
    check_environment,
    check_retry,
    check_timeout,
    definition_of,
    needs_of,
    variables,
)
from batchml.local.operations.resources import queue_of
from batchml.local.state import Definition, Job
from batchml.model.names import bare_name

MAX_DEPENDENCIES = 20
MAX_SUBMIT = 30 * 1024  # bytes of a SubmitJob request


def submit_job(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobName"]
    check_name(name, "Job name", request)
    check_tags(request)
    refuse_not_yet(request.params, request)
    if len(msgspec.json.encode(params)) > MAX_SUBMIT:
        raise refuse(f"SubmitJob request must be at most {MAX_SUBMIT} bytes", request)
    queue = queue_of(draft, params["jobQueue"], request)
    if not queue.enabled:
        raise refuse(f"JobQueue {queue.name} is DISABLED and does not accept jobs", request)
    definition = definition_of(draft, params["jobDefinition"], request)
    retry = params.get("retryStrategy", definition.detail.get("retryStrategy", {}))
    timeout = params.get("timeout", definition.detail.get("timeout", {}))
    check_retry(retry, request)
    check_timeout(timeout, request)
    parameters = {**definition.detail.get("parameters", {}), **params.get("parameters", {})}
    overrides = params.get("containerOverrides", {})
    check_environment(overrides, request)
    container = _container(definition, overrides, parameters)
    waiting_for, dependency_failed = _dependencies(draft, request)
    job = Job(
        id=request.new_id,
        name=name,
        queue=queue.name,
        definition=definition.key,
        container=container,
        needs=needs_of(container, request),
        created_at=request.now,
        sequence=draft.next_sequence(),
        retry=retry,
        timeout=timeout.get("attemptDurationSeconds"),
        parameters=parameters,
        depends_on=tuple(params.get("dependsOn", ())),
        waiting_for=waiting_for,
        dependency_failed=dependency_failed,
        tags=params.get("tags", {}),
        propagate_tags=params.get("propagateTags", False),
    )
    lifecycle.admit(draft, job)
    return {"jobArn": job.arn, "jobName": name, "jobId": job.id}


def _container(
    definition: Definition, overrides: dict[str, Any], parameters: dict[str, str]
) -> dict[str, Any]:
    """The container as it will run: overrides applied, `Ref::name` replaced in the command.

    Environments merge by name. A command is a list of elements before and after: nothing is split.
    """
    container = dict(definition.detail["containerProperties"])
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


def _dependencies(draft: Draft, request: Requested) -> tuple[tuple[str, ...], bool]:
    given = request.params.get("dependsOn", ())
    if len(given) > MAX_DEPENDENCIES:
        raise refuse(f"At most {MAX_DEPENDENCIES} dependencies", request)
    waiting: list[str] = []
    failed = False
    for entry in given:
        if entry.get("type"):
            raise refuse(f"Dependency type {entry['type']} needs an array job", request)
        job_id = bare_name(entry.get("jobId", ""))
        if job_id in draft.state.jobs:
            waiting.append(job_id)
        elif job_id in request.ended:
            failed = failed or request.ended[job_id] == "FAILED"
        else:
            raise refuse(f"Dependency job {job_id!r} does not exist", request)
    return tuple(dict.fromkeys(waiting)), failed


def cancel_job(draft: Draft, request: Requested) -> dict[str, Any]:
    job = draft.state.jobs.get(bare_name(request.params["jobId"]))
    if job is not None:
        lifecycle.cancel(draft, job, request.params["reason"], request.now)
    return {}


def terminate_job(draft: Draft, request: Requested) -> dict[str, Any]:
    job = draft.state.jobs.get(bare_name(request.params["jobId"]))
    if job is not None:
        lifecycle.terminate(draft, job, request.params["reason"], request.now)
    return {}
