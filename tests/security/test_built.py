"""The requests that batchml builds for AWS, from ordinary environments: no rule finds anything."""

import copy
import itertools
from typing import Any, Literal

import pytest

from batchml.aws.batch.requests import SubmissionContext, definition_request, make_submission
from batchml.aws.batch.resources import compute_environment_request, queue_request
from batchml.aws.ec2 import LaunchTemplate, launch_template_request
from batchml.aws.ecr import create_repository
from batchml.aws.naming import make_platform, make_site
from batchml.model.environment import Compute, Environment, Queue, Storage
from batchml.model.job import JobSpec, Resources, Retry
from tests.security.cloudformation import FILES, load
from tests.security.rules import request_violations
from tests.security.samples import DIGEST

IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/batchml/pytorch{DIGEST}"

COMPUTE = {
    "gpu": Compute(instance_types=("g5",), max_vcpus=64),
    "spot": Compute(instance_types=("p4d", "p5"), max_vcpus=960, spot=True),
    "cpu": Compute(instance_types=("c7i",), max_vcpus=16, placement_group="cluster"),
    "reserved": Compute(
        instance_types=("p5.48xlarge",), max_vcpus=192, capacity_reservation="cr-0123456789abcdef0"
    ),
}
JOBS = {
    "cpu": JobSpec(name="cpu", image="python", command=("python", "a.py"), retry=Retry(attempts=3)),
    "gpu": JobSpec(name="gpu", image="pytorch", command=("a",), resources=Resources(gpus=1)),
}
# What stacks give, by the templates' own names.
OUTPUTS = {
    "SubnetIds": "subnet-0123abcd,subnet-0123abce",
    "SecurityGroupId": "sg-0123abcd",
    "InstanceProfileArn": "arn:aws:iam::123456789012:instance-profile/i",
    "JobRoleArn": "arn:aws:iam::123456789012:role/job",
    "ExecutionRoleArn": "arn:aws:iam::123456789012:role/execution",
    "LogGroupName": "/aws/batch/job",
    "ImageId": "ami-0123456789abcdef0",
    "FileSystemId": "fs-0123456789abcdef0",
    "FileSystemDns": "fs-0123456789abcdef0.example",
    "LustreMountName": "abcdefgh",
    "AccessPointId": "fsap-0123456789abcdef0",
}
WORKSPACES: tuple[Literal["efs", "fsx-lustre", "none"], ...] = ("efs", "fsx-lustre", "none")
ENVIRONMENTS = {
    f"{ami}, {workspace}": Environment(
        region="us-east-1", ami=ami, storage=Storage(workspace=workspace), compute=COMPUTE
    )
    for ami, workspace in itertools.product(("build", "ecs-gpu"), WORKSPACES)
}  # fmt: skip

Request = tuple[str, dict[str, Any]]


def built(environment: Environment) -> list[Request]:
    """Every request for an environment `lab`, with its operation."""
    site = make_site("lab", environment, OUTPUTS)
    platform = make_platform("lab", environment, OUTPUTS)
    found: list[Request] = [("CreateRepository", create_repository("pytorch", "lab", {}))]
    for name, compute in environment.compute.items():
        request = launch_template_request(site, name, compute)
        found.append(("CreateLaunchTemplate", request))
        template = LaunchTemplate(request["LaunchTemplateName"], 3, "")
        found.append(
            ("CreateComputeEnvironment", compute_environment_request(site, name, compute, template))
        )
    found.append(("CreateJobQueue", queue_request(site, "default", Queue(compute=("gpu", "spot")))))
    for spec in JOBS.values():
        found.append(("RegisterJobDefinition", definition_request(spec, IMAGE, platform)))
        both = make_submission(
            spec,
            image=IMAGE,
            queue="batchml-lab-default",
            submission=SubmissionContext(tags=platform.tags),
            platform=platform,
        )
        found.append(("SubmitJob", both.submit))
    return found


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_built_has_no_violation(name: str) -> None:
    for operation, request in built(ENVIRONMENTS[name]):
        assert request_violations(operation, request) == []


def test_privileged_is_what_needs_the_driver_alone() -> None:
    def privileged(environment: Environment) -> list[str]:
        return [
            request["jobDefinitionName"].partition("-")[0]
            for operation, request in built(environment)
            if operation == "RegisterJobDefinition"
            and request["containerProperties"].get("privileged")
        ]

    assert privileged(ENVIRONMENTS["build, efs"]) == ["gpu"]
    assert privileged(ENVIRONMENTS["ecs-gpu, efs"]) == []


def test_an_image_by_tag_is_seen() -> None:
    requests = built(ENVIRONMENTS["build, efs"])
    request = copy.deepcopy(next(each for name, each in requests if name.startswith("Register")))
    request["containerProperties"]["image"] = "python:3.12"
    assert len(request_violations("RegisterJobDefinition", request)) == 1


def test_the_outputs_are_those_of_the_templates() -> None:
    given = {name for path in FILES for name in load(path)["Outputs"]}
    assert set(OUTPUTS) <= given
