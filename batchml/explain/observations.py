"""The questions about a waiting run, and the answers of AWS so far. Pure."""

from enum import StrEnum

from msgspec import Struct

from batchml.explain.suggest import CommandWriter
from batchml.model.explanation import (
    ComputeState,
    ConsumableState,
    HostType,
    QueueSnapshot,
    QueueState,
    ScalingActivity,
)
from batchml.model.run import Run

# The time from the start of a host to its first job: minutes on a GPU host with a large image.
# Before that no problem is reported, because AWS Batch says "no host is large enough" while a host
# boots.
BOOT = 10 * 60_000  # ms
SOON = 60_000  # ms in which AWS Batch examines a new job


class AwsQuestion(StrEnum):
    """A question, which is one call to AWS."""

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


class RunObservations(Struct, frozen=True):
    """The answers so far. A value that was not asked for, or not answered, is None or empty.

    Of a waiting array, `run` is a waiting child, and `array` the array itself.
    """

    run: Run
    now: int  # ms
    words: CommandWriter = CommandWriter()
    asked: frozenset[AwsQuestion] = frozenset()
    array: Run | None = None
    failed: tuple[Run, ...] = ()  # children
    dependencies: tuple[Run, ...] = ()
    queue: QueueState | None = None
    environments: tuple[ComputeState, ...] = ()
    stock: ConsumableState | None = None
    snapshot: QueueSnapshot | None = None
    head: Run | None = None
    types: tuple[HostType, ...] | None = None
    architecture: str | None = None
    activities: tuple[ScalingActivity, ...] | None = None
    hosts: int | None = None

    @property
    def text(self) -> str:
        """AWS Batch's status reason, which only the head of a queue has."""
        return self.run.status_reason

    @property
    def place(self) -> int | None:
        """The number of runs before it in the queue; None if unknown."""
        return self.snapshot.position_of(self.run.job_id) if self.snapshot else None

    @property
    def since(self) -> int:
        """The earliest time, in ms, since which it waits at its present place in the queue."""
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
        """Whether a host may still be booting. `local` starts no hosts."""
        return not self.words.is_local and self.waited < BOOT

    @property
    def usable(self) -> tuple[ComputeState, ...]:
        return tuple(each for each in self.environments if each.is_enabled and is_usable(each))

    @property
    def vcpus(self) -> int:
        """vCPUs that all nodes of the run need at once."""
        return self.run.vcpus * max(1, self.run.nodes)


def is_usable(environment: ComputeState) -> bool:
    return environment.status in ("VALID", "UPDATING", "CREATING")
