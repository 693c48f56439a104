"""What a SubmitJob call comes to: the definition and its overrides, merged into specs."""

import json
from typing import Any

from msgspec.structs import replace

from batchml.local.messages import Requested
from batchml.local.operations.checks import MAX_TAGS, check_between, refuse, refuse_not_served
from batchml.local.operations.definitions import (
    Range,
    check_command,
    check_retry,
    check_timeout,
    enum_case,
    layout,
    narrowest,
    needs_of,
    node_range,
    variables,
)
from batchml.local.state import Definition, Needs, Nodes, Spec
from batchml.model.names import bare_name

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
