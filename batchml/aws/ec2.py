"""EC2 launch templates and placement groups of compute environments.

Source: EC2 API reference, RequestLaunchTemplateData; AWS Batch User Guide, "Use Amazon EC2 launch
templates" (what AWS Batch ignores in one: instance types, profile, subnets, market options; but
the market option of a capacity block is in AWS's own samples for it: (U), decision 035).
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from shlex import quote
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.aws.errors import translated
from batchml.aws.naming import NOTICE_FILE, NOTICES, WORKSPACE, Site, Workspace, owner_tags
from batchml.aws.session import Session
from batchml.errors import ConfigError, ServiceError
from batchml.model.environment import Compute

# --- user data of hosts ---------------------------------------------------------------------------
# What an instance does when it starts, as user data: AWS Batch wants MIME and adds a part.
#
# Everything here may run again at the next boot and leaves the same behind.
#
# Source: AWS Batch User Guide, "Amazon EC2 user data in launch templates"; Amazon ECS Developer
# Guide, "Container agent configuration".


MAX_USER_DATA = 16 * 1024  # bytes before base64; EC2
METADATA = "169.254.169.254"

_BOUNDARY = "==BATCHML=="
_TRIES = 12  # of a mount, five seconds apart


class Part(NamedTuple):
    """`boothook`: at every boot, before Docker and the ECS agent; `script`: once, before ECS."""

    kind: str
    text: str


_TYPES = {"boothook": "text/cloud-boothook", "script": "text/x-shellscript"}


def user_data(
    *,
    workspace: Workspace = Workspace(),  # noqa: B008  (a frozen value)
    stop_seconds: int = 110,
    has_gpus: bool = False,
    lets_privileged: bool = False,
    is_spot: bool = False,
) -> str:
    """The user data of an instance, not encoded.

    `stop_seconds` is how long a container has from SIGTERM to SIGKILL. Raises ConfigError over 16
    KB.
    """
    parts = [Part("boothook", _firewall())]
    mount = _mount(workspace)
    if mount:
        parts.append(Part("boothook", mount))
    if is_spot:
        parts.append(Part("boothook", _notices()))
    parts.append(Part("script", _agent(stop_seconds, has_gpus, lets_privileged)))
    return multipart(parts)


def multipart(parts: Iterable[Part]) -> str:
    """The parts as one MIME message. Raises ConfigError when it is more than EC2 takes."""
    lines = ["MIME-Version: 1.0", f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"', ""]
    for kind, text in parts:
        lines += [f"--{_BOUNDARY}", f'Content-Type: {_TYPES[kind]}; charset="us-ascii"', ""]
        lines += [text.rstrip("\n"), ""]
    made = "\n".join([*lines, f"--{_BOUNDARY}--", ""])
    size = len(made.encode())
    if size > MAX_USER_DATA:
        raise ConfigError("The user data", [f"{size} bytes; EC2 takes {MAX_USER_DATA}."])
    return made


def _firewall() -> str:
    """Jobs share the host's network, so a hop limit alone does not keep them from the instance's
    role. Their own credentials come from 169.254.170.2, which this does not touch.
    """
    return f"""\
#!/bin/bash
rule=(OUTPUT -d {METADATA}/32 -m owner ! --uid-owner 0 -j DROP)
iptables -w 10 -C "${{rule[@]}}" 2> /dev/null || iptables -w 10 -I "${{rule[@]}}"
"""


def _notices() -> str:
    """A service that asks what EC2 announces and writes it where containers read it: they cannot
    ask, because of the firewall. batchml/runtime/telemetry/spot.py reads it. The folder stays while
    the service starts anew, or containers would see the old one. `docs/decisions/027-notices.md`
    """
    return f"""\
