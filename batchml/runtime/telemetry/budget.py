"""The budget guard: makes a run save and stop before its budget is spent.

The client converts the budget into running seconds of all attempts together (BATCHML_MAX_SECONDS).
The run's store has an account with the seconds of each attempt. An attempt enters its seconds in
advance: if its host is lost, the time that was entered counts as spent.
"""

from __future__ import annotations

import json
import time
from typing import Callable, Dict, Optional

from batchml.runtime.entry.attempt import AttemptHandle
from batchml.runtime.processes import process_age
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.variables import is_main_node
from batchml.runtime.storage.store import StoreError

_AHEAD = 60.0  # seconds that are entered in advance


class BudgetGuard:
    """An attempt plug-in. It works only in runs with a budget, on their main node."""

    def __init__(
        self,
        attempt: AttemptHandle,
        age: Optional[float] = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`age`: seconds since the attempt started."""
        env = attempt.env
        self._attempt = attempt
        self._limit = env.max_seconds if is_main_node(attempt.environ) else 0.0
        self._stop_at = stop_at(self._limit, env.grace)
        self._ahead = max(1.0, min(_AHEAD, self._limit / 20))
        self._account = f"spent/{env.array_index or 0}"
        self._number = str(env.attempt)
        self._age = process_age() if age is None else age
        self._monotonic = monotonic
        self._began: Optional[float] = None
        self._entered = 0.0  # the seconds of this attempt that the account has
        self._before: Dict[str, float] = {}  # seconds of earlier attempts
        self._has_read = attempt.store is None
        self._has_warned = False

    def tick(self, now: float) -> None:
        if not self._limit:
            return
        if self._began is None:
            self._began = now - self._age
        took = now - self._began
        if took >= self._entered:
            self._entered = took + self._ahead
            self._enter(self._entered)
        spent = took + sum(self._before.values())
        if spent >= self._stop_at:
            self._attempt.stop(self._describe(spent), STOPPED)

    def finish(self) -> None:
        if self._limit and self._began is not None:
            # The attempt is nearly over, so the time that was entered in advance is corrected.
            self._enter(self._monotonic() - self._began)

    def _enter(self, seconds: float) -> None:
        """Write the seconds of this attempt into the account, if there is a store."""
        store = self._attempt.store
        if store is None:
            return
        try:
            if not self._has_read:
                found = read_account(store.get(self._account))
                self._before = {each: s for each, s in found.items() if each != self._number}
                self._has_read = True
            account = {**self._before, self._number: round(seconds, 1)}
            store.put(self._account, json.dumps({"attempts": account}).encode())
        except StoreError as error:
            if not self._has_warned:
                self._has_warned = True
                known = "" if self._has_read else ", and earlier attempts are not counted"
                self._attempt.say(f"batchml: the spent budget cannot be saved{known}: {error}")

    def _describe(self, spent: float) -> str:
        price = _amount(self._attempt.environ.get("BATCHML_PRICE"))
        usd = spent * price / 3600
        money = f" (${usd:.{2 if usd >= 1 else 4}f} at ${price:.4g} an hour)" if price else ""
        return (
            f"the budget of --max-cost is spent: {spent:.0f} of {self._limit:.0f} seconds{money}. "
            "The run saves and stops."
        )


def stop_at(limit: float, grace: float) -> float:
    """The second at which a run is stopped, so that its grace ends within the limit.

    A run is never stopped before three quarters of its limit, however long the grace is. If the
    limit is short compared to the grace, the run may therefore end after the limit.
    """
    return limit - min(grace, limit / 4)


def read_account(data: Optional[bytes]) -> Dict[str, float]:
    """Attempt -> seconds; empty for a missing or invalid account."""
    try:
        found = json.loads(data or b"{}")
        return {str(each): max(0.0, float(s)) for each, s in found["attempts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _amount(text: Optional[str]) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
