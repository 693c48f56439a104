"""session-manager-plugin, AWS's program that carries a session of ECS Exec or Session Manager."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping

from msgspec import Struct

from batchml.aws.exec import PLUGIN
from batchml.errors import NoDoor

# Where its own installers put it; their PATH entry needs a new login.
_USUAL = "/usr/local/sessionmanagerplugin/bin"
_PLACE = "https://s3.amazonaws.com/session-manager-downloads/plugin/latest"
_LIMIT = 20.0  # seconds for it to say its version


class Plugin(Struct, frozen=True):
    """`path` and the version that it says."""

    path: str
    version: str


def find_plugin(environ: Mapping[str, str]) -> Plugin:
    """Raises NoDoor, with the line that installs it on this machine."""
    search = os.pathsep.join((environ.get("PATH", os.defpath), _USUAL))
    path = shutil.which(PLUGIN, path=search)
    if path is None:
        raise NoDoor(
            f"AWS's program {PLUGIN} is not on this machine; nothing was started. Install it:\n"
            f"  {install_line(platform.system(), platform.machine(), _family())}"
        )
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_LIMIT, check=False,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise NoDoor(f"{path} cannot be run: {error}. Install it anew.") from error
    return Plugin(path, said.strip())


def install_line(system: str, machine: str, family: str = "") -> str:
    """What to type to have the plugin. `family` is of a Linux: "rpm" or "deb".

    Source: AWS Systems Manager User Guide, "Install the Session Manager plugin".
    """
    is_arm = machine.lower() in ("arm64", "aarch64")
    if system == "Darwin":
        return "brew install --cask session-manager-plugin"
    if system != "Linux":
        return f"see {_PLACE.rpartition('/plugin')[0]} and AWS's guide for {system}"
    if family == "rpm":
        folder = "linux_arm64" if is_arm else "linux_64bit"
        return f"sudo dnf install -y {_PLACE}/{folder}/session-manager-plugin.rpm"
    folder = "ubuntu_arm64" if is_arm else "ubuntu_64bit"
    return (
        f"curl -fsSLO {_PLACE}/{folder}/session-manager-plugin.deb && "
        "sudo dpkg -i session-manager-plugin.deb"
    )


def _family() -> str:
    return "rpm" if shutil.which("rpm") and not shutil.which("dpkg") else "deb"
