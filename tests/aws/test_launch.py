"""Launch templates and placement groups: requests judged by botocore's model, calls by moto."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse, HeadersDict
from moto import mock_aws
from msgspec.structs import replace

from batchml.aws.ec2 import (
    LaunchApi,
    LaunchTemplate,
    content_hash,
    launch_template_request,
    placement_group_request,
)
from batchml.aws.naming import Site, WorkspaceMount
from batchml.aws.session import Access, Session
from batchml.errors import AccessError, ServiceError
from batchml.model.environment import Compute
from tests.support.models import faults

SITE = Site(
    env="dev", subnets=("subnet-1",), gpu_mode="driver-mount", tags={"team": "vision"},
    workspace=WorkspaceMount(kind="efs", file_system="fs-0123"),
)  # fmt: skip
GPU = Compute(instance_types=("g5.xlarge",), max_vcpus=64, disk="200 GiB", tags={"cost": "7"})


def data(compute: Compute = GPU, site: Site = SITE) -> dict[str, Any]:
    return dict(launch_template_request(site, "gpu", compute)["LaunchTemplateData"])


def test_requests_are_what_ec2_asks_for() -> None:
    for text in ("", "cr-0123456789abcdef0", "open", "none",
                 "arn:aws:resource-groups:us-east-1:123456789012:group/odcr"):  # fmt: skip
        request = launch_template_request(SITE, "gpu", replace(GPU, capacity_reservation=text))
        assert faults("ec2", "CreateLaunchTemplate", request) == []
    assert faults("ec2", "CreatePlacementGroup", placement_group_request(SITE, "gpu")) == []


def test_an_instance_is_closed_and_its_disk_encrypted() -> None:
    found = data()
    (disk,) = found["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/xvda"
    assert disk["Ebs"] == {
        "VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True,
    }  # fmt: skip
    assert found["MetadataOptions"]["HttpTokens"] == "required"
    assert found["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert found["MetadataOptions"]["InstanceMetadataTags"] == "disabled"
    # No key, no addresses of its own; groups, type, profile and image are the environment's.
    assert set(found) == {"BlockDeviceMappings", "MetadataOptions", "TagSpecifications", "UserData"}


def test_instances_and_volumes_say_whose_they_are() -> None:
    for entry in data()["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in entry["Tags"]}
        assert tags == {
            "Name": "batchml-dev-gpu", "batchml:env": "dev", "batchml:name": "gpu",
            "cost": "7", "team": "vision",
        }  # fmt: skip
    assert [e["ResourceType"] for e in data()["TagSpecifications"]] == ["instance", "volume"]


def test_user_data_is_that_of_the_environment() -> None:
    text = base64.b64decode(data()["UserData"]).decode()
    assert "fs-0123:/" in text
    assert "put ECS_DISABLE_PRIVILEGED false" in text
    assert "put ECS_CONTAINER_STOP_TIMEOUT 110s" in text
    cpu = data(Compute(instance_types=("c7i.large",), max_vcpus=8, stop_timeout="60s"))
    text = base64.b64decode(cpu["UserData"]).decode()
    assert "put ECS_DISABLE_PRIVILEGED true" in text
    assert "put ECS_CONTAINER_STOP_TIMEOUT 60s" in text


def test_hosts_that_may_be_taken_back_say_so_and_their_template_is_another() -> None:
    """By its content `setup` sees that a template made before wants a new version."""
    given = Compute(instance_types=("c7i.large",), max_vcpus=8)
    made = [
        launch_template_request(SITE, "gpu", replace(given, spot=spot)) for spot in (False, True)
    ]
    texts = [base64.b64decode(each["LaunchTemplateData"]["UserData"]).decode() for each in made]
    assert ["batchml-notice" in text for text in texts] == [False, True]
    assert content_hash(made[0]) != content_hash(made[1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cr-01234567", {"CapacityReservationTarget": {"CapacityReservationId": "cr-01234567"}}),
        ("arn:aws:resource-groups:r:1:group/g", {"CapacityReservationTarget": {
            "CapacityReservationResourceGroupArn": "arn:aws:resource-groups:r:1:group/g"}}),
        ("open", {"CapacityReservationPreference": "open"}),
        ("none", {"CapacityReservationPreference": "none"}),
    ],
)  # fmt: skip
def test_reserved_capacity_is_asked_for(text: str, expected: dict[str, Any]) -> None:
    found = data(replace(GPU, capacity_reservation=text))
    assert found["CapacityReservationSpecification"] == expected


P5 = Compute(instance_types=("p5.48xlarge",), max_vcpus=384, ami="build", efa=True)
GROUPS = replace(SITE, security_groups=("sg-1", "sg-2"))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("p5.48xlarge", ["efa", *["efa-only"] * 31]),
        ("p5e.48xlarge", ["efa", *["efa-only"] * 31]),
        ("p5en.48xlarge", ["efa", *["efa-only"] * 15]),
        ("p4d.24xlarge", ["efa", *["efa-only"] * 3]),
        ("p6-b200.48xlarge", ["efa", *["efa-only"] * 7]),
        ("p6-b300.48xlarge", ["interface", *["efa-only"] * 16]),
        ("g6e.24xlarge", ["efa", "efa-only"]),
        ("g5.12xlarge", ["efa"]),
        ("trn1.32xlarge", ["efa", *["efa-only"] * 7]),
        ("hpc6a.48xlarge", ["efa"]),
    ],
)
def test_hosts_with_efa_have_an_interface_on_each_of_its_cards(name: str, kinds: list[str]) -> None:
    compute = replace(P5, instance_types=(name,), ami="ami-01234567")
    request = launch_template_request(GROUPS, "gpu", compute)
    assert faults("ec2", "CreateLaunchTemplate", request) == []
    found = request["LaunchTemplateData"]["NetworkInterfaces"]
    assert [each["InterfaceType"] for each in found] == kinds
    assert [each["NetworkCardIndex"] for each in found] == list(range(len(kinds)))
    for each in found:
        assert each["DeviceIndex"] == 0, "the first card keeps room for the interface of ECS"
        assert each["Groups"] == ["sg-1", "sg-2"]
        assert each["AssociatePublicIpAddress"] is False
        assert each["DeleteOnTermination"] is True


def test_without_efa_a_template_is_what_it_was_before_efa_was_known() -> None:
    """Else every environment would replace its hosts after an upgrade."""
    known = launch_template_request(GROUPS, "gpu", replace(P5, efa=False))
    assert content_hash(known) == "cfa99cc7bee8755aabb021c69628c93c7b4be13f"
    for off in (replace(P5, efa="auto", spot=True), replace(P5, efa="auto", ami="ecs-gpu")):
        assert "NetworkInterfaces" not in data(off, GROUPS)


def test_a_template_with_many_interfaces_is_made_and_read(api: LaunchApi) -> None:
    request = launch_template_request(GROUPS, "gpu", P5)
    made = api.create_template(request)
    assert api.template("batchml-dev-gpu") == made
    assert made.content != content_hash(
        launch_template_request(GROUPS, "gpu", replace(P5, efa=False))
    )


def test_a_template_is_known_by_its_content() -> None:
    request = launch_template_request(SITE, "gpu", GPU)
    assert content_hash(request) == content_hash(launch_template_request(SITE, "gpu", GPU))
    assert len(content_hash(request)) == 40
    for changed in (replace(GPU, disk="201 GiB"), replace(GPU, stop_timeout="100s")):
        assert content_hash(request) != content_hash(launch_template_request(SITE, "gpu", changed))
    elsewhere = replace(SITE, workspace=WorkspaceMount(kind="efs", file_system="fs-4567"))
    assert content_hash(request) != content_hash(launch_template_request(elsewhere, "gpu", GPU))


@pytest.fixture
def api() -> Iterator[LaunchApi]:
    with mock_aws():
        yield LaunchApi(Session(Access("us-east-1")))


def test_the_newest_version_and_what_it_says_are_read(api: LaunchApi) -> None:
    request = launch_template_request(SITE, "gpu", GPU)
    assert api.template("batchml-dev-gpu") is None
    first = api.create_template(request)
    assert first == LaunchTemplate("batchml-dev-gpu", 1, content_hash(request))
    assert api.template("batchml-dev-gpu") == first  # so an unchanged one gets no new version
    changed = launch_template_request(SITE, "gpu", replace(GPU, disk="300 GiB"))
    second = api.add_version(changed)
    assert second == LaunchTemplate("batchml-dev-gpu", 2, content_hash(changed))
    assert api.template("batchml-dev-gpu") == second


def test_a_template_of_somebody_else_has_no_content_of_ours(api: LaunchApi) -> None:
    client = api._client
    client.create_launch_template(
        LaunchTemplateName="batchml-dev-gpu", LaunchTemplateData={"InstanceType": "t3.micro"}
    )
    found = api.template("batchml-dev-gpu")
    assert found is not None
    assert (found.version, found.content) == (1, "")


def test_a_template_is_deleted_with_its_versions(api: LaunchApi) -> None:
    api.create_template(launch_template_request(SITE, "gpu", GPU))
    api.delete_template("batchml-dev-gpu")
    assert api.template("batchml-dev-gpu") is None


def test_a_taken_name_is_an_error_that_says_so(api: LaunchApi) -> None:
    request = launch_template_request(SITE, "gpu", GPU)
    api.create_template(request)
    with pytest.raises(ServiceError) as caught:
        api.create_template(request)
    assert caught.value.code == "InvalidLaunchTemplateName.AlreadyExistsException"


class Scripted(LaunchApi):
    """Answers in EC2's words where moto has others: `answers` by operation, a code or a body."""

    def __init__(self, answers: dict[str, str]) -> None:
        super().__init__(Session(Access("us-east-1")))
        self.answers = answers
        self.sent: list[str] = []
        self._client.meta.events.register("before-send.*.*", self._answer)

    def _answer(self, request: Any, **_: Any) -> AWSResponse:
        body = request.body.decode() if isinstance(request.body, bytes) else request.body
        self.sent.append(body)
        operation = body.partition("Action=")[2].partition("&")[0]
        text = self.answers[operation]
        if text.startswith("<"):
            return AWSResponse(request.url, 200, HeadersDict({}), Raw(text))
        error = f"<Errors><Error><Code>{text}</Code><Message>m</Message></Error></Errors>"
        return AWSResponse(request.url, 400, HeadersDict({}), Raw(f"<Response>{error}</Response>"))


