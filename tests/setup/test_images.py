"""The images of hosts: what AWS says of them, their refresh, and the findings of doctor."""

from collections.abc import Mapping
from typing import Any

import pytest

from batchml.errors import UsageError
from batchml.local.server.protocol import problems, service_model
from batchml.model.environment import Compute, Environment
from batchml.setup.doctor import AccountCheck, Finding
from batchml.setup.images import (
    HostImage,
    ask_images,
    check_images,
    check_refresh,
    describe_refresh,
    has_newest_images,
    host_images,
    newer_image_lines,
    refresh_members,
)
from tests.support.wire import NOW, Refusal, Script, Wire
from tests.support.wire import keys as keys

pytestmark = pytest.mark.usefixtures("keys")

OWN = "ami-0123456789abcdef0"


def detail(*images: dict[str, str], **more: Any) -> dict[str, Any]:
    resources = {
        "type": "EC2", "allocationStrategy": "BEST_FIT_PROGRESSIVE", "desiredvCpus": 16,
        "ec2Configuration": list(images), **more,
    }  # fmt: skip
    return {"type": "MANAGED", "status": "VALID", "computeResources": resources}


def image(status: str = "", own: str = "") -> dict[str, str]:
    found = {"imageType": "ECS_AL2023_NVIDIA", "batchImageStatus": status, "imageIdOverride": own}
    return {key: value for key, value in found.items() if value}


OLD, NEW, UNKNOWN = image("UPDATE_AVAILABLE"), image("LATEST"), image()


def test_every_image_is_read_with_its_own_status() -> None:
    assert host_images(detail(OLD, image(own=OWN))) == (
        HostImage("ECS_AL2023_NVIDIA", "", "UPDATE_AVAILABLE"),
        HostImage("ECS_AL2023_NVIDIA", OWN, ""),
    )
    assert host_images({"type": "UNMANAGED"}) == ()


def test_images_are_the_newest_only_if_aws_says_so_of_each() -> None:
    assert has_newest_images(detail(NEW, NEW))
    for images in ((NEW, OLD), (NEW, UNKNOWN), (NEW, image(own=OWN)), ()):
        assert not has_newest_images(detail(*images)), images


def test_only_environments_of_which_aws_has_a_newer_image_are_named_with_the_command() -> None:
    details = {"gpu": detail(NEW, OLD), "cpu": detail(NEW), "new": detail(UNKNOWN)}
    assert list(newer_image_lines(details, "dev")) == [
        "gpu: AWS has a newer AMI. To use it: batchml compute update gpu --refresh --env dev"
    ]


def test_a_refresh_is_a_request_that_aws_takes_and_stops_no_run_at_once() -> None:
    request = {"computeEnvironment": "batchml-dev-gpu", **refresh_members(45)}
    shape = service_model("batch").operation_model("UpdateComputeEnvironment").input_shape
    assert list(problems(shape, request, strict=True)) == []
    assert request["computeResources"] == {"updateToLatestImageVersion": True}
    assert request["updatePolicy"] == {
        "terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": 45,
    }  # fmt: skip


def neuron_detail(image_id: str, chosen: str) -> dict[str, Any]:
    entry = {"imageType": "ECS_AL2023", "imageIdOverride": image_id}
    return {**detail(entry), "tags": {"batchml:neuron-image": chosen}}


def test_a_refresh_of_hosts_with_neuron_chips_names_aws_newest_image_for_them() -> None:
    found = neuron_detail(OWN, OWN)
    check_refresh("trn", found, is_local=False)
    request = {"computeEnvironment": "batchml-dev-trn", **refresh_members(45, found, "ami-1")}
    shape = service_model("batch").operation_model("UpdateComputeEnvironment").input_shape
    assert list(problems(shape, request, strict=True)) == []
    assert request["computeResources"] == {
        "ec2Configuration": [{"imageType": "ECS_AL2023", "imageIdOverride": "ami-1"}]
    }
    with pytest.raises(UsageError, match="your AMI"):
        check_refresh("trn", neuron_detail(OWN, "ami-0aaaaaaa"), is_local=False)


