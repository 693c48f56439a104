"""Every served operation is called, over both transports, and its answer fits its shape strictly.

A new operation is called in one of the PARTS, or in a new one. The test fails for one that is
served and was not called: an answer that nobody has looked at is a guess.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from batchml.local.batch.operations import HANDLERS
from batchml.local.batch.reads import READS
from batchml.local.logs.api import LOG_OPERATIONS
from tests.support.transports import TRANSPORTS, Scene

GROUP = "/aws/batch/job"


def environments_and_queues(scene: Scene) -> None:
    batch = scene.batch
    made = batch.create_compute_environment(
        computeEnvironmentName="other", type="UNMANAGED", unmanagedvCpus=2, tags={"k": "v"}
    )
    batch.update_compute_environment(computeEnvironment="other", state="DISABLED")
    order = [{"order": 1, "computeEnvironment": made["computeEnvironmentArn"]}]
    batch.create_job_queue(
        jobQueueName="other", priority=1, computeEnvironmentOrder=order, tags={"k": "v"}
    )
    batch.update_job_queue(jobQueue="other", priority=3)
    batch.get_job_queue_snapshot(jobQueue="other")
    assert batch.describe_compute_environments(computeEnvironments=["other"])["computeEnvironments"]
    assert batch.describe_job_queues(jobQueues=["other"])["jobQueues"]
    batch.update_job_queue(jobQueue="other", state="DISABLED")
    batch.delete_job_queue(jobQueue="other")
    batch.delete_compute_environment(computeEnvironment="other")
    batch.describe_compute_environments()
    batch.describe_job_queues()


def definitions(scene: Scene) -> None:
    container = {"image": "i", "command": ["true"], "vcpus": 1, "memory": 64}
    made = scene.batch.register_job_definition(
        jobDefinitionName="mine", type="container", containerProperties=container,
        parameters={"a": "b"}, retryStrategy={"attempts": 2}, propagateTags=True,
        timeout={"attemptDurationSeconds": 60}, tags={"k": "v"},
    )  # fmt: skip
    scene.batch.describe_job_definitions(jobDefinitions=[made["jobDefinitionArn"]])
    scene.batch.deregister_job_definition(jobDefinition=made["jobDefinitionArn"])
    assert scene.batch.describe_job_definitions(status="INACTIVE")["jobDefinitions"]


def jobs_and_their_output(scene: Scene) -> None:
    batch = scene.batch
    first = scene.submit(tags={"k": "v"})
    waits = scene.submit(dependsOn=[{"jobId": first}])
    batch.list_jobs(jobQueue="q", jobStatus="PENDING")
    batch.cancel_job(jobId=waits, reason="r")
    batch.terminate_job(jobId=waits, reason="r")
    batch.cancel_jobs(jobs=[waits, "none"], reason="r")
    batch.terminate_jobs(jobs=[waits, "none"], reason="r")
    job = scene.ended(first)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 3)
    batch.describe_jobs(jobs=[first, waits])
    assert batch.list_jobs(jobQueue="q", jobStatus="FAILED")["jobSummaryList"]
    stream = job["attempts"][-1]["container"]["logStreamName"]
    page = scene.logs.get_log_events(logGroupName=GROUP, logStreamName=stream, startFromHead=True)
    assert [event["message"] for event in page["events"]][-2:] == ["one", "two"]
    found = scene.logs.filter_log_events(logGroupName=GROUP, filterPattern="two")["events"]
    assert [event["message"] for event in found] == ["two"]
    assert scene.logs.describe_log_groups()["logGroups"]
    (shown,) = scene.logs.describe_log_streams(logGroupName=GROUP)["logStreams"]
    assert shown["logStreamName"] == stream
    assert scene.logs.describe_log_streams(logGroupName=GROUP, orderBy="LastEventTime")


def scheduling_policies(scene: Scene) -> None:
    batch = scene.batch
    share = [{"shareIdentifier": "a", "weightFactor": 0.5}, {"shareIdentifier": "b*"}]
    arn = batch.create_scheduling_policy(
        name="p", fairsharePolicy={"shareDecaySeconds": 60, "shareDistribution": share}
    )["arn"]
    batch.update_scheduling_policy(arn=arn, fairsharePolicy={"computeReservation": 1})
    assert batch.describe_scheduling_policies(arns=[arn])["schedulingPolicies"]
    assert batch.list_scheduling_policies()["schedulingPolicies"]
    batch.delete_scheduling_policy(arn=arn)


def consumable_resources(scene: Scene) -> None:
    batch = scene.batch
    batch.create_consumable_resource(consumableResourceName="licence", totalQuantity=1)
    batch.update_consumable_resource(consumableResource="licence", operation="ADD", quantity=1)
    assert batch.describe_consumable_resource(consumableResource="licence")["totalQuantity"] == 2
    assert batch.list_consumable_resources()["consumableResources"]
    needs = {"consumableResourceList": [{"consumableResource": "licence", "quantity": 1}]}
    job_id = scene.submit(consumableResourcePropertiesOverride=needs)
    batch.list_jobs_by_consumable_resource(consumableResource="licence")
    scene.ended(job_id)
    batch.delete_consumable_resource(consumableResource="licence")


def tags(scene: Scene) -> None:
    """Of every kind of resource, by names that have to be escaped in a path."""
    batch = scene.batch
    arns = [
        batch.describe_job_queues(jobQueues=["q"])["jobQueues"][0]["jobQueueArn"],
        batch.describe_jobs(jobs=[scene.submit()])["jobs"][0]["jobArn"],
        batch.describe_job_definitions(jobDefinitionName="d")["jobDefinitions"][0][
            "jobDefinitionArn"
        ],
    ]
    given = {"a": "b", "é/&=% +": "?"}
    for arn in arns:
        batch.tag_resource(resourceArn=arn, tags=given)
        assert batch.list_tags_for_resource(resourceArn=arn)["tags"] == given
        batch.untag_resource(resourceArn=arn, tagKeys=["é/&=% +", "none"])
        assert batch.list_tags_for_resource(resourceArn=arn)["tags"] == {"a": "b"}


def hosts(scene: Scene) -> None:
    asked = {"cluster": "batchml-local"}
    (arn,) = scene.ecs.list_container_instances(**asked)["containerInstanceArns"]
    assert scene.ecs.list_container_instances(**asked, status="DRAINING")[
        "containerInstanceArns"
    ] == []  # fmt: skip
    scene.submit()
    found = scene.ecs.describe_container_instances(**asked, containerInstances=[arn, "none"])
    assert [each["reason"] for each in found["failures"]] == ["MISSING"]
    (host,) = found["containerInstances"]
    had, left = (
        {each["name"]: each.get("integerValue") for each in host[f"{kind}Resources"]}
        for kind in ("registered", "remaining")
    )
    assert had["CPU"] >= left["CPU"] >= 0
    for wrong in ({"cluster": "another"}, {}):
        with pytest.raises(ClientError, match="ClusterNotFoundException"):
            scene.ecs.list_container_instances(**wrong)


PARTS: list[Callable[[Scene], None]] = [
    environments_and_queues, definitions, jobs_and_their_output, scheduling_policies,
    consumable_resources, tags, hosts,
]  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_served_operation_answers_in_its_shape(tmp_path: Path, transport: Any) -> None:
    with TRANSPORTS[transport](tmp_path) as scene:
        for part in PARTS:
            part(scene)
            assert scene.checked.wrong == [], part.__name__
        identity = scene.sts.get_caller_identity()
        assert identity["Account"] == "000000000000"
    served = {*HANDLERS, *LOG_OPERATIONS, *(name for service, name in READS if service != "sts")}
    assert scene.checked.seen == served
