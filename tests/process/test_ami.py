"""The build of the machine image, run in containers: the very scripts of `cfn/ami.yaml`.

The programs of Amazon Linux are played (`ami_host.sh`); files, links, modes and the libraries that
are loaded are real. What only a build in AWS can show is listed in docs/ami.md.
"""

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ami import scripts
from tests.support.executor_rig import IMAGE, docker, need_engine

PLAYED = [
    "dnf", "rpm", "systemctl", "uname", "modinfo", "modprobe", "nvidia-ctk", "cloud-init", "lspci",
    "docker", "curl", "gpg",
]  # fmt: skip
VERSION = "580.178.04"
KERNEL = "6.1.158-178.288.amzn2023.x86_64"
MODULES = f"/fake/modules/{KERNEL}"
REFRESH = "/usr/local/libexec/batchml/driver-folder"
CHECK = "/usr/local/libexec/batchml/check-host"
SOURCE = "https://efa-installer.amazonaws.com"

# A build instance as the parent image starts: an agent that ran, and what sessions leave.
PARENT = f"""
set -e
mkdir -p /fake/packages /fake/modules /fake/enabled /fake/active /var/lib/ecs/data /var/log/ecs
echo {KERNEL} >/fake/kernel
echo {VERSION} >/fake/driver
echo x86_64 >/fake/machine
echo 1.103.0-1 >/fake/packages/ecs-init
echo 4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC >/fake/signer
touch /fake/efas /fake/packages/gnupg2-minimal
touch /fake/calls /fake/gpus /fake/enabled/ecs /fake/active/ecs /fake/enabled/sshd /fake/active/sshd
for each in {" ".join(PLAYED)}; do ln -s /played/host /played/$each; done
printf 'ID="amzn"\\nVERSION_ID="2023"\\nPLATFORM_ID="platform:al2023"\\n' >/etc/os-release
mkdir -p /usr/lib64 /root/.ssh /home/ec2-user/.ssh /etc/ssh /root/.aws /etc/ecs
mkdir -p /var/lib/cloud/instances/i-0123 /var/lib/cloud/data
cp -L "$(ldconfig -p | sed -n 's/.*libc\\.so\\.6 .*=> //p' | head -n 1)" /usr/lib64/libc.so.6
echo x | tee /var/lib/ecs/data/agent.db /var/lib/ecs/data/.hidden /var/log/ecs/ecs-agent.log \\
  /root/.ssh/authorized_keys /home/ec2-user/.ssh/authorized_keys /etc/ssh/ssh_host_rsa_key \\
  /root/.bash_history /home/ec2-user/.bash_history /root/.aws/credentials >/etc/machine-id
"""


class Host:
    """A container that plays a host; `host(script)` runs a script in it as Image Builder would."""

    def __init__(self, image: str) -> None:
        self.name = f"batchml-ami-{uuid.uuid4().hex[:12]}"
        made = docker("run", "-d", "--init", "--name", self.name, image, "sleep", "600")
        assert made.returncode == 0, made.stderr

    def __call__(self, script: str, *, driver: str = VERSION) -> subprocess.CompletedProcess[str]:
        path = "PATH=/played:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return subprocess.run(
            ["docker", "exec", "-i", "-e", path, self.name, "bash", "-s"],
            input=with_parameters(script, DriverVersion=driver),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def run(self, script: str, **options: str) -> str:
        done = self(script, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self, tag: str) -> str:
        done = docker("commit", self.name, tag)
        assert done.returncode == 0, done.stderr
        return tag

    def close(self) -> None:
        docker("rm", "-f", "-v", self.name)


def with_parameters(script: str, **values: str) -> str:
    """The script with its parameters, as Image Builder puts them in."""
    for name, value in {"EfaVersion": "1.51.0", "EfaSource": SOURCE, **values}.items():
        script = script.replace(f"{{{{ {name} }}}}", value)
    return script


