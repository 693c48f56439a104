"""Register, find and deregister job definitions, and find old definitions that no run needs."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from batchml.aws.batch.jobs import DefinitionApi, DefinitionRevision, JobApi
from batchml.aws.batch.requests import dated_registration
from batchml.clock import Clock
from batchml.errors import NotFound

RATE = 10  # deregistrations a second; AWS Batch accepts 50 calls of all kinds


def register(api: JobApi, request: Mapping[str, Any], now: float) -> bool:
    """Register a definition unless an active one exists; the name depends on the content.

    Returns whether it was registered. `now` in seconds since the epoch.
    """
    if api.has_definition(request["jobDefinitionName"]):
        return False
    api.register(dated_registration(request, now))
    return True


def find_definitions(definitions: DefinitionApi, asked: str) -> list[DefinitionRevision]:
    """The active revisions that `NAME` or `NAME:REVISION` means. Raises NotFound."""
    name, _, revision = asked.partition(":")
    found = definitions.active(name)
    chosen = [each for each in found if revision in ("", str(each.revision))]
    if not chosen:
        known = [each.full_name for each in found or definitions.active() if found or each.job]
        hint = "To list active definitions: batchml jobdef list --all"
        raise NotFound("Job definition", asked, known[:20], hint)
    return chosen


def find_old(
    definitions: Iterable[DefinitionRevision],
    env: str,
    keep: Collection[str],
    now: float,
    older_than: int,
) -> list[DefinitionRevision]:
    """The definitions of an environment that are old, and not the newest of a job in `keep`.

    Old: registered more than `older_than` seconds before `now`, rounded up to whole days. A
    definition without a date is old, because an earlier version registered it. Runs may still use
    an old definition: see `unused`.
    """
    ours = [each for each in definitions if each.job and each.env == env]
    newest: dict[str, str] = {}
    for each in ours:
        newest[each.job] = max(newest.get(each.job, ""), each.registered)
    limit = datetime.fromtimestamp(now, UTC) - timedelta(seconds=older_than)
    return [
        each
        for each in ours
        if _is_before(each.registered, limit)
        and not (each.job in keep and each.registered == newest[each.job])
    ]


def _is_before(day: str, limit: datetime) -> bool:
    """Whether the whole day lies before the limit; true without a date."""
    try:
        end = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
    except ValueError:
        return True
    return end <= limit


def unused(
    candidates: Iterable[DefinitionRevision], is_used: Callable[[DefinitionRevision], bool]
) -> Iterator[DefinitionRevision]:
    """The definitions that no run uses; `is_used` is called for one after the other."""
    for each in candidates:
        if not is_used(each):
            yield each


def deregister(
    call: Callable[[str], None], chosen: Sequence[DefinitionRevision], clock: Clock
) -> Iterator[DefinitionRevision]:
    """Deregister definitions by `call`, which takes a full name, and yield each when it is done.

    The rate is limited, so that the account's other calls are not throttled.
    """
    for index, each in enumerate(chosen):
        if index:
            clock.sleep(1 / RATE)
        call(each.full_name)
        yield each
