"""Scheduling policies: create, update, delete."""

from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import (
    check_between,
    check_name,
    check_tags,
    existing,
    refuse,
    refuse_not_served,
)
from batchml.local.state import Policy, arn
from batchml.model.names import bare_name

MAX_DECAY = 604_800  # seconds
MAX_SHARE_NAME = 255


def create_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    params = request.params
    name = params["name"]
    check_name(name, "Scheduling policy name", request)
    check_tags(request)
    refuse_not_served(params, request)
    if name in draft.state.policies:
        raise refuse(f"Object already exists: {name}", request)
    made = arn("scheduling-policy", name)
    detail = {
        "name": name,
        "arn": made,
        "fairsharePolicy": _fair_share(request),
        "tags": params.get("tags", {}),
    }
    draft.put(Policy(name, detail))
    return {"name": name, "arn": made}


def update_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    refuse_not_served(request.params, request)
    asked = request.params["arn"]
    record = existing(draft.state.policies, asked, "SchedulingPolicy", request)
    if "fairsharePolicy" in request.params:
        detail = {**record.detail, "fairsharePolicy": _fair_share(request)}
        draft.put(replace(record, detail=detail))
    return {}


def delete_scheduling_policy(draft: Draft, request: Requested) -> dict[str, Any]:
    name = bare_name(request.params["arn"])
    if any(queue.policy == name for queue in draft.state.queues.values()):
        raise refuse("Cannot delete, found existing JobQueue relationship", request)
    record = draft.state.policies.get(name)
    if record is not None:
        draft.drop(record)
    return {}


def _fair_share(request: Requested) -> dict[str, Any]:
    policy: dict[str, Any] = request.params.get("fairsharePolicy", {})
    check_between(policy.get("shareDecaySeconds", 0), 0, MAX_DECAY, "shareDecaySeconds", request)
    check_between(policy.get("computeReservation", 0), 0, 99, "computeReservation", request)
    names = [entry["shareIdentifier"] for entry in policy.get("shareDistribution", ())]
    for name in names:
        check_share_name(name, request)
    for one, other in pairwise(sorted(names)):  # `a*` comes right before what starts with `a`
        same = one.removesuffix("*") == other.removesuffix("*")
        if same or (one.endswith("*") and other.startswith(one[:-1])):
            raise refuse(f"shareIdentifiers must not overlap: '{one}', '{other}'", request)
    for entry in policy.get("shareDistribution", ()):
        weight = entry.get("weightFactor", 1.0)
        check_between(weight, 0.0001, 999.9999, "weightFactor", request)
    return policy


def check_share_name(name: str, request: Requested) -> None:
    plain = name.removesuffix("*")
    if not (plain.isascii() and plain.isalnum()) or len(plain) > MAX_SHARE_NAME:
        raise refuse(
            f"shareIdentifier must have 1-{MAX_SHARE_NAME} letters and digits, "
            f"and may end with *: '{name}'",
            request,
        )
