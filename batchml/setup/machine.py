"""Check this machine for `doctor`: state folder, Docker engine, disk, Python, plugin."""

import http.client
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from batchml.errors import BatchmlError
from batchml.local.disk import measure
from batchml.local.home import Home
from batchml.local.images import uv_program
from batchml.setup.doctor import ConfigCheck, EngineCheck, Finding, MachineCheck, Mark

GIB = 1024**3
HOME_NEEDS = 1 * GIB  # for the journal and its reserve: less is a problem
HOME_WANTS = 5 * GIB  # for virtual environments, too: less is a warning
IMAGES_WANT = 20 * GIB  # to build and push an image with CUDA and PyTorch
OLDEST_API = (1, 41)  # API of Docker 20.10, the oldest version that the executor is tested with
_TIMEOUT = 5.0  # seconds for the engine's answer
_SOCKET = "unix:///var/run/docker.sock"
_PLUGIN_PAGE = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/"
    "session-manager-working-with-install-plugin.html"
)


# --- answers --------------------------------------------------------------------------------


def examine_machine(
    environ: Mapping[str, str],
    home: Home,
    check: Callable[[], object],
    *,
    wants_docker: bool,
    server_trouble: str = "",
    system_trouble: str = "",
) -> MachineCheck:
    """Examine this machine. `check` raises BatchmlError if the state folder must not be used."""
    engine = find_engine(environ.get("DOCKER_HOST") or _SOCKET)
    trouble = _trouble_of(home.root, check)
    cache = Path(environ.get("UV_CACHE_DIR") or home.envs)
    return MachineCheck(
        home=str(home.root),
        home_trouble=trouble,
        home_free=_free(home.root) or 0,
        disk=None if trouble else measure(home),
        server_trouble=server_trouble,
        system_trouble=system_trouble,
        engine=engine,
        images_free=_free(Path(engine.root)) if engine.root else None,
        wants_docker=wants_docker,
        has_venv=importlib.util.find_spec("venv") is not None,
        has_pip=importlib.util.find_spec("ensurepip") is not None,
        uv=uv_program(),
        uv_cache="" if _device(cache) == _device(home.envs) else str(cache),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        has_plugin=shutil.which("session-manager-plugin", path=environ.get("PATH")) is not None,
    )


def _trouble_of(home: Path, check: Callable[[], object]) -> str:
    try:
        check()
    except (BatchmlError, OSError) as error:
        return str(error)
    folder = _existing_folder(home)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def _existing_folder(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _device(path: Path) -> int:
    """The number of the file system that has the path, or will have it."""
    return _existing_folder(path.absolute()).stat().st_dev


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing_folder(path)).free
    except OSError:
        return None


def find_engine(address: str) -> EngineCheck:
    """Ask the Docker engine at an address (DOCKER_HOST) for its version and its images' folder."""
    parts = urlsplit(address)
    if parts.scheme == "unix":
        connection: http.client.HTTPConnection = _UnixConnection(parts.path)
    elif parts.scheme in ("tcp", "http") and not os.environ.get("DOCKER_TLS_VERIFY"):
        connection = http.client.HTTPConnection(parts.netloc, timeout=_TIMEOUT)
    else:
        return EngineCheck(address, "unchecked")
    try:
        version, about = _get(connection, "/version"), _get(connection, "/info")
    except (FileNotFoundError, ConnectionRefusedError) as error:
        return EngineCheck(address, "missing", str(error))
    except PermissionError as error:
        return EngineCheck(address, "permission", str(error), group=_group_of(parts.path))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return EngineCheck(address, "silent", str(error))
    finally:
        connection.close()
    root = str(about.get("DockerRootDir", ""))
    is_here = parts.scheme == "unix" and Path(root).is_dir()
    return EngineCheck(
        address,
        version=str(version.get("Version", "")),
        api=str(version.get("ApiVersion", "")),
        root=root if is_here else "",
    )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT)
        self.sock.connect(self._path)


def _get(connection: http.client.HTTPConnection, path: str) -> dict[str, Any]:
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    if not isinstance(answer, dict):
        raise ValueError("the answer is not that of a Docker engine")
    return answer


def _group_of(path: str) -> str:
    """The group that may use a socket."""
    import grp

    try:
        return grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return "docker"


# --- findings -------------------------------------------------------------------------------


def check_config(config: ConfigCheck) -> Iterator[Finding]:
    if config.mistakes:
        count = len(config.mistakes)
        text = f"{config.path or 'batchml.toml'}: {count} mistake{'s'[: count > 1]}"
        yield Finding("config", "problem", text, config.mistakes)
    elif config.path is None:
        text = "no batchml.toml here or above: only the environment `local` exists"
        yield Finding("config", "ok", text)
    else:
        yield Finding("config", "ok", f"{config.path}, environment {config.env}")


