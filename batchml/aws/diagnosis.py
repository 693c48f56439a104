"""Ask AWS why a run waits or failed, in at most six calls.

A call that fails or is not allowed is recorded in `failed_calls` and returns None: the explanation
is then less certain, and says so.

Sources: AWS Batch User Guide, "Jobs stuck in RUNNABLE"; API References of AWS Batch, ECS, EC2 Auto
Scaling and EC2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.errors import translate_errors
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceUnreachable
from batchml.model.explanation import (
    ComputeState,
    ConsumableState,
    HostType,
    InstanceState,
    QueueSnapshot,
    QueueState,
    ScalingActivity,
    WaitingJob,
)
from batchml.model.names import bare_name
from batchml.model.run import Run

MOST_CALLS = 6
LAST_LINES = 200
_MAX_DESCRIBE = 100
_TRIES = 2  # of a call to other services than AWS Batch

T = TypeVar("T")


class Diagnosis:
    """`calls` counts the calls; `failed_calls` has the failed calls, each with the reason."""

    def __init__(self, session: Session, most: int = MOST_CALLS) -> None:
        self._session = session
        self._most = most
        self.calls = 0
        self.failed_calls: list[str] = []

    @property
    def left(self) -> int:
        return self._most - self.calls

    # --- AWS Batch --------------------------------------------------------------------------

    def runs(self, job_ids: Sequence[str]) -> tuple[Run, ...]:
        """The first hundred of these runs that AWS Batch still knows.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        self.calls += 1
        with translate_errors("DescribeJobs"):
            ids = list(job_ids[:_MAX_DESCRIBE])
            found = self._session.client("batch").describe_jobs(jobs=ids)["jobs"]
        return tuple(map(to_run, found))

    def children(self, array: Run, status: str) -> tuple[Run, ...]:
        """The first 1,000 children of an array in a state, by index."""

        def ask() -> tuple[Run, ...]:
            found = self._session.client("batch").list_jobs(
                arrayJobId=array.job_id, jobStatus=status
            )["jobSummaryList"]
            children = [to_summary(each, array.queue) for each in found]
            return tuple(sorted(children, key=lambda each: each.array_index or 0))

        return self._try("batch:ListJobs", ask) or ()

    def running(self, queue: str) -> tuple[str, ...]:
        """The job ids of the first hundred running runs of a queue."""

        def ask() -> tuple[str, ...]:
            found = self._session.client("batch").list_jobs(
                jobQueue=queue, jobStatus="RUNNING", maxResults=_MAX_DESCRIBE
            )["jobSummaryList"]
            return tuple(each["jobId"] for each in found)

        return self._try("batch:ListJobs", ask) or ()

    def queue(self, name: str) -> QueueState | None:
        """A queue that does not exist has the status DELETED."""

        def ask() -> QueueState:
            found = self._session.client("batch").describe_job_queues(jobQueues=[name])
            return next(map(to_queue, found["jobQueues"]), QueueState(name, status="DELETED"))

        return self._try("batch:DescribeJobQueues", ask)

    def environments(self, names: Sequence[str]) -> tuple[ComputeState, ...] | None:
        """In the order of `names`."""

        def ask() -> tuple[ComputeState, ...]:
            found = self._session.client("batch").describe_compute_environments(
                computeEnvironments=list(names)
            )["computeEnvironments"]
            known = sorted(map(to_compute, found), key=lambda each: names.index(each.name))
            return tuple(known)

        return self._try("batch:DescribeComputeEnvironments", ask)

    def snapshot(self, queue: str) -> QueueSnapshot | None:
        def ask() -> QueueSnapshot:
            return to_snapshot(self._session.client("batch").get_job_queue_snapshot(jobQueue=queue))

        return self._try("batch:GetJobQueueSnapshot", ask)

    def consumable(self, name: str) -> ConsumableState | None:
        def ask() -> ConsumableState:
            found = self._session.client("batch").describe_consumable_resource(
                consumableResource=name
            )
            return ConsumableState(
                name, found.get("totalQuantity", 0), found.get("inUseQuantity", 0)
            )

        return self._try("batch:DescribeConsumableResource", ask)

    # --- Hosts ------------------------------------------------------------------------------

    def hosts(self, cluster: str) -> int | None:
        """The number of hosts in the cluster of a compute environment, at most 100."""

        def ask() -> int:
            found = self._client("ecs").list_container_instances(cluster=cluster)
            return len(found["containerInstanceArns"])

        return self._try("ecs:ListContainerInstances", ask)

    def activities(self, environments: Iterable[str]) -> tuple[ScalingActivity, ...] | None:
        """The last activities of the compute environments' Auto Scaling groups, newest first.

        They are selected from the last hundred activities of all groups, by the group's name:
        AWS Batch seems to name groups `NAME-asg-...` after the compute environment.
        """
        names = tuple(environments)

        def ask() -> tuple[ScalingActivity, ...]:
            found = self._client("autoscaling").describe_scaling_activities()["Activities"]
            return _of_groups(tuple(map(to_activity, found)), names)

        return self._try("autoscaling:DescribeScalingActivities", ask)

    def host_types(self, names: Sequence[str]) -> tuple[HostType, ...] | None:
        """The instance types with these names or families that the region has.

        None if they fill more than one page: the largest type might be on another page.
        """
        values = [name if "." in name else f"{name}.*" for name in names]

        def ask() -> tuple[HostType, ...] | None:
            found = self._client("ec2").describe_instance_types(
                Filters=[{"Name": "instance-type", "Values": values}]
            )
            is_whole = not found.get("NextToken")
            return tuple(map(to_host_type, found["InstanceTypes"])) if is_whole else None

        return self._try("ec2:DescribeInstanceTypes", ask)

    def architecture(self, ami: str) -> str | None:
        """`x86_64` or `arm64`; "" for an image that does not exist."""

        def ask() -> str:
            found = self._client("ec2").describe_images(ImageIds=[ami])["Images"]
            return str(found[0].get("Architecture", "")) if found else ""

        return self._try("ec2:DescribeImages", ask)

    def instance(self, instance_id: str) -> InstanceState | None:
        def ask() -> InstanceState | None:
            found = self._client("ec2").describe_instances(InstanceIds=[instance_id])
            each = [one for group in found["Reservations"] for one in group["Instances"]]
            return to_machine(each[0]) if each else None

        return self._try("ec2:DescribeInstances", ask)

    # --- The log ----------------------------------------------------------------------------

    def last_lines(self, group: str, stream: str) -> tuple[str, ...] | None:
        """The last lines of a stream, at most 200."""

        def ask() -> tuple[str, ...]:
            page = self._client("logs").get_log_events(
                logGroupName=group, logStreamName=stream, limit=LAST_LINES
            )
            return tuple(event["message"] for event in page["events"])

        return self._try("logs:GetLogEvents", ask)

    def _client(self, service: str) -> Any:
        return self._session.client(service, attempts=_TRIES)

    def _try(self, action: str, ask: Callable[[], T]) -> T | None:
        if self.left <= 0:
            return None
        self.calls += 1
        try:
            with translate_errors(action.partition(":")[2]):
                return ask()
        except BatchmlError as error:
            self.failed_calls.append(f"{action} ({_why(error)})")
        return None


