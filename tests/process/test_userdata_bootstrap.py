"""The bootstrap script of a host: the user data of its launch template, run by bash."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchml.aws.bootstrap import MINUTES, SHOWN_LINES, pack_script, parse_console, read_script
from batchml.aws.ec2 import content_hash, launch_template_request, make_user_data
from batchml.aws.naming import Site, WorkspaceMount
from batchml.model.environment import Compute
from tests.aws.test_userdata import BOOTHOOK, Instance, instance, scripts

__all__ = ["instance"]

SITE = Site(env="dev", workspace=WorkspaceMount(kind="efs", file_system="fs-0123"))
GPU = Compute(instance_types=("g5.xlarge",), max_vcpus=8, bootstrap="on_create.sh")


class Bootstrap:
    """A host that has the script; `start` is what systemd does before it starts the agent."""

    def __init__(self, instance: Instance, script: str) -> None:
        self.instance = instance
        self.console = instance.root / "dev/console"
        self.console.parent.mkdir(exist_ok=True)
        site = replace(SITE, scripts={"on_create.sh": script})
        data = launch_template_request(site, "gpu", GPU)["LaunchTemplateData"]["UserData"]
        hook = scripts(base64.b64decode(data).decode(), BOOTHOOK)[-1]
        for _ in range(2):  # two boots
            shown = instance.run(self.here(hook))
            assert (shown.returncode, shown.stderr) == (0, "")
        self.program = instance.root / "usr/local/sbin/batchml-bootstrap"

    def here(self, script: str) -> str:
        for path in ("/var/lib/batchml", "/dev/console"):
            script = script.replace(path, f"{self.instance.root}{path}")
        return script

    def start(self) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{self.instance.bin}:/usr/bin:/bin"}
        return subprocess.run([self.program], env=path, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("first", "is_read"),
    [
        ("#!/bin/bash", True), ("#!/bin/sh -eu", True), ("#!/usr/bin/env bash", True),
        ("#!/usr/bin/python3", False), ("#!/bin/zsh", False), ("#!/bin/bash-static/x", False),
    ],
)  # fmt: skip
def test_bash_reads_a_script_of_the_shell_before_a_host_does(
    first: str, is_read: bool, tmp_path: Path
) -> None:
    script = tmp_path / "on_create.sh"
    script.write_text(f"{first}\nif true; then\necho $(\n")
    text, mistakes = read_script(tmp_path, "on_create.sh")
    assert [not text, len(mistakes)] == ([True, 1] if is_read else [False, 0])
    script.write_text(f"{first}\nif true; then\nrm -rf {tmp_path}/*\nfi\n")
    assert read_script(tmp_path, "on_create.sh")[1] == [] and script.exists(), "it is not run"


def test_the_script_runs_once_as_it_was_written_before_the_agent_and_after_the_mount(
    instance: Instance,
) -> None:
    ran = instance.root / "ran"
    host = Bootstrap(
        instance, f"#!/bin/sh\n# Gr\u00fc\u00dfe\necho \"$HOME 'x' $1\" >> {ran}\ncat\n"
    )
    assert host.start().returncode == 0
    assert host.start().returncode == 0, "the next boot"
    assert ran.read_text() == "/root 'x' \n"
    drop_ins = instance.root / "etc/systemd/system/ecs.service.d"
    # systemd reads them by name; commands are added, of the time limit the last counts.
    names = sorted(path.name for path in drop_ins.iterdir())
    assert names == ["bootstrap.conf"]
    assert names[0] > "batchml.conf", "after the drop-in that mounts the workspace"
    unit = (drop_ins / "bootstrap.conf").read_text()
    assert f"ExecStartPre={host.program}\n" in unit
    assert f"TimeoutStartSec={MINUTES * 60 + 900}\n" in unit, "longer than the script may take"
    assert "poweroff" not in "".join(instance.called("systemctl"))
    script = Path(f"{host.program}-script")
    assert script.stat().st_mode & 0o777 == 0o700, "others may not read it"


def test_a_script_that_fails_keeps_the_host_out_ends_it_and_is_told(instance: Instance) -> None:
    lines = "for i in $(seq 1 30); do echo line $i; done"
    host = Bootstrap(
        instance, f"#!/bin/bash\n{lines}\nprintf 'no \\033[1mpackage\\007' >&2\nexit 3\n"
    )
    ended = host.start()
    assert ended.returncode == 1, "systemd does not start the agent"
    assert instance.called("systemctl")[-1] == "poweroff --no-block"
    why, said = parse_console(host.console.read_text()) or ("", ())
    assert why.startswith("exit code 3 after ")
    assert len(said) == SHOWN_LINES
    assert said[-2:] == ("line 30", "no [1mpackage"), "without control characters"
    # systemd tries again before the host is off: the script does not run a second time.
    Path(f"{host.program}-script").write_text("#!/bin/sh\nexit 0\n")
    assert host.start().returncode == 1
    assert instance.called("systemctl").count("poweroff --no-block") == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/no/such/interpreter\n", "exit code 126 "),
        ("#!/bin/sh\nkill -9 $$\n", "exit code 137 "),
        ("#!/bin/bash\nif\n", "exit code 2 "),
    ],
    ids=["interpreter", "killed", "syntax"],
)
def test_every_kind_of_failure_is_one(instance: Instance, script: str, why: str) -> None:
    host = Bootstrap(instance, script)
    assert host.start().returncode == 1
    found, _ = parse_console(host.console.read_text()) or ("", ())
    assert found.startswith(why) or (why.startswith("exit code 126") and "127" in found), found


def test_a_script_that_hangs_is_ended(instance: Instance) -> None:
    host = Bootstrap(instance, "#!/bin/sh\necho waiting for the proxy\nsleep 3600\n")
    text = host.program.read_text()
    assert f"--kill-after=30 {MINUTES * 60} " in text
    # The program itself, with a limit of a moment.
    limit = f"{MINUTES * 60}"
    host.program.write_text(
        text.replace(f"=30 {limit}", "=30 0.2").replace(f"-lt {limit}", "-lt 0")
    )
    instance.install("sleep", "exec /bin/sleep 60")
    assert host.start().returncode == 1
    assert parse_console(host.console.read_text()) == (
        f"no end after {MINUTES} minutes", ("waiting for the proxy",),
    )  # fmt: skip


def test_a_linter_has_nothing_to_say(instance: Instance) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    host = Bootstrap(instance, "#!/bin/sh\n")
    hook = scripts(make_user_data(bootstrap=pack_script("#!/bin/sh\n")), BOOTHOOK)[-1]
    for content in (hook, host.program.read_text()):
        shown = subprocess.run([shellcheck, "-"], input=content, text=True, capture_output=True)
        assert (shown.returncode, shown.stdout) == (0, "")
    assert os.access(host.program, os.X_OK)


def test_a_changed_script_is_a_new_version_of_the_template() -> None:
    def hashed(script: str, compute: Compute = GPU) -> str:
        site = replace(SITE, scripts={"on_create.sh": script} if script else {})
        return content_hash(launch_template_request(site, "gpu", compute))

    plain = replace(GPU, bootstrap="")
    assert hashed("#!/bin/sh\n") != hashed("#!/bin/sh\nexit\n")
    assert hashed("#!/bin/sh\n", plain) == hashed("", plain), "who has no script sees no change"
