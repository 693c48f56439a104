"""Every operation of AWS Batch, driven by the AWS CLI alone: nothing of ours but the server.

The server is started as a user does, by `batchml local env`; from then on there are only the
variables that it printed, and `aws`. The last test compares what was called with all that the CLI
itself knows.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import AWS_CLI, BATCHML, Asked, run_forked
from tests.support.local_server import wait_for
from tests.support.models import ec2

SEARCH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
pytestmark = [
    pytest.mark.skipif(shutil.which("aws", path=SEARCH) is None, reason="no `aws` here"),
    pytest.mark.full,  # test_every_operation.py asks for each with boto3
    pytest.mark.xdist_group("aws-cli-everything"),  # the last test looks back at the others
]


class Refused(Exception):
    """What the CLI printed when it failed."""


class Aws:
    """`aws batch submit-job ...` as `aws("batch", "submit-job", ...)`; notes what was called."""

    def __init__(self, home: Path) -> None:
        self.environ = {"PATH": SEARCH, "HOME": str(home), "BATCHML_HOME": str(home / "state")}
        told = self._run(["batchml", "local", "env"])
        self.environ |= dict(re.findall(r"export (\w+)=(.*)", told))
        self.environ["AWS_PAGER"] = ""
        self.called: set[str] = set()

    def __call__(self, service: str, command: str, **options: Any) -> Any:
        words = ["aws", service, command]
        for name, value in options.items():
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words.append(value if isinstance(value, str) else json.dumps(value))
        self.called.add(command)
        answer = self._run(words)
        return json.loads(answer) if answer.strip() else {}

    def commands(self) -> set[str]:
        """The operations of Batch that this CLI knows: it lists them for one that it does not."""
        try:
            self._run(["aws", "batch", "no-such-command"])
        except Refused as told:
            return set(re.findall(r"[a-z]+(?:-[a-z]+)+", str(told)))
        raise AssertionError("it knows every command")

    def _run(self, words: list[str]) -> str:
        program, *arguments = words
        modules, module = {"aws": (AWS_CLI, "awscli"), "batchml": (BATCHML, "batchml")}[program]
        folder = Path(self.environ["HOME"])
        done = run_forked(modules, Asked(module, arguments, folder, self.environ))
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout

    # --- what several tests need ------------------------------------------------------------

    def define(self, name: str, command: list[str], **more: Any) -> None:
        self(
            "batch", "register-job-definition", job_definition_name=name, type="container",
            container_properties=container(command), **more,
        )  # fmt: skip

    def submit(self, definition: str, queue: str = "default", **more: Any) -> str:
        made = self("batch", "submit-job", job_name=definition, job_queue=queue,
                    job_definition=definition, **more)  # fmt: skip
        return str(made["jobId"])

    def job(self, job_id: str) -> dict[str, Any]:
        (found,) = self("batch", "describe-jobs", jobs=[job_id])["jobs"]
        return dict(found)

    def ended(self, job_id: str) -> dict[str, Any]:
        def look() -> Any:
            found = self.job(job_id)
            return found if found["status"] in ("SUCCEEDED", "FAILED") else None

        return dict(wait_for(look, f"the end of {job_id}", 90))


def container(command: list[str]) -> dict[str, Any]:
    needs = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}]
    return {"image": "any", "command": command, "resourceRequirements": needs}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aws]:
    made = Aws(tmp_path_factory.mktemp("user"))
    yield made
    subprocess.run(["batchml", "local", "stop"], env=made.environ, capture_output=True)


def names(found: dict[str, Any], key: str, member: str) -> list[str]:
    return sorted(entry[member] for entry in found[key])


def test_environments_and_queues(aws: Aws) -> None:
    resources = ec2(1)
    aws("batch", "create-compute-environment", compute_environment_name="ce", type="MANAGED",
        compute_resources=resources)  # fmt: skip
    aws("batch", "update-compute-environment", compute_environment="ce",
        compute_resources={"maxvCpus": 2})  # fmt: skip
    found = aws("batch", "describe-compute-environments", compute_environments=["ce"])
    (environment,) = found["computeEnvironments"]
    assert (environment["status"], environment["computeResources"]["maxvCpus"]) == ("VALID", 2)
    limit = {
        "reason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
        "state": "RUNNABLE", "maxTimeSeconds": 600, "action": "CANCEL",
    }  # fmt: skip
    aws("batch", "create-job-queue", job_queue_name="q", priority="3",
        compute_environment_order="order=1,computeEnvironment=ce",
        job_state_time_limit_actions=[limit])  # fmt: skip
    aws("batch", "update-job-queue", job_queue="q", priority="7")
    (queue,) = aws("batch", "describe-job-queues", job_queues=["q"])["jobQueues"]
    assert (queue["priority"], queue["jobStateTimeLimitActions"]) == (7, [limit])
    aws("batch", "update-job-queue", job_queue="q", state="DISABLED")
    aws("batch", "delete-job-queue", job_queue="q")
    aws("batch", "update-compute-environment", compute_environment="ce", state="DISABLED")
    aws("batch", "delete-compute-environment", compute_environment="ce")
    assert names(aws("batch", "describe-job-queues"), "jobQueues", "jobQueueName") == ["default"]


def test_a_job_with_everything_and_its_log(aws: Aws) -> None:
    secretless = {
        "environment": [{"name": "WHO", "value": "world"}],
        "command": ["sh", "-c", "echo hello $WHO $0 $AWS_BATCH_JOB_ATTEMPT; exit 3", "Ref::word"],
    }
    aws.define("all", ["true"], parameters={"word": "default"}, tags={"team": "a"})
    job_id = aws.submit(
        "all",
        container_overrides=secretless,
        parameters={"word": "given"},
        retry_strategy={
            "attempts": 3,
            "evaluateOnExit": [{"onExitCode": "9", "action": "RETRY"},
                               {"onReason": "*", "action": "exit"}],
        },
        timeout={"attemptDurationSeconds": 60},
        tags={"run": "1"},
        propagate_tags=True,
    )  # fmt: skip
    job = aws.ended(job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 3)
    assert len(job["attempts"]) == 1
    assert job["tags"] == {"run": "1"}
    stream = job["container"]["logStreamName"]
    group = "/aws/batch/job"
    events = aws("logs", "get-log-events", log_group_name=group, log_stream_name=stream)["events"]
    assert [event["message"] for event in events][-1] == "hello world given 1"
    found = aws("logs", "filter-log-events", log_group_name=group, filter_pattern="given")
    assert [event["logStreamName"] for event in found["events"]] == [stream]
    described = aws("logs", "describe-log-streams", log_group_name=group)
    assert stream in names(described, "logStreams", "logStreamName")
    assert names(aws("logs", "describe-log-groups"), "logGroups", "logGroupName") == [group]
    listed = aws("batch", "list-jobs", job_queue="default",
                 filters="name=JOB_NAME,values=AL*")  # fmt: skip
    assert names(listed, "jobSummaryList", "jobId") == [job_id]
    assert aws("sts", "get-caller-identity")["Account"]


def test_arrays_and_dependencies(aws: Aws) -> None:
    aws.define("child", ["sh", "-c", "exit $((AWS_BATCH_JOB_ARRAY_INDEX == 2))"])
    first = aws.submit("child", array_properties={"size": 4})
    second = aws.submit("child", array_properties={"size": 4},
                        depends_on=[{"jobId": first, "type": "N_TO_N"}])  # fmt: skip
    in_turn = aws.submit("child", array_properties={"size": 4},
                         depends_on=[{"type": "SEQUENTIAL"}])  # fmt: skip
    after = aws.submit("child", depends_on=f"jobId={first}")
    done = {job_id: aws.ended(job_id) for job_id in (first, second, in_turn, after)}
    assert [done[i]["statusReason"] for i in (first, second)] == ["Array Child Job failed"] * 2
    assert done[after]["statusReason"] == "Dependent Job failed"
    summary = done[first]["arrayProperties"]["statusSummary"]
    assert (summary["SUCCEEDED"], summary["FAILED"]) == (3, 1)
    summary = done[in_turn]["arrayProperties"]["statusSummary"]
    assert (summary["SUCCEEDED"], summary["FAILED"]) == (2, 2)
    failed = aws("batch", "list-jobs", array_job_id=second, job_status="FAILED")
    assert names(failed, "jobSummaryList", "jobId") == [f"{second}:2"]
    assert aws.job(f"{second}:2")["statusReason"] == "Dependent Job failed"


def test_multi_node_jobs(aws: Aws) -> None:
    program = "echo node $AWS_BATCH_JOB_NODE_INDEX of $AWS_BATCH_JOB_NUM_NODES"
    ranges = [
        {"targetNodes": "0:0", "container": container(["sh", "-c", f"{program}; sleep 1"])},
        {"targetNodes": "1:", "container": container(["sh", "-c", f"{program}; sleep 60"])},
    ]
    properties = {"numNodes": 2, "mainNode": 0, "nodeRangeProperties": ranges}
    aws("batch", "register-job-definition", job_definition_name="nodes", type="multinode",
        node_properties=properties)  # fmt: skip
    job_id = aws.submit("nodes")
    job = aws.ended(job_id)
    assert (job["status"], job["nodeProperties"]["numNodes"]) == ("SUCCEEDED", 2)
    for node in range(2):
        detail = aws.job(f"{job_id}#{node}")
        assert detail["nodeDetails"] == {"nodeIndex": node, "isMainNode": node == 0}
        events = aws(
            "logs", "get-log-events", log_group_name="/aws/batch/job",
            log_stream_name=detail["container"]["logStreamName"], start_from_head=True,
        )["events"]  # fmt: skip
        assert f"node {node} of 2" in [event["message"] for event in events]
    listed = aws("batch", "list-jobs", multi_node_job_id=job_id, job_status="SUCCEEDED")
    assert names(listed, "jobSummaryList", "jobId") == [f"{job_id}#0", f"{job_id}#1"]


def test_stopping(aws: Aws) -> None:
    aws.define("long", ["sleep", "300"])
    running = aws.submit("long")
    waiting = aws.submit("long", depends_on=f"jobId={running}")
    array = aws.submit("long", array_properties={"size": 50})
    front = aws("batch", "get-job-queue-snapshot", job_queue="default")["frontOfQueue"]["jobs"]
    assert len(front) >= 45
    aws("batch", "cancel-job", job_id=waiting, reason="not needed")
    aws("batch", "terminate-job", job_id=array, reason="too many")
    aws("batch", "terminate-job", job_id=running, reason="long enough")
    for job_id, reason in ((running, "long enough"), (waiting, "not needed"), (array, "too many")):
        job = aws.ended(job_id)
        assert (job["status"], job["statusReason"]) == ("FAILED", reason)
    assert aws.job(array)["arrayProperties"]["statusSummary"]["FAILED"] == 50


@pytest.mark.parametrize("command", ["cancel-jobs", "terminate-jobs"])
def test_stopping_many(aws: Aws, command: str) -> None:
    if command not in aws.commands():
        pytest.skip(f"this `aws` does not know {command} yet")
    aws.define("late", ["true"])
    first = aws.submit("long")
    many = [aws.submit("late", depends_on=f"jobId={first}") for _ in range(2)]
    assert aws("batch", command, jobs=many, reason="all")["successful"] == many
    aws("batch", "terminate-job", job_id=first, reason="done")
    assert [aws.ended(job_id)["statusReason"] for job_id in many] == ["all", "all"]


def test_shares(aws: Aws) -> None:
    policy = {"shareDecaySeconds": 60, "shareDistribution": [{"shareIdentifier": "a*"}]}
    arn = aws("batch", "create-scheduling-policy", name="fair", fairshare_policy=policy)["arn"]
    policy["shareDecaySeconds"] = 120
    aws("batch", "update-scheduling-policy", arn=arn, fairshare_policy=policy)
    (found,) = aws("batch", "describe-scheduling-policies", arns=[arn])["schedulingPolicies"]
    assert found["fairsharePolicy"]["shareDecaySeconds"] == 120
    listed = aws("batch", "list-scheduling-policies")
    assert names(listed, "schedulingPolicies", "arn") == [arn]
    aws("batch", "create-job-queue", job_queue_name="shared", priority="1",
        compute_environment_order="order=1,computeEnvironment=this-machine",
        scheduling_policy_arn=arn)  # fmt: skip
    aws.define("quick", ["true"])
    with pytest.raises(Refused, match="shareIdentifier must be provided"):
        aws.submit("quick", "shared")
    job_id = aws.submit("quick", "shared", share_identifier="alice",
                        scheduling_priority_override="5")  # fmt: skip
    assert aws.ended(job_id)["shareIdentifier"] == "alice"
    with pytest.raises(Refused, match="existing JobQueue relationship"):
        aws("batch", "delete-scheduling-policy", arn=arn)
    aws("batch", "update-job-queue", job_queue="shared", state="DISABLED")
    aws("batch", "delete-job-queue", job_queue="shared")
    aws("batch", "delete-scheduling-policy", arn=arn)


def test_consumable_resources(aws: Aws) -> None:
    made = aws("batch", "create-consumable-resource", consumable_resource_name="licence",
               total_quantity="0", resource_type="REPLENISHABLE")  # fmt: skip
    aws.define("licensed", ["true"], consumable_resource_properties={
        "consumableResourceList": [{"consumableResource": "licence", "quantity": 1}]})  # fmt: skip
    job_id = aws.submit("licensed")
    users = aws("batch", "list-jobs-by-consumable-resource", consumable_resource="licence")
    assert names(users, "jobs", "jobStatus") == ["RUNNABLE"]
    aws("batch", "update-consumable-resource", consumable_resource="licence", operation="ADD",
        quantity="2")  # fmt: skip
    assert aws.ended(job_id)["status"] == "SUCCEEDED"
    found = aws("batch", "describe-consumable-resource", consumable_resource="licence")
    assert (found["totalQuantity"], found["availableQuantity"]) == (2, 2)
    listed = aws("batch", "list-consumable-resources")
    key = "consumableResourceArn"
    assert names(listed, "consumableResources", key) == [made[key]]
    aws("batch", "delete-consumable-resource", consumable_resource="licence")


def test_definitions_and_tags(aws: Aws) -> None:
    aws.define("tagged", ["true"], tags={"one": "1"})
    (found,) = aws("batch", "describe-job-definitions", job_definition_name="tagged")[
        "jobDefinitions"
    ]
    arn = found["jobDefinitionArn"]
    aws("batch", "tag-resource", resource_arn=arn, tags={"two": "2 :/"})
    aws("batch", "untag-resource", resource_arn=arn, tag_keys=["one"])
    assert aws("batch", "list-tags-for-resource", resource_arn=arn)["tags"] == {"two": "2 :/"}
    aws("batch", "deregister-job-definition", job_definition="tagged:1")
    with pytest.raises(Refused, match=r"\(ClientException\).*not ACTIVE"):
        aws.submit("tagged")


VERBS = (
    "cancel create delete deregister describe get list register submit tag terminate untag update"
)

REQUIRED: dict[str, dict[str, Any]] = {
    "create-quota-share": {
        "quota_share_name": "n", "job_queue": "default",
        "capacity_limits": [{"maxCapacity": 1, "capacityUnit": "NUM_INSTANCES"}],
        "resource_sharing_configuration": {"strategy": "RESERVE"},
        "preemption_configuration": {"inSharePreemption": "ENABLED"},
    },
    "delete-quota-share": {"quota_share_arn": "n"},
    "describe-quota-share": {"quota_share_arn": "n"},
    "list-quota-shares": {"job_queue": "default"},
    "update-quota-share": {"quota_share_arn": "n"},
    "create-service-environment": {
        "service_environment_name": "n", "service_environment_type": "SAGEMAKER_TRAINING",
        "capacity_limits": [{"maxCapacity": 1, "capacityUnit": "NUM_INSTANCES"}],
    },
    "delete-service-environment": {"service_environment": "n"},
    "describe-service-environments": {},
    "update-service-environment": {"service_environment": "n"},
    "describe-service-job": {"job_id": "n"},
    "list-service-jobs": {"job_queue": "default"},
    "submit-service-job": {
        "job_name": "n", "job_queue": "default", "service_request_payload": "{}",
        "service_job_type": "SAGEMAKER_TRAINING",
    },
    "terminate-service-job": {"job_id": "n", "reason": "r"},
    "update-service-job": {"job_id": "n", "scheduling_priority": "1"},
}  # fmt: skip


@pytest.mark.parametrize("command", REQUIRED)
def test_what_is_out_of_scope_says_so(aws: Aws, command: str) -> None:
    with pytest.raises(Refused, match=r"not served by the embedded AWS Batch|Invalid choice") as no:
        aws("batch", command, **REQUIRED[command])
    assert "(ClientException)" in str(no.value) or "Invalid choice" in str(no.value)


def test_every_operation_that_the_cli_knows_was_called(aws: Aws) -> None:
    known = {command for command in aws.commands() if command.split("-")[0] in VERBS.split()}
    assert len(known) > 40
    assert known - aws.called == set()
