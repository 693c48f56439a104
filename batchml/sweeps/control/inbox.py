"""The inbox of a sweep's controller: messages of trials, stop signals, requests of users.

Only a controller writes the ledger. It reads an object of the store, appends the events that follow
from it to the ledger, and then deletes the object. After a crash between these steps the next
controller reads the object again, which does no harm: a message that was applied changes nothing, a
request gives new limits in full, and the first batch of trials that a request leads to has the
request's key, so that it is not planned twice.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.model.names import is_key
from batchml.model.sweep import SweepLimits
from batchml.runtime.protocol.sweep import (
    DEADLINE,
    INBOX,
    STOP_ALL,
    deadline_key,
    decode_message,
    stop_key,
)
from batchml.runtime.storage.store import Store
from batchml.sweeps.control import plan
from batchml.sweeps.control.events import USER, Event, LimitsChanged, SweepReopened, TrialBatch
from batchml.sweeps.control.plan import MakeKey, SubmitMode
from batchml.sweeps.control.totals import SweepTotals, is_target_reached, limits_now

# --- The stop signal and the deadline -------------------------------------------------------------


def signal_stop(store: Store, why: str) -> None:
    """Signal all trials, and the controller, to end. Raises StoreError."""
    store.put(STOP_ALL, why.encode())


def read_stop_signal(store: Store) -> str | None:
    """Why the sweep was stopped; None if it was not. Raises StoreError."""
    reason = store.get(STOP_ALL)
    return None if reason is None else reason.decode("utf-8", "replace") or "it was stopped"


def clear_stop_signal(store: Store, trials: Iterable[int] = ()) -> None:
    """Let trials begin again; `trials` may also have stop signals of their own, which are cleared.

    Raises StoreError.
    """
    store.delete(STOP_ALL, *map(stop_key, trials))


def publish_deadline(store: Store, at: float) -> None:
    """Publish when all trials must end, in seconds since the epoch. It replaces an earlier one.

    Raises StoreError.
    """
    key = deadline_key(at)
    store.put(key, b"the sweep's time is over")
    store.delete(*(old for old in store.keys(DEADLINE) if old != key))


# --- The inbox ------------------------------------------------------------------------------------


MAX_MESSAGES = 1000  # messages that are read at once

_FIELDS = (
    "wave", "trial", "attempt", "seq", "index", "job", "began", "at", "kind", "points", "decisions",
    "metrics", "counter", "other", "state", "code", "why", "tail", "again",
)  # fmt: skip


class InboxMessages(NamedTuple):
    messages: list[dict[str, Any]]
    keys: list[str]  # of the messages, and of unreadable objects


def read_inbox(store: Store, limit: int = MAX_MESSAGES) -> InboxMessages:
    """The first messages in the inbox. Raises StoreError."""
    keys = store.keys(INBOX, limit)
    contents = filter(None, store.get_many(keys))
    messages = [message for data in contents if (message := decode_message(data)) is not None]
    return InboxMessages([_known_fields(message) for message in messages], keys)


def _known_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields of a message, with text that UTF-8 can encode.

    A name that a program printed as JSON may have half of a surrogate pair. Such a message must not
    stop a controller, and then each of its successors.
    """
    kept = {name: message[name] for name in _FIELDS if name in message}
    try:
        msgspec.json.encode(kept)
    except UnicodeEncodeError:
        return {name: _encodable(value) for name, value in kept.items()}
    return kept


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return value


# --- Requests of users ----------------------------------------------------------------------------


_REQUESTS = "asks/"  # the prefix of requests in the sweep's store


class TopUpRequest(Struct, frozen=True, tag="top-up", omit_defaults=True):
    """New limits, as totals and not as increments; None: unchanged."""

    key: str  # made by `names.new_key`, as in all requests
    trials: int | None = None
    hours: float | None = None
    cost: float | None = None
    parallel: int | None = None


class RerunRequest(Struct, frozen=True, tag="rerun", omit_defaults=True):
    """Run trials again from their beginning; without numbers, all failed ones."""

    key: str
    numbers: tuple[int, ...] = ()


class ConfirmRequest(Struct, frozen=True, tag="confirm", omit_defaults=True):
    """Run the best `top` trials again, each with `seeds` new seeds."""

    key: str
    top: int = 3
    seeds: int = 3


class ResumeRequest(Struct, frozen=True, tag="go-on", omit_defaults=True):
    """Continue a sweep that its user has stopped, or that failures have stopped."""

    key: str


