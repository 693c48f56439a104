"""What users set up: environments, queues, definitions, policies, consumable resources."""

from typing import Any, ClassVar

from msgspec import Struct

from batchml.model.names import bare_name

# The compute environment, and its queue, of sweeps' controllers. They take nothing of the machine:
# one must be able to run while trials take all of it. Nothing else runs there.
CONTROLLERS = "controllers"


class Record(Struct, frozen=True):
    """What stays until it is deleted: a name, and AWS's own JSON. `field` is where `State` has it,
    `arn_kind` what its ARN calls it.
    """

    kind: ClassVar[str]
    field: ClassVar[str]
    arn_kind: ClassVar[str]

    name: str
    detail: dict[str, Any]

    @property
    def key(self) -> str:
        return self.name


class Environment(Record, frozen=True):
    """A compute environment."""

    kind = "environment"
    field = "environments"
    arn_kind = "compute-environment"

    @property
    def enabled(self) -> bool:
        return bool(self.detail["state"] == "ENABLED")

    @property
    def max_vcpus(self) -> int:
        if self.detail["type"] == "UNMANAGED":
            return int(self.detail["unmanagedvCpus"])
        return int(self.detail["computeResources"].get("maxvCpus", 0))

    @property
    def takes_nodes(self) -> bool:
        """Whether multi-node jobs are placed here: not on spot instances, not on others' hosts."""
        if self.detail["type"] == "UNMANAGED":
            return False
        return bool(self.detail["computeResources"].get("type") == "EC2")


class Queue(Record, frozen=True):
    """A job queue."""

    kind = "queue"
    field = "queues"
    arn_kind = "job-queue"

    @property
    def enabled(self) -> bool:
        return bool(self.detail["state"] == "ENABLED")

    @property
    def priority(self) -> int:
        return int(self.detail["priority"])

    @property
    def environments(self) -> list[str]:
        order = sorted(self.detail["computeEnvironmentOrder"], key=lambda entry: entry["order"])
        return [bare_name(entry["computeEnvironment"]) for entry in order]

    @property
    def policy(self) -> str:
        """The name of its scheduling policy; empty for a queue that is first in, first out."""
        return bare_name(self.detail.get("schedulingPolicyArn", ""))


class Definition(Record, frozen=True):
    """One revision of a job definition."""

    kind = "definition"
    field = "definitions"
    arn_kind = "job-definition"

    revision: int

    @property
    def key(self) -> str:
        return f"{self.name}:{self.revision}"

    @property
    def active(self) -> bool:
        return bool(self.detail["status"] == "ACTIVE")


class Policy(Record, frozen=True):
    """A scheduling policy: how the shares of a queue come to their parts."""

    kind = "policy"
    field = "policies"
    arn_kind = "scheduling-policy"

    @property
    def fair_share(self) -> dict[str, Any]:
        return dict(self.detail.get("fairsharePolicy", {}))


class Consumable(Record, frozen=True):
    """A consumable resource. `spent` is what was taken of one that is not given back."""

    kind = "consumable"
    field = "consumables"
    arn_kind = "consumable-resource"

    total: int
    spent: int = 0
    updates: dict[str, tuple[int, str, int]] = {}  # token -> when (ms), operation, quantity

    @property
    def replenishable(self) -> bool:
        return bool(self.detail["resourceType"] == "REPLENISHABLE")


RECORDS: tuple[type[Record], ...] = (Environment, Queue, Definition, Policy, Consumable)
