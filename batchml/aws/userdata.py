"""What an instance does when it starts, as user data: AWS Batch wants MIME and adds a part.

Everything here may run again at the next boot and leaves the same behind.

Source: AWS Batch User Guide, "Amazon EC2 user data in launch templates"; Amazon ECS Developer
Guide, "Container agent configuration".
"""

from collections.abc import Iterable
from shlex import quote
from typing import NamedTuple

from batchml.aws.site import NOTICE_FILE, NOTICES, WORKSPACE, Workspace
from batchml.errors import ConfigError

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
