"""When a run that is held for a person has been idle for too long, and the messages about that.

What counts as use is for the callers to say: someone inside the run (`exec/presence.py`), a busy
kernel, a request. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Callable, Optional

from batchml.runtime.processes import process_age

LIMIT = "BATCHML_IDLE"  # seconds without use after which the run ends itself; unset: never
RATE = "BATCHML_RATE"  # USD an hour of the whole run, if the client knew it


class IdleTimer:
    """Measures how long the run has not been used. Its start counts as use."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; `math.inf` for no limit."""
        self.limit = limit
        self._last_use: Optional[float] = None

    def seconds_left(self, is_used: bool, now: float) -> float:
        """Return the seconds until the run has to end; 0 when it has to end now."""
        if is_used or self._last_use is None:
            self._last_use = now
        return max(0.0, self._last_use + self.limit - now)


class Lifetime:
    """How long this process has lived, which is about how long its run has."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        age: Optional[float] = None,
    ) -> None:
        self._monotonic = monotonic
        self._start = monotonic() - (process_age() if age is None else age)

    def seconds(self) -> float:
        return self._monotonic() - self._start


def read_limit(environ: Mapping[str, str]) -> float:
    """Return the run's limit in seconds; `math.inf` if it has none."""
    return _positive_number(environ.get(LIMIT)) or math.inf


def describe_idle_end(name: str, limit: float, ran: float, environ: Mapping[str, str]) -> str:
    """`NAME was idle for 1 h 0 min and is ended. It ran 63 h 12 min, about 63.50 USD at 1.005 USD
    an hour.`"""
    return (
        f"{name} was idle for {format_seconds(limit)} and is ended. {describe_cost(ran, environ)}"
    )


def describe_cost(ran: float, environ: Mapping[str, str]) -> str:
    """`It ran 63 h 12 min, about 63.50 USD at 1.005 USD an hour.` Without a rate, no cost."""
    rate = _positive_number(environ.get(RATE))
    usd = rate * ran / 3600
    money = f", about {usd:.{2 if usd >= 1 else 4}f} USD at {rate:.4g} USD an hour" if rate else ""
    return f"It ran {format_seconds(ran)}{money}."


def format_seconds(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 0 min`"""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _positive_number(text: Optional[str]) -> float:
    """Parse a number above 0; 0 for anything else, since users may set any value."""
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if 0 < found < math.inf else 0.0