def _why(error: BatchmlError) -> str:
    if isinstance(error, ServiceUnreachable):
        return "no answer"
    return str(getattr(error, "code", "")) or "refused"


# --- From AWS's JSON ------------------------------------------------------------------------------


def to_queue(detail: Mapping[str, Any]) -> QueueState:
    order = sorted(detail.get("computeEnvironmentOrder", ()), key=lambda each: int(each["order"]))
    return QueueState(
        name=detail["jobQueueName"],
        is_enabled=detail.get("state") != "DISABLED",
        status=detail.get("status", "VALID"),
        status_reason=detail.get("statusReason", ""),
        environments=tuple(bare_name(each["computeEnvironment"]) for each in order),
        policy=bare_name(detail.get("schedulingPolicyArn", "")),
        priority=detail.get("priority", 0),
    )


def to_compute(detail: Mapping[str, Any]) -> ComputeState:
    resources = detail.get("computeResources") or {}
    images = [each.get("imageIdOverride", "") for each in resources.get("ec2Configuration", ())]
    return ComputeState(
        name=detail["computeEnvironmentName"],
        is_enabled=detail.get("state") != "DISABLED",
        status=detail.get("status", "VALID"),
        status_reason=detail.get("statusReason", ""),
        max_vcpus=resources.get("maxvCpus", 0),
        desired_vcpus=resources.get("desiredvCpus", 0),
        is_spot="SPOT" in resources.get("type", ""),
        is_managed=detail.get("type", "MANAGED") == "MANAGED",
        instance_types=tuple(resources.get("instanceTypes") or ()),
        cluster=detail.get("ecsClusterArn", ""),
        service_role=detail.get("serviceRole", ""),
        ami=next(filter(None, images), "") or resources.get("imageId", ""),
        min_vcpus=resources.get("minvCpus", 0),
    )