def phase(name: str, component: str = "") -> list[str]:
    found = [each.text for each in scripts(name) if each.component.startswith(component)]
    assert found
    return found


def step(name: str) -> str:
    (text,) = [script.text for script in scripts("build") if script.step == name]
    return text


@pytest.fixture(scope="module")
def parent() -> Iterator[str]:
    """An image that plays the parent."""
    need_engine()
    host = Host(IMAGE)
    tag = f"{host.name}:parent"
    try:
        host.run("mkdir /played")
        played = Path(__file__).with_name("ami_host.sh")
        assert docker("cp", str(played), f"{host.name}:/played/host").returncode == 0
        host.run("chmod 755 /played/host")
        host.run(PARENT)
        yield host.commit(tag)
    finally:
        host.close()
        docker("rmi", "-f", tag)


@pytest.fixture(scope="module")
def built(parent: str) -> Iterator[str]:
    """The image after the build phase of every component."""
    host = Host(parent)
    tag = f"{host.name}:built"
    try:
        for script in phase("build"):
            host.run(script)
        yield host.commit(tag)
    finally:
        host.close()
        docker("rmi", "-f", tag)


@pytest.fixture
def fresh(parent: str) -> Iterator[Host]:
    """A host of its own, as the parent starts."""
    host = Host(parent)
    yield host
    host.close()


@pytest.fixture
def host(built: str) -> Iterator[Host]:
    """A host of its own, as the build left it."""
    made = Host(built)
    yield made
    made.close()


@pytest.fixture(scope="module")
def done(built: str) -> Iterator[Host]:
    """One that is looked at and not changed."""
    made = Host(built)
    yield made
    made.close()


# --- what the build does ------------------------------------------------------------------------


def test_what_is_installed_and_held_at_its_version(done: Host) -> None:
    calls = done.run("cat /fake/calls").splitlines()
    names = (
        "kmod-nvidia-open-dkms",
        "nvidia-driver-cuda",
        "nvidia-persistenced",
        "nvidia-modprobe",
    )
    parts = " ".join(f"{name}-{VERSION}-*" for name in names)
    assert [call for call in calls if call.startswith("dnf ")] == [
        "dnf install -y dnf-command(versionlock) dkms pciutils nvidia-release "
        f"kernel-devel-{KERNEL} kernel-modules-extra-{KERNEL}",
        "dnf versionlock add kernel*",
        f"dnf install -y {parts}",
        f"dnf install -y nvidia-fabricmanager-{VERSION}-*",
        "dnf versionlock add nvidia* kmod* libnvidia*",
        "dnf install -y nvidia-container-toolkit",
        "dnf install -y lustre-client amazon-efs-utils",
        "dnf swap -y gnupg2-minimal gnupg2-full",
        "dnf versionlock add efa* rdma-core* ibacm* libib* librdmacm* infiniband-diags*",
        "dnf swap -y gnupg2-full gnupg2-minimal",
        "dnf clean all",
    ]
    assert not done.run("ls -A /etc/dkms"), "of this machine's vCPUs, not of the hosts'"


def test_all_checks_of_the_validate_phase_pass(done: Host) -> None:
    said = [done.run(script) for script in phase("validate")]
    assert said == [
        "", "good: driver toolkit folder ecs\n", "good: storage\n",
        "no Elastic Fabric Adapter here: its devices were not tried\ngood: efa\n",
        "good: clean\n",
    ]  # fmt: skip


def test_services_that_hosts_start_and_none_for_ssh(done: Host) -> None:
    assert done.run("ls /fake/enabled").split() == [
        "batchml-driver", "docker", "ecs", "nvidia-fabricmanager", "nvidia-persistenced",
    ]  # fmt: skip
    assert done.run("ls /fake/active") == ""


def test_an_agent_that_came_back_during_the_build_leaves_nothing(host: Host) -> None:
    host.run("touch /fake/active/ecs")
    host.run(step("Clean"))
    host.run(f"{CHECK} clean")


