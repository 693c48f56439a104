"""EC2 launch templates and placement groups of compute environments.

Source: EC2 API reference, RequestLaunchTemplateData; AWS Batch User Guide, "Use Amazon EC2 launch
templates" (what AWS Batch ignores in one: instance types, profile, subnets, market options; but
the market option of a capacity block is in AWS's own samples for it: (U), decision 035).
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.aws.site import Site, owner_tags
from batchml.aws.userdata import user_data
from batchml.errors import ServiceError
from batchml.model.environment import Compute

_NO_TEMPLATE = ("InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound")
_NO_GROUP = "InvalidPlacementGroup.Unknown"
_SAME_GROUP = "InvalidPlacementGroup.Duplicate"
_GROUP_IN_USE = "InvalidPlacementGroup.InUse"
_HASH = "batchml content "  # before the hash, in a version's description


class Template(Struct, frozen=True):
    """A version of a launch template, and the hash of what it says."""

    name: str
    version: int
    content: str


def starting_script(site: Site, compute: Compute) -> str:
    """The user data of a compute environment's instances."""
    return user_data(
        workspace=site.workspace,
        stop_seconds=compute.stop_seconds,
        has_gpus=compute.has_gpus,
        lets_privileged=site.lets_privileged(compute),
        is_spot=compute.spot,
    )


def launch_template(site: Site, name: str, compute: Compute) -> dict[str, Any]:
    """The CreateLaunchTemplate arguments for a compute environment `name`.

    The security groups are the compute environment's. The description holds a hash of the content,
    by which an unchanged template is known: `content_of`. Raises ConfigError for user data over 16
    KB.
    """
    tags = site.tagged(name, compute.tags)
    named = {**tags, "Name": site.named(name)}
    data: dict[str, Any] = {
        "BlockDeviceMappings": [_root_disk(compute)],
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            # Containers with a network of their own, the nodes of a multi-node job, are a hop away.
            "HttpPutResponseHopLimit": 1,
            "HttpProtocolIpv6": "disabled",
            "InstanceMetadataTags": "disabled",
        },
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": _pairs(named)} for kind in ("instance", "volume")
        ],
        "UserData": base64.b64encode(starting_script(site, compute).encode()).decode(),
    }
    reserved = compute.capacity_block or compute.capacity_reservation
    if reserved:
        data["CapacityReservationSpecification"] = _reservation(reserved)
    if compute.capacity_block:
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    return {
        "LaunchTemplateName": site.named(name),
        "VersionDescription": f"{_HASH}{digest[:40]}",
        "LaunchTemplateData": data,
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": _pairs(tags)}],
    }


def content_of(request: Mapping[str, Any]) -> str:
    """The hash of what a launch template's request says."""
    return str(request["VersionDescription"]).removeprefix(_HASH)


def placement_group(site: Site, name: str) -> dict[str, Any]:
    """The CreatePlacementGroup arguments for a compute environment `name`."""
    tags = _pairs(site.tagged(name))
    return {
        "GroupName": site.named(name),
        "Strategy": "cluster",
        "TagSpecifications": [{"ResourceType": "placement-group", "Tags": tags}],
    }


def _root_disk(compute: Compute) -> dict[str, Any]:
    return {
        "DeviceName": "/dev/xvda",
        "Ebs": {
            "VolumeSize": compute.disk_gib,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        },
    }


def _reservation(text: str) -> dict[str, Any]:
    if text in ("open", "none"):
        return {"CapacityReservationPreference": text}
    key = (
        "CapacityReservationId" if text.startswith("cr-") else "CapacityReservationResourceGroupArn"
    )
    return {"CapacityReservationTarget": {key: text}}


def _pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


