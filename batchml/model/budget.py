"""What a run's budget of running seconds says when the run is read back (pure)."""

from collections.abc import Iterable, Mapping
from typing import Protocol

# What the runtime exits with when a budget is spent: batchml/runtime/telemetry/budget.py
STOPPED = 143


class Timed(Protocol):
    """An attempt: `batchml.model.run.Attempt`."""

    @property
    def started_at(self) -> int | None: ...

    @property
    def stopped_at(self) -> int | None: ...


def max_seconds(environment: Mapping[str, str]) -> int:
    """The running seconds that a run was given, all attempts together; 0 for no limit."""
    text = environment.get("BATCHML_MAX_SECONDS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def ran_seconds(attempts: Iterable[Timed]) -> float:
    """How long finished attempts ran, together."""
    return sum(
        max(0, attempt.stopped_at - attempt.started_at) / 1000
        for attempt in attempts
        if attempt.started_at and attempt.stopped_at
    )


def is_spent(
    environment: Mapping[str, str], exit_code: int | None, attempts: Iterable[Timed]
) -> bool:
    """True for the times and the code of a run whose budget of --max-cost was spent.

    A container's own words do not reach AWS Batch. It is asked to stop at three quarters of its
    seconds at the earliest. Whether it ended by itself is for `batchml.model.run` to say.
    """
    limit = max_seconds(environment)
    return bool(limit) and exit_code == STOPPED and ran_seconds(attempts) >= limit * 3 / 4 - 1