def test_the_agent_is_told_of_gpus_once_and_of_no_cluster(host: Host) -> None:
    host.run(step("ToolkitAndEcs"))
    assert host.run("cat /var/lib/ecs/ecs.config") == "ECS_ENABLE_GPU_SUPPORT=true\n"
    assert host.run("ls -A /etc/ecs") == ""
    runtime = host.run(
        "stat -c %a /etc/docker-runtimes.d/nvidia; cat /etc/docker-runtimes.d/nvidia"
    )
    assert runtime == '755\n#!/bin/sh\nexec /usr/bin/nvidia-container-runtime "$@"\n'


def test_the_folder_holds_the_driver_links_as_links_and_nothing_else(done: Host) -> None:
    listed = done.run("cd /opt/nvidia; find . -printf '%P %M %u %l\\n' | LC_ALL=C sort")
    libraries = ["cuda", "cudadebugger", "nvcuvid", "nvidia-ml", "nvidia-nvvm"]
    libraries += ["nvidia-ptxjitcompiler"]
    expected = [" drwxr-xr-x root ", "VERSION -rw-r--r-- root "]
    expected += [f"{folder} drwxr-xr-x root " for folder in ("bin", "lib64")]
    expected += [f"bin/nvidia-{name} -rwxr-xr-x root " for name in ("cuda-mps-server", "smi")]
    for name in libraries:
        expected.append(f"lib64/lib{name}.so.{VERSION} -rwxr-xr-x root ")
        expected.append(f"lib64/lib{name}.so.1 lrwxrwxrwx root lib{name}.so.{VERSION}")
    for name in ("cuda", "nvidia-ml"):
        expected.append(f"lib64/lib{name}.so lrwxrwxrwx root lib{name}.so.1")
    assert sorted(listed.splitlines()) == sorted(expected)
    assert done.run("cat /opt/nvidia/VERSION") == f"{VERSION}\n"
    assert done.run("ls -A /opt") == "nvidia\n"


def test_the_list_of_packages_is_one_and_complete(done: Host) -> None:
    listed = json.loads(done.run("cat /usr/share/batchml/sbom.cdx.json"))
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.5")
    seen = {part["name"]: part for part in listed["components"]}
    assert set(seen) == set(done.run("ls /fake/packages").split("\n")) - {""}
    assert seen["nvidia-driver-cuda"] == {
        "type": "library", "name": "nvidia-driver-cuda", "version": f"{VERSION}-1.amzn2023",
        "purl": f"pkg:rpm/amzn/nvidia-driver-cuda@{VERSION}-1.amzn2023?arch=x86_64",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("branch", "version", "manager"),
    [("580", VERSION, "nvidia-fabricmanager"), ("570", "570.86.15", "nvidia-fabric-manager")],
)
def test_a_branch_takes_the_newest_of_which_all_parts_are_offered(
    fresh: Host, branch: str, version: str, manager: str
) -> None:
    fresh.run(step("Driver"), driver=branch)
    assert fresh.run("cat /fake/packages/nvidia-driver-cuda") == f"{version}-1.amzn2023\n"
    assert fresh.run(f"cat /fake/packages/{manager}") == f"{version}-1\n"


def test_later_kernels_have_packages_of_their_own_name(fresh: Host) -> None:
    fresh.run("echo 6.12.55-74.119.amzn2023.x86_64 >/fake/kernel")
    fresh.run(step("Driver"))
    assert "kernel6.12-devel" in fresh.run("ls /fake/packages").split()