class LaunchApi:
    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("ec2")

    def template(self, name: str) -> Template | None:
        """The newest version of a launch template; None where there is none."""
        try:
            with translated("DescribeLaunchTemplateVersions"):
                found = self._client.describe_launch_template_versions(
                    LaunchTemplateName=name, Versions=["$Latest"]
                )["LaunchTemplateVersions"]
        except ServiceError as error:
            if error.code in _NO_TEMPLATE:
                return None
            raise
        return _template(name, found[0]) if found else None

    def templates(self, env: str) -> dict[str, Template]:
        """The newest version of every launch template of an environment, by name."""
        with translated("DescribeLaunchTemplates"):
            pages = self._client.get_paginator("describe_launch_templates").paginate(
                Filters=[_tagged(env)]
            )
            names = [each["LaunchTemplateName"] for p in pages for each in p["LaunchTemplates"]]
        found = {name: self.template(name) for name in sorted(names)}
        return {name: template for name, template in found.items() if template is not None}

    def groups(self, env: str) -> list[str]:
        """The names of an environment's placement groups."""
        with translated("DescribePlacementGroups"):
            found = self._client.describe_placement_groups(Filters=[_tagged(env)])
            return sorted(group["GroupName"] for group in found["PlacementGroups"])

    def delete_images(self, env: str, keep: str = "") -> list[str]:
        """Deregister the AMIs that were built for an environment, with their snapshots; their ids.

        `keep` is the id of one that somebody else deletes.
        """
        with translated("DescribeImages"):
            found = self._client.describe_images(Owners=["self"], Filters=[_tagged(env)])["Images"]
        for image in found:
            if image["ImageId"] == keep:
                continue
            with translated("DeregisterImage"):
                self._client.deregister_image(ImageId=image["ImageId"])
            for mapping in image.get("BlockDeviceMappings", ()):
                snapshot = mapping.get("Ebs", {}).get("SnapshotId")
                if snapshot:
                    with translated("DeleteSnapshot"):
                        self._client.delete_snapshot(SnapshotId=snapshot)
        return [image["ImageId"] for image in found if image["ImageId"] != keep]

    def create_template(self, request: Mapping[str, Any]) -> Template:
        """Make a launch template; its first version."""
        with translated("CreateLaunchTemplate"):
            made = self._client.create_launch_template(**request)["LaunchTemplate"]
            version = int(made["LatestVersionNumber"])
        return Template(request["LaunchTemplateName"], version, content_of(request))

    def add_version(self, request: Mapping[str, Any]) -> Template:
        """Make a version of the launch template that a CreateLaunchTemplate request is about."""
        given = {key: value for key, value in request.items() if key != "TagSpecifications"}
        with translated("CreateLaunchTemplateVersion"):
            made = self._client.create_launch_template_version(**given)["LaunchTemplateVersion"]
            version = int(made["VersionNumber"])
        return Template(request["LaunchTemplateName"], version, content_of(request))

    def delete_template(self, name: str) -> None:
        """Delete a launch template with all of its versions, if it is there."""
        try:
            with translated("DeleteLaunchTemplate"):
                self._client.delete_launch_template(LaunchTemplateName=name)
        except ServiceError as error:
            if error.code not in _NO_TEMPLATE:
                raise

    def create_placement_group(self, request: Mapping[str, Any]) -> None:
        """Make a placement group. The call has no token: sent again, it finds what it made."""
        try:
            with translated("CreatePlacementGroup"):
                self._client.create_placement_group(**request)
        except ServiceError as error:
            tags = {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}
            ours = error.code == _SAME_GROUP and self.groups(tags["batchml:env"])
            if not ours or request["GroupName"] not in ours:
                raise

    def delete_placement_group(self, name: str) -> bool:
        """Delete a placement group, if it is there. False while instances are in it."""
        try:
            with translated("DeletePlacementGroup"):
                self._client.delete_placement_group(GroupName=name)
        except ServiceError as error:
            if error.code == _GROUP_IN_USE:
                return False
            if error.code != _NO_GROUP:
                raise
        return True


def _tagged(env: str) -> dict[str, Any]:
    (tag, value), *_ = owner_tags(env).items()
    return {"Name": f"tag:{tag}", "Values": [value]}


def _template(name: str, detail: Mapping[str, Any]) -> Template:
    return Template(
        name, int(detail.get("VersionNumber", 0)), content_of({"VersionDescription": "", **detail})
    )
