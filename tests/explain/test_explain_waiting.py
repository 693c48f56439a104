"""Why a run waits: one world for each cause of "Jobs stuck in RUNNABLE", its calls counted.

An alarm is raised only for what cannot mend itself: a host that boots is waited for.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.explain.ask import own_held_runs
from batchml.explain.suggest import CommandWriter
from batchml.explain.waiting import add_waiting_workers, explain_idleness
from batchml.model.explanation import Explanation
from batchml.model.group import HELD_TAG
from batchml.model.run import JobStatus, Record, Run
from tests.support.explain_world import (
    CE,
    ID,
    NOW,
    OTHER,
    QUEUE,
    Aws,
    World,
    activity,
    ago,
    compute,
    host_type,
    job,
    moment,
    queue,
    snapshot,
)

TOO_LARGE = (
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) is "
    "higher than that can be met by the CE(s) attached to the job queue."
)
MAX_RESOURCE = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - CE(s) associated with the job queue "
    "cannot meet the CPU requirement of the job."
)
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for "
    "instance type [g5.xlarge]"
)
ROLE = (
    "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS \N{EN DASH} Batch service role has a permission "
    "issue."
)
UNSUPPORTED = (
    "MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED - Your compute environment associated "
    "with this job queue has an unsupported instance type configuration."
)
ACTION = "ACTION_REQUIRED - CE(s) associated with the job queue are invalid."
UNDETERMINED = "UNDETERMINED - Batch job is blocked, root cause is undetermined."
NOT_OFFERED = (
    "Your requested instance type (g6.xlarge) is not supported in your requested Availability Zone "
    "(us-east-1e). Please retry your request by not specifying an Availability Zone."
)
QUOTA = (
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the "
    "instance bucket that the specified instance type belongs to. Launching EC2 instance failed."
)


def environments(**more: Any) -> dict[str, Any]:
    return {"computeEnvironments": [compute(**more)]}


def queues(**more: Any) -> dict[str, Any]:
    return {"jobQueues": [queue(**more)]}


INVALID = "CLIENT_ERROR - Not authorized to perform sts:AssumeRole"
NEVER_JOINED = (
    "Your compute environment has been INVALIDATED and scaled down because none of the instances "
    "joined the underlying ECS Cluster."
)
LICENCE = {"consumableResourceList": [{"consumableResource": "licence", "quantity": 2}]}
FORTY = [{"capacityUnit": "VCPU", "quantity": 40.0}]
FAIR: dict[str, Any] = {
    "activeShareCount": 3,
    "topCapacityUtilization": [{"shareIdentifier": "ann", "capacityUsage": FORTY}],
}
POLICY = "arn:aws:batch:us-east-1:123456789012:scheduling-policy/p"
BIG = {"VCPU": "128", "MEMORY": "1024"}
EIGHT_GPUS = {"VCPU": "4", "MEMORY": "1024", "GPU": "8"}
AHEAD = {"jobs": [{**job("RUNNABLE"), "jobId": OTHER}]}
STUCK = {"jobs": [{**job("RUNNABLE", text=MAX_RESOURCE), "jobId": OTHER}]}
ONE_HOST = {"containerInstanceArns": ["arn:aws:ecs:us-east-1:123456789012:container-instance/c/1"]}


def activities(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"Activities": list(entries)}


# name -> (cause, is it a problem, a word of the evidence, the command's beginning, the world)
CAUSES: dict[str, tuple[str, bool, str, str, World]] = {
    "not at the head": (
        "queue-position", False, "position 2", "batchml ls --queue default",
        World(job(), GetJobQueueSnapshot=snapshot(OTHER, ID),
              DescribeJobs=[{"jobs": [job()]}, AHEAD]),
    ),
    "beyond the first hundred": (
        "queue-position", False, "not among the first 100", "batchml ls --queue",
        World(job(), GetJobQueueSnapshot=snapshot(*[OTHER] * 100)),
    ),
    "behind one that is stuck": (
        "behind-stuck-run", True, "MAX_RESOURCE", f"batchml explain {OTHER}",
        World(job(), GetJobQueueSnapshot=snapshot(OTHER, ID),
              DescribeJobs=[{"jobs": [job()]}, STUCK]),
    ),
    "what it needs is in use": (
        "full", False, "62 of at most 64", "batchml ls --queue default --status RUNNING",
        World(job(), GetJobQueueSnapshot=snapshot(ID, used=62)),
    ),
    "no capacity": (
        "no-capacity", True, "keeps trying", "",
        World(job(text=NO_CAPACITY)),
    ),
    "no capacity, says Auto Scaling": (
        "no-capacity", True, "do not have sufficient", "",
        World(job(), DescribeScalingActivities=activities(activity(
            "Failed", "We currently do not have sufficient g5.xlarge capacity in us-east-1a."))),
    ),
    "larger than max_vcpus": (
        "too-large-for-compute", True, "at most 64 vCPUs", "batchml compute update gpu --max-vcpus",
        World(job(text=MAX_RESOURCE, needs=BIG)),
    ),
    "larger than max_vcpus, by arithmetic alone": (
        "too-large-for-compute", True, "at most 64 vCPUs", "batchml compute update gpu --max-vcpus",
        World(job(needs=BIG, age=1)),
    ),
    "larger than any host": (
        "too-large-for-hosts", True, "1 GPU", "batchml setup",
        World(job(text=TOO_LARGE, needs=EIGHT_GPUS, age=1)),
    ),
    "hosts without Neuron chips": (
        "no-neurons", True, "c7i.large", "batchml compute list",
        World(job(needs={"VCPU": "1", "MEMORY": "1024"}, container={"linuxParameters": {"devices": [
            {"hostPath": "/dev/infiniband/uverbs0"}, {"hostPath": "/dev/neuron0"}]}}),
            DescribeComputeEnvironments=environments(resources={"instanceTypes": ["c7i.large"]})),
    ),
    "AWS says so for long, and arithmetic cannot tell": (
        "too-large-for-hosts", True, "JOB_RESOURCE", "batchml setup",
        World(job(text=TOO_LARGE), DescribeComputeEnvironments=environments(
            resources={"instanceTypes": ["optimal"]})),
    ),
    "the service role": (
        "service-role", True, "role/mine", "batchml setup",
        World(job(text=ROLE), DescribeComputeEnvironments=environments(
            serviceRole="arn:aws:iam::123456789012:role/mine")),
    ),
    "a type that the region does not have": (
        "instance-configuration", True, "asked for: g5.xlarge, g6.xlarge", "batchml setup",
        World(job(text=UNSUPPORTED),
              DescribeInstanceTypes={"InstanceTypes": [host_type("g5.xlarge", 4, 16_384, 1)]}),
    ),
    "an AMI for another processor": (
        "instance-configuration", True, "UNSUPPORTED", "batchml setup",
        World(job(text=UNSUPPORTED),
              DescribeComputeEnvironments=environments(resources={
                  "ec2Configuration": [{"imageType": "ECS_AL2023", "imageIdOverride": "ami-0"}]}),
              DescribeImages={"Images": [{"ImageId": "ami-0", "Architecture": "arm64"}]}),
    ),
    "an invalid environment": (
        "environment-invalid", True, "sts:AssumeRole", "batchml setup",
        World(job(text=ACTION), DescribeComputeEnvironments=environments(
            status="INVALID", statusReason=INVALID)),
    ),
    "an environment given up by AWS Batch": (
        "hosts-not-joining", True, "none of the instances joined", "batchml setup",
        World(job(text=ACTION), DescribeComputeEnvironments=environments(
            status="INVALID", statusReason=NEVER_JOINED)),
    ),
    "a disabled environment": (
        "environment-disabled", True, "DISABLED", "batchml compute update gpu --enable",
        World(job(), DescribeComputeEnvironments=environments(state="DISABLED")),
    ),
    "a disabled queue, and nothing else": (
        "queue-disabled", True, "DISABLED", "batchml queue update default --enable",
        World(job(), DescribeJobQueues=queues(state="DISABLED"),
              ListContainerInstances=ONE_HOST),
    ),
    "a queue that was deleted": (
        "queue-gone", True, "", "batchml queue list",
        World(job(), DescribeJobQueues={"jobQueues": []}),
    ),
    "an invalid queue": (
        "queue-invalid", True, "broken", "batchml setup",
        World(job(), DescribeJobQueues=queues(status="INVALID", statusReason="broken")),
    ),
    "a queue without environments": (
        "no-compute", True, "", "batchml setup",
        World(job(), DescribeJobQueues=queues(computeEnvironmentOrder=[])),
    ),
    "AWS Batch asks for no host": (
        "no-hosts", True, "0 vCPUs asked for", "batchml doctor",
        World(job(text=UNDETERMINED),
              DescribeComputeEnvironments=environments(resources={"desiredvCpus": 0})),
    ),
    "a quota of 0": (
        "quota", True, "vCPU limit of 0", "batchml doctor",
        World(job(), DescribeScalingActivities=activities(activity("Failed", QUOTA))),
    ),
    "a spot quota that is reached": (
        "quota", True, "MaxSpot", "batchml doctor",
        World(job(age=1), GetJobQueueSnapshot=snapshot(ID, age=1), DescribeScalingActivities=(
            activities(activity("Failed", "MaxSpotInstanceCountExceeded", 1)))),
    ),
    "instances that never join": (
        "hosts-not-joining", True, "hosts in the cluster: 0", "batchml setup",
        World(job(), DescribeScalingActivities=activities(activity("Successful"))),
    ),
    "EC2 refuses for another reason": (
        "launch-failed", True, "not authorized to use launch template", "batchml setup",
        World(job(), DescribeScalingActivities=activities(
            activity("Failed", "You are not authorized to use launch template"))),
    ),
    "a zone that does not offer its instance type": (
        "launch-failed", True, "requested Availability Zone (us-east-1e)", "batchml setup",
        World(job(), DescribeScalingActivities=activities(activity("Failed", NOT_OFFERED))),
    ),
    "a subnet that has no free address": (
        "launch-failed", True, "free addresses", "batchml setup",
        World(job(), DescribeScalingActivities=activities(activity(
            "Failed", "There are not enough free addresses in subnet 'subnet-1' to satisfy the "
            "requested number of instances."))),
    ),
    "a run that it depends on goes on": (
        "dependency", False, f"{OTHER} is RUNNING", f"batchml explain {OTHER}",
        World(None, DescribeJobs=[{"jobs": [job("PENDING", dependsOn=[{"jobId": OTHER}])]},
                                  {"jobs": [{**job("RUNNING"), "jobId": OTHER}]}]),
    ),
    "a run that it depends on has failed": (
        "dependency-failed", True, "fails runs that depend", f"batchml explain {OTHER}",
        World(None, DescribeJobs=[{"jobs": [job("PENDING", dependsOn=[{"jobId": OTHER}])]},
                                  {"jobs": [{**job("FAILED"), "jobId": OTHER}]}]),
    ),
    "a circle of runs": (
        "dependency-cycle", True, "waits for", f"batchml cancel {ID}",
        World(None, DescribeJobs=[
            {"jobs": [job("PENDING", dependsOn=[{"jobId": OTHER}])]},
            {"jobs": [{**job("PENDING", dependsOn=[{"jobId": ID}]), "jobId": OTHER}]}]),
    ),
    "a run that is forgotten": (
        "dependency-forgotten", True, "does not know it", f"batchml cancel {ID}",
        World(None, DescribeJobs=[{"jobs": [job("PENDING", dependsOn=[{"jobId": OTHER}])]},
                                  {"jobs": []}]),
    ),
    "an array at work": (
        "array-at-work", False, "2 RUNNING", f"batchml logs -f {ID}",
        World(job("PENDING", arrayProperties={
            "size": 4, "statusSummary": {"RUNNING": 2, "SUCCEEDED": 2}})),
    ),
    "an array of which some has failed": (
        "array-at-work", True, "1 FAILED, 1 RUNNING of 2", f"batchml explain {ID}:1",
        World(job("PENDING", arrayProperties={
            "size": 2, "statusSummary": {"RUNNING": 1, "FAILED": 1}}),
              ListJobs={"jobSummaryList": [{
                  "jobId": f"{ID}:1", "jobName": "lenet", "status": "FAILED",
                  "arrayProperties": {"index": 1}}]}),
    ),
    "an array of which some has failed, after runs that have ended": (
        "array-at-work", True, "1 FAILED, 1 RUNNING of 2", f"batchml explain {ID}:1",
        World(job("PENDING", dependsOn=[{"jobId": OTHER}], arrayProperties={
            "size": 2, "statusSummary": {"RUNNING": 1, "FAILED": 1}}),
              ListJobs={"jobSummaryList": [{
                  "jobId": f"{ID}:1", "jobName": "lenet", "status": "FAILED",
                  "arrayProperties": {"index": 1}}]}),
    ),
    "an array whose children wait": (
        "full", False, "child 3 of 4", "batchml ls --queue",
        World(job("PENDING", arrayProperties={"size": 4, "statusSummary": {"RUNNABLE": 4}}),
              ListJobs={"jobSummaryList": [{
                  "jobId": f"{ID}:3", "jobName": "lenet", "status": "RUNNABLE",
                  "createdAt": ago(30), "arrayProperties": {"index": 3}}]},
              GetJobQueueSnapshot=snapshot(f"{ID}:3", used=64)),
    ),
    "its share's turn": (
        "share-waits", False, "share ann: 40 vCPUs", "batchml ls --queue",
        World(job(shareIdentifier="ann"), DescribeJobQueues=queues(schedulingPolicyArn=POLICY),
              DescribeJobs=[{"jobs": [job(shareIdentifier="ann")]}, AHEAD],
              GetJobQueueSnapshot=snapshot(OTHER, ID, fairshareUtilization=FAIR)),
    ),
    "more shares than a queue serves": (
        "share-limit", True, "active shares: 500", "batchml ls --queue",
        World(job(shareIdentifier="zoe"), DescribeJobQueues=queues(schedulingPolicyArn=POLICY),
              GetJobQueueSnapshot=snapshot(
                  OTHER, fairshareUtilization={**FAIR, "activeShareCount": 500})),
    ),
    "a consumable resource is exhausted": (
        "consumable", False, "9 of 10 in use", "aws batch list-jobs-by-consumable-resource",
        World(job(consumableResourceProperties=LICENCE), DescribeConsumableResource={
            "consumableResourceName": "licence", "consumableResourceArn": "a",
            "totalQuantity": 10, "inUseQuantity": 9}),
    ),
    "nothing explains it": (
        "undetermined", True, "UNDETERMINED", "batchml doctor",
        World(job(text=UNDETERMINED), ListContainerInstances=ONE_HOST),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_told_by_at_most_six_calls(aws: Aws, name: str) -> None:
    cause, is_problem, evidence, command, world = CAUSES[name]
    told, calls = aws.explain(world)
    found = told.explanation
    assert (found.cause, found.is_problem) == (cause, is_problem), (found, calls)
    assert evidence in "\n".join(found.evidence)
    assert found.command.startswith(command)
    assert "\n" not in found.command
    assert bool(found.command) == bool(command)
    assert not command or found.command.endswith("--env dev") or command.startswith("aws ")
    assert len(calls) <= 6
    assert not told.failed_calls


# --- a bootstrap script that fails ----------------------------------------------------------

CONSOLE = """\
[   17.1] systemd[1]: Starting ECS agent\r
batchml-bootstrap: exit code 3 after 12 s\r
batchml-bootstrap| installing lustre\r
batchml-bootstrap| no such package\r
[   33.0] systemd[1]: Powering off\r
"""
SCRIPTS = {"gpu": "on_create.sh"}


def instance(state: str, launched: float, name: str = "i-0abc") -> dict[str, Any]:
    tags = [{"Key": "batchml:name", "Value": "gpu"}]
    return {
        "InstanceId": name, "LaunchTime": moment(launched), "State": {"Name": state}, "Tags": tags
    }  # fmt: skip


def hosts(*instances: dict[str, Any], console: str | None = CONSOLE, **more: Any) -> World:
    output = {"InstanceId": "i-0abc", **({"Output": console} if console is not None else {})}
    return World(
        more.pop("run", job(age=40)), DescribeInstances={"Reservations": [
            {"Instances": list(instances)}]}, GetConsoleOutput=output, **more,
    )  # fmt: skip


DIED = [instance("terminated", 35, "i-0old"), instance("terminated", 20)]


@pytest.mark.parametrize(
    "world",
    [
        hosts(*DIED),
        hosts(*DIED, run=job(text=TOO_LARGE)),
        hosts(*DIED, run=job(text=ACTION), DescribeComputeEnvironments=environments(
            status="INVALID", statusReason=NEVER_JOINED)),
        hosts(*DIED, DescribeComputeEnvironments=environments(computeEnvironmentName=f"{CE}-r2"),
              DescribeJobQueues=queues(computeEnvironmentOrder=[
                  {"order": 1, "computeEnvironment": f"{CE}-r2"}])),
    ],
    ids=["at the head", "AWS calls it too large", "INVALID", "a replacement"],
)  # fmt: skip
def test_a_bootstrap_script_that_fails_is_told_with_its_last_lines_and_what_it_costs(
    aws: Aws, world: World
) -> None:
    told, calls = aws.explain(world, scripts=SCRIPTS)
    found = told.explanation
    assert (found.cause, found.is_problem) == ("bootstrap-failed", True), (found, calls)
    assert "script on_create.sh fails" in found.verdict
    assert found.evidence == (
        "host i-0abc, launched 20 min ago: exit code 3 after 12 s",
        "hosts that have ended within about an hour: 2",
        "  installing lustre", "  no such package",
    )  # fmt: skip
    assert "you pay for each" in found.fix
    assert "batchml compute update gpu --disable --env dev" in found.fix
    assert found.command == "batchml setup --env dev"


@pytest.mark.parametrize(
    ("world", "cause"),
    [
        (hosts(*DIED, console="Linux version 6.1\r\n"), "undetermined"),
        (hosts(*DIED, console=None), "undetermined"),  # EC2 has no output yet
        (hosts(*DIED, instance("running", 30)), "undetermined"),  # the script succeeds
        (hosts(), "undetermined"),
        (hosts(*DIED, GetJobQueueSnapshot=snapshot(ID, used=64), console=""), "full"),
    ],
    ids=["another end", "no console", "a host that stays", "no host", "full"],
)
def test_hosts_that_end_for_another_reason_are_not_blamed_on_the_script(
    aws: Aws, world: World, cause: str
) -> None:
    found = aws.explain(world, scripts=SCRIPTS)[0].explanation
    assert found.cause == cause, found


def test_a_newer_host_may_have_the_corrected_script(aws: Aws) -> None:
    world = hosts(*DIED, instance("running", 3, "i-0new"))
    found = aws.explain(world, scripts=SCRIPTS)[0].explanation
    assert found.cause == "bootstrap-failed"
    assert "hosts that are starting: 1; if you corrected the script, wait" in found.evidence


def test_where_no_script_is_described_no_console_is_read(aws: Aws) -> None:
    _, calls = aws.explain(hosts(*DIED))
    assert "DescribeInstances" not in calls


SEATS = [
    ("notebook", f"batchml notebook {OTHER[:8]} --end --env dev"),
    ("alloc", f"batchml cancel {OTHER[:8]} --env dev"),
]


@pytest.mark.parametrize(("kind", "command"), SEATS)
def test_a_seat_that_holds_what_a_run_waits_for_is_named_with_the_command_that_ends_it(
    aws: Aws, kind: str, command: str
) -> None:
    seat = {**job("RUNNING", tags={"batchml:seat": kind}), "jobId": OTHER}
    world = World(
        job(tags={"batchml:fallback": "batchml-dev-big:1817"}),
        GetJobQueueSnapshot=snapshot(ID, used=64),
        ListJobs={"jobSummaryList": [{"jobId": OTHER, "jobName": "x"}]},
    )
    first = world.answers["DescribeJobs"]
    world.answers["DescribeJobs"] = [first, {"jobs": [seat]}]
    told, calls = aws.explain(world)
    found = told.explanation
    assert f"in use: {kind} {OTHER[:8]} holds 4 vCPUs." in found.verdict
    assert found.evidence[0] == f"{kind} {OTHER[:8]} holds 4 vCPUs"
    assert found.evidence[-1] == "it moves to the queue big in 17 s"
    assert (found.command, len(calls)) == (command, 6)


def test_of_the_runs_submitted_here_seats_of_this_week_that_have_not_ended_are_looked_at() -> None:
    seat = Record(key="k", job_id="a", env="dev", at=int(NOW * 1000), tags={"batchml:seat": "x"})
    others = [
        replace(seat, job_id="b", env="local"), replace(seat, job_id="c", tags={}),
        replace(seat, job_id="d", status="SUCCEEDED"), replace(seat, job_id="e", at=1),
    ]  # fmt: skip
    assert own_held_runs([seat, *others], "dev", NOW) == ["a"]


def test_the_twelve_causes_are_among_them() -> None:
    assert {cause for cause, *_ in CAUSES.values()} >= {
        "queue-position", "no-capacity", "too-large-for-compute", "too-large-for-hosts",
        "service-role", "instance-configuration", "environment-invalid", "environment-disabled",
        "quota", "hosts-not-joining", "dependency-failed", "dependency-cycle", "share-limit",
        "consumable",
    }  # fmt: skip


# --- no wolf --------------------------------------------------------------------------------


@pytest.mark.parametrize("minutes", [0.1, 1, 5, 9.5])
@pytest.mark.parametrize("text", ["", TOO_LARGE, UNDETERMINED])
@pytest.mark.parametrize("desired", [0, 4])
def test_while_a_host_boots_nothing_is_wrong(
    aws: Aws, minutes: float, text: str, desired: int
) -> None:
    launching = activities(activity("InProgress", age=minutes / 2))
    world = World(
        job(text=text, age=minutes), GetJobQueueSnapshot=snapshot(ID, age=minutes),
        DescribeComputeEnvironments=environments(resources={"desiredvCpus": desired}),
        DescribeScalingActivities=launching,
    )  # fmt: skip
    told, _ = aws.explain(world)
    assert told.explanation.cause == "host-starting"
    assert not told.explanation.is_problem
    assert aws.clock.naps == []


def test_a_host_that_was_launched_a_moment_ago_may_boot_however_long_the_run_waited(
    aws: Aws,
) -> None:
    world = World(job(age=300), GetJobQueueSnapshot=snapshot(ID, age=300),
                  DescribeScalingActivities=activities(activity("Successful", age=2)))  # fmt: skip
    told, _ = aws.explain(world)
    assert told.explanation.cause == "host-starting"


def test_who_came_to_the_head_a_moment_ago_has_just_begun_to_wait_for_a_host(aws: Aws) -> None:
    told, _ = aws.explain(World(job(age=300), GetJobQueueSnapshot=snapshot(ID, age=1)))
    assert told.explanation.cause == "host-starting"


def test_a_retry_begins_its_wait_anew(aws: Aws) -> None:
    tried = [{"stoppedAt": ago(1), "container": {}, "statusReason": "Host EC2 (instance i-0)"}]
    world = World(job(age=300, attempts=tried), GetJobQueueSnapshot=snapshot())
    told, _ = aws.explain(world)
    assert told.explanation.cause == "host-starting"


def test_what_aws_says_is_looked_at_twice_before_it_is_repeated(aws: Aws) -> None:
    stuck = job(text=TOO_LARGE)
    optimal = environments(resources={"instanceTypes": ["optimal"]})
    starting = {"jobs": [job("STARTING")]}
    world = World(None, DescribeJobs=[{"jobs": [stuck]}, starting],
                  DescribeComputeEnvironments=optimal)  # fmt: skip
    told, calls = aws.explain(world)
    assert calls.count("DescribeJobs") == 2
    assert aws.clock.naps == [5.0]
    assert told.explanation.cause == "starting"


def test_a_failure_that_a_later_launch_has_settled_is_not_told(aws: Aws) -> None:
    world = World(job(), DescribeScalingActivities=activities(
        activity("Successful", age=3), activity("Failed", QUOTA, age=8)))  # fmt: skip
    told, _ = aws.explain(world)
    assert told.explanation.cause == "host-starting"


def test_the_failure_of_another_environment_is_not_ours(aws: Aws) -> None:
    other = activity("Failed", QUOTA, group="batchml-dev-gpu-spot")
    ours = activity("Successful", age=3)
    told, _ = aws.explain(World(job(), DescribeScalingActivities=activities(other, ours)))
    assert told.explanation.cause == "host-starting"


# What is certain at once, however young the run is: time does not mend it.
CERTAIN = {
    "queue-gone", "queue-invalid", "no-compute", "environment-invalid", "environment-disabled",
    "hosts-not-joining", "too-large-for-compute", "too-large-for-hosts", "service-role",
    "instance-configuration", "quota", "launch-failed", "share-limit", "behind-stuck-run",
    "no-neurons",
    "consumable", "dependency-failed", "dependency-cycle", "dependency-forgotten",
}  # fmt: skip
TEXTS = ["", TOO_LARGE, MAX_RESOURCE, NO_CAPACITY, ROLE, UNSUPPORTED, ACTION, UNDETERMINED, "new"]
_WORLDS = [world.answers for *_, world in CAUSES.values()]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["RUNNABLE", "SUBMITTED"]), st.sampled_from(TEXTS),
    st.sampled_from([0.1, 5.0, 30.0]), st.lists(st.sampled_from(_WORLDS), min_size=9, max_size=9),
    st.booleans(),
)  # fmt: skip
def test_whatever_the_answers_are_there_is_one_verdict_and_no_early_alarm(
    aws: Aws, status: str, text: str, age: float, mixed: list[dict[str, Any]], denied: bool
) -> None:
    detail = job(status, text=text, age=age)
    answers = {name: one[name] for one in mixed for name in one if name in World(None).answers}
    answers["DescribeJobs"] = {"jobs": [detail]}
    if denied:
        answers["GetJobQueueSnapshot"] = "AccessDeniedException: no"
    told, calls = aws.explain(World(None, **answers))
    found = told.explanation
    assert found.verdict and len(calls) <= 6
    assert found.command or found.fix or not found.is_problem
    if age < 10 and found.is_problem:
        assert found.cause in CERTAIN


# --- what may not be asked --------------------------------------------------------------------


def test_what_is_denied_is_noted_and_the_rest_still_told(aws: Aws) -> None:
    world = World(job(age=1), GetJobQueueSnapshot="AccessDeniedException: no",
                  ListContainerInstances="AccessDeniedException: no",
                  DescribeScalingActivities="AccessDenied: no")  # fmt: skip
    told, _ = aws.explain(world)
    assert told.explanation.cause == "host-starting"
    assert [each.partition(" ")[0] for each in told.failed_calls] == [
        "batch:GetJobQueueSnapshot", "autoscaling:DescribeScalingActivities",
        "ecs:ListContainerInstances",
    ]  # fmt: skip


@pytest.mark.parametrize("refusal", ["AccessDeniedException: no", "ThrottlingException: slower"])
@pytest.mark.parametrize("operation", sorted(set(World(None).answers) - {"DescribeJobs"}))
@pytest.mark.parametrize("text", ["", TOO_LARGE, UNSUPPORTED, UNDETERMINED])
def test_a_question_that_is_not_answered_raises_neither_an_error_nor_an_alarm(
    aws: Aws, operation: str, refusal: str, text: str
) -> None:
    whole, _ = aws.explain(World(job(text=text)))
    told, calls = aws.explain(World(job(text=text), **{operation: refusal}))
    says = {TOO_LARGE: "too-large-for-hosts", UNSUPPORTED: "instance-configuration"}.get(text)
    if told.explanation.is_problem:
        assert told.explanation.cause in (whole.explanation.cause, says, "undetermined")
    why = "no answer" if "Throttling" in refusal else "AccessDeniedException"
    noted = [each.partition("(")[2].rstrip(")") for each in told.failed_calls]
    assert noted == [why] * (operation in calls)


def test_of_more_types_than_a_page_the_largest_is_not_known(aws: Aws) -> None:
    small = {"InstanceTypes": [host_type("g5.xlarge", 4, 16_384, 1)], "NextToken": "more"}
    world = World(job(text=TOO_LARGE, needs=EIGHT_GPUS, age=1), DescribeInstanceTypes=small)
    told, _ = aws.explain(world)
    found = told.explanation
    assert (found.cause, found.is_problem) == ("placement-refused", False)


def test_a_run_that_aws_says_fits_no_host_is_not_told_that_its_host_is_being_started(
    aws: Aws,
) -> None:
    optimal = environments(resources={"instanceTypes": ["optimal"], "desiredvCpus": 0})
    gpus = job(text=TOO_LARGE, needs=EIGHT_GPUS, age=1)
    told, _ = aws.explain(World(gpus, DescribeComputeEnvironments=optimal))
    found = told.explanation
    assert found.verdict.startswith("AWS Batch says that no host of its queue fits it.")
    assert found.evidence[:2] == (
        "it needs 4 vCPU, 1 GiB, 8 GPU", f"AWS Batch says: {TOO_LARGE}",
    )  # fmt: skip
    assert "request less" in found.fix and not found.command
    assert "being started" not in " ".join((found.verdict, *found.evidence, found.fix))
    fits, _ = aws.explain(World(job(text=TOO_LARGE, age=1)))
    assert fits.explanation.cause == "host-starting"  # the sizes of the instance types say so


def test_where_one_environment_leaves_the_hosts_to_aws_nothing_is_too_large(aws: Aws) -> None:
    other = {**compute(), "computeEnvironmentName": "other"}
    other["computeResources"] = {"type": "FARGATE", "maxvCpus": 64}
    two = [{"order": 1, "computeEnvironment": CE}, {"order": 2, "computeEnvironment": "other"}]
    world = World(
        job(text=TOO_LARGE, needs=EIGHT_GPUS, age=1),
        DescribeJobQueues=queues(computeEnvironmentOrder=two),
        DescribeComputeEnvironments={"computeEnvironments": [compute(), other]},
    )
    told, calls = aws.explain(world)
    assert (told.explanation.cause, told.explanation.is_problem) == ("placement-refused", False)
    assert "DescribeInstanceTypes" not in calls


def test_a_host_that_could_not_be_ended_is_no_launch_that_failed(aws: Aws) -> None:
    ending = {**activity("Failed", "It is protected"), "Description": "Terminating EC2 instance"}
    world = World(job(age=1), DescribeScalingActivities=activities(ending))
    told, _ = aws.explain(world)
    assert (told.explanation.cause, told.explanation.is_problem) == ("host-starting", False)


@pytest.mark.parametrize("most", range(1, 6))
@pytest.mark.parametrize("name", list(CAUSES))
def test_with_fewer_calls_it_says_less_but_raises_no_false_alarm(
    aws: Aws, name: str, most: int
) -> None:
    cause, *_, world = CAUSES[name]
    told, calls = aws.explain(world, most=most)
    assert len(calls) <= most
    if told.explanation.is_problem:
        assert told.explanation.cause in (cause, "undetermined")


# --- what waits for nothing --------------------------------------------------------------------


@pytest.mark.parametrize(("status", "cause"), [("RUNNING", "running"), ("STARTING", "starting")])
def test_one_call_is_enough_for_a_run_that_has_its_host(aws: Aws, status: str, cause: str) -> None:
    told, calls = aws.explain(World(job(status, startedAt=ago(3))))
    assert (told.explanation.cause, told.explanation.is_problem) == (cause, False)
    assert calls == ["DescribeJobs"]


def test_a_run_that_was_just_submitted_is_not_looked_into(aws: Aws) -> None:
    told, calls = aws.explain(World(job("SUBMITTED", age=0.2)))
    assert (told.explanation.cause, calls) == ("submitted", ["DescribeJobs"])


def test_on_this_machine_there_are_no_hosts_to_ask_for(aws: Aws) -> None:
    told, calls = aws.explain(World(job(text=TOO_LARGE)), CommandWriter())
    assert told.explanation.cause == "too-large-for-hosts"
    assert set(calls) <= {"DescribeJobs", "DescribeJobQueues", "DescribeComputeEnvironments"}
    assert (
        told.explanation.command == "batchml submit --name lenet --image pytorch -- python train.py"
    )


def test_a_queue_is_named_as_our_commands_name_it() -> None:
    assert CommandWriter("dev").bare(QUEUE) == "default"
    assert replace(CommandWriter("dev"), env="prod").bare(QUEUE) == QUEUE


def test_a_run_that_runs_and_does_nothing_is_a_problem_with_a_cause() -> None:
    running = Explanation("running", "It is not waiting.", is_problem=False, command="x")
    run = Run(ID, "n", "q", JobStatus.RUNNING)
    waits = ("node 1: 0.02 cores; rank 1 waits to connect to 10.0.0.1:29500, where nobody listens",)
    found = explain_idleness(running, run, 840.0, waits, CommandWriter("dev"))
    assert (found.cause, found.is_problem, found.evidence) == ("idle", True, waits)
    assert found.verdict.startswith("It runs, and has done nothing for 14 min: no CPU, network")
    assert "idle_after" in found.fix and found.command == f"batchml cancel {ID} --env dev"
    assert explain_idleness(running, run, 0.0, (), CommandWriter()) is running
    held = replace(run, tags={HELD_TAG: "notebook"})
    seen = explain_idleness(running, held, 840.0, waits, CommandWriter())
    assert (seen.cause, seen.is_problem) == ("running", False)
    assert seen.evidence == ("nobody has used it for 14 min",)


def test_workers_that_wait_are_told_of_beside_a_head_that_runs() -> None:
    head = Explanation("running", "It is not waiting: it has run for 3 min.", is_problem=False)
    array = Run("w", "n", "q", JobStatus.PENDING, array_size=2, children={"RUNNABLE": 1})
    going = Run("g", "n", "q", JobStatus.RUNNING)
    found = add_waiting_workers(head, {"gpu": going, "cpu": array}, CommandWriter())
    assert found.evidence == ("group cpu: 1 of 2 wait, w",)
    assert found.command == "batchml explain w"
    assert add_waiting_workers(head, {"gpu": going}, CommandWriter()) is head