def to_snapshot(answer: Mapping[str, Any]) -> QueueSnapshot:
    front = (answer.get("frontOfQueue") or {}).get("jobs", ())
    use = answer.get("queueUtilization") or {}
    fair = use.get("fairshareUtilization") or {}
    return QueueSnapshot(
        front=tuple(
            WaitingJob(bare_name(each["jobArn"]), int(each.get("earliestTimeAtPosition", 0)))
            for each in front
        ),
        used_vcpus=_vcpus(use.get("totalCapacityUsage", ())),
        active_shares=int(fair.get("activeShareCount", 0)),
        shares={
            each["shareIdentifier"]: _vcpus(each.get("capacityUsage", ()))
            for each in fair.get("topCapacityUtilization", ())
        },
    )


def _vcpus(capacities: Iterable[Mapping[str, Any]]) -> float:
    return sum(float(c["quantity"]) for c in capacities if c.get("capacityUnit") == "VCPU")


def to_activity(raw: Mapping[str, Any]) -> ScalingActivity:
    return ScalingActivity(
        group=raw.get("AutoScalingGroupName", ""),
        status=raw.get("StatusCode", ""),
        message=raw.get("StatusMessage", ""),
        description=raw.get("Description", ""),
        at=_ms(raw.get("StartTime")),
    )


def _of_groups(
    activities: tuple[ScalingActivity, ...], names: Iterable[str]
) -> tuple[ScalingActivity, ...]:
    exact = tuple(f"{name}-asg" for name in names)
    loose = tuple(f"{name}-" for name in names)
    found = tuple(each for each in activities if each.group.startswith(exact))
    return found or tuple(each for each in activities if each.group.startswith(loose))


def _ms(moment: object) -> int:
    return int(moment.timestamp() * 1000) if isinstance(moment, datetime) else 0


def to_host_type(raw: Mapping[str, Any]) -> HostType:
    gpus = (raw.get("GpuInfo") or {}).get("Gpus", ())
    return HostType(
        name=raw["InstanceType"],
        vcpus=raw["VCpuInfo"]["DefaultVCpus"],
        memory_mib=raw["MemoryInfo"]["SizeInMiB"],
        gpus=sum(int(each.get("Count", 0)) for each in gpus),
        architectures=tuple((raw.get("ProcessorInfo") or {}).get("SupportedArchitectures", ())),
    )


def to_machine(raw: Mapping[str, Any]) -> InstanceState:
    reason = raw.get("StateReason") or {}
    return InstanceState(
        instance_id=raw["InstanceId"],
        is_spot=raw.get("InstanceLifecycle") == "spot",
        state=(raw.get("State") or {}).get("Name", ""),
        reason=reason.get("Message", "") or reason.get("Code", ""),
    )
