"""Resources that users set up: compute environments, queues, definitions, policies, consumables."""

from typing import Any, ClassVar

from msgspec import Struct

from batchml.model.names import bare_name

# The compute environment, and the queue, of controllers of sweeps and fallbacks. They take no
# resources of the machine: a controller must be able to run while its jobs take all of them.
# Nothing else runs there.
CONTROLLERS = "controllers"


class ResourceRecord(Struct, frozen=True):
    """A resource that exists until it is deleted: its name, and AWS's own JSON.

    `field` is its attribute of `BatchState`, `arn_kind` its type in an ARN. `name_key` and
    `arn_key` are AWS's members for its name and its ARN.
    """

    kind: ClassVar[str]
    field: ClassVar[str]
    arn_kind: ClassVar[str]
    name_key: ClassVar[str]
    arn_key: ClassVar[str]

    name: str
    detail: dict[str, Any]

    @property
    def key(self) -> str:
        return self.name

    def identifiers(self) -> dict[str, Any]:
        """Its name and its ARN, as AWS answers a call that creates or updates it."""
        return {self.name_key: self.name, self.arn_key: self.detail[self.arn_key]}


class ComputeEnvironment(ResourceRecord, frozen=True):
    """A compute environment."""

    kind = "environment"
    field = "environments"
    arn_kind = "compute-environment"
    name_key, arn_key = "computeEnvironmentName", "computeEnvironmentArn"

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
        """Whether multi-node jobs can run here: AWS refuses spot instances and unmanaged
        environments.
        """
        if self.detail["type"] == "UNMANAGED":
            return False
        return bool(self.detail["computeResources"].get("type") == "EC2")


class JobQueue(ResourceRecord, frozen=True):
    """A job queue."""

    kind = "queue"
    field = "queues"
    arn_kind = "job-queue"
    name_key, arn_key = "jobQueueName", "jobQueueArn"

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
        """The name of its scheduling policy; empty for a first-in-first-out queue."""
        return bare_name(self.detail.get("schedulingPolicyArn", ""))


class JobDefinition(ResourceRecord, frozen=True):
    """One revision of a job definition."""

    kind = "definition"
    field = "definitions"
    arn_kind = "job-definition"
    name_key, arn_key = "jobDefinitionName", "jobDefinitionArn"

    revision: int

    @property
    def key(self) -> str:
        return f"{self.name}:{self.revision}"

    @property
    def active(self) -> bool:
        return bool(self.detail["status"] == "ACTIVE")


class SchedulingPolicy(ResourceRecord, frozen=True):
    """A scheduling policy: how the shares of a queue divide the capacity."""

    kind = "policy"
    field = "policies"
    arn_kind = "scheduling-policy"
    name_key, arn_key = "name", "arn"

    @property
    def fair_share(self) -> dict[str, Any]:
        return dict(self.detail.get("fairsharePolicy", {}))


class ConsumableResource(ResourceRecord, frozen=True):
    """A consumable resource. `spent` is the quantity taken from one that is not replenished."""

    kind = "consumable"
    field = "consumables"
    arn_kind = "consumable-resource"
    name_key, arn_key = "consumableResourceName", "consumableResourceArn"

    total: int
    spent: int = 0
    updates: dict[str, tuple[int, str, int]] = {}  # token -> when (ms), operation, quantity

    @property
    def replenishable(self) -> bool:
        return bool(self.detail["resourceType"] == "REPLENISHABLE")


RECORDS: tuple[type[ResourceRecord], ...] = (
    ComputeEnvironment,
    JobQueue,
    JobDefinition,
    SchedulingPolicy,
    ConsumableResource,
)