@pytest.mark.parametrize("wanted", ["560.35.03", "560", "580.200.01"])
def test_a_version_that_is_not_offered_ends_the_build_and_shows_what_is(
    fresh: Host, wanted: str
) -> None:
    ended = fresh(step("Driver"), driver=wanted)
    assert ended.returncode == 1
    assert f"FAIL driver: no NVIDIA driver {wanted}" in ended.stderr
    assert f"kmod-nvidia-open-dkms {VERSION}-1.amzn2023" in ended.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("echo ID=debian >/etc/os-release", "not an Amazon Linux 2023"),
        ("echo aarch64 >/fake/machine", "not for x86_64"),
        ("rm /fake/packages/ecs-init", "ecs-init is missing"),
        ("touch /fake/packages/nvidia-driver-cuda", "has a driver already"),
    ],
)
def test_another_parent_is_refused(fresh: Host, change: str, reason: str) -> None:
    assert fresh(step("ParentIsKnown")).returncode == 0
    fresh.run(change)
    ended = fresh(step("ParentIsKnown"))
    assert (ended.returncode, ended.stderr.startswith("FAIL parent: ")) == (1, True)
    assert reason in ended.stderr


def test_the_efa_installer_installs_a_driver_only_if_aws_has_signed_it(fresh: Host) -> None:
    fresh.run(step("Driver"))
    ended = fresh("echo 0000 >/fake/signer\n" + step("Efa"))
    assert (ended.returncode, f"{SOURCE}/aws-efa" in ended.stderr) == (1, True)
    assert ended.stderr.startswith("FAIL efa: ") and "is not signed by AWS" in ended.stderr
    assert "efa_installer" not in fresh.run("cat /fake/calls")
    fresh.run("dnf swap -y gnupg2-full gnupg2-minimal")
    ended = fresh(with_parameters(step("Efa"), EfaSource="https://elsewhere.example/efa"))
    assert "FAIL efa: no https://elsewhere.example/efa/aws-efa" in ended.stderr


def test_the_efa_installer_makes_only_what_hosts_need(done: Host) -> None:
    calls = done.run("cat /fake/calls").splitlines()
    assert "efa_installer -y --minimal" in calls
    assert done.run("ls -A /tmp") == ""


def test_a_host_with_efa_needs_devices_that_jobs_can_open(host: Host) -> None:
    host.run('for n in 6 7; do echo "00:0$n.0 0200: 1d0f:efa1"; done >/fake/efas')
    host.run("mkdir /dev/infiniband; for n in 0 1; do mknod /dev/infiniband/uverbs$n c 1 3; done")
    host.run("chmod 666 /dev/infiniband/uverbs0; chmod 600 /dev/infiniband/uverbs1")
    ended = host(f"{CHECK} efa")
    assert ended.stderr == "FAIL efa: /dev/infiniband/uverbs1 cannot be opened by jobs' user\n"
    host.run("chmod 666 /dev/infiniband/uverbs1")
    assert host.run(f"{CHECK} efa") == "good: efa\n"


# --- what validation sees -----------------------------------------------------------------------