@pytest.mark.parametrize(
    ("found", "is_local", "words"),
    [
        (detail(OLD), True, "local has no AMIs"),
        ({"type": "UNMANAGED"}, False, "is unmanaged"),
        (detail(image(own=OWN)), False, "setup --rebuild-image"),
        (detail(OLD, allocationStrategy="BEST_FIT"), False, "another name in batchml.toml"),
        ({**detail(OLD), "status": "UPDATING"}, False, "gpu is UPDATING"),
    ],
    ids=["local", "unmanaged", "own image", "best fit", "busy"],
)
def test_a_refresh_that_could_not_work_is_refused_with_what_works(
    found: dict[str, Any], is_local: bool, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_refresh("gpu", found, is_local=is_local)


def test_before_a_refresh_it_is_said_what_becomes_of_hosts_and_runs() -> None:
    check_refresh("gpu", detail(OLD), is_local=False)
    hosts, runs = describe_refresh("gpu", detail(OLD), 45)
    assert "with 16 vCPUs now, are replaced" in hosts and "a newer AMI is available" in hosts
    assert "have 45 minutes to finish" in runs and "host-lost" in runs
    (alone,) = describe_refresh("gpu", detail(UNKNOWN, desiredvCpus=0), 45)
    assert "no hosts now" in alone and "unknown until a host has started" in alone


# --- doctor -------------------------------------------------------------------------------------


def examined(
    found: Mapping[str, Any], script: Script | None = None, ami: str = "ecs-gpu"
) -> tuple[list[Finding], list[str]]:
    wire = Wire(script or {}, NOW)
    environment = Environment(
        region="us-east-1", ami=ami, compute={"gpu": Compute(instance_types=("g5",), max_vcpus=8)}
    )
    others = {"batchml-devil-x": detail(OLD), "theirs": detail(OLD)}
    account = AccountCheck("dev", environment, NOW, compute={**found, **others})
    findings = list(check_images(ask_images(wire.session(), account)))
    assert wire.wrong == []
    return findings, wire.operations


def test_doctor_names_the_refresh_for_an_old_image_for_neuron_chips() -> None:
    old = dated("2020-01-01T00:00:00.000Z")
    findings, _ = examined({"batchml-dev-trn": neuron_detail(OWN, OWN)}, old)
    assert [each.fix for each in findings] == [
        ("batchml compute update trn --refresh --env dev",)
    ]  # fmt: skip


def dated(text: str) -> Script:
    return {"DescribeImages": {"Images": [{"ImageId": OWN, "CreationDate": text}]}}


def test_doctor_names_the_command_for_old_images_of_this_environment_alone() -> None:
    found = {"batchml-dev-gpu": detail(OLD), "batchml-dev-cpu-r2": detail(NEW)}
    findings, asked = examined(found)
    assert asked == [], "AWS Batch has said it already"
    assert [(each.mark, each.fix) for each in findings] == [
        ("warning", ("batchml compute update gpu --refresh --env dev",)), ("ok", ()),
    ]  # fmt: skip
    assert "cpu-r2" in findings[1].text


@pytest.mark.parametrize(
    ("script", "ami", "mark", "text", "fix"),
    [
        (dated("2020-01-01T00:00:00.000Z"), "build", "warning", "days old and lacks",
         "batchml setup --rebuild-image --env dev"),
        (dated("2020-01-01T00:00:00.000Z"), OWN, "warning", "days old and lacks",
         "build a newer AMI"),
        (dated("2026-11-20T00:00:00.000Z"), "build", "ok", "days old", ""),
        ({"DescribeImages": {"Images": []}}, "build", "problem", "no longer exists",
         "choose another ami"),
        ({"DescribeImages": Refusal("UnauthorizedOperation", "not authorized", 403)}, "build",
         "warning", "is unknown", ""),
    ],
    ids=["old", "old, by id", "young", "gone", "denied"],
)  # fmt: skip
def test_doctor_says_how_old_an_own_image_is(
    script: Script, ami: str, mark: str, text: str, fix: str
) -> None:
    (finding,), asked = examined({"batchml-dev-gpu": detail(image(own=OWN))}, script, ami)
    assert finding.mark == mark and text in finding.text, finding
    assert fix in "".join(finding.fix)
    assert len(asked) == 1
