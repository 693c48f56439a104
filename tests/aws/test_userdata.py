"""User data, read as cloud-init reads it and run with the programs of an instance replaced."""

import email
import os
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.ec2 import MAX_USER_DATA, UserDataPart, make_user_data, to_mime
from batchml.aws.naming import WorkspaceMount
from batchml.errors import ConfigError

EFS = WorkspaceMount(kind="efs", file_system="fs-0123456789abcdef0")
POINT = WorkspaceMount(kind="efs", file_system="fs-0123456789abcdef0", access_point="fsap-01")
LUSTRE = WorkspaceMount(
    kind="fsx-lustre", file_system="fs-0123", dns="fs-0123.fsx.eu-west-1.amazonaws.com",
    mount_name="abcdefgh",
)  # fmt: skip
PLACES = pytest.mark.parametrize(
    "workspace",
    [WorkspaceMount(), EFS, POINT, LUSTRE],
    ids=["none", "efs", "access-point", "lustre"],
)


def parts(text: str) -> list[tuple[str, str]]:
    """(content type, content) of each part."""
    message = email.message_from_string(text)
    assert message.is_multipart()
    assert message.defects == []
    found = []
    for part in message.walk():
        if not part.is_multipart():
            assert part.defects == []
            found.append((part.get_content_type(), decoded(part)))
    return found


def decoded(part: Message) -> str:
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)
    return content.decode("ascii")


def scripts(text: str, kind: str) -> list[str]:
    return [content for found, content in parts(text) if found == kind]


BOOTHOOK, SCRIPT = "text/cloud-boothook", "text/x-shellscript"


