"""Job definitions: register, deregister, find; and the parts that jobs override."""

import re
from typing import Any

import msgspec
from msgspec.structs import replace

from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import check_name, check_tags, refuse, refuse_not_yet
from batchml.local.state import Definition, Needs, arn
from batchml.model.names import bare_name

MAX_DEFINITION = 24 * 1024  # bytes of a job definition

# As long as 32 bits allow: what is kept must fit the journal and the client's integers.
_WHOLE = re.compile(r"-?[0-9]{1,9}")


def register_job_definition(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["jobDefinitionName"]
    check_name(name, "Job definition name", request)
    check_tags(request)
    refuse_not_yet(request.params, request)
    if params["type"] != "container" or "containerProperties" not in params:
        raise refuse("Only container job definitions with containerProperties", request)
    if len(msgspec.json.encode(params)) > MAX_DEFINITION:
        raise refuse(f"Job definition must be at most {MAX_DEFINITION} bytes", request)
    container = params["containerProperties"]
    refuse_not_yet(container, request)
    if not container.get("image"):
        raise refuse("Container properties image must be provided", request)
    check_retry(params.get("retryStrategy", {}), request)
    check_timeout(params.get("timeout", {}), request)
    check_environment(container, request)
    needs_of(container, request)
    revision = draft.state.revisions.get(name, 0) + 1
    detail = {
        **params,
        "jobDefinitionArn": arn("job-definition", f"{name}:{revision}"),
        "revision": revision,
        "status": "ACTIVE",
        "platformCapabilities": params.get("platformCapabilities", ["EC2"]),
        "containerOrchestrationType": "ECS",
        "parameters": params.get("parameters", {}),
        "tags": params.get("tags", {}),
    }
    draft.put_definition(Definition(name, revision, detail))
    return {
        "jobDefinitionName": name,
        "jobDefinitionArn": detail["jobDefinitionArn"],
        "revision": revision,
    }


def deregister_job_definition(draft: Draft, request: Requested) -> dict[str, Any]:
    asked = bare_name(request.params["jobDefinition"])
    record = draft.state.definitions.get(asked)
    if record is None:
        raise refuse(f"Job definition {asked} does not exist", request)
    draft.put_definition(replace(record, detail={**record.detail, "status": "INACTIVE"}))
    return {}


def definition_of(draft: Draft, asked: str, request: Requested) -> Definition:
    """`name` is its newest active revision; `name:revision` that one, if active."""
    name = bare_name(asked)
    if ":" in name:
        record = draft.state.definitions.get(name)
        if record is not None and record.active:
            return record
    else:
        for revision in range(draft.state.revisions.get(name, 0), 0, -1):
            record = draft.state.definitions.get(f"{name}:{revision}")
            if record is not None and record.active:
                return record
    raise refuse(f"JobDefinition {asked} not found or not ACTIVE", request)


def check_retry(strategy: dict[str, Any], request: Requested) -> None:
    if strategy.get("evaluateOnExit") and "attempts" not in strategy:
        raise refuse("RetryAttempts must be provided with retry strategy", request)
    if not 1 <= strategy.get("attempts", 1) <= 10:
        raise refuse("RetryAttempts must be between 1 and 10", request)
    if len(strategy.get("evaluateOnExit", ())) > 5:
        raise refuse("At most 5 evaluateOnExit entries", request)
    for rule in strategy.get("evaluateOnExit", ()):
        if str(rule["action"]).upper() not in ("RETRY", "EXIT"):
            raise refuse("evaluateOnExit action must be RETRY or EXIT", request)


def check_timeout(timeout: dict[str, Any], request: Requested) -> None:
    seconds = timeout.get("attemptDurationSeconds")
    if seconds is not None and seconds < 60:
        raise refuse("attemptDurationSeconds must be at least 60", request)


def needs_of(container: dict[str, Any], request: Requested) -> Needs:
    """vCPUs, memory (MiB) and GPUs; resourceRequirements win over the deprecated members."""
    found: dict[str, str] = {}
    for requirement in container.get("resourceRequirements", ()):
        found[requirement["type"]] = requirement["value"]
    vcpus = found.get("VCPU", container.get("vcpus"))
    memory = found.get("MEMORY", container.get("memory"))
    if vcpus is None or memory is None:
        raise refuse("Resource requirements VCPU and MEMORY must be provided", request)
    given = [str(value) for value in (vcpus, memory, found.get("GPU", 0))]
    if not all(_WHOLE.fullmatch(value) for value in given):
        raise refuse("Resource requirement values must be whole numbers", request)
    needs = Needs(*map(int, given))
    if needs.vcpus < 1 or needs.memory < 4 or needs.gpus < 0 or found.get("GPU") == "0":
        raise refuse("VCPU must be at least 1, MEMORY at least 4 MiB, GPU at least 1", request)
    return needs


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("environment", ())}


def check_environment(container: dict[str, Any], request: Requested) -> None:
    """AWS's model requires neither name nor value; a variable without a name can not be set."""
    if not all(entry.get("name") for entry in container.get("environment", ())):
        raise refuse("Environment variable name must be provided", request)
