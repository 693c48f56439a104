"""Register, deregister and find job definitions; check the parts of them that jobs override."""

import re
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from batchml.local.batch.events import CallReceived
from batchml.local.batch.operations.checks import (
    check_between,
    check_name,
    check_served,
    check_tags,
    request_error,
)
from batchml.local.batch.state import JobDefinition, Nodes, arn
from batchml.local.batch.transaction import Transaction
from batchml.local.machine import Needs
from batchml.model.names import bare_name

MAX_DEFINITION = 24 * 1024  # bytes of a job definition
MAX_NODES = 1000
MAX_RANGES = 5

_TARGET = re.compile(r"([0-9]{1,4})|([0-9]{1,4})?:([0-9]{1,4})?")

# Source: AWS Batch API reference, EvaluateOnExit.
_PATTERNS = {
    "onStatusReason": re.compile(r"[A-Za-z0-9.:\s]*\*?"),
    "onReason": re.compile(r"[A-Za-z0-9.:\s]*\*?"),
    "onExitCode": re.compile(r"[0-9]*\*?"),
}
MAX_PATTERN = 512

# Nine digits fit 32 bits: values must fit the journal and the client's integers.
_WHOLE = re.compile(r"-?[0-9]{1,9}")


def register_job_definition(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    params = request.params
    name = params["jobDefinitionName"]
    check_name(name, "Job definition name", request)
    check_tags(request)
    check_served(params, request)
    if len(msgspec.json.encode(params)) > MAX_DEFINITION:
        raise request_error(f"Job definition must be at most {MAX_DEFINITION} bytes", request)
    if "FARGATE" in params.get("platformCapabilities", ()):
        raise request_error("Fargate is not served by the embedded AWS Batch", request)
    if params["type"] == "multinode":
        _check_nodes(params, request)
    elif "containerProperties" not in params:
        raise request_error("containerProperties must be provided", request)
    elif "nodeProperties" in params:
        raise request_error("nodeProperties are for the type multinode", request)
    else:
        check_container(params["containerProperties"], request)
    check_retry(params.get("retryStrategy", {}), request)
    check_timeout(params.get("timeout", {}), request)
    check_between(params.get("schedulingPriority", 0), 0, 9999, "schedulingPriority", request)
    revision = tx.next_revision(name)
    detail = {
        **_to_description(params),
        "jobDefinitionArn": arn("job-definition", f"{name}:{revision}"),
        "revision": revision,
        "status": "ACTIVE",
        "platformCapabilities": params.get("platformCapabilities", ["EC2"]),
        "containerOrchestrationType": "ECS",
        "parameters": params.get("parameters", {}),
        "tags": params.get("tags", {}),
    }
    tx.put(JobDefinition(name, detail, revision))
    return {
        "jobDefinitionName": name,
        "jobDefinitionArn": detail["jobDefinitionArn"],
        "revision": revision,
    }


# The lists of a container that are always present in AWS's samples of DescribeJobDefinitions.
_LISTS = ("command", "volumes", "environment", "mountPoints", "ulimits", "resourceRequirements")


def _to_description(params: dict[str, Any]) -> dict[str, Any]:
    """The request in the form of DescribeJobDefinitions: with empty lists for missing ones."""
    detail = dict(params)
    if "containerProperties" in params:
        detail["containerProperties"] = _with_lists(params["containerProperties"])
    if "nodeProperties" in params:
        ranges = [
            {**entry, "container": _with_lists(entry["container"])}
            for entry in params["nodeProperties"]["nodeRangeProperties"]
        ]
        detail["nodeProperties"] = {**params["nodeProperties"], "nodeRangeProperties": ranges}
    if "retryStrategy" in params:
        detail["retryStrategy"] = normalize_actions(params["retryStrategy"])
    return detail


def _with_lists(container: dict[str, Any]) -> dict[str, Any]:
    return {**{name: [] for name in _LISTS}, **container}


def normalize_actions(strategy: dict[str, Any]) -> dict[str, Any]:
    """A retry strategy with actions in upper case, as the enum has them: AWS accepts any case."""
    if "evaluateOnExit" not in strategy:
        return strategy
    rules = [{**rule, "action": rule["action"].upper()} for rule in strategy["evaluateOnExit"]]
    return {**strategy, "evaluateOnExit": rules}


def deregister_job_definition(tx: Transaction, request: CallReceived) -> dict[str, Any]:
    key = bare_name(request.params["jobDefinition"])
    record = tx.state.definitions.get(key)
    if record is None:
        raise request_error(f"Job definition {key} does not exist", request)
    tx.put(replace(record, detail={**record.detail, "status": "INACTIVE"}))
    return {}


def definition_of(tx: Transaction, reference: str, request: CallReceived) -> JobDefinition:
    """The active definition that a job names: `name` is the newest active revision, `name:3` is
    revision 3. Raises ApiError.
    """
    name = bare_name(reference)
    if ":" in name:
        record = tx.state.definitions.get(name)
        if record is not None and record.active:
            return record
    else:
        for revision in range(tx.state.revisions.get(name, 0), 0, -1):
            record = tx.state.definitions.get(f"{name}:{revision}")
            if record is not None and record.active:
                return record
    raise request_error(f"JobDefinition {reference} not found or not ACTIVE", request)


def _check_nodes(params: dict[str, Any], request: CallReceived) -> None:
    if "nodeProperties" not in params:
        raise request_error("nodeProperties must be provided for the type multinode", request)
    if "containerProperties" in params:
        raise request_error("containerProperties are for the type container", request)
    node_layout(params["nodeProperties"], {}, request)  # refuses ranges that do not fit together
    for entry in params["nodeProperties"]["nodeRangeProperties"]:
        check_served(entry, request)
        check_container(entry.get("container", {}), request)


def check_container(container: dict[str, Any], request: CallReceived) -> None:
    """Raise ApiError for container properties that cannot run."""
    check_served(container, request)
    if not container.get("image"):
        raise request_error("Container properties image must be provided", request)
    check_command(container, request)
    check_secrets(container, request)
    check_mounts(container, request)
    needs_of(container, request)


def check_retry(strategy: dict[str, Any], request: CallReceived) -> None:
    if strategy.get("evaluateOnExit") and "attempts" not in strategy:
        raise request_error("RetryAttempts must be provided with retry strategy", request)
    if not 1 <= strategy.get("attempts", 1) <= 10:
        raise request_error("RetryAttempts must be between 1 and 10", request)
    if len(strategy.get("evaluateOnExit", ())) > 5:
        raise request_error("At most 5 evaluateOnExit entries", request)
    for rule in strategy.get("evaluateOnExit", ()):
        for name, pattern in _PATTERNS.items():
            text = rule.get(name, "")
            if len(text) > MAX_PATTERN or not pattern.fullmatch(text):
                raise request_error(
                    f"evaluateOnExit {name} must have at most {MAX_PATTERN} characters and match "
                    f"{pattern.pattern}",
                    request,
                )


def check_timeout(timeout: dict[str, Any], request: CallReceived) -> None:
    seconds = timeout.get("attemptDurationSeconds")
    if seconds is not None and seconds < 60:
        raise request_error("attemptDurationSeconds must be at least 60", request)


def needs_of(container: dict[str, Any], request: CallReceived) -> Needs:
    """vCPUs, memory (MiB) and GPUs; resourceRequirements win over the deprecated members."""
    required: dict[str, str] = {}
    for requirement in container.get("resourceRequirements", ()):
        required[requirement["type"]] = requirement["value"]
    vcpus = required.get("VCPU", container.get("vcpus"))
    memory = required.get("MEMORY", container.get("memory"))
    if vcpus is None or memory is None:
        raise request_error("Resource requirements VCPU and MEMORY must be provided", request)
    values = [str(value) for value in (vcpus, memory, required.get("GPU", 0))]
    if not all(_WHOLE.fullmatch(value) for value in values):
        raise request_error("Resource requirement values must be whole numbers", request)
    needs = Needs(*map(int, values))
    if needs.vcpus < 1 or needs.memory < 4 or needs.gpus < 0:
        raise request_error(
            "VCPU must be at least 1, MEMORY at least 4 MiB, GPU at least 0", request
        )
    return needs


def variables(container: dict[str, Any]) -> dict[str, str]:
    """The environment variables. AWS's model requires neither name nor value; a variable without a
    name is left out, because it cannot be set.
    """
    entries = container.get("environment", ())
    return {entry["name"]: entry.get("value", "") for entry in entries if entry.get("name")}


def check_command(container: dict[str, Any], request: CallReceived) -> None:
    if not all(container.get("command", ())):
        raise request_error("Command field cannot have empty strings", request)


def check_secrets(container: dict[str, Any], request: CallReceived) -> None:
    names = [entry["name"] for entry in container.get("secrets", ())]
    clash = sorted({*names} & {*variables(container)})
    if clash or len(names) != len({*names}) or not all(names):
        raise request_error(
            f"Secret names must be unique and differ from variables: {clash or names}", request
        )


def check_mounts(container: dict[str, Any], request: CallReceived) -> None:
    volumes = {entry.get("name") for entry in container.get("volumes", ())}
    for mount in container.get("mountPoints", ()):
        if mount.get("sourceVolume") not in volumes:
            raise request_error(
                f"Unknown volume '{mount.get('sourceVolume')}' in mountPoints", request
            )


# --- Nodes ---------------------------------------------------------------------------------------


class NodeRange(NamedTuple):
    """The nodes from `first` to `last`, both included, and AWS's NodeRangeProperty of them."""

    first: int
    last: int
    properties: dict[str, Any]

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and self.first <= node <= self.last


def node_layout(
    properties: dict[str, Any], overrides: dict[str, Any], request: CallReceived
) -> tuple[Nodes, list[NodeRange]]:
    """The nodes and the ranges of a multi-node job, checked: each node is in a range."""
    count = overrides.get("numNodes", properties["numNodes"])
    main = properties["mainNode"]
    entries = properties.get("nodeRangeProperties", [])
    check_between(count, 1, MAX_NODES, "numNodes", request)
    if not 0 <= main < count:
        raise request_error(f"mainNode must be below numNodes, {count}", request)
    check_between(len(entries), 1, MAX_RANGES, "The number of node ranges", request)
    open_ended = any(entry["targetNodes"].endswith(":") for entry in entries)
    if count != properties["numNodes"] and not open_ended:
        raise request_error(
            "numNodes can only be overridden for a range with an open end, n:", request
        )
    ranges = [node_range(entry, count, request) for entry in entries]
    missing = [node for node in range(count) if not any(node in found for found in ranges)]
    if missing:
        raise request_error(
            f"Node ranges must cover all nodes, not covered: {missing[:10]}", request
        )
    return Nodes(count, main), ranges


def node_range(entry: dict[str, Any], count: int, request: CallReceived) -> NodeRange:
    """Parse `a:b`, `a:`, `:b` or `:`, with both ends included, or a single number."""
    text = entry["targetNodes"]
    match = _TARGET.fullmatch(text)
    if match is None:
        raise request_error(f"targetNodes must look like 0:3, :3 or 2: and not '{text}'", request)
    alone, low, high = match.groups()
    first = int(alone or low or 0)
    last = int(alone or high or count - 1)
    if not first <= last < count:
        raise request_error(f"targetNodes {text} must lie within the nodes 0:{count - 1}", request)
    return NodeRange(first, last, entry)


def narrowest_range(ranges: list[NodeRange], node: int) -> NodeRange:
    """The range that applies to a node: a nested range overrides the outer one."""
    return min((found for found in ranges if node in found), key=lambda r: r.last - r.first)
