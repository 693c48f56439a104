"""Job definitions as a whole: register one, find one, and collect those that nobody needs."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from batchml.aws.batch.definitions import Definition, Definitions
from batchml.aws.batch.jobs import BatchApi
from batchml.aws.batch.requests import registration
from batchml.clock import Clock
from batchml.errors import NotFound

A_SECOND = 10  # deregistrations; AWS Batch takes 50 calls of all kinds


def register(api: BatchApi, request: Mapping[str, Any], now: float) -> bool:
    """Register a definition unless an active one of its name, which is its content, exists.

    True when it was registered. `now` in seconds since the epoch.
    """
    if api.has_definition(request["jobDefinitionName"]):
        return False
    api.register(registration(request, now))
    return True


def find(definitions: Definitions, asked: str) -> list[Definition]:
    """The active revisions that `NAME` or `NAME:REVISION` means. Raises NotFound."""
    name, _, revision = asked.partition(":")
    found = definitions.active(name)
    chosen = [each for each in found if revision in ("", str(each.revision))]
    if not chosen:
        known = [each.full_name for each in found or definitions.active() if found or each.job]
        hint = "Definitions that are active: batchml jobdef list --all"
        raise NotFound("Job definition", asked, known[:20], hint)
    return chosen


def collectable(
    definitions: Iterable[Definition], env: str, keep: Collection[str], now: float, older_than: int
) -> list[Definition]:
    """Those of `definitions` that nobody needs, as far as they say it themselves.

    They are of the environment `env`, were registered more than `older_than` seconds before `now`
    (to the day, and whole days over), and are not the newest of a job in `keep`. One without a date
    is old: it was registered by an earlier version. Who is left may still be used: `unused`.
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
    """True when a whole day lies before the limit."""
    try:
        end = datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)
    except ValueError:
        return True
    return end <= limit


def unused(
    candidates: Iterable[Definition], is_used: Callable[[Definition], bool]
) -> Iterator[Definition]:
    """Those that no run uses; asked for each when it comes to it."""
    for each in candidates:
        if not is_used(each):
            yield each


def deregister(
    forget: Callable[[str], None], chosen: Sequence[Definition], clock: Clock
) -> Iterator[Definition]:
    """Call `forget` with the name and revision of one after another; each once it is done.

    Not faster than AWS takes well, so that the account's other calls go through.
    """
    for place, each in enumerate(chosen):
        if place:
            clock.sleep(1 / A_SECOND)
        forget(each.full_name)
        yield each
