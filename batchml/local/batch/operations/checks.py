"""What every call that changes something checks, and how it says no."""

from collections.abc import Mapping
from typing import Any, TypeVar

from batchml.local.batch import fault_injection as chaos
from batchml.local.batch.events import Requested
from batchml.local.server.protocol import Refused, client_error
from batchml.model.names import bare_name, is_valid_name

R = TypeVar("R")

MAX_TAGS = 50
MAX_KEY, MAX_VALUE = 128, 256  # characters of a tag

# Parts of requests that AWS has and that are not served here: they would otherwise be ignored.
_NOT_SERVED = (
    "eksProperties", "eksPropertiesOverride", "ecsProperties", "ecsPropertiesOverride",
    "serviceEnvironmentOrder", "eksConfiguration", "quotaSharePolicy",
)  # fmt: skip


def refuse(text: str, request: Requested) -> Refused:
    return client_error(
        f"Error executing request, Exception : {text}, RequestId: {request.request_id}"
    )


def refuse_not_served(given: Mapping[str, Any], request: Requested) -> None:
    """Refuse what would otherwise be ignored, in a request or in its container."""
    asked = [name for name in _NOT_SERVED if given.get(name)]
    if asked:
        raise refuse(f"{', '.join(asked)}: not served by the embedded AWS Batch", request)


def existing(records: Mapping[str, R], name_or_arn: str, kind: str, request: Requested) -> R:
    """The record that a name or an ARN means. Raises Refused."""
    record = records.get(bare_name(name_or_arn))
    if record is None:
        raise refuse(f"{kind} {name_or_arn} not found", request)
    return record


def check_name(name: str, what: str, request: Requested) -> None:
    if not is_valid_name(name):
        raise refuse(
            f"{what} should match valid pattern: 1-128 letters, digits, hyphens and underscores",
            request,
        )


def check_tags(request: Requested) -> None:
    given: dict[str, str] = request.params.get("tags", {})
    if len(given) > MAX_TAGS:
        raise refuse(f"Tags limit exceeded: at most {MAX_TAGS}", request)
    for key, value in given.items():
        if not 1 <= len(key) <= MAX_KEY or len(value) > MAX_VALUE or key.startswith("aws:"):
            raise refuse(
                f"Tag keys have 1-{MAX_KEY} characters and do not start with aws:, "
                f"values at most {MAX_VALUE}",
                request,
            )


def check_chaos(tags: Mapping[str, str], request: Requested) -> None:
    """Refuse a rehearsal that would silently not take place."""
    mistakes = chaos.read_tag(tags[chaos.TAG])[1] if chaos.TAG in tags else []
    if mistakes:
        raise refuse(f"Tag {chaos.TAG}: {' '.join(mistakes)}", request)


def check_between(value: float, low: float, high: float, what: str, request: Requested) -> None:
    if not low <= value <= high:
        raise refuse(f"{what} must be between {low} and {high}", request)