SweepRequest = TopUpRequest | RerunRequest | ConfirmRequest | ResumeRequest

_DECODER = msgspec.json.Decoder(SweepRequest)


def put_request(store: Store, request: SweepRequest) -> None:
    """Write a request to the sweep's store, for the controller. Raises StoreError."""
    store.create(_request_key(request), msgspec.json.encode(request))


def pending_requests(store: Store) -> list[SweepRequest]:
    """The requests that were not carried out yet, without unreadable ones. Raises StoreError."""
    requests: list[SweepRequest] = []
    for key in store.keys(_REQUESTS):
        data = store.get(key)
        try:
            request = _DECODER.decode(data or b"")
        except msgspec.DecodeError:
            continue
        if is_key(request.key) and _request_key(request) == key:
            requests.append(request)
    return requests


def request_keys(requests: list[SweepRequest]) -> list[str]:
    """The requests' keys in the store, to be deleted once the ledger has their events."""
    return [_request_key(each) for each in requests]


def _request_key(request: SweepRequest) -> str:
    return f"{_REQUESTS}{request.key}.json"


# --- From a request to events of the ledger -------------------------------------------------------


def events_of_request(
    totals: SweepTotals, mode: SubmitMode, request: SweepRequest, at: float, make_key: MakeKey
) -> list[Event]:
    """The events that carry out a request; none if that was done before.

    A sweep that has ended is reopened. After a stop only `resume` begins other trials: running
    failed ones again does not.
    """
    if any(batch.key == request.key for batch in totals.state.batches.values()):
        return []
    events: list[Event] = []
    match request:
        case TopUpRequest():
            events += _top_up_events(totals, request, at)
        case ResumeRequest(key):
            events.append(LimitsChanged(_requested_limits(totals), at))
            if totals.state.stopping is not None:
                events += _with_key(plan.plan_continuations(totals, at, make_key), key)
        case RerunRequest(key, numbers):
            events += _keep_trials_stopped(totals, at)
            events += _with_key(plan.plan_reruns(totals, mode, numbers, at, make_key), key)
        case ConfirmRequest(key, top, seeds):
            chosen = plan.choose_for_confirmation(totals, top, seeds)
            events += _keep_trials_stopped(totals, at)
            events += _with_key(plan.plan_confirmations(totals, chosen, at, make_key), key)
    return [*_reopening_events(totals, events, at), *events]


def _reopening_events(totals: SweepTotals, events: list[Event], at: float) -> list[Event]:
    """The event that reopens a sweep that has ended. `events`: the events that follow."""
    state = totals.state
    if state.ended is None:
        return []
    planned = {
        each.number for batch in events if isinstance(batch, TrialBatch) for each in batch.trials
    }
    left = [each.state for each in state.trials.values() if each.number not in planned]
    return [
        SweepReopened(
            "a user requested it",
            at,
            paused=max(0.0, at - state.ended.at),
            failed=sum(each.is_failure for each in left),
            over=sum(each.is_ended for each in left),
        )
    ]


def _top_up_events(totals: SweepTotals, request: TopUpRequest, at: float) -> list[Event]:
    """The events of a top-up. A target that was reached no longer counts."""
    limits, present = _requested_limits(totals), limits_now(totals.state, totals.spec)
    changes = {name: getattr(request, name) for name in ("trials", "hours", "cost", "parallel")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if is_target_reached(totals.state, totals.spec, totals.tally):
        changes["target"] = None
    events: list[Event] = [LimitsChanged(replace(limits, **changes), at)]
    if present != limits and request.trials is None:  # keep what `_keep_trials_stopped` limits
        events.append(LimitsChanged(replace(present, **changes), at, for_now=True))
    return events


def _keep_trials_stopped(totals: SweepTotals, at: float) -> list[Event]:
    """For a sweep that its user stopped: allow no other trials than there are."""
    stopping, limits = totals.state.stopping, limits_now(totals.state, totals.spec)
    if totals.state.ended is None or stopping is None or stopping.by != USER:
        return []
    return [LimitsChanged(replace(limits, trials=totals.tally.planned), at, for_now=True)]


def _requested_limits(totals: SweepTotals) -> SweepLimits:
    """The limits that were requested last, without the changes of `_keep_trials_stopped`."""
    return totals.state.requested_limits or totals.spec.limits


def _with_key(batches: list[TrialBatch], key: str) -> list[TrialBatch]:
    """Give the first batch the key of the request, which shows that it was carried out."""
    return [replace(batches[0], key=key), *batches[1:]] if batches else []
