"""Seen: what has been found out about a run that waits, and what to look at next. Pure."""

from enum import StrEnum

from msgspec import Struct

from batchml.model.explanation import Activity, ComputeState, HostType, QueueState, Snapshot, Stock
from batchml.model.run import Run
from batchml.ops.explain.words import Words

# What a host takes from its start to its first job: minutes on a GPU host with a large image. No
# alarm is raised before, for AWS Batch itself says "no host is large enough" while one boots.
BOOT = 10 * 60_000  # ms
SOON = 60_000  # ms that AWS Batch may take until it has looked at a new job


class Look(StrEnum):
    """One question, which is one call."""

    DEPENDENCIES = "dependencies"
    FAILED = "failed"
    CHILD = "child"
    QUEUE = "queue"
    ENVIRONMENTS = "environments"
    STOCK = "stock"
    SNAPSHOT = "snapshot"
    HEAD = "head"
    TYPES = "types"
    IMAGE = "image"
    ACTIVITIES = "activities"
    HOSTS = "hosts"
    AGAIN = "again"


class Seen(Struct, frozen=True):
    """What is known so far. What was not asked, or not answered, is None.

    Of an array that waits, `run` is a child of it that does, and `array` the whole.
    """

    run: Run
    now: int  # ms
    words: Words = Words()
    asked: frozenset[Look] = frozenset()
    array: Run | None = None
    failed: tuple[Run, ...] = ()  # children
    dependencies: tuple[Run, ...] = ()
    queue: QueueState | None = None
    environments: tuple[ComputeState, ...] = ()
    stock: Stock | None = None
    snapshot: Snapshot | None = None
    head: Run | None = None
    types: tuple[HostType, ...] | None = None
    architecture: str | None = None
    activities: tuple[Activity, ...] | None = None
    hosts: int | None = None

    @property
    def text(self) -> str:
        """Why AWS Batch says that it is stuck; it says so for the head of a queue alone."""
        return self.run.status_reason

    @property
    def place(self) -> int | None:
        """How many runs are before it; None where that is not known."""
        return self.snapshot.place_of(self.run.job_id) if self.snapshot else None

    @property
    def since(self) -> int:
        """Since when it has waited at the head, or for its turn: ms, at the earliest."""
        ends = [attempt.stopped_at or 0 for attempt in self.run.attempts]
        found = max([self.run.created_at or self.now, *ends])
        if self.snapshot is not None and self.place is not None:
            found = max(found, self.snapshot.front[self.place].since)
        return found

    @property
    def waited(self) -> int:
        return max(0, self.now - self.since)

    @property
    def is_early(self) -> bool:
        """True while a host may still be on its way. Here none is ever started."""
        return not self.words.is_local and self.waited < BOOT

    @property
    def usable(self) -> tuple[ComputeState, ...]:
        return tuple(each for each in self.environments if each.is_enabled and is_well(each))

    @property
    def vcpus(self) -> int:
        """What the whole run needs at once."""
        return self.run.vcpus * max(1, self.run.nodes)


def is_well(environment: ComputeState) -> bool:
    return environment.status in ("VALID", "UPDATING", "CREATING")