# A name, what is broken, and what validation says of it.
FAULTS = {
    "no libcuda": ("rm /opt/nvidia/lib64/libcuda.so.1", "folder: libcuda.so.1 is not in"),
    "no libnvidia-ml": ("rm /opt/nvidia/lib64/libnvidia-ml.so*", "folder: libnvidia-ml.so.1 is"),
    "no jit": ("rm /opt/nvidia/lib64/libnvidia-ptx*", "folder: libnvidia-ptxjitcompiler.so.1 is"),
    "no nvidia-smi": ("rm /opt/nvidia/bin/nvidia-smi", "folder: nvidia-smi is not in"),
    "no folder": ("rm -r /opt/nvidia", "folder: libcuda.so.1 is not in"),
    "libc": (
        "cp /usr/lib64/libc.so.6 /opt/nvidia/lib64/",
        "folder: /opt/nvidia/lib64/libc.so.6 is",
    ),
    "ld": ("touch /opt/nvidia/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2 is the host's C"),
    "libstdc++": ("touch /opt/nvidia/lib64/libstdc++.so.6", "libstdc++.so.6 is the host's C"),
    "link to nothing": (
        "rm /opt/nvidia/lib64/libnvidia-nvvm.so.5*",
        "libnvidia-nvvm.so.1 leads out",
    ),
    "link out": ("ln -s /etc/passwd /opt/nvidia/bin/x", "/opt/nvidia/bin/x leads out"),
    "writable": ("chmod o+w /opt/nvidia/bin/nvidia-smi", "nvidia-smi can be changed by others"),
    "writable by a group": ("chmod g+w /opt/nvidia/VERSION", "VERSION can be changed by others"),
    "setuid": ("chmod u+s /opt/nvidia/bin/nvidia-smi", "or is setuid"),
    "not at boot": ("rm /fake/enabled/batchml-driver", "folder: batchml-driver is not enabled"),
    "old toolkit": ("echo 1.17.7 >/fake/toolkit", "toolkit: the container toolkit is 1.17.7; at"),
    "no toolkit": ("rm /played/nvidia-ctk", "toolkit: nvidia-ctk is missing"),
    "no runtime": ("rm /etc/docker-runtimes.d/nvidia", "toolkit: Docker has no runtime nvidia"),
    "no GPU support": (": >/var/lib/ecs/ecs.config", "toolkit: ECS_ENABLE_GPU_SUPPORT=true is not"),
    "no module": (f"rm {MODULES}/nvidia-uvm", "driver: no kernel module nvidia-uvm for the"),
    "other kernel": (
        "echo 6.1.9 >/fake/kernel",
        "no kernel module nvidia for the running kernel, 6.1.9",
    ),
    "other driver": (
        f"echo 5.1 >{MODULES}/nvidia",
        f"the kernel module is 5.1, the files in /opt/nvidia {VERSION}",
    ),
    "ecs off": ("rm /fake/enabled/ecs", "ecs: ecs is not enabled"),
    "a cluster": ("echo ECS_CLUSTER=x >/etc/ecs/ecs.config", "ecs: ECS_CLUSTER is set"),
    "no lustre module": (f"rm {MODULES}/lustre", "storage: no kernel module lustre"),
    "no lustre": ("rm /usr/sbin/mount.lustre", "storage: mount.lustre is missing"),
    "no efs": ("rm /usr/sbin/mount.efs", "storage: mount.efs is missing"),
    "no efa": (f"rm {MODULES}/efa", "efa: no kernel module efa for the running kernel"),
    "the kernel's efa": (
        f"echo >{MODULES}/efa",
        "efa: the kernel module is not of the package, the",
    ),
    "another efa": (f"echo 2.1.0 >{MODULES}/efa", "efa: the kernel module is 2.1.0, the package"),
    "no rdma-core": ("rm /fake/packages/rdma-core", "efa: rdma-core is missing"),
    "no device": ("echo '00:06.0 0200: 1d0f:efa1' >/fake/efas", "efa: 1 adapters, but 0 devices"),
    "agent state": (
        "echo x >/var/lib/ecs/data/agent.db",
        "clean: agent state is left: /var/lib/ecs",
    ),
    "hidden state": ("echo x >/var/lib/ecs/data/.x", "agent state is left: /var/lib/ecs/data/.x"),
    "agent runs": ("touch /fake/active/ecs", "clean: ecs runs"),
    "cloud-init": ("mkdir -p /var/lib/cloud/instances", "clean: cloud-init's state is left"),
    "root's key": ("echo x >/root/.ssh/authorized_keys", "left of the build: /root/.ssh/auth"),
    "a user's key": ("echo x >/home/ec2-user/.ssh/authorized_keys", "left of the build: /home/ec2"),
    "host key": (
        "echo x >/etc/ssh/ssh_host_ed25519_key",
        "left of the build: /etc/ssh/ssh_host_ed",
    ),
    "history": ("echo x >/home/ec2-user/.bash_history", "/home/ec2-user/.bash_history"),
    "credentials": ("mkdir /root/.aws", "left of the build: /root/.aws"),
    "machine id": ("echo x >/etc/machine-id", "clean: /etc/machine-id is not empty"),
    "no list": ("rm /usr/share/batchml/sbom.cdx.json", "clean: there is no list of the packages"),
}


