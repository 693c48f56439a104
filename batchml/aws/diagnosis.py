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
from batchml.aws.bootstrap import MOST_MS, BootstrapFailure, parse_console
from batchml.aws.errors import call
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
from batchml.model.run import PROJECT_TAG, Run

MOST_CALLS = 6
LAST_LINES = 200
_MAX_DESCRIBE = 100
_TRIES = 2  # of a call to a service other than AWS Batch

T = TypeVar("T")


class Diagnosis:
    """Makes at most `max_calls` calls for one explanation.

    `calls` counts the calls; `failed_calls` lists the failed calls, each with the reason.
    """

    def __init__(self, session: Session, max_calls: int = MOST_CALLS) -> None:
        self._session = session
        self._max_calls = max_calls
        self.calls = 0
        self.failed_calls: list[str] = []

    @property
    def left(self) -> int:
        """The number of calls that are left."""
        return self._max_calls - self.calls

    # --- AWS Batch --------------------------------------------------------------------------

    def runs(self, job_ids: Sequence[str]) -> tuple[Run, ...]:
        """The first hundred of these runs that AWS Batch still knows.

        Raises AccessError, ServiceError, ServiceUnreachable.
        """
        self.calls += 1
        ids = list(job_ids[:_MAX_DESCRIBE])
        answer = call(self._session.client("batch"), "DescribeJobs", jobs=ids)
        return tuple(map(to_run, answer["jobs"]))

    def children(self, array: Run, status: str) -> tuple[Run, ...]:
        """The first 1,000 children of an array in a state, by index."""

        def convert(answer: Mapping[str, Any]) -> tuple[Run, ...]:
            children = [to_summary(each, array.queue) for each in answer["jobSummaryList"]]
            return tuple(sorted(children, key=lambda each: each.array_index or 0))

        request = {"arrayJobId": array.job_id, "jobStatus": status}
        return self._ask("batch:ListJobs", convert, **request) or ()

    def running(self, queue: str) -> tuple[str, ...]:
        """The job ids of the first hundred running runs of a queue."""

        def convert(answer: Mapping[str, Any]) -> tuple[str, ...]:
            return tuple(each["jobId"] for each in answer["jobSummaryList"])

        request = {"jobQueue": queue, "jobStatus": "RUNNING", "maxResults": _MAX_DESCRIBE}
        return self._ask("batch:ListJobs", convert, **request) or ()

    def queue(self, name: str) -> QueueState | None:
        """The queue; if it does not exist, its status is DELETED."""

        def convert(answer: Mapping[str, Any]) -> QueueState:
            return next(map(to_queue, answer["jobQueues"]), QueueState(name, status="DELETED"))

        return self._ask("batch:DescribeJobQueues", convert, jobQueues=[name])

    def environments(self, names: Sequence[str]) -> tuple[ComputeState, ...] | None:
        """The compute environments that exist, in the order of `names`."""

        def convert(answer: Mapping[str, Any]) -> tuple[ComputeState, ...]:
            found = map(to_compute, answer["computeEnvironments"])
            return tuple(sorted(found, key=lambda each: names.index(each.name)))

        request = {"computeEnvironments": list(names)}
        return self._ask("batch:DescribeComputeEnvironments", convert, **request)

    def snapshot(self, queue: str) -> QueueSnapshot | None:
        """The front of a queue."""
        return self._ask("batch:GetJobQueueSnapshot", to_snapshot, jobQueue=queue)

    def consumable(self, name: str) -> ConsumableState | None:
        """A consumable resource."""

        def convert(answer: Mapping[str, Any]) -> ConsumableState:
            total, in_use = answer.get("totalQuantity", 0), answer.get("inUseQuantity", 0)
            return ConsumableState(name, total, in_use)

        return self._ask("batch:DescribeConsumableResource", convert, consumableResource=name)

    # --- Hosts ------------------------------------------------------------------------------

    def count_hosts(self, cluster: str) -> int | None:
        """The number of hosts in the ECS cluster of a compute environment, at most 100."""

        def convert(answer: Mapping[str, Any]) -> int:
            return len(answer["containerInstanceArns"])

        return self._ask("ecs:ListContainerInstances", convert, cluster=cluster)

    def activities(self, environments: Iterable[str]) -> tuple[ScalingActivity, ...] | None:
        """The last activities of the compute environments' Auto Scaling groups, newest first.

        They are selected from the last hundred activities of all groups by the group's name: AWS
        Batch seems to name groups `NAME-asg-...` after the compute environment.
        """
        names = tuple(environments)

        def convert(answer: Mapping[str, Any]) -> tuple[ScalingActivity, ...]:
            return _of_groups(tuple(map(to_activity, answer["Activities"])), names)

        return self._ask("autoscaling:DescribeScalingActivities", convert)

    def host_types(self, names: Sequence[str]) -> tuple[HostType, ...] | None:
        """The instance types with these names or families that the region has.

        None if they fill more than one page: the largest type might be on another page.
        """

        def convert(answer: Mapping[str, Any]) -> tuple[HostType, ...] | None:
            if answer.get("NextToken"):
                return None
            return tuple(map(to_host_type, answer["InstanceTypes"]))

        values = [name if "." in name else f"{name}.*" for name in names]
        filters = [{"Name": "instance-type", "Values": values}]
        return self._ask("ec2:DescribeInstanceTypes", convert, Filters=filters)

    def architecture(self, ami: str) -> str | None:
        """`x86_64` or `arm64`; "" if the image does not exist."""

        def convert(answer: Mapping[str, Any]) -> str:
            return next((str(each.get("Architecture", "")) for each in answer["Images"]), "")

        return self._ask("ec2:DescribeImages", convert, ImageIds=[ami])

    def instance(self, instance_id: str) -> InstanceState | None:
        """An EC2 instance; None if EC2 does not know it."""

        def convert(answer: Mapping[str, Any]) -> InstanceState | None:
            found = (each for group in answer["Reservations"] for each in group["Instances"])
            return next(map(to_instance, found), None)

        return self._ask("ec2:DescribeInstances", convert, InstanceIds=[instance_id])

    def bootstrap_failure(
        self, env: str, computes: Sequence[str], now: int
    ) -> BootstrapFailure | None:
        """Why the newest ended host of these compute environments did not join, in two calls.

        `computes`: names in batchml.toml. `now`: in ms. None if its console shows no failed script,
        or if the script succeeds now: a host has run for longer than a script may take.
        """

        def newest_first(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
            found = [each for group in answer["Reservations"] for each in group["Instances"]]
            return sorted(found, key=lambda each: _ms(each.get("LaunchTime")), reverse=True)

        filters = [
            {"Name": "tag:batchml:env", "Values": [env]},
            {"Name": "tag:batchml:name", "Values": list(computes)},
        ]
        hosts = self._ask("ec2:DescribeInstances", newest_first, Filters=filters) or []
        up = [each for each in hosts if each["State"]["Name"] in ("pending", "running")]
        gone = [each for each in hosts if each not in up]
        if not gone or any(now - _ms(each.get("LaunchTime")) > MOST_MS for each in up):
            return None
        newest = gone[0]
        tags = {each["Key"]: each["Value"] for each in newest.get("Tags", ())}

        def convert(answer: Mapping[str, Any]) -> BootstrapFailure | None:
            found = parse_console(answer.get("Output") or "")
            if found is None:
                return None
            return BootstrapFailure(
                tags.get("batchml:name", ""), newest["InstanceId"], *found,
                ended=len(gone), starting=len(up), at=_ms(newest.get("LaunchTime")),
            )  # fmt: skip

        return self._ask("ec2:GetConsoleOutput", convert, InstanceId=newest["InstanceId"])

    # --- The log ----------------------------------------------------------------------------

    def last_lines(self, group: str, stream: str) -> tuple[str, ...] | None:
        """The last lines of a stream, at most 200."""

        def convert(answer: Mapping[str, Any]) -> tuple[str, ...]:
            return tuple(event["message"] for event in answer["events"])

        request = {"logGroupName": group, "logStreamName": stream, "limit": LAST_LINES}
        return self._ask("logs:GetLogEvents", convert, **request)

    def _ask(
        self, action: str, convert: Callable[[Mapping[str, Any]], T], **request: Any
    ) -> T | None:
        """Convert the answer of a call; None if the call failed, or if no call is left."""
        if self.left <= 0:
            return None
        self.calls += 1
        service, _, operation = action.partition(":")
        try:
            client = self._session.client(service, attempts=5 if service == "batch" else _TRIES)
            return convert(call(client, operation, **request))
        except ServiceUnreachable:
            self.failed_calls.append(f"{action} (no answer)")
        except BatchmlError as error:
            code = str(getattr(error, "code", "")) or "refused"
            self.failed_calls.append(f"{action} ({code})")
        return None


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
        project=detail.get("tags", {}).get(PROJECT_TAG, ""),
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


def to_instance(raw: Mapping[str, Any]) -> InstanceState:
    reason = raw.get("StateReason") or {}
    return InstanceState(
        instance_id=raw["InstanceId"],
        is_spot=raw.get("InstanceLifecycle") == "spot",
        state=(raw.get("State") or {}).get("Name", ""),
        reason=reason.get("Message", "") or reason.get("Code", ""),
    )
