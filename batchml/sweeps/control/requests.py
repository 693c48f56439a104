"""What people request of a started sweep: other limits, trials again, the best again, to continue.

Only a controller writes the ledger. So a request is an object in the sweep's store, and the
controller that runs, or the next one, carries it out and deletes it. To carry it out twice changes
nothing: new limits are given in full, and the key of a request is the key of the first batch of
trials that it leads to.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from batchml.model.names import is_key
from batchml.model.sweep import SweepLimits
from batchml.runtime.storage.store import Store
from batchml.sweeps.control import budgets, plan
from batchml.sweeps.control.decide import USER
from batchml.sweeps.control.events import Event, LimitsChanged, SweepReopened, TrialBatch
from batchml.sweeps.control.plan import DrawKey, SubmitMode
from batchml.sweeps.control.totals import SweepTotals

_FOLDER = "asks/"


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
    """Continue after `stop`."""

    key: str


SweepRequest = TopUpRequest | RerunRequest | ConfirmRequest | ResumeRequest

_DECODER = msgspec.json.Decoder(SweepRequest)


def put_request(store: Store, request: SweepRequest) -> None:
    """Write it for the controller. Raises StoreError."""
    store.create(_request_key(request), msgspec.json.encode(request))


def pending_requests(store: Store) -> list[SweepRequest]:
    """The requests that were not carried out yet, without unreadable ones. Raises StoreError."""
    found: list[SweepRequest] = []
    for key in store.keys(_FOLDER):
        data = store.get(key)
        try:
            request = _DECODER.decode(data or b"")
        except msgspec.DecodeError:
            continue
        if is_key(request.key) and _request_key(request) == key:
            found.append(request)
    return found


def request_keys(requests: list[SweepRequest]) -> list[str]:
    """Their keys in the store, to be deleted once the ledger has their events."""
    return [_request_key(each) for each in requests]


def _request_key(request: SweepRequest) -> str:
    return f"{_FOLDER}{request.key}.json"


# --- From a request to events of the ledger -------------------------------------------------------


def events_of_request(
    totals: SweepTotals, mode: SubmitMode, request: SweepRequest, at: float, draw: DrawKey
) -> list[Event]:
    """The events that carry out a request; none if that was done before.

    A sweep that has ended is reopened. After a stop only `resume` begins other trials: running
    failed ones again does not.
    """
    if any(batch.key == request.key for batch in totals.state.batches.values()):
        return []
    found: list[Event] = []
    match request:
        case TopUpRequest():
            found += _top_up_events(totals, request, at)
        case ResumeRequest(key):
            found.append(LimitsChanged(_requested_limits(totals), at))
            if totals.state.stopping is not None:
                found += _with_key(plan.plan_continuations(totals, at, draw), key)
        case RerunRequest(key, numbers):
            found += _keep_trials_stopped(totals, at)
            found += _with_key(plan.plan_reruns(totals, mode, numbers, at, draw), key)
        case ConfirmRequest(key, top, seeds):
            chosen = plan.choose_for_confirmation(totals, top, seeds)
            found += _keep_trials_stopped(totals, at)
            found += _with_key(plan.plan_confirmations(totals, chosen, at, draw), key)
    return [*_reopening_events(totals, found, at), *found]


def _reopening_events(totals: SweepTotals, found: list[Event], at: float) -> list[Event]:
    """The event that reopens a sweep that has ended. `found`: the events that follow."""
    state = totals.state
    if state.ended is None:
        return []
    again = {
        each.number for batch in found if isinstance(batch, TrialBatch) for each in batch.trials
    }
    left = [each.state for each in state.trials.values() if each.number not in again]
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
    """The limits with the requested changes. A target that was reached is dropped."""
    limits, held = _requested_limits(totals), budgets.limits_now(totals.state, totals.spec)
    changes = {name: getattr(request, name) for name in ("trials", "hours", "cost", "parallel")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if budgets.is_target_reached(totals.state, totals.spec, totals.tally):
        changes["target"] = None
    found: list[Event] = [LimitsChanged(replace(limits, **changes), at)]
    if held != limits and request.trials is None:  # trials that were stopped stay so
        found.append(LimitsChanged(replace(held, **changes), at, for_now=True))
    return found


def _keep_trials_stopped(totals: SweepTotals, at: float) -> list[Event]:
    """For a sweep that its user stopped: allow no other trials than there are."""
    stopping, limits = totals.state.stopping, budgets.limits_now(totals.state, totals.spec)
    if totals.state.ended is None or stopping is None or stopping.by != USER:
        return []
    return [LimitsChanged(replace(limits, trials=totals.tally.planned), at, for_now=True)]


def _requested_limits(totals: SweepTotals) -> SweepLimits:
    """The limits that were requested last, without the changes of `_keep_trials_stopped`."""
    return totals.state.requested_limits or totals.spec.limits


def _with_key(batches: list[TrialBatch], key: str) -> list[TrialBatch]:
    """Give the first batch the key of the request, which shows that it was carried out."""
    return [replace(batches[0], key=key), *batches[1:]] if batches else []