#!/bin/bash
cat > /usr/local/sbin/batchml-notice << 'END'
#!/bin/bash
umask 022
ask() {{ curl --silent --noproxy '*' --max-time 2 "$@"; }}
look() {{
    answer=$(ask -w '%{{http_code}}' -H "X-aws-ec2-metadata-token: $token" \\
        "http://{METADATA}/latest/meta-data/$1")
    case ${{answer: -3}} in
        200) echo "${{answer%???}}" > "$2.new" && mv -f "$2.new" "$2" ;;
        404) rm -f "$2" ;;
        401) token= ;;
    esac
}}
mkdir -p {NOTICES}
token=
while :; do
    if [ -z "$token" ]; then
        token=$(ask --fail -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 21600' \\
            http://{METADATA}/latest/api/token)
    fi
    if [ -n "$token" ]; then
        look spot/instance-action {NOTICE_FILE}
        look events/recommendations/rebalance {NOTICE_FILE}.rebalance
    fi
    sleep 5
done
END
chmod 0755 /usr/local/sbin/batchml-notice
cat > /etc/systemd/system/batchml-notice.service << 'END'
[Service]
ExecStart=/usr/local/sbin/batchml-notice
Restart=always
RestartSec=5
END
systemctl daemon-reload
systemctl start --no-block batchml-notice
"""


def _agent(stop_seconds: int, has_gpus: bool, lets_privileged: bool) -> str:
    """Set keys of the agent's file one by one: AWS Batch writes ECS_CLUSTER into the same one."""
    settings = {
        "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
        "ECS_CONTAINER_STOP_TIMEOUT": f"{stop_seconds}s",
        "ECS_ENABLE_TASK_IAM_ROLE": "true",
        "ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST": "true",
        "ECS_ENABLE_AWSLOGS_EXECUTIONROLE_OVERRIDE": "true",
        "ECS_AWSVPC_BLOCK_IMDS": "true",
        "ECS_IMAGE_PULL_BEHAVIOR": "prefer-cached",
        "ECS_DISABLE_PRIVILEGED": "false" if lets_privileged else "true",
    }
    if has_gpus:
        settings["ECS_ENABLE_GPU_SUPPORT"] = "true"
    lines = "\n".join(f"put {key} {quote(value)}" for key, value in settings.items())
    return f"""\
#!/bin/bash
set -eu
file=/etc/ecs/ecs.config
mkdir -p "$(dirname "$file")"
touch "$file"
if [ -n "$(tail -c 1 "$file")" ]; then echo >> "$file"; fi
put() {{
    sed -i "/^$1=/d" "$file"
    printf '%s=%s\\n' "$1" "$2" >> "$file"
}}
{lines}
"""


def _mount(workspace: Workspace) -> str:
    """Mount the workspace. The agent does not start without it: jobs would write to the disk."""
    if workspace.kind == "none":
        return ""
    efs = workspace.kind == "efs"
    # The programs that mount are in the AMIs of AWS and ours; another may lack them.
    program, package = ("mount.efs", "amazon-efs-utils") if efs else ("mount.lustre", LUSTRE)
    command = _mount_efs(workspace) if efs else _mount_lustre(workspace)
    # Every job may write, whatever its user is; with an access point that is its matter.
    share = "" if workspace.access_point else f"\n        chmod 1777 {WORKSPACE}"
    return f"""\
#!/bin/bash
cat > /usr/local/sbin/batchml-workspace << 'END'
#!/bin/bash
mountpoint -q {WORKSPACE} && exit 0
mkdir -p {WORKSPACE}
for _ in $(seq {_TRIES}); do
    command -v {program} > /dev/null || dnf install -y {package}
    if {command}; then{share}
        exit 0
    fi
    sleep 5
done
echo "batchml: {WORKSPACE} cannot be mounted ({workspace.file_system})" >&2
exit 1
END
chmod 0755 /usr/local/sbin/batchml-workspace
mkdir -p /etc/systemd/system/ecs.service.d
cat > /etc/systemd/system/ecs.service.d/batchml.conf << 'END'
[Service]
ExecStartPre=/usr/local/sbin/batchml-workspace
TimeoutStartSec=900
END
systemctl daemon-reload
/usr/local/sbin/batchml-workspace
"""


LUSTRE = "lustre-client"


def _mount_efs(workspace: Workspace) -> str:
    point = f",accesspoint={workspace.access_point}" if workspace.access_point else ""
    source = quote(f"{workspace.file_system}:/")
    return f"mount -t efs -o {quote(f'tls,noresvport{point}')} {source} {WORKSPACE}"


def _mount_lustre(workspace: Workspace) -> str:
    source = quote(f"{workspace.dns}@tcp:/{workspace.mount_name}")
    return f"mount -t lustre -o relatime,flock {source} {WORKSPACE}"


# --- launch ---------------------------------------------------------------------------------------


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