class Instance:
    """A folder that stands for an instance's file system, and programs that note their use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir(parents=True)
        self.calls = root / "calls"
        for folder in ("usr/local/sbin", "etc/ecs", "etc/systemd/system"):
            (root / folder).mkdir(parents=True)
        for program in ("mount", "iptables", "systemctl", "dnf", "sleep", "mount.efs"):
            self.install(program, "exit 0")
        self.install("mount", f"touch {root}/mounted")
        self.install("mountpoint", f"test -e {root}/mounted")
        self.install("iptables", f'[ "$3" != -C ] || grep -q "iptables.*-I" {self.calls}')

    def install(self, name: str, body: str) -> None:
        path = self.bin / name
        # Noted after its work: a rule that is asked for must not find its own question.
        path.write_text(
            f'#!/bin/bash\n({body})\nend=$?\necho "{name} $*" >> {self.calls}\nexit $end\n'
        )
        path.chmod(0o755)

    def here(self, script: str) -> str:
        for folder in (
            "/etc/", "/usr/local/sbin", "/workspace", "/run/batchml", "/var/lib/", "/dev/md",
            "/dev/disk",
        ):  # fmt: skip
            script = script.replace(folder, f"{self.root}{folder}")
        return script.replace("//", "/")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash"], input=self.here(script), text=True, capture_output=True, timeout=60,
            env={"PATH": f"{self.bin}:/usr/bin:/bin"},
        )  # fmt: skip

    def called(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [
            line.removeprefix(f"{program} ").replace(str(self.root), "")
            for line in lines
            if line.startswith(f"{program} ")
        ]

    @property
    def agent(self) -> str:
        return (self.root / "etc/ecs/ecs.config").read_text()


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "root")


@PLACES
def test_every_part_is_a_shell_script_for_cloud_init(workspace: WorkspaceMount) -> None:
    found = parts(make_user_data(workspace=workspace, is_spot=True))
    assert [kind for kind, _ in found][-1] == SCRIPT
    assert {kind for kind, _ in found} <= {BOOTHOOK, SCRIPT}
    for _, content in found:
        assert content.startswith("#!/bin/bash\n")  # nothing before it, or it is not run by bash
        checked = subprocess.run(
            ["bash", "-n"], input=content, text=True, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stderr) == (0, "")


@PLACES
def test_a_linter_has_nothing_to_say(instance: Instance, workspace: WorkspaceMount) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    text = make_user_data(workspace=workspace, is_spot=True, has_cache=True)
    found = [content for _, content in parts(text)]
    for hook in found[:-1]:
        instance.run(hook)  # some write scripts of their own
    found += [path.read_text() for path in (instance.root / "usr/local/sbin").iterdir()]
    assert len(found) == (5 if workspace.kind == "none" else 7)
    for content in found:
        shown = subprocess.run([shellcheck, "-"], input=content, text=True, capture_output=True)
        assert (shown.returncode, shown.stdout) == (0, "")


def test_the_agent_gets_its_settings_and_keeps_what_batch_wrote(instance: Instance) -> None:
    path = instance.root / "etc/ecs/ecs.config"
    path.write_text("ECS_CLUSTER=batch-1\nECS_CONTAINER_STOP_TIMEOUT=30s")  # no end of line
    (script,) = scripts(make_user_data(stop_seconds=90), SCRIPT)
    shown = instance.run(script)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = instance.agent.splitlines()
    assert lines[0] == "ECS_CLUSTER=batch-1"
    settings = dict(line.split("=") for line in lines)
    assert len(settings) == len(lines)
    assert (
        settings
        | {
            "ECS_ENABLE_SPOT_INSTANCE_DRAINING": "true",
            "ECS_CONTAINER_STOP_TIMEOUT": "90s",
            "ECS_ENABLE_TASK_IAM_ROLE": "true",
            "ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST": "true",
            "ECS_AWSVPC_BLOCK_IMDS": "true",
            "ECS_IMAGE_PULL_BEHAVIOR": "prefer-cached",
        }
        == settings
    )
    before = instance.agent
    assert instance.run(script).returncode == 0
    assert instance.agent == before


def test_the_agent_file_is_made_where_there_is_none(instance: Instance) -> None:
    (script,) = scripts(make_user_data(), SCRIPT)
    assert instance.run(script).returncode == 0
    assert instance.agent.startswith("ECS_")


@pytest.mark.parametrize("lets", [True, False])
def test_privileged_containers_start_only_where_the_driver_is_mounted(
    instance: Instance, lets: bool
) -> None:
    (script,) = scripts(make_user_data(lets_privileged=lets, has_gpus=lets), SCRIPT)
    instance.run(script)
    assert f"ECS_DISABLE_PRIVILEGED={'false' if lets else 'true'}\n" in instance.agent
    assert ("ECS_ENABLE_GPU_SUPPORT=true\n" in instance.agent) is lets


def test_only_root_reaches_the_metadata_and_the_rule_is_made_once(instance: Instance) -> None:
    (hook,) = scripts(make_user_data(), BOOTHOOK)
    for _ in range(2):
        assert instance.run(hook).returncode == 0
    made = [call for call in instance.called("iptables") if " -I " in call]
    assert made == [
        "-w 10 -I OUTPUT -d 169.254.169.254/32 -m owner ! --uid-owner 0 -j DROP",
    ]
    assert "169.254.170.2" not in "".join(instance.called("iptables"))


@pytest.mark.parametrize(
    ("workspace", "command"),
    [
        (EFS, "-t efs -o tls,noresvport fs-0123456789abcdef0:/ /workspace"),
        (POINT, "-t efs -o tls,noresvport,accesspoint=fsap-01 fs-0123456789abcdef0:/ /workspace"),
        (LUSTRE, "-t lustre -o relatime,flock "
                 "fs-0123.fsx.eu-west-1.amazonaws.com@tcp:/abcdefgh /workspace"),
    ],
    ids=["efs", "access-point", "lustre"],
)  # fmt: skip
def test_the_workspace_is_mounted_once_and_before_the_agent(
    instance: Instance, workspace: WorkspaceMount, command: str
) -> None:
    _, hook = scripts(make_user_data(workspace=workspace), BOOTHOOK)
    states = []
    for _ in range(2):  # two boots of which the second finds it mounted
        assert instance.run(hook).returncode == 0
        states.append(sorted(str(p.relative_to(instance.root)) for p in instance.root.rglob("*")))
    assert instance.called("mount") == [command]
    assert states[0] == states[1]
    drop_in = (instance.root / "etc/systemd/system/ecs.service.d/batchml.conf").read_text()
    assert "ExecStartPre=" in drop_in
    before_the_agent = instance.root / "usr/local/sbin/batchml-workspace"
    assert str(before_the_agent) in drop_in
    assert os.access(before_the_agent, os.X_OK)
    assert instance.called("systemctl") == ["daemon-reload"] * 2


def test_every_job_may_write_unless_an_access_point_says_who(instance: Instance) -> None:
    _, hook = scripts(make_user_data(workspace=EFS), BOOTHOOK)
    instance.run(hook)
    assert (instance.root / "workspace").stat().st_mode & 0o7777 == 0o1777
    assert "chmod 1777" not in scripts(make_user_data(workspace=POINT), BOOTHOOK)[1]


def test_a_mount_is_tried_again_and_in_the_end_the_agent_does_not_start(
    instance: Instance,
) -> None:
    _, hook = scripts(make_user_data(workspace=EFS), BOOTHOOK)
    instance.install("mount", "exit 32")
    shown = instance.run(hook)
    assert shown.returncode == 1
    assert "cannot be mounted (fs-0123456789abcdef0)" in shown.stderr
    assert len(instance.called("mount")) == len(instance.called("sleep")) == 12
    # What systemd runs before the agent fails alike, and succeeds once the file system answers.
    gate = [str(instance.root / "usr/local/sbin/batchml-workspace")]
    path = {"PATH": f"{instance.bin}:/usr/bin:/bin"}
    assert subprocess.run(gate, env=path, stderr=subprocess.DEVNULL, check=False).returncode == 1
    instance.install("mount", f"touch {instance.root}/mounted")
    assert subprocess.run(gate, env=path, check=False).returncode == 0


def test_what_mounts_is_installed_where_an_image_lacks_it(instance: Instance) -> None:
    _, hook = scripts(make_user_data(workspace=LUSTRE), BOOTHOOK)
    assert instance.run(hook).returncode == 0
    assert instance.called("dnf") == ["install -y lustre-client"]
    _, hook = scripts(make_user_data(workspace=EFS), BOOTHOOK)  # mount.efs is there
    (instance.root / "mounted").unlink()
    assert instance.run(hook).returncode == 0
    assert instance.called("dnf") == ["install -y lustre-client"]


def test_without_a_workspace_nothing_is_mounted() -> None:
    assert "/workspace" not in make_user_data()


class NvmeInstance(Instance):
    """An instance with disks of the instance store, of which some are mounted elsewhere."""

    def __init__(self, root: Path, disks: int, mounted: int = 0) -> None:
        super().__init__(root)
        links = root / "dev/disk/by-id"
        links.mkdir(parents=True)
        (root / "dev/md").mkdir()
        for number in range(disks):
            (root / f"nvme{number}").touch()
            for end in ("", "_1"):  # two links lead to each disk
                name = f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{number}{end}"
                (links / name).symlink_to(root / f"nvme{number}")
        self.install("lsblk", f'[ "${{3: -1}}" -ge {disks - mounted} ] && echo /scratch; exit 0')
        self.install("mdadm", f'[ "$1" = --create ] && touch {root}/dev/md/batchml')
        self.install("mkfs.xfs", f"touch {root}/formatted")
        self.install("mount", f"[ -e {root}/formatted ] && touch {root}/mounted")
        self.install("df", "echo Size; echo 1000")

    def boot(self) -> None:
        hook = scripts(make_user_data(has_cache=True), BOOTHOOK)[1]
        shown = self.run(hook)
        assert (shown.returncode, shown.stderr) == (0, "")

    @property
    def cache(self) -> Path:
        return self.root / "var/lib/batchml/cache"


def test_data_sets_are_cached_on_the_nvme_disk_and_stay_there_after_a_reboot(
    tmp_path: Path,
) -> None:
    host = NvmeInstance(tmp_path / "root", 1)
    host.boot()
    assert host.called("mkfs.xfs") == ["-f -q -K /nvme0"]
    assert host.called("mount")[-1] == "-o noatime,nodev,nosuid /nvme0 /var/lib/batchml/cache"
    assert not (host.cache / "limit").exists() and host.cache.stat().st_mode & 0o777 == 0o777
    (host.root / "mounted").unlink()
    host.boot()
    assert len(host.called("mkfs.xfs")) == 1, "the file system is there"
    mounts = len(host.called("mount"))
    host.boot()
    assert len(host.called("mount")) == mounts, "it is mounted"


def test_several_disks_are_one_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    host = NvmeInstance(tmp_path / "root", 4, mounted=1)
    host.boot()
    assert host.called("mdadm") == [
        "--assemble /dev/md/batchml /nvme0 /nvme1 /nvme2",
        "--create /dev/md/batchml --run --force --level=0 --homehost=any --raid-devices=3 "
        "/nvme0 /nvme1 /nvme2",
    ]
    assert host.called("mkfs.xfs") == ["-f -q -K /dev/md/batchml"]
    lone = NvmeInstance(tmp_path / "lone", 2)
    lone.install("mdadm", "exit 1")  # it fails: one disk is better than none
    lone.boot()
    assert lone.called("mkfs.xfs") == ["-f -q -K /nvme0"]


def test_without_such_a_disk_the_cache_takes_half_of_the_root_disk(tmp_path: Path) -> None:
    host = NvmeInstance(tmp_path / "root", 0)
    host.boot()
    assert (host.cache / "limit").read_text() == "500\n"
    assert host.called("mkfs.xfs") == host.called("mount") == []
    assert host.cache.stat().st_mode & 0o777 == 0o777


@given(st.integers(1, 40_000))
def test_user_data_is_never_more_than_ec2_takes(length: int) -> None:
    try:
        made = to_mime([UserDataPart("script", "#!/bin/bash\n" + "#" * length)])
    except ConfigError as error:
        assert "16384" in str(error)
        assert length > MAX_USER_DATA - 400
    else:
        assert len(made.encode()) <= MAX_USER_DATA