class Raw:
    def __init__(self, text: str) -> None:
        self.text = text

    def stream(self) -> list[bytes]:
        return [self.text.encode()]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "example")


def test_what_is_gone_is_none_and_may_be_deleted_again() -> None:
    api = Scripted(
        {
            "DescribeLaunchTemplateVersions": "InvalidLaunchTemplateName.NotFoundException",
            "DeleteLaunchTemplate": "InvalidLaunchTemplateName.NotFoundException",
            "DeletePlacementGroup": "InvalidPlacementGroup.Unknown",
        }
    )
    assert api.template("template") is None
    api.delete_template("template")
    api.delete_placement_group("group")
    assert len(api.sent) == 3


def test_a_placement_group_with_instances_in_it_is_not_deleted_yet() -> None:
    assert Scripted({"DeletePlacementGroup": "<Gone/>"}).delete_placement_group("group")
    api = Scripted({"DeletePlacementGroup": "InvalidPlacementGroup.InUse"})
    assert not api.delete_placement_group("group")


@pytest.mark.parametrize(("found", "is_ours"), [("batchml-dev-gpu", True), ("other", False)])
def test_a_placement_group_that_a_lost_answer_was_about_is_ours(found: str, is_ours: bool) -> None:
    """AWS refuses the call that is sent again, since the first was carried out."""
    api = Scripted(
        {
            "CreatePlacementGroup": "InvalidPlacementGroup.Duplicate",
            "DescribePlacementGroups": (
                "<DescribePlacementGroupsResponse><placementGroupSet><item>"
                f"<groupName>{found}</groupName></item></placementGroupSet>"
                "</DescribePlacementGroupsResponse>"
            ),
        }
    )
    if is_ours:
        api.create_placement_group(placement_group_request(SITE, "gpu"))
    else:
        with pytest.raises(ServiceError, match="Duplicate"):
            api.create_placement_group(placement_group_request(SITE, "gpu"))


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "Unavailable"])
def test_any_other_refusal_is_an_error(code: str) -> None:
    operations = (
        "DescribeLaunchTemplateVersions", "DeleteLaunchTemplate", "DeletePlacementGroup",
        "CreatePlacementGroup",
    )  # fmt: skip
    api = Scripted(dict.fromkeys(operations, code))
    request = placement_group_request(SITE, "gpu")
    calls: list[Callable[[], object]] = [
        lambda: api.template("template"), lambda: api.delete_template("template"),
        lambda: api.delete_placement_group("group"),
        lambda: api.create_placement_group(request),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((AccessError, ServiceError)):
            call()


def test_a_placement_group_is_read_and_made() -> None:
    api = Scripted(
        {
            "CreatePlacementGroup": "<CreatePlacementGroupResponse/>",
            "DescribePlacementGroups": (
                "<DescribePlacementGroupsResponse><placementGroupSet><item>"
                "<groupName>batchml-dev-gpu</groupName><strategy>cluster</strategy>"
                "<state>available</state></item></placementGroupSet>"
                "</DescribePlacementGroupsResponse>"
            ),
        }
    )
    api.create_placement_group(placement_group_request(SITE, "gpu"))
    assert "GroupName=batchml-dev-gpu&Strategy=cluster" in api.sent[0]
    assert api.groups("dev") == ["batchml-dev-gpu"]