# What the faults touch, kept and put back.
SAVE = """
tar -C / -cf /saved.tar opt var/lib/ecs var/lib/cloud etc/ecs etc/ssh etc/machine-id root home \\
  etc/docker-runtimes.d fake played usr/sbin/mount.lustre usr/sbin/mount.efs usr/share/batchml
"""
END = "-- end of a fault --"
RESTORE = """
rm -rf /opt/* /var/lib/{ecs,cloud} /etc/{ecs,ssh} /root /home /fake /played
tar -C / -xpf /saved.tar
"""


def test_each_fault_is_seen_and_said(host: Host) -> None:
    """One container for all: each fault is made, looked at, and undone."""
    validation = "\n".join(f"{text.strip()} || echo it failed" for text in phase("validate"))
    host.run(SAVE)
    rounds = (f"{change}\n{validation}\n{RESTORE}" for change, _ in FAULTS.values())
    said = host.run(f"\necho {END}\n".join(("exec 2>&1", *rounds, validation))).split(f"{END}\n")
    healthy = said.pop()
    wrong = {
        name: shown
        for (name, (_, reason)), shown in zip(FAULTS.items(), said[1:], strict=True)
        if not re.search(rf"^FAIL .*{re.escape(reason)}", shown, re.M) or "it failed" not in shown
    }
    assert wrong == {}
    assert "it failed" not in healthy and "FAIL" not in healthy, "without a fault it passes"


def test_all_faults_are_said_at_once(host: Host) -> None:
    host.run(
        "rm /opt/nvidia/lib64/libcuda.so* /opt/nvidia/bin/nvidia-smi; echo 1.9.0 >/fake/toolkit"
    )
    lines = host(phase("validate")[1]).stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["FAIL toolkit", "FAIL folder", "FAIL folder"]


def test_a_check_that_does_not_exist_is_no_success(done: Host) -> None:
    assert "FAIL typo: there is no such check" in done(f"{CHECK} typo").stderr
    assert [done(f"{CHECK} typo").returncode, done(CHECK).returncode] == [1, 2]


# --- at every start of a host -------------------------------------------------------------------


def test_a_start_with_the_same_driver_changes_nothing(host: Host) -> None:
    look = "find /opt -printf '%P %i %T@\\n' | sort"
    before = host.run(look)
    assert host.run(REFRESH) == f"/opt/nvidia has driver {VERSION}\n"
    assert host.run(look) == before


def test_a_start_with_another_driver_replaces_the_folder_whole(host: Host) -> None:
    host.run(f"rm /usr/lib64/*.{VERSION}; rm -r /fake/packages/*nvidia*")
    host.run("echo 590.44.01 >/fake/driver; touch /fake/packages/nvidia-release")
    host.run("dnf install -y nvidia-driver-cuda")
    assert host.run(REFRESH) == "/opt/nvidia has driver 590.44.01 now\n"
    listed = host.run("ls /opt/nvidia/lib64; cat /opt/nvidia/VERSION; ls -A /opt")
    assert VERSION not in listed and "libcuda.so.590.44.01" in listed
    assert listed.endswith("590.44.01\nnvidia\n")
    host.run(f"{CHECK} folder")


