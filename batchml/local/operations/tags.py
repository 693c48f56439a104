"""TagResource and UntagResource: on everything that has an ARN here.

Source: AWS Batch API reference, TagResource; array children and nodes can not be tagged.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import MAX_TAGS, check_chaos, check_tags, refuse
from batchml.local.state import Job
from batchml.model.names import Arn, parse_arn

# kind in the ARN -> field of the state, and how a record of it is kept
_RECORDS: dict[str, tuple[str, Callable[[Draft, Any], None]]] = {
    "compute-environment": ("environments", Draft.put_environment),
    "job-queue": ("queues", Draft.put_queue),
    "job-definition": ("definitions", Draft.put_definition),
    "scheduling-policy": ("policies", Draft.put_policy),
    "consumable-resource": ("consumables", Draft.put_consumable),
}


def tag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    check_tags(request)
    given: dict[str, str] = request.params["tags"]
    check_chaos(given, request)
    return _change(draft, request, lambda tags: {**tags, **given})


def untag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    gone = {*request.params["tagKeys"]}
    return _change(draft, request, lambda tags: {k: v for k, v in tags.items() if k not in gone})


def _change(
    draft: Draft, request: Requested, change: Callable[[dict[str, str]], dict[str, str]]
) -> dict[str, Any]:
    asked = request.params["resourceArn"]
    arn = parse_arn(asked)
    if arn is None:
        raise refuse(f"Invalid resource ARN: {asked}", request)
    record, keep = _tagged(draft, arn, request)
    tags = change(record.tags if isinstance(record, Job) else record.detail.get("tags", {}))
    if len(tags) > MAX_TAGS:
        raise refuse(f"Tags limit exceeded: at most {MAX_TAGS}", request)
    if isinstance(record, Job):
        draft.put_job(replace(record, tags=tags))
    else:
        keep(draft, replace(record, detail={**record.detail, "tags": tags}))
    return {}


def _tagged(draft: Draft, arn: Arn, request: Requested) -> tuple[Any, Callable[..., None]]:
    """The record that an ARN names, and how it is kept. `request.found` has finished jobs."""
    if arn.kind == "job":
        if set(arn.name) & set(":#"):
            raise refuse("Array children and nodes can not be tagged", request)
        found: Struct | None = draft.state.jobs.get(arn.name) or request.found.get(arn.name)
        keep: Callable[..., None] = Draft.put_job
    else:
        field, keep = _RECORDS.get(arn.kind, ("", Draft.put_queue))
        found = getattr(draft.state, field).get(arn.name) if field else None
    if found is None:
        raise refuse(f"Resource not found: {arn}", request)
    return found, keep
