"""Consumable resources: create, update, delete.

Source: AWS Batch User Guide, "Resource-aware scheduling".
"""

from typing import Any

from msgspec.structs import replace

from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import (
    check_name,
    check_tags,
    existing,
    refuse,
)
from batchml.local.state import Consumable, arn
from batchml.model.names import bare_name

TOKENS = 8 * 3600 * 1000  # ms that a clientToken is known
KINDS = ("REPLENISHABLE", "NON_REPLENISHABLE")


def create_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["consumableResourceName"]
    check_name(name, "Consumable resource name", request)
    check_tags(request)
    if name in draft.state.consumables:
        raise refuse(f"Object already exists: {name}", request)
    kind = params.get("resourceType", KINDS[0])
    if kind not in KINDS:
        raise refuse(f"resourceType must be one of {', '.join(KINDS)}", request)
    total = params.get("totalQuantity", 0)
    if total < 0:
        raise refuse("totalQuantity must be 0 or more", request)
    detail = {
        "consumableResourceName": name,
        "consumableResourceArn": arn("consumable-resource", name),
        "resourceType": kind,
        "createdAt": request.now,
        "tags": params.get("tags", {}),
    }
    draft.put(Consumable(name, detail, total))
    return {
        "consumableResourceName": name,
        "consumableResourceArn": detail["consumableResourceArn"],
    }


def update_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    """SET, ADD or REMOVE a quantity. What jobs hold already they keep, even above the total."""
    params = request.params
    record = consumable_of(draft, params["consumableResource"], request)
    quantity, operation = params.get("quantity", 0), params.get("operation", "SET")
    if quantity < 0:
        raise refuse("quantity must be 0 or more", request)
    totals = {"SET": quantity, "ADD": record.total + quantity, "REMOVE": record.total - quantity}
    if operation not in totals:
        raise refuse("operation must be SET, ADD or REMOVE", request)
    answer = {
        "consumableResourceName": record.name,
        "consumableResourceArn": record.detail["consumableResourceArn"],
        "totalQuantity": record.total,
    }
    token = params.get("clientToken", "")
    updates = {key: made for key, made in record.updates.items() if made[0] > request.now - TOKENS}
    if token in updates and tuple(updates[token][1:]) == (operation, quantity):
        return answer
    if token:
        updates[token] = (request.now, operation, quantity)
    total = totals[operation]
    if not 0 <= total < 2**63:
        raise refuse(f"The total quantity would be {total}", request)
    draft.put(replace(record, total=total, updates=updates))
    return {**answer, "totalQuantity": total}


def delete_consumable_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["consumableResource"])
    record = draft.state.consumables.get(name)
    if record is None:
        return {}
    users = [job for job in draft.state.jobs.values() if name in dict(job.spec.consumables)]
    if users:
        raise refuse(
            f"Cannot delete, {len(users)} unfinished jobs ask for {name}, one is {users[0].id}",
            request,
        )
    draft.drop(record)
    return {}


def consumable_of(draft: Draft, name_or_arn: str, request: Requested) -> Consumable:
    return existing(draft.state.consumables, name_or_arn, "ConsumableResource", request)