@pytest.mark.parametrize(
    "cut",
    ["rm -r /opt/nvidia", "mv /opt/nvidia /opt/.nvidia.abc.old", "rm /opt/nvidia/VERSION"],
)
def test_a_start_after_one_that_was_cut_off_makes_it_whole(host: Host, cut: str) -> None:
    host.run(f"{cut}; mkdir -p /opt/.nvidia.xyz/lib64; touch /opt/.nvidia.xyz/lib64/libcuda.so.1")
    host.run(REFRESH)
    assert host.run("ls -A /opt") == "nvidia\n"
    host.run(f"{CHECK} folder")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("touch /usr/lib64/libcuda.so.570.86.15", "one libcuda.so.VERSION is expected"),
        ("rm /usr/lib64/libcuda.so.*.*", "found: none"),
        ("ln -sf /usr/lib64/x /usr/lib64/libnvidia-x.so.1", "libnvidia-x.so.1 -> /usr/lib64/x"),
        ("rm /usr/lib64/libnvidia-ml.so.*.*", "links that would lead nowhere"),
    ],
)
def test_a_driver_that_cannot_be_laid_out_leaves_the_folder_as_it_was(
    host: Host, change: str, reason: str
) -> None:
    host.run("echo 1.0.0 >/opt/nvidia/VERSION")
    before = host.run("find /opt -printf '%P %i\\n' | sort")
    host.run(change)
    ended = host(REFRESH)
    assert (ended.returncode, ended.stderr.startswith("FAIL driver-folder: ")) == (1, True)
    assert reason in ended.stderr
    assert host.run("find /opt -printf '%P %i\\n' | sort") == before


# --- the test phase, on an instance from the image ----------------------------------------------


def test_a_host_without_a_gpu_says_what_was_not_tried(host: Host) -> None:
    host.run(
        "touch /fake/active/batchml-driver /fake/active/ecs; echo x >/var/lib/ecs/data/agent.db"
    )
    said = "".join(host.run(script) for script in phase("test"))
    assert "no GPU here" in said
    assert "good: driver toolkit folder ecs started\n" in said


def test_a_host_with_a_gpu_needs_its_nodes_and_a_program_that_finds_its_libraries(
    host: Host,
) -> None:
    host.run("touch /fake/active/batchml-driver; echo '00:1e.0 3D controller: NVIDIA' >/fake/gpus")
    ended = host(f"{CHECK} started")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"FAIL started: there is no /dev/nvidia{name}" for name in ("0", "ctl", "-uvm")
    ]
    host.run("for each in 0 ctl -uvm; do mknod /dev/nvidia$each c 1 3; done")
    assert "GPU 0: played, with /opt/nvidia/lib64" in host.run(f"{CHECK} started")
    host.run("printf '#!/bin/sh\\nexit 9\\n' >/opt/nvidia/bin/nvidia-smi")
    assert "does not see the GPU" in host(f"{CHECK} started").stderr


def test_a_host_whose_folder_was_not_made_at_its_start_fails(done: Host) -> None:
    assert "batchml-driver did not run well" in done(f"{CHECK} started").stderr


# --- as jobs see it -----------------------------------------------------------------------------

LOADS = """
import ctypes
library = ctypes.CDLL("libcuda.so.1")
library.zlibVersion.restype = ctypes.c_char_p  # what plays libcuda is zlib
assert library.zlibVersion()
print({line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line})
try:
    open("/usr/local/nvidia/lib64/new", "w")
except OSError as error:
    print(error.strerror)
"""


def test_another_container_loads_the_library_from_the_folder(done: Host, tmp_path: Path) -> None:
    assert docker("cp", f"{done.name}:/opt/nvidia", str(tmp_path)).returncode == 0
    mount = ["-v", f"{tmp_path}/nvidia:/usr/local/nvidia:ro", "--rm", "--user", "1234:99"]
    path = ["-e", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"]
    ran = docker("run", *mount, *path, IMAGE, "python3", "-c", LOADS)
    assert ran.stdout.splitlines() == [
        f"{{'/usr/local/nvidia/lib64/libcuda.so.{VERSION}'}}", "Read-only file system",
    ], ran.stderr  # fmt: skip
    smi = docker("run", *mount, *path, IMAGE, "/usr/local/nvidia/bin/nvidia-smi")
    assert smi.stdout == "GPU 0: played, with /usr/local/nvidia/lib64\n"
    without = docker("run", *mount, IMAGE, "python3", "-c", LOADS)
    assert "libcuda.so.1: cannot open shared object file" in without.stderr
