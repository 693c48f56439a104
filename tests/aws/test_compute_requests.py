"""Compute environments, queues and policies -> requests, judged by botocore's model."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from batchml.aws.batch.resources import (
    ComputeApi,
    compute_environment_request,
    machine_image,
    neuron_image_of,
    queue_request,
    scheduling_policy_request,
    weight_factor,
)
from batchml.aws.ec2 import LaunchTemplate, launch_template_request
from batchml.aws.naming import NEURON_IMAGE, Site, WorkspaceMount, make_platform, make_site
from batchml.config.environments import read_environments
from batchml.errors import ConfigError
from batchml.model.environment import (
    TIME_LIMITS,
    Compute,
    Environment,
    FairShare,
    Network,
    Queue,
    Storage,
)
from tests.support.models import faults

OUTPUTS = {
    "SubnetIds": "subnet-0000000a,subnet-0000000b",
    "SecurityGroupId": "sg-0000000a",
    "InstanceProfileArn": "arn:aws:iam::123456789012:instance-profile/batchml-dev",
    "ImageId": "ami-0123456789abcdef0",
    "FileSystemId": "fs-0123",
    "FileSystemDns": "fs-0123.efs.us-east-1.amazonaws.com",
    "AccessPointId": "fsap-0123",
    "LustreMountName": "",
}
DEV = Environment(region="us-east-1", ami="build", tags={"team": "vision"})
SITE = make_site("dev", DEV, OUTPUTS)
GPU = Compute(instance_types=("g5.xlarge", "g6"), max_vcpus=64)
TEMPLATE = LaunchTemplate("batchml-dev-gpu", 3, "abc")


def resources(compute: Compute, site: Site = SITE) -> dict[str, Any]:
    request = compute_environment_request(site, "gpu", compute, None if site.is_local else TEMPLATE)
    assert faults("batch", "CreateComputeEnvironment", request) == []
    return dict(request["computeResources"])


def test_a_compute_environment_is_all_that_the_file_says() -> None:
    request = compute_environment_request(SITE, "gpu", GPU, TEMPLATE)
    assert faults("batch", "CreateComputeEnvironment", request) == []
    assert request == {
        "computeEnvironmentName": "batchml-dev-gpu",
        "type": "MANAGED",
        "state": "ENABLED",
        "tags": {"team": "vision", "batchml:env": "dev", "batchml:name": "gpu"},
        "computeResources": {
            "type": "EC2",
            "allocationStrategy": "BEST_FIT_PROGRESSIVE",
            "minvCpus": 0,
            "maxvCpus": 64,
            "instanceTypes": ["g5.xlarge", "g6"],
            "subnets": ["subnet-0000000a", "subnet-0000000b"],
            "securityGroupIds": ["sg-0000000a"],
            "instanceRole": OUTPUTS["InstanceProfileArn"],
            "ec2Configuration": [
                {"imageType": "ECS_AL2023_NVIDIA", "imageIdOverride": "ami-0123456789abcdef0"}
            ],
            "launchTemplate": {"launchTemplateName": "batchml-dev-gpu", "version": "3"},
            "scalingPolicy": {"minScaleDownDelayMinutes": 0},
        },
    }


def test_spot_reserved_room_and_a_delay_are_asked_for() -> None:
    found = resources(replace(GPU, spot=True, bid_percentage=60, scale_down_delay="30m"))
    assert found["type"] == "SPOT"
    assert found["allocationStrategy"] == "SPOT_PRICE_CAPACITY_OPTIMIZED"
    assert found["bidPercentage"] == 60
    assert found["scalingPolicy"] == {"minScaleDownDelayMinutes": 30}


@pytest.mark.parametrize(
    ("given_name", "expected"), [("cluster", "batchml-dev-gpu"), ("theirs", "theirs")]
)
def test_a_placement_group_is_ours_or_one_that_exists(given_name: str, expected: str) -> None:
    assert resources(replace(GPU, placement_group=given_name))["placementGroup"] == expected
    assert "placementGroup" not in resources(GPU)


CPU = Compute(instance_types=("c7i",), max_vcpus=8)
ARM = Compute(instance_types=("g5g.xlarge",), max_vcpus=8)
TRN = Compute(instance_types=("trn1.32xlarge",), max_vcpus=256)


@pytest.mark.parametrize(
    ("ami", "compute", "kind", "image"),
    [
        ("build", GPU, "ECS_AL2023_NVIDIA", "ami-0123456789abcdef0"),
        ("build", CPU, "ECS_AL2023", ""),
        ("build", ARM, "ECS_AL2023_NVIDIA", ""),  # ours is for x86
        ("build", replace(CPU, ami="build"), "ECS_AL2023", "ami-0123456789abcdef0"),
        ("build", replace(GPU, ami="ecs-gpu"), "ECS_AL2023_NVIDIA", ""),
        ("build", replace(GPU, ami="ami-99999999"), "ECS_AL2023_NVIDIA", "ami-99999999"),
        ("ecs-gpu", GPU, "ECS_AL2023_NVIDIA", ""),
        ("ecs-gpu", CPU, "ECS_AL2023", ""),
        ("ami-88888888", CPU, "ECS_AL2023", "ami-88888888"),
        ("ecs-gpu", TRN, "ECS_AL2023", "ami-0aaaaaaa"),
        ("build", TRN, "ECS_AL2023", "ami-0aaaaaaa"),  # ours has NVIDIA's driver
        ("ami-88888888", TRN, "ECS_AL2023", "ami-88888888"),
        ("ecs-gpu", replace(TRN, ami="ami-99999999"), "ECS_AL2023", "ami-99999999"),
    ],
)
def test_the_image_is_said_in_one_place(ami: str, compute: Compute, kind: str, image: str) -> None:
    site = replace(SITE, neuron_image="ami-0aaaaaaa")
    found = machine_image(replace(site, ami=ami), compute)
    assert found["imageType"] == kind
    assert found.get("imageIdOverride", "") == image
    assert "imageId" not in resources(compute, replace(SITE, ami=ami))
    assert "ImageId" not in launch_template_request(SITE, "gpu", compute)["LaunchTemplateData"]


def test_the_image_for_neuron_chips_is_known_again_and_the_users_own_is_not_taken_for_it() -> None:
    def described(site: Site, compute: Compute = TRN) -> dict[str, Any]:
        request = compute_environment_request(site, "trn", compute, TEMPLATE)
        assert faults("batch", "CreateComputeEnvironment", request) == []
        return request

    site = replace(SITE, neuron_image="ami-0aaaaaaa")
    ours = described(site)
    assert ours["tags"][NEURON_IMAGE] == neuron_image_of(ours) == "ami-0aaaaaaa"
    own = described(site, replace(TRN, ami="ami-99999999"))
    assert NEURON_IMAGE not in own["tags"]
    # A tag stays in AWS when the user names an AMI later.
    assert neuron_image_of({**own, "tags": ours["tags"]}) == ""
    assert neuron_image_of(described(site, CPU)) == neuron_image_of(described(SITE, GPU)) == ""
    assert "«" in described(SITE)["tags"][NEURON_IMAGE], "a plan without AWS shows a placeholder"
    assert "ec2Configuration" not in resources(TRN, replace(site, env="local"))


def test_an_image_that_is_not_built_yet_is_an_error_not_another_image() -> None:
    with pytest.raises(ConfigError, match="not built yet"):
        machine_image(replace(SITE, built_image=""), GPU)


P5 = Compute(instance_types=("p5.48xlarge",), max_vcpus=384, efa=True)


def test_hosts_with_efa_are_close_together_and_have_the_groups_of_their_interfaces() -> None:
    found = resources(P5)
    assert found["placementGroup"] == "batchml-dev-gpu"
    template = launch_template_request(SITE, "gpu", P5)["LaunchTemplateData"]
    assert {tuple(each["Groups"]) for each in template["NetworkInterfaces"]} == {
        tuple(found["securityGroupIds"])
    }
    assert resources(replace(P5, placement_group="theirs"))["placementGroup"] == "theirs"
    for reserved in ({"capacity_reservation": "cr-01234567"}, {"capacity_block": "cr-01234567"}):
        assert "placementGroup" not in resources(replace(P5, **reserved))
    assert "placementGroup" not in resources(replace(P5, efa=False))


def test_hosts_with_efa_and_without_gpus_start_from_the_ami_that_has_its_driver() -> None:
    cpu = replace(P5, instance_types=("c7i.48xlarge",))
    assert machine_image(SITE, cpu) == {
        "imageType": "ECS_AL2023", "imageIdOverride": OUTPUTS["ImageId"],
    }  # fmt: skip
    assert machine_image(SITE, replace(cpu, efa=False)) == {"imageType": "ECS_AL2023"}


def test_a_queue_has_its_environments_in_order_and_its_limits() -> None:
    described = Queue(
        priority=10, compute=("gpu-spot", "gpu"),
        time_limits={"no-capacity": "2h", "too-large-for-compute": 0},
    )  # fmt: skip
    request = queue_request(
        SITE, "default", described, "arn:aws:batch:us-east-1:1:scheduling-policy/p"
    )
    assert faults("batch", "CreateJobQueue", request) == []
    assert request == {
        "jobQueueName": "batchml-dev-default",
        "state": "ENABLED",
        "priority": 10,
        "computeEnvironmentOrder": [
            {"order": 1, "computeEnvironment": "batchml-dev-gpu-spot"},
            {"order": 2, "computeEnvironment": "batchml-dev-gpu"},
        ],
        "jobStateTimeLimitActions": [
            {"reason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY", "state": "RUNNABLE",
             "maxTimeSeconds": 7200, "action": "CANCEL"},
        ],
        "schedulingPolicyArn": "arn:aws:batch:us-east-1:1:scheduling-policy/p",
        "tags": {"team": "vision", "batchml:env": "dev", "batchml:name": "default"},
    }  # fmt: skip
    assert "schedulingPolicyArn" not in queue_request(SITE, "default", described)
    # In one order, however the file has them: what did not change is not sent again.
    limits = {"too-large-for-instances": "1h", "no-capacity": "2h"}
    other = dict(reversed(limits.items()))
    assert queue_request(SITE, "q", replace(described, time_limits=limits)) == (
        queue_request(SITE, "q", replace(described, time_limits=other))
    )


def test_a_share_of_more_weight_gets_more() -> None:
    request = scheduling_policy_request(
        SITE, "q", FairShare(shares={"red": 4, "blue*": 1}, decay="2h", reservation=10)
    )
    assert faults("batch", "CreateSchedulingPolicy", request) == []
    assert request["name"] == "batchml-dev-q"
    assert request["fairsharePolicy"] == {
        "shareDecaySeconds": 7200,
        "computeReservation": 10,
        "shareDistribution": [
            {"shareIdentifier": "blue*", "weightFactor": 1.0},
            {"shareIdentifier": "red", "weightFactor": 0.25},
        ],
    }


@given(st.floats(0.0011, 9999), st.floats(0.0011, 9999))
def test_weights_are_inverted_and_stay_within_what_batch_takes(one: float, other: float) -> None:
    assert 0.0001 <= weight_factor(one) <= 999.9999
    if one < other:
        assert weight_factor(one) >= weight_factor(other)


def test_on_local_nothing_refers_to_other_services() -> None:
    site = make_site("local", Environment(tags={"a": "b"}), OUTPUTS)
    request = compute_environment_request(
        site, "gpu", replace(GPU, placement_group="cluster"), None
    )
    assert faults("batch", "CreateComputeEnvironment", request) == []
    assert request["computeEnvironmentName"] == "gpu"
    assert set(request["computeResources"]) == {
        "type", "allocationStrategy", "minvCpus", "maxvCpus", "instanceTypes", "subnets",
        "scalingPolicy", "instanceRole",
    }  # fmt: skip
    assert queue_request(site, "q", Queue(compute=("gpu",)))["jobQueueName"] == "q"


def test_a_network_that_is_given_is_taken() -> None:
    network = Network(subnets=("subnet-00000001",), security_groups=("sg-00000001", "sg-00000002"))
    site = make_site("dev", replace(DEV, network=network), OUTPUTS)
    assert site.subnets == ("subnet-00000001",)
    assert site.security_groups == ("sg-00000001", "sg-00000002")


def test_the_workspace_is_what_the_stack_made() -> None:
    assert SITE.workspace == WorkspaceMount(
        kind="efs", file_system="fs-0123", dns="fs-0123.efs.us-east-1.amazonaws.com",
        access_point="fsap-0123",
    )  # fmt: skip
    none = replace(DEV, storage=Storage(workspace="none"))
    assert make_site("dev", none, OUTPUTS).workspace == WorkspaceMount()
    assert make_platform("dev", none, OUTPUTS).workspace == ""


# --- any environment that the file may describe ---------------------------------------------

# What replaces a compute environment has a name that ends like -r2.
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True).filter(
    lambda name: re.search(r"-r[0-9]+$", name) is None
)
tags = st.dictionaries(st.from_regex(r"[a-z]{1,40}", fullmatch=True), st.text("abc -", max_size=60),
                       max_size=5)  # fmt: skip
computes = st.fixed_dictionaries(
    {
        "instance_types": st.lists(st.sampled_from(["g5.xlarge", "p4d", "c7i", "m6i.large"]),
                                   min_size=1, unique=True),
        "max_vcpus": st.integers(8, 100_000),
    },
    optional={
        "min_vcpus": st.integers(0, 8),
        "disk": st.integers(30, 16_384).map("{} GiB".format),
        "placement_group": st.sampled_from(["cluster", "theirs"]),
        "scale_down_delay": st.sampled_from([0, "20m", "7d"]),
        "stop_timeout": st.integers(30, 120).map("{}s".format),
        "ami": st.sampled_from(["build", "ecs-gpu", "ami-0123456789abcdef0"]),
        "tags": tags,
    },
)  # fmt: skip
kinds = st.one_of(
    st.fixed_dictionaries(
        {"spot": st.just(True)},
        optional={
            "bid_percentage": st.integers(1, 100),
            "allocation_strategy": st.sampled_from(
                ["SPOT_CAPACITY_OPTIMIZED", "SPOT_PRICE_CAPACITY_OPTIMIZED"]
            ),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "allocation_strategy": st.sampled_from(["BEST_FIT", "BEST_FIT_PROGRESSIVE"]),
            "capacity_reservation": st.sampled_from(
                ["open", "none", "cr-0123456789abcdef0",
                 "arn:aws:resource-groups:us-east-1:123456789012:group/g"]
            ),
        },
    ),
)  # fmt: skip
queues = st.fixed_dictionaries(
    {"priority": st.integers(0, 1000)},
    optional={
        "time_limits": st.dictionaries(
            st.sampled_from(sorted(TIME_LIMITS)), st.sampled_from([0, "10m", "24h"])
        ),
        "fair_share": st.fixed_dictionaries(
            {"shares": st.dictionaries(st.from_regex(r"[a-z]{1,40}\*?", fullmatch=True),
                                       st.floats(0.0011, 9999), max_size=3)},
            optional={"decay": st.integers(0, 604_800), "reservation": st.integers(0, 99)},
        ),
    },
)  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    described = draw(st.dictionaries(names, st.tuples(computes, kinds), min_size=1, max_size=3))
    order = draw(st.permutations(sorted(described)))
    return {
        "region": "us-east-1",
        "gpu_access": "toolkit",
        "ami": draw(st.sampled_from(["build", "ecs-gpu", "ami-01234567"])),
        "storage": {"workspace": draw(st.sampled_from(["efs", "fsx-lustre", "none"]))},
        "tags": draw(tags),
        "compute": {name: {**base, **kind} for name, (base, kind) in described.items()},
        "queues": {
            name: {**inner, "compute": order}
            for name, inner in draw(st.dictionaries(names, queues, max_size=2)).items()
        },
    }


@given(tables(), st.sampled_from(["dev", "a-name-of-20-letters", "local"]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_the_file_may_say_makes_requests_that_aws_takes(
    table: dict[str, Any], env: str
) -> None:
    given_table = {k: v for k, v in table.items() if k != "region"} if env == "local" else table
    _, read = read_environments({"env": {env: given_table}}, "batchml.toml")
    environment = read[env]
    site = make_site(env, environment, OUTPUTS)
    for name, compute in environment.compute.items():
        template = None
        if not site.is_local:
            request = launch_template_request(site, name, compute)
            assert faults("ec2", "CreateLaunchTemplate", request) == []
            template = LaunchTemplate(request["LaunchTemplateName"], 1, "")
        made = compute_environment_request(site, name, compute, template)
        assert faults("batch", "CreateComputeEnvironment", made) == []
    for name, described in environment.queues.items():
        made = queue_request(site, name, described, "arn:aws:batch:us-east-1:1:scheduling-policy/p")
        assert faults("batch", "CreateJobQueue", made) == []
        if described.fair_share is not None:
            made = scheduling_policy_request(site, name, described.fair_share)
            assert faults("batch", "CreateSchedulingPolicy", made) == []


class MovingJob:
    """A session and client of a queue with two jobs, of which each call moves the first one on."""

    STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")

    def __init__(self) -> None:
        self.calls = 0

    def client(self, service: str) -> "MovingJob":
        return self

    def list_jobs(self, jobQueue: str, jobStatus: str) -> dict[str, Any]:
        states = {"moving": self.STATES[min(self.calls, 4)], "waiting": "RUNNABLE"}
        self.calls += 1
        found = [{"jobId": job} for job, state in states.items() if state == jobStatus]
        return {"jobSummaryList": found}


def test_a_job_that_changes_its_state_while_it_is_counted_counts_once() -> None:
    assert ComputeApi(MovingJob()).unfinished("q") == 2  # type: ignore[arg-type]
