"""The money guard: a run with a budget is asked to save, and stopped, before it is spent.

The client turned money into running seconds (BATCHML_MAX_SECONDS), all attempts together; what each
took is kept in the run's store. Time is entered ahead: a host that is lost takes its account
along, and what it may have spent since the last entry counts as spent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Callable, Dict, Optional

from batchml.runtime.entry.attempt import Attempt
from batchml.runtime.storage.store import StoreError

STOPPED = 143  # as after any TERM: the client calls it cancelled
_AHEAD = 60.0  # seconds that an entry covers


class Guard:
    """A companion. It does nothing where no budget was given, or on a node that is not the main."""

    def __init__(
        self,
        attempt: Attempt,
        age: Optional[float] = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`age`: for how many seconds the attempt has been running already."""
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
        self._entered = 0.0  # seconds of this attempt that the account covers
        self._before: Dict[str, float] = {}
        self._has_read = attempt.store is None
        self._has_told = False

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
            self._attempt.stop(self._words(spent), STOPPED)

    def finish(self) -> None:
        if self._limit and self._began is not None:
            # What follows is short, and what was entered ahead is given back.
            self._enter(self._monotonic() - self._began)

    def _enter(self, seconds: float) -> None:
        """Put what this attempt took into the account; without it, this attempt is limited."""
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
            if not self._has_told:
                self._has_told = True
                known = "" if self._has_read else ", and earlier attempts are not counted"
                self._attempt.say(f"batchml: what was spent cannot be kept{known}: {error}")

    def _words(self, spent: float) -> str:
        price = _amount(self._attempt.environ.get("BATCHML_PRICE"))
        usd = spent * price / 3600
        money = f" (${usd:.{2 if usd >= 1 else 4}f} at ${price:.4g} an hour)" if price else ""
        return (
            f"the budget of --max-cost is spent: {spent:.0f} of {self._limit:.0f} seconds{money}. "
            "The run saves and stops."
        )


def stop_at(limit: float, grace: float) -> float:
    """The second at which a run is asked to stop, so that its grace is within the limit.

    A limit that is short beside the grace keeps three quarters of itself; saving may then pass it.
    """
    return limit - min(grace, limit / 4)


def is_main_node(environ: Mapping[str, str]) -> bool:
    """True for the node that a multi-node run ends with, and for any other run."""
    main = environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")
    return environ.get("AWS_BATCH_JOB_NODE_INDEX", main) == main


def read_account(data: Optional[bytes]) -> Dict[str, float]:
    """Attempt -> seconds; nothing for an account that is not there, or not one of ours."""
    try:
        found = json.loads(data or b"{}")
        return {str(each): max(0.0, float(s)) for each, s in found["attempts"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def process_age() -> float:
    """Seconds since this process began, which fetched the run's code before it came here.

    0 where the system does not tell. Source: proc(5), /proc/pid/stat, field 22.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = float(file.read().rpartition(b")")[2].split()[19])
        began = ticks / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _amount(text: Optional[str]) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
