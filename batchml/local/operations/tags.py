"""TagResource and UntagResource: on everything that has an ARN here.

Source: AWS Batch API reference, TagResource; array children and nodes can not be tagged.
"""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from batchml.local.draft import Draft
from batchml.local.messages import Requested
from batchml.local.operations.checks import MAX_TAGS, check_chaos, check_tags, refuse
from batchml.local.state import Job
from batchml.model.names import Arn, parse_arn

Change = Callable[[dict[str, str]], dict[str, str]]


def tag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    check_tags(request)
    given: dict[str, str] = request.params["tags"]
    check_chaos(given, request)
    return _change(draft, request, lambda tags: {**tags, **given})


def untag_resource(draft: Draft, request: Requested) -> dict[str, Any]:
    gone = {*request.params["tagKeys"]}
    return _change(draft, request, lambda tags: {k: v for k, v in tags.items() if k not in gone})


def _change(draft: Draft, request: Requested, change: Change) -> dict[str, Any]:
    asked = request.params["resourceArn"]
    arn = parse_arn(asked)
    if arn is None:
        raise refuse(f"Invalid resource ARN: {asked}", request)
    if arn.kind == "job":
        job = _job(draft, arn, request)
        draft.put_job(replace(job, tags=_changed(job.tags, change, request)))
        return {}
    record = draft.state.record(arn.kind, arn.name)
    if record is None:
        raise refuse(f"Resource not found: {arn}", request)
    tags = _changed(record.detail.get("tags", {}), change, request)
    draft.put(replace(record, detail={**record.detail, "tags": tags}))
    return {}


def _job(draft: Draft, arn: Arn, request: Requested) -> Job:
    """`request.found` has it if it is finished."""
    if set(arn.name) & set(":#"):
        raise refuse("Array children and nodes can not be tagged", request)
    job = draft.state.jobs.get(arn.name) or request.found.get(arn.name)
    if job is None:
        raise refuse(f"Resource not found: {arn}", request)
    return job


def _changed(tags: dict[str, str], change: Change, request: Requested) -> dict[str, str]:
    tags = change(tags)
    if len(tags) > MAX_TAGS:
        raise refuse(f"Tags limit exceeded: at most {MAX_TAGS}", request)
    return tags
