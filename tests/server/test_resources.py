"""The resources that `setup` creates in AWS, created on the embedded server by the same
requests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.aws.batch.resources import (
    compute_environment_request,
    queue_request,
    scheduling_policy_request,
)
from batchml.aws.naming import make_site
from batchml.config.environments import read_environments
from batchml.setup.images import refresh_members
from tests.support.server_rig import Rig

TABLE = {
    "env": {
        "local": {
            "tags": {"team": "vision"},
            "compute": {
                "gpu": {"instance_types": ["g5.xlarge"], "max_vcpus": 64,
                        "placement_group": "cluster", "capacity_reservation": "open"},
                "spot": {"instance_types": ["c7i"], "max_vcpus": 8, "spot": True},
            },
            "queues": {
                "shared": {"priority": 100, "compute": ["spot", "gpu"],
                           "fair_share": {"shares": {"red": 4, "blue*": 1}},
                           "time_limits": {"no-capacity": "1h"}},
                "plain": {"compute": ["gpu"]},
            },
        }
    }
}  # fmt: skip


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_an_environment_of_the_file_is_made_and_a_run_goes_through_it(rig: Rig) -> None:
    _, environments = read_environments(TABLE, "batchml.toml")
    local = environments["local"]
    site, batch = make_site("local", local, {}), rig.client("batch")
    for name, compute in local.compute.items():
        batch.create_compute_environment(**compute_environment_request(site, name, compute, None))
    for name, described in local.queues.items():
        share, arn = described.fair_share, ""
        if share is not None:
            arn = batch.create_scheduling_policy(**scheduling_policy_request(site, name, share))[
                "arn"
            ]
        batch.create_job_queue(**queue_request(site, name, described, arn))

    found = {each["jobQueueName"]: each for each in batch.describe_job_queues()["jobQueues"]}
    order = found["shared"]["computeEnvironmentOrder"]
    assert [each["computeEnvironment"].rpartition("/")[2] for each in order] == ["spot", "gpu"]
    assert found["shared"]["priority"] == 100
    assert found["shared"]["jobStateTimeLimitActions"][0]["maxTimeSeconds"] == 3600
    assert found["plain"]["tags"] == {
        "team": "vision", "batchml:env": "local", "batchml:name": "plain",
    }  # fmt: skip
    batch.register_job_definition(
        jobDefinitionName="d", type="container",
        containerProperties={"image": "i", "command": ["true"], "vcpus": 1, "memory": 64},
    )  # fmt: skip
    job = batch.submit_job(
        jobName="j", jobQueue="shared", jobDefinition="d", shareIdentifier="red"
    )["jobId"]
    rig.start(job)
    rig.end(job)
    assert batch.describe_jobs(jobs=[job])["jobs"][0]["status"] == "SUCCEEDED"


def test_a_refresh_of_images_changes_nothing_that_is_described_but_the_policy(rig: Rig) -> None:
    _, environments = read_environments(TABLE, "batchml.toml")
    local, batch = environments["local"], rig.client("batch")
    request = compute_environment_request(
        make_site("local", local, {}), "gpu", local.compute["gpu"], None
    )
    batch.create_compute_environment(**request)
    only = {"computeEnvironments": ["gpu"]}
    (before,) = batch.describe_compute_environments(**only)["computeEnvironments"]
    batch.update_compute_environment(computeEnvironment="gpu", **refresh_members(60))
    (after,) = batch.describe_compute_environments(**only)["computeEnvironments"]
    policy = {"terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": 60}
    assert after.pop("updatePolicy") == policy
    before.pop("updatePolicy", None)
    assert after == before
