"""What AWS knows about why a run waits or failed: at most six calls, each for one question.

A question that may not be asked, is refused or not answered, comes to nothing and is noted: the
verdict then rests on less, and says so. Sources: AWS Batch User Guide, "Jobs stuck in RUNNABLE";
API References of AWS Batch, ECS, EC2 Auto Scaling and EC2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from batchml.aws.batch.responses import to_run, to_summary
from batchml.aws.errors import translated
from batchml.aws.session import Session
from batchml.errors import BatchmlError, ServiceUnreachable
from batchml.model.explanation import (
    Activity,
    ComputeState,
    HostType,
    Machine,
    QueueState,
    Snapshot,
    Stock,
    Waiting,
)
from batchml.model.names import bare_name
from batchml.model.run import Run

MOST_CALLS = 6
LAST_LINES = 200
_MAX_DESCRIBE = 100
_TRIES = 2  # of a question beside those to AWS Batch: where nobody answers, it is left out

T = TypeVar("T")


class Diagnosis:
    """Asks AWS. `calls` counts what was sent; `unasked` names what could not be asked, and why."""

    def __init__(self, session: Session, most: int = MOST_CALLS) -> None:
        self._session = session
        self._most = most
        self.calls = 0
        self.unasked: list[str] = []

    @property
    def left(self) -> int:
        return self._most - self.calls

    # --- AWS Batch --------------------------------------------------------------------------

    def runs(self, job_ids: Sequence[str]) -> tuple[Run, ...]:
        """The first hundred of these runs, as far as AWS Batch still knows them.

        Raises AccessError, ServiceError, ServiceUnreachable: without it there is nothing to say.
        """
        self.calls += 1
        with translated("DescribeJobs"):
            asked = list(job_ids[:_MAX_DESCRIBE])
            found = self._session.client("batch").describe_jobs(jobs=asked)["jobs"]
        return tuple(map(to_run, found))

    def children(self, array: Run, status: str) -> tuple[Run, ...]:
        """Those of an array that are in a state, by number, as far as one page of 1,000 tells."""

        def ask() -> tuple[Run, ...]:
            found = self._session.client("batch").list_jobs(
                arrayJobId=array.job_id, jobStatus=status
            )["jobSummaryList"]
            children = [to_summary(each, array.queue) for each in found]
            return tuple(sorted(children, key=lambda each: each.array_index or 0))

        return self._try("batch:ListJobs", ask) or ()

    def running(self, queue: str) -> tuple[str, ...]:
        """The job ids of a queue's runs that run, as far as the first hundred tell."""

        def ask() -> tuple[str, ...]:
            found = self._session.client("batch").list_jobs(
                jobQueue=queue, jobStatus="RUNNING", maxResults=_MAX_DESCRIBE
            )["jobSummaryList"]
            return tuple(each["jobId"] for each in found)

        return self._try("batch:ListJobs", ask) or ()

    def queue(self, name: str) -> QueueState | None:
        """One that is not there is DELETED."""

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

    def snapshot(self, queue: str) -> Snapshot | None:
        def ask() -> Snapshot:
            return to_snapshot(self._session.client("batch").get_job_queue_snapshot(jobQueue=queue))

        return self._try("batch:GetJobQueueSnapshot", ask)

    def stock(self, name: str) -> Stock | None:
        def ask() -> Stock:
            found = self._session.client("batch").describe_consumable_resource(
                consumableResource=name
            )
            return Stock(name, found.get("totalQuantity", 0), found.get("inUseQuantity", 0))

        return self._try("batch:DescribeConsumableResource", ask)

    # --- hosts ------------------------------------------------------------------------------

    def hosts(self, cluster: str) -> int | None:
        """How many hosts have joined the cluster of a compute environment; 100 counts as many."""

        def ask() -> int:
            found = self._client("ecs").list_container_instances(cluster=cluster)
            return len(found["containerInstanceArns"])

        return self._try("ecs:ListContainerInstances", ask)

    def activities(self, environments: Iterable[str]) -> tuple[Activity, ...] | None:
        """What the Auto Scaling groups of compute environments did last, the newest first.

        AWS Batch names a group after its environment, `NAME-asg-...` as far as anyone has seen; so
        all groups are asked for at once, the last hundred activities, and ours taken.
        """
        names = tuple(environments)

        def ask() -> tuple[Activity, ...]:
            found = self._client("autoscaling").describe_scaling_activities()["Activities"]
            return _of_groups(tuple(map(to_activity, found)), names)

        return self._try("autoscaling:DescribeScalingActivities", ask)

    def host_types(self, names: Sequence[str]) -> tuple[HostType, ...] | None:
        """What the instance types and families give, as far as the region has them.

        None as well for more than one page of them: a part says nothing of the largest.
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
        """`x86_64` or `arm64`; empty for an image that is not there."""

        def ask() -> str:
            found = self._client("ec2").describe_images(ImageIds=[ami])["Images"]
            return str(found[0].get("Architecture", "")) if found else ""

        return self._try("ec2:DescribeImages", ask)

    def machine(self, instance_id: str) -> Machine | None:
        def ask() -> Machine | None:
            found = self._client("ec2").describe_instances(InstanceIds=[instance_id])
            each = [one for group in found["Reservations"] for one in group["Instances"]]
            return to_machine(each[0]) if each else None

        return self._try("ec2:DescribeInstances", ask)

    # --- the log ----------------------------------------------------------------------------

    def last_lines(self, group: str, stream: str) -> tuple[str, ...] | None:
        """The last page of a stream: at most 200 lines, one call."""

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
            with translated(action.partition(":")[2]):
                return ask()
        except BatchmlError as error:
            self.unasked.append(f"{action} ({_why(error)})")
        return None


def _why(error: BatchmlError) -> str:
    if isinstance(error, ServiceUnreachable):
        return "no answer"
    return str(getattr(error, "code", "")) or "refused"


# --- AWS JSON -> our nouns --------------------------------------------------------------------


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


def to_snapshot(answer: Mapping[str, Any]) -> Snapshot:
    front = (answer.get("frontOfQueue") or {}).get("jobs", ())
    use = answer.get("queueUtilization") or {}
    fair = use.get("fairshareUtilization") or {}
    return Snapshot(
        front=tuple(
            Waiting(bare_name(each["jobArn"]), int(each.get("earliestTimeAtPosition", 0)))
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


def to_activity(raw: Mapping[str, Any]) -> Activity:
    return Activity(
        group=raw.get("AutoScalingGroupName", ""),
        status=raw.get("StatusCode", ""),
        message=raw.get("StatusMessage", ""),
        description=raw.get("Description", ""),
        at=_ms(raw.get("StartTime")),
    )


def _of_groups(activities: tuple[Activity, ...], names: Iterable[str]) -> tuple[Activity, ...]:
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


def to_machine(raw: Mapping[str, Any]) -> Machine:
    reason = raw.get("StateReason") or {}
    return Machine(
        instance_id=raw["InstanceId"],
        is_spot=raw.get("InstanceLifecycle") == "spot",
        state=(raw.get("State") or {}).get("Name", ""),
        reason=reason.get("Message", "") or reason.get("Code", ""),
    )
