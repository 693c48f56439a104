"""A scripted AWS for `explain_from_aws`: what each service would answer about one run, and what was
asked.

botocore's clients are real and check every request; the answers are a world's.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from batchml.aws.diagnosis import MOST_CALLS, Diagnosis
from batchml.explain.ask import ExplainedRun, explain_from_aws
from batchml.explain.missing import EndedRun
from batchml.explain.suggest import CommandWriter
from batchml.model.run import Attempt, JobStatus, Record, Run
from tests.support.fakes import FakeClock
from tests.support.scripted import ScriptedSession

NOW = 1_800_000_000.0  # seconds
MINUTE = 60_000  # ms
ID = "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-2222-3333-4444-555555555555"
DEV = CommandWriter("dev", "jobs/lenet")

EXITED = "Essential container in task exited"
OOM = "OutOfMemoryError: Container killed due to memory usage"
LOST = "Host EC2 (instance i-0abc) terminated."
TIMED_OUT = "Job attempt duration exceeded timeout"

_ARN = "arn:aws:batch:us-east-1:123456789012"
CE = "batchml-dev-gpu"
QUEUE = "batchml-dev-default"


def ended(code: int | None = 1, *lines: str, **more: Any) -> EndedRun:
    run = Run(
        ID, "lenet", "q", JobStatus.FAILED, exit_code=code, image="batchml/pytorch:0123456789ab",
        command=("python", "train.py"), memory_mib=1024, vcpus=1,
        attempts=(Attempt(exit_code=code, log_stream="s"),),
        **{"status_reason": EXITED, **more},
    )  # fmt: skip
    return EndedRun(run, DEV, lines=lines)


def ago(minutes: float) -> int:
    return int(NOW * 1000 - minutes * MINUTE)


def moment(minutes: float) -> datetime:
    return datetime.fromtimestamp(NOW - minutes * 60, UTC)


def job(
    status: str = "RUNNABLE", *, text: str = "", age: float = 30, **more: Any
) -> dict[str, Any]:
    """A JobDetail. `age` in minutes."""
    needs = more.pop("needs", {"VCPU": "4", "MEMORY": "15360"})
    container = {
        "image": "batchml/pytorch:0123456789ab", "command": ["python", "train.py"],
        "resourceRequirements": [{"type": k, "value": v} for k, v in needs.items()],
        **more.pop("container", {}),
    }  # fmt: skip
    found = {
        "jobId": ID, "jobName": "lenet", "jobQueue": f"{_ARN}:job-queue/{QUEUE}", "status": status,
        "createdAt": ago(age), "startedAt": 0, "container": container, **more,
    }  # fmt: skip
    return {**found, "statusReason": text} if text else found


def queue(**more: Any) -> dict[str, Any]:
    return {
        "jobQueueName": QUEUE, "state": "ENABLED", "status": "VALID", "priority": 1,
        "statusReason": "JobQueue Healthy",
        "computeEnvironmentOrder": [
            {"order": 1, "computeEnvironment": f"{_ARN}:compute-environment/{CE}"}
        ],
        **more,
    }  # fmt: skip


def compute(**more: Any) -> dict[str, Any]:
    resources = {
        "type": "EC2", "minvCpus": 0, "maxvCpus": 64, "desiredvCpus": 4,
        "instanceTypes": ["g5.xlarge", "g6.xlarge"], **more.pop("resources", {}),
    }  # fmt: skip
    return {
        "computeEnvironmentName": CE, "state": "ENABLED", "status": "VALID", "type": "MANAGED",
        "statusReason": "ComputeEnvironment Healthy", "computeResources": resources,
        "ecsClusterArn": "arn:aws:ecs:us-east-1:123456789012:cluster/c", **more,
    }  # fmt: skip


def snapshot(*front: str, age: float = 30, used: float = 0, **shares: Any) -> dict[str, Any]:
    """`front`: job ids; each has been at its place for `age` minutes."""
    return {
        "frontOfQueue": {
            "jobs": [
                {"jobArn": f"{_ARN}:job/{each}", "earliestTimeAtPosition": ago(age)}
                for each in front
            ]
        },
        "queueUtilization": {
            "totalCapacityUsage": [{"capacityUnit": "VCPU", "quantity": used}], **shares,
        },
    }  # fmt: skip


def host_type(name: str, vcpus: int, mib: int, gpus: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {
        "InstanceType": name, "VCpuInfo": {"DefaultVCpus": vcpus},
        "MemoryInfo": {"SizeInMiB": mib},
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
    }  # fmt: skip
    return {**found, "GpuInfo": {"Gpus": [{"Count": gpus}]}} if gpus else found


def activity(status: str, message: str = "", age: float = 20, group: str = CE) -> dict[str, Any]:
    return {
        "AutoScalingGroupName": f"{group}-asg-0abc", "StatusCode": status,
        "StatusMessage": message, "StartTime": moment(age),
        "Description": "Launching a new EC2 instance: i-0abc",
    }  # fmt: skip


class World:
    """Answers by operation. Of a list, one a call, and its last from then on."""

    def __init__(self, detail: Mapping[str, Any] | None, **answers: Any) -> None:
        self.answers: dict[str, Any] = {
            "DescribeJobs": {"jobs": [detail] if detail else []},
            "DescribeJobQueues": {"jobQueues": [queue()]},
            "DescribeComputeEnvironments": {"computeEnvironments": [compute()]},
            "GetJobQueueSnapshot": snapshot(ID),
            "ListContainerInstances": {"containerInstanceArns": []},
            "ListJobs": {"jobSummaryList": []},
            "DescribeScalingActivities": {"Activities": []},
            "DescribeInstanceTypes": {
                "InstanceTypes": [
                    host_type("g5.xlarge", 4, 16_384, 1), host_type("g6.xlarge", 4, 16_384, 1)
                ]
            },
            "GetLogEvents": {"events": [], "nextForwardToken": "f", "nextBackwardToken": "b"},
            **answers,
        }  # fmt: skip

    def __call__(self, operation: str, times: int) -> Any:
        """The answer to the n-th call of an operation, from 1."""
        answer = self.answers[operation]
        return answer[min(times, len(answer)) - 1] if isinstance(answer, list) else answer


def log(*lines: str) -> dict[str, Any]:
    events = [{"timestamp": 1, "message": line, "ingestionTime": 1} for line in lines]
    return {"events": events, "nextForwardToken": "f", "nextBackwardToken": "b"}


class Aws:
    """One session for all tests of a module: its clients take long to make."""

    def __init__(self) -> None:
        self.world = World(None)
        self.session = ScriptedSession(
            lambda name, _: self.world(name, len(self.session.asked(name)))
        )
        self.clock = FakeClock(NOW)

    def explain(
        self,
        world: World,
        commands: CommandWriter = DEV,
        record: Record | None = None,
        most: int = MOST_CALLS,
        job_id: str = ID,
        scripts: Mapping[str, str] = {},
    ) -> tuple[ExplainedRun, list[str]]:
        """What is told of the run, and the operations that were called for it."""
        self.world = world
        self.session.calls.clear()
        self.clock = FakeClock(NOW)
        told = explain_from_aws(
            Diagnosis(self.session, most), job_id, record, commands, self.clock, scripts=scripts
        )
        calls = [name for name, _ in self.session.calls]
        assert told.calls == len(calls) <= MOST_CALLS, calls
        return told, calls
