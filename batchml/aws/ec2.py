"""EC2 launch templates with the user data of hosts, placement groups, and AMIs.

AWS Batch needs user data in the MIME format and adds a part of its own. A script of the user data
may run again at the next boot, so each script has the same result when it is repeated.

Source: EC2 API reference, RequestLaunchTemplateData; AWS Batch User Guide, "Use Amazon EC2 launch
templates" (AWS Batch ignores instance types, profile, subnets and market options of a template; but
AWS's samples for capacity blocks set their market option: decision 035), "Amazon EC2 user data in
launch templates"; Amazon ECS Developer Guide, "Container agent configuration".
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from shlex import quote
from typing import Any, NamedTuple

from msgspec import Struct

from batchml.aws.bootstrap import make_bootstrap, pack_script, script_hash
from batchml.aws.errors import call, read_entries
from batchml.aws.naming import (
    CACHE_ON_HOST,
    NOTICE_FILE,
    NOTICES,
    WORKSPACE,
    Site,
    WorkspaceMount,
    owner_tags,
)
from batchml.aws.session import Session
from batchml.errors import ConfigError, ServiceError
from batchml.model.environment import Compute
from batchml.model.fabric import FabricLayout, fabric_layout

# --- User data ------------------------------------------------------------------------------------


MAX_USER_DATA = 16 * 1024  # bytes before base64; EC2
METADATA = "169.254.169.254"  # the instance metadata service

_BOUNDARY = "==BATCHML=="
_TRIES = 12  # of a mount, five seconds apart


class UserDataPart(NamedTuple):
    """A script of the user data.

    A `boothook` runs at every boot, before Docker and the ECS agent. A `script` runs once, before
    the ECS agent.
    """

    kind: str
    text: str


_TYPES = {"boothook": "text/cloud-boothook", "script": "text/x-shellscript"}


def make_user_data(
    *,
    workspace: WorkspaceMount = WorkspaceMount(),  # noqa: B008  (a frozen value)
    stop_seconds: int = 110,
    has_gpus: bool = False,
    lets_privileged: bool = False,
    is_spot: bool = False,
    bootstrap: str = "",
    has_cache: bool = False,
) -> str:
    """The user data of an instance before base64. Raises ConfigError if it exceeds 16 KB.

    `stop_seconds` is the time that a container has between SIGTERM and SIGKILL. `bootstrap`: the
    packed bootstrap script.
    """
    parts = [UserDataPart("boothook", _firewall())]
    mount = _mount(workspace)
    if mount:
        parts.append(UserDataPart("boothook", mount))
    if has_cache:
        parts.append(UserDataPart("boothook", _cache()))
    if is_spot:
        parts.append(UserDataPart("boothook", _notices()))
    if bootstrap:
        parts.append(UserDataPart("boothook", make_bootstrap(bootstrap)))
    parts.append(UserDataPart("script", _agent(stop_seconds, has_gpus, lets_privileged)))
    return to_mime(parts)


def to_mime(parts: Iterable[UserDataPart]) -> str:
    """The parts as one MIME message. Raises ConfigError if it exceeds EC2's limit."""
    lines = ["MIME-Version: 1.0", f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"', ""]
    for kind, text in parts:
        lines += [f"--{_BOUNDARY}", f'Content-Type: {_TYPES[kind]}; charset="us-ascii"', ""]
        lines += [text.rstrip("\n"), ""]
    message = "\n".join([*lines, f"--{_BOUNDARY}--", ""])
    size = len(message.encode())
    if size > MAX_USER_DATA:
        raise ConfigError("The user data", [f"{size} bytes; EC2 allows {MAX_USER_DATA}."])
    return message


def _firewall() -> str:
    """Block the instance metadata for jobs, so that they cannot use the instance's role.

    Jobs share the host's network, so a hop limit does not suffice. The credentials of their own
    role come from 169.254.170.2, which this rule does not block.
    """
    return f"""\
#!/bin/bash
rule=(OUTPUT -d {METADATA}/32 -m owner ! --uid-owner 0 -j DROP)
iptables -w 10 -C "${{rule[@]}}" 2> /dev/null || iptables -w 10 -I "${{rule[@]}}"
"""


def _notices() -> str:
    """A service that writes EC2's spot notices to a file for batchml/runtime/telemetry/spot.py.

    The firewall keeps containers from reading the notices themselves. A restart of the service must
    not replace the folder, because containers have mounted it. See `docs/decisions/027-notices.md`.
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


def _cache() -> str:
    """Make the folder of the cache of data sets, before Docker: on the NVMe disks of the instance
    store if there are any, several as RAID 0, else on the root disk, of which it may take half.

    The disks are empty after a stop of the instance, but not after a reboot. Disks that something
    else has mounted, as some AMIs do, are left alone. Source: EC2 User Guide, "NVMe instance store
    volumes" (names of the links, and that an instance's volumes are not formatted).
    """
    return f"""\
#!/bin/bash
cache={CACHE_ON_HOST}
mkdir -p "$cache"
if ! mountpoint -q "$cache"; then
    disks=()
    for link in /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_*; do
        disk=$(readlink -f "$link")
        if [ -e "$disk" ] && [[ " ${{disks[*]}} " != *" $disk "* ]] &&
            ! lsblk -nro MOUNTPOINT "$disk" | grep -q .; then
            disks+=("$disk")
        fi
    done
    disk=${{disks[0]}}
    if [ ${{#disks[@]}} -gt 1 ] &&
        {{ command -v mdadm || dnf install -y mdadm; }} > /dev/null 2>&1; then
        [ -e /dev/md/batchml ] || mdadm --assemble /dev/md/batchml "${{disks[@]}}" ||
            mdadm --create /dev/md/batchml --run --force --level=0 --homehost=any \
                --raid-devices=${{#disks[@]}} "${{disks[@]}}"
        [ ! -e /dev/md/batchml ] || disk=/dev/md/batchml
    fi
    if [ -n "$disk" ]; then
        mount -o noatime,nodev,nosuid "$disk" "$cache" 2> /dev/null || {{
            mkfs.xfs -f -q -K "$disk" && mount -o noatime,nodev,nosuid "$disk" "$cache"
        }}
    fi
fi
mountpoint -q "$cache" ||
    echo $(($(df -B1 --output=size "$cache" | tail -n 1) / 2)) > "$cache/limit"
chmod 0777 "$cache"
"""


def _agent(stop_seconds: int, has_gpus: bool, lets_privileged: bool) -> str:
    """Configure the ECS agent, key by key, because AWS Batch writes ECS_CLUSTER to the file."""
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


def _mount(workspace: WorkspaceMount) -> str:
    """Mount the workspace before the ECS agent starts; otherwise jobs could write to the disk."""
    if workspace.kind == "none":
        return ""
    efs = workspace.kind == "efs"
    # AWS's AMIs and ours have the program that mounts; other AMIs may lack it.
    program = "mount.efs" if efs else "mount.lustre"
    package = "amazon-efs-utils" if efs else "lustre-client"
    command = _mount_efs(workspace) if efs else _mount_lustre(workspace)
    # Any user of a container may write. An access point has its own permissions.
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


def _mount_efs(workspace: WorkspaceMount) -> str:
    point = f",accesspoint={workspace.access_point}" if workspace.access_point else ""
    source = quote(f"{workspace.file_system}:/")
    return f"mount -t efs -o {quote(f'tls,noresvport{point}')} {source} {WORKSPACE}"


def _mount_lustre(workspace: WorkspaceMount) -> str:
    source = quote(f"{workspace.dns}@tcp:/{workspace.mount_name}")
    return f"mount -t lustre -o relatime,flock {source} {WORKSPACE}"


# --- Requests -------------------------------------------------------------------------------------


_NO_TEMPLATE = ("InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound")
_NO_GROUP = "InvalidPlacementGroup.Unknown"
_SAME_GROUP = "InvalidPlacementGroup.Duplicate"
_GROUP_IN_USE = "InvalidPlacementGroup.InUse"
_HASH_PREFIX = "batchml content "  # of a version's description


class LaunchTemplate(Struct, frozen=True):
    """A version of a launch template, with the hash of its content."""

    name: str
    version: int
    content: str


def compute_user_data(
    site: Site, compute: Compute, pack: Callable[[str], str] = pack_script
) -> str:
    """The user data for the instances of a compute environment."""
    script = site.scripts.get(compute.bootstrap, "")
    return make_user_data(
        workspace=site.workspace,
        stop_seconds=compute.stop_seconds,
        has_gpus=compute.has_gpus,
        lets_privileged=site.lets_privileged(compute),
        is_spot=compute.spot,
        bootstrap=pack(script) if script else "",
        has_cache=site.data_cache,
    )


def launch_template_request(site: Site, name: str, compute: Compute) -> dict[str, Any]:
    """The CreateLaunchTemplate request for the compute environment `name`.

    The compute environment has the security groups; so have the interfaces of hosts with EFA, and
    they must be the same. The description has a hash of the content (see `content_hash`), by which
    `setup` recognizes an unchanged template. Raises ConfigError if the user data exceeds 16 KB.
    """
    tags = site.tagged(name, compute.tags)
    named = {**tags, "Name": site.named(name)}
    data: dict[str, Any] = {
        "BlockDeviceMappings": [_root_disk(compute)],
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            # The nodes of a multi-node job are in another network, one hop away.
            "HttpPutResponseHopLimit": 1,
            "HttpProtocolIpv6": "disabled",
            "InstanceMetadataTags": "disabled",
        },
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": _pairs(named)} for kind in ("instance", "volume")
        ],
        "UserData": base64.b64encode(compute_user_data(site, compute).encode()).decode(),
    }
    layout = fabric_layout(compute, site.ami)
    if layout is not None:
        data["NetworkInterfaces"] = _network_interfaces(layout, site.security_groups)
    reserved = compute.capacity_block or compute.capacity_reservation
    if reserved:
        data["CapacityReservationSpecification"] = _reservation(reserved)
    if compute.capacity_block:
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    content = json.dumps(_comparable(site, compute, data), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {
        "LaunchTemplateName": site.named(name),
        "VersionDescription": f"{_HASH_PREFIX}{digest[:40]}",
        "LaunchTemplateData": data,
        "TagSpecifications": [{"ResourceType": "launch-template", "Tags": _pairs(tags)}],
    }


def _comparable(site: Site, compute: Compute, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a template that decides its hash.

    A script counts by its text: another version of zlib compresses it to other bytes, and a plan on
    another machine would replace all instances.
    """
    if not site.scripts.get(compute.bootstrap):
        return data
    return {**data, "UserData": compute_user_data(site, compute, pack=script_hash)}


def content_hash(request: Mapping[str, Any]) -> str:
    """The hash of a launch template's content, from its request or description."""
    return str(request["VersionDescription"]).removeprefix(_HASH_PREFIX)


def placement_group_request(site: Site, name: str) -> dict[str, Any]:
    """The CreatePlacementGroup request for the compute environment `name`."""
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


def _network_interfaces(layout: FabricLayout, groups: Sequence[str]) -> list[dict[str, Any]]:
    """The interfaces of a host with EFA: one with an address, and one of EFA alone on other cards.

    Each is the first of its card. So the first card keeps room for the interface that ECS adds for
    each node of a multi-node job, and a host takes one address of the subnet. With more than one
    interface EC2 assigns no public address. Source: EC2 User Guide, "Maximize network bandwidth on
    Amazon EC2 instances with multiple network cards".
    """
    cards = list(range(layout.first, layout.first + layout.interfaces))
    kinds = {0: "efa"} if layout.first == 0 else {0: "interface"}
    kinds |= {card: "efa-only" for card in cards if card}
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": 0,
            "InterfaceType": kind,
            "Groups": list(groups),
            "AssociatePublicIpAddress": False,
            "DeleteOnTermination": True,
        }
        for card, kind in kinds.items()
    ]


def _reservation(text: str) -> dict[str, Any]:
    if text in ("open", "none"):
        return {"CapacityReservationPreference": text}
    key = (
        "CapacityReservationId" if text.startswith("cr-") else "CapacityReservationResourceGroupArn"
    )
    return {"CapacityReservationTarget": {key: text}}


def _pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


# --- Calls ----------------------------------------------------------------------------------------


class LaunchApi:
    """EC2's calls for launch templates, placement groups and AMIs, with our types."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _client(self) -> Any:
        return self._session.client("ec2")

    def template(self, name: str) -> LaunchTemplate | None:
        """The newest version of a launch template; None if it does not exist."""
        try:
            request = {"LaunchTemplateName": name, "Versions": ["$Latest"]}
            answer = call(self._client, "DescribeLaunchTemplateVersions", **request)
            found = answer["LaunchTemplateVersions"]
        except ServiceError as error:
            if error.code in _NO_TEMPLATE:
                return None
            raise
        return _template(name, found[0]) if found else None

    def templates(self, env: str) -> dict[str, LaunchTemplate]:
        """The newest version of every launch template of an environment, by name."""
        entries = read_entries(
            self._client, "DescribeLaunchTemplates", "LaunchTemplates", Filters=[_env_filter(env)]
        )
        names = sorted(each["LaunchTemplateName"] for each in entries)
        found = {name: self.template(name) for name in names}
        return {name: template for name, template in found.items() if template is not None}

    def groups(self, env: str) -> list[str]:
        """The names of an environment's placement groups."""
        answer = call(self._client, "DescribePlacementGroups", Filters=[_env_filter(env)])
        return sorted(group["GroupName"] for group in answer["PlacementGroups"])

    def image_dates(self, ids: Sequence[str]) -> dict[str, float]:
        """When AMIs were made, in seconds since the epoch, by id. Those that are gone are left out.

        By a filter, because a call with ids fails if one of them does not exist.
        """
        filters = [{"Name": "image-id", "Values": list(ids)}]
        images = call(self._client, "DescribeImages", Filters=filters)["Images"]
        return {
            image["ImageId"]: datetime.fromisoformat(image["CreationDate"]).timestamp()
            for image in images
        }

    def delete_images(self, env: str, keep: str = "") -> list[str]:
        """Deregister the AMIs of an environment, with their snapshots. Return their ids.

        The AMI with the id `keep` stays.
        """
        request = {"Owners": ["self"], "Filters": [_env_filter(env)]}
        images = call(self._client, "DescribeImages", **request)["Images"]
        to_delete = [image for image in images if image["ImageId"] != keep]
        for image in to_delete:
            call(self._client, "DeregisterImage", ImageId=image["ImageId"])
            for mapping in image.get("BlockDeviceMappings", ()):
                snapshot = mapping.get("Ebs", {}).get("SnapshotId")
                if snapshot:
                    call(self._client, "DeleteSnapshot", SnapshotId=snapshot)
        return [image["ImageId"] for image in to_delete]

    def create_template(self, request: Mapping[str, Any]) -> LaunchTemplate:
        """Create a launch template. Return its first version."""
        created = call(self._client, "CreateLaunchTemplate", **request)["LaunchTemplate"]
        version = int(created["LatestVersionNumber"])
        return LaunchTemplate(request["LaunchTemplateName"], version, content_hash(request))

    def add_version(self, request: Mapping[str, Any]) -> LaunchTemplate:
        """Create a version of an existing launch template, from a CreateLaunchTemplate request."""
        untagged = {key: value for key, value in request.items() if key != "TagSpecifications"}
        answer = call(self._client, "CreateLaunchTemplateVersion", **untagged)
        version = int(answer["LaunchTemplateVersion"]["VersionNumber"])
        return LaunchTemplate(request["LaunchTemplateName"], version, content_hash(request))

    def delete_template(self, name: str) -> None:
        """Delete a launch template with all its versions, if it exists."""
        try:
            call(self._client, "DeleteLaunchTemplate", LaunchTemplateName=name)
        except ServiceError as error:
            if error.code not in _NO_TEMPLATE:
                raise

    def create_placement_group(self, request: Mapping[str, Any]) -> None:
        """Create a placement group, if an earlier call has not created it already."""
        try:
            call(self._client, "CreatePlacementGroup", **request)
        except ServiceError as error:
            tags = {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}
            ours = error.code == _SAME_GROUP and self.groups(tags["batchml:env"])
            if not ours or request["GroupName"] not in ours:
                raise

    def delete_placement_group(self, name: str) -> bool:
        """Delete a placement group, if it exists. Return False while instances use it."""
        try:
            call(self._client, "DeletePlacementGroup", GroupName=name)
        except ServiceError as error:
            if error.code == _GROUP_IN_USE:
                return False
            if error.code != _NO_GROUP:
                raise
        return True


# AWS's newest AMI for hosts with Neuron chips. Source: Amazon ECS Developer Guide, "Retrieving
# Amazon ECS-optimized Linux AMI metadata".
_NEURON_IMAGE = "/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id"


def newest_neuron_image(session: Session) -> str:
    """The id of AWS's newest AMI for hosts with Neuron chips: one call. Raises what `call` does."""
    answer = call(session.client("ssm"), "GetParameter", Name=_NEURON_IMAGE)
    return str(answer["Parameter"]["Value"])


def _env_filter(env: str) -> dict[str, Any]:
    (tag, value), *_ = owner_tags(env).items()
    return {"Name": f"tag:{tag}", "Values": [value]}


def _template(name: str, detail: Mapping[str, Any]) -> LaunchTemplate:
    return LaunchTemplate(
        name,
        int(detail.get("VersionNumber", 0)),
        content_hash({"VersionDescription": "", **detail}),
    )
