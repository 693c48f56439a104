"""When a run that is held for a person, an allocation or a notebook, has been left idle.

The decision and its words are here; what counts as use is said by whoever looks: a held seat
(`seats.py`), a kernel that computes, a request. Times are seconds of a clock that never jumps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Callable, Optional

from batchml.runtime.limits import process_age

LIMIT = "BATCHML_IDLE"  # seconds without use after which the run ends itself; none: never
RATE = "BATCHML_RATE"  # USD an hour of the whole run, where the client knew it


class Idle:
    """How long nobody has used the run. It counts as used when it begins."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; `math.inf` for no limit."""
        self.limit = limit
        self._used: Optional[float] = None

    def seen(self, active: bool, now: float) -> float:
        """Seconds that are left, 0 once it is to end; `active`: whether it is used now."""
        if active or self._used is None:
            self._used = now
        return max(0.0, self._used + self.limit - now)


class Life:
    """How long this process has lived, which is about how long its run has."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        age: Optional[float] = None,
    ) -> None:
        self._monotonic = monotonic
        self._began = monotonic() - (process_age() if age is None else age)

    def seconds(self) -> float:
        return self._monotonic() - self._began


def limit_of(environ: Mapping[str, str]) -> float:
    """The limit that the run was given, in seconds; `math.inf` where there is none."""
    return _number(environ.get(LIMIT)) or math.inf


def last_words(what: str, limit: float, ran: float, environ: Mapping[str, str]) -> str:
    """`WHAT was idle for 1 h 0 min: it is ended. It ran 63 h 12 min, about 63.50 USD at 1.005 USD
    an hour`; times in seconds."""
    return f"{what} was idle for {spelled(limit)}: it is ended. {cost_words(ran, environ)}"


def cost_words(ran: float, environ: Mapping[str, str]) -> str:
    """`It ran 63 h 12 min, about 63.50 USD at 1.005 USD an hour.` Without a rate, no money."""
    rate = _number(environ.get(RATE))
    usd = rate * ran / 3600
    money = f", about {usd:.{2 if usd >= 1 else 4}f} USD at {rate:.4g} USD an hour" if rate else ""
    return f"It ran {spelled(ran)}{money}."


def spelled(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 0 min`"""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _number(text: Optional[str]) -> float:
    """A number above 0; 0 for anything else, which a user may have set."""
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if 0 < found < math.inf else 0.0
