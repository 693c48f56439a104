"""Checks and errors that several operations share."""

from collections.abc import Mapping
from typing import Any, TypeVar

from batchml.local.batch import fault_injection
from batchml.local.batch.events import CallReceived
from batchml.local.batch.state import ResourceRecord
from batchml.local.batch.transaction import Transaction
from batchml.local.server import protocol
from batchml.local.server.protocol import ApiError
from batchml.model.names import bare_name, is_valid_name

R = TypeVar("R", bound=ResourceRecord)

MAX_TAGS = 50
MAX_KEY, MAX_VALUE = 128, 256  # characters of a tag

# Members of requests that AWS has and this server does not serve. They are refused, not ignored.
_NOT_SERVED = (
    "eksProperties", "eksPropertiesOverride", "ecsProperties", "ecsPropertiesOverride",
    "serviceEnvironmentOrder", "eksConfiguration", "quotaSharePolicy",
)  # fmt: skip


def request_error(text: str, request: CallReceived) -> ApiError:
    return protocol.request_error(text, request.request_id)


def check_served(params: Mapping[str, Any], request: CallReceived) -> None:
    """Refuse members, of a request or of its container, that would otherwise be ignored."""
    names = [name for name in _NOT_SERVED if params.get(name)]
    if names:
        raise request_error(f"{', '.join(names)}: not served by the embedded AWS Batch", request)


def find_record(tx: Transaction, kind: type[R], name_or_arn: str, request: CallReceived) -> R:
    """The resource with a name or an ARN. Raises ApiError."""
    record = look_up(tx, kind, name_or_arn)
    if record is None:
        raise request_error(f"{kind.__name__} {name_or_arn} not found", request)
    return record


def look_up(tx: Transaction, kind: type[R], name_or_arn: str) -> R | None:
    """The resource, or None. To delete a missing resource is no error in AWS."""
    found: R | None = getattr(tx.state, kind.field).get(bare_name(name_or_arn))
    return found


def check_name(name: str, what: str, request: CallReceived) -> None:
    if not is_valid_name(name):
        raise request_error(
            f"{what} should match valid pattern: 1-128 letters, digits, hyphens and underscores",
            request,
        )


def check_tags(request: CallReceived) -> None:
    tags: dict[str, str] = request.params.get("tags", {})
    check_tag_count(tags, request)
    for key, value in tags.items():
        if not 1 <= len(key) <= MAX_KEY or len(value) > MAX_VALUE or key.startswith("aws:"):
            raise request_error(
                f"Tag keys have 1-{MAX_KEY} characters and do not start with aws:, "
                f"values at most {MAX_VALUE}",
                request,
            )


def check_tag_count(tags: Mapping[str, str], request: CallReceived) -> None:
    if len(tags) > MAX_TAGS:
        raise request_error(f"Tags limit exceeded: at most {MAX_TAGS}", request)


def check_chaos(tags: Mapping[str, str], request: CallReceived) -> None:
    """Refuse a `batchml:chaos` tag with mistakes, because its faults would silently not be
    injected.
    """
    tag = tags.get(fault_injection.TAG)
    mistakes = [] if tag is None else fault_injection.read_tag(tag)[1]
    if mistakes:
        raise request_error(f"Tag {fault_injection.TAG}: {' '.join(mistakes)}", request)


def check_between(value: float, low: float, high: float, what: str, request: CallReceived) -> None:
    if not low <= value <= high:
        raise request_error(f"{what} must be between {low} and {high}", request)