def check_machine(machine: MachineCheck) -> Iterator[Finding]:
    if machine.system_trouble:
        yield Finding("system", "problem", machine.system_trouble)
    yield from _check_home(machine)
    if machine.server_trouble:
        yield Finding("server", "problem", machine.server_trouble, ("batchml local status",))
    yield from _check_engine(machine)
    yield from _check_python(machine)


def _check_home(machine: MachineCheck) -> Iterator[Finding]:
    if machine.home_trouble:
        fix = f"export BATCHML_HOME={machine.home}-mine   # your own folder"
        yield Finding("state", "problem", machine.home_trouble, (fix,))
    else:
        yield Finding("state", "ok", f"state folder {machine.home}")
    free = _describe_size(machine.home_free)
    use = f"; it takes: {machine.disk.describe()}" if machine.disk else ""
    fixes = (
        "batchml local clean --all   # removes environments, which runs make again",
        "batchml local reset   # deletes local jobs and their outputs; or free other space",
    )
    if machine.home_free < HOME_NEEDS:
        text = f"{free} are free for the state folder; a full disk stops the queues{use}"
        yield Finding("disk", "problem", text, fixes)
    elif machine.home_free < HOME_WANTS:
        text = f"{free} are free for the state folder; PyTorch's packages take 1 to 6 GiB{use}"
        yield Finding("disk", "warning", text, fixes)
    else:
        yield Finding("disk", "ok", f"{free} are free for the state folder{use}")


def _check_engine(machine: MachineCheck) -> Iterator[Finding]:
    """A missing engine is a warning if `local` runs jobs as processes: only builds need it then."""
    engine = machine.engine
    if engine is None:
        return
    mark: Mark = "problem" if machine.wants_docker else "warning"
    use = "to run local jobs" if machine.wants_docker else "to build and push images"
    if engine.trouble == "missing":
        text = f"no Docker engine answers at {engine.address} (needed: {use})"
        fix = (
            "sudo systemctl start docker   # to install it: https://docs.docker.com/engine/install"
        )
        yield Finding("docker", mark, text, (fix,))
    elif engine.trouble == "permission":
        text = f"you may not use the Docker engine at {engine.address} (needed: {use})"
        fix = f"sudo usermod -aG {engine.group} $USER && newgrp {engine.group}"
        yield Finding("docker", mark, text, (fix,))
    elif engine.trouble == "silent":
        text = f"the Docker engine at {engine.address} does not answer: {engine.text}"
        yield Finding("docker", mark, text, ("sudo systemctl restart docker",))
    elif engine.trouble == "unchecked":
        text = f"DOCKER_HOST is {engine.address}, which doctor does not check"
        yield Finding("docker", "warning", text, ("docker version",))
    elif _parse_version(engine.api) < OLDEST_API:
        text = f"Docker {engine.version} is too old (API {engine.api}): 20.10 or newer is needed"
        fix = "install a newer version: https://docs.docker.com/engine/install"
        yield Finding("docker", mark, text, (fix,))
    else:
        yield Finding("docker", "ok", f"Docker {engine.version} at {engine.address}")
        yield from _check_images(machine, engine)


def _check_images(machine: MachineCheck, engine: EngineCheck) -> Iterator[Finding]:
    if machine.images_free is None:
        return
    text = f"{_describe_size(machine.images_free)} are free for images, in {engine.root}"
    if machine.images_free < IMAGES_WANT:
        text += "; an image with CUDA and PyTorch takes up to 20 GiB during its build"
        yield Finding("disk", "warning", text, ("docker system prune",))
    else:
        yield Finding("disk", "ok", text)


def _check_python(machine: MachineCheck) -> Iterator[Finding]:
    if machine.has_venv and (machine.uv or machine.has_pip):
        yield Finding("python", "ok", f"Python {machine.python} with venv")
        yield from _check_uv(machine)
        return
    text = f"Python {machine.python} cannot create virtual environments, which local jobs need"
    fix = f"sudo apt-get install python{machine.python}-venv   # Debian and Ubuntu"
    yield Finding("python", "problem", text, (fix,))


def _check_uv(machine: MachineCheck) -> Iterator[Finding]:
    if not machine.uv:
        text = "uv is missing: pip makes environments, slowly and without sharing packages"
        yield Finding("uv", "warning", text, (f"{sys.executable} -m pip install uv",))
    elif machine.uv_cache:
        text = (
            f"uv's cache {machine.uv_cache} is on another file system than the environments, so "
            "that each has its own copy of PyTorch"
        )
        fix = "unset UV_CACHE_DIR   # the cache is then beside the environments"
        yield Finding("uv", "warning", text, (fix, "batchml local stop"))
    else:
        yield Finding("uv", "ok", "environments are made with uv, and share packages")


def check_plugin(machine: MachineCheck) -> Iterator[Finding]:
    if machine.has_plugin:
        yield Finding("plugin", "ok", "session-manager-plugin is installed")
    else:
        text = "session-manager-plugin is not installed: shells into running jobs need it"
        yield Finding("plugin", "warning", text, (f"install it: {_PLUGIN_PAGE}",))


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _describe_size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
