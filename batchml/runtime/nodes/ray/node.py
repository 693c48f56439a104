"""Ray's own processes on one node: find Ray, run `ray start --block`, watch it, and end it.

Never `ray stop`: it ends every Ray that it can see on the host. Measured and read in Ray 2.60.0.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Dict, List, NamedTuple, Optional

from batchml.runtime.nodes.launcher import OWN_PYTHONPATH, VERDICT
from batchml.runtime.nodes.link.address import Get, container_metadata, free_port
from batchml.runtime.nodes.link.interfaces import interface_of
from batchml.runtime.nodes.supervisor.rank_env import prepend_path
from batchml.runtime.processes import kill_descendants
from batchml.runtime.protocol.launch import VCPUS

DRAIN = 20.0  # seconds that Ray has to move work away from a node that ends
_LONGEST = 40  # characters of a path; Ray's sockets add 60, and Linux allows 107
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t[A-Z]+ \S+ -- ")
_MOST_LINES = 8  # of Ray's output in a message

# ray[default] has a dashboard. Without it Ray Train repeats a warning.
_VERSIONS = """
import importlib.metadata, importlib.util, platform
has_dashboard = importlib.util.find_spec("aiohttp_cors") is not None
print(importlib.metadata.version("ray"), platform.python_version(), int(has_dashboard))
"""


class RayMissing(Exception):
    """This image has no usable Ray."""


class RayInstall(NamedTuple):
    """The Ray of an image."""

    program: str
    version: str
    python: str
    has_dashboard: bool = False


def find_ray(environ: Mapping[str, str]) -> RayInstall:
    """Find Ray on the PATH. Raises RayMissing."""
    program = shutil.which("ray", path=environ.get("PATH"))
    if program is None:
        raise RayMissing(
            'this image has no Ray. Name one that has: image = "ray", or one built on it'
        )
    python = os.path.join(os.path.dirname(program), "python")
    command = [python if os.path.exists(python) else "python3", "-c", _VERSIONS]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RayMissing(f"{program} is there, but its Python has no Ray: {last}")
    version, python_version, has_dashboard = done.stdout.split()
    return RayInstall(program, version, python_version, has_dashboard == "1")


def unlike(head: Sequence[str], worker: Sequence[str]) -> str:
    """Why a worker with these versions of Ray and Python cannot join; empty when it can.

    Ray requires its own version to be equal, and pickles need the same minor version of Python.
    """
    if head[0] != worker[0]:
        return f"the head has Ray {head[0]} and this worker {worker[0]}: use one image for both"
    ours, theirs = (python.split(".")[:2] for python in (head[1], worker[1]))
    if ours != theirs:
        return f"the head has Python {head[1]} and this worker {worker[1]}: use one image for both"
    return ""


def variables(environ: Mapping[str, str], token: str, address: str) -> Dict[str, str]:
    """The environment of Ray's processes and drivers. A user's value wins, except for the token."""
    own = {"PYTHONPATH": environ.get(OWN_PYTHONPATH, environ.get("PYTHONPATH", ""))}
    usual = {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # by default workers would linger for 60 s
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(int(DRAIN)),
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        # A silent node is given up after about 20 s; with Ray's own values that takes minutes.
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each line of a trainer twice
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it takes the machine's memory for ours
        **_interfaces(address),
    }
    return {
        **{name: value for name, value in usual.items() if name not in environ},
        # Tasks import the job's own modules on every node.
        "PYTHONPATH": prepend_path(own, "PYTHONPATH", os.getcwd()),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }


def _interfaces(address: str) -> Dict[str, str]:
    name = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


class RayNode:
    """The Ray processes of one node. Started at most once."""

    def __init__(self, ray: RayInstall, address: str, environ: Mapping[str, str]) -> None:
        self._ray = ray
        self._address = address
        self._environ = environ
        self._folder = make_folder(environ)
        self._process: Optional[subprocess.Popen[bytes]] = None

    def start_head(self) -> None:
        client, dashboard = (str(free_port(self._address)) for _ in range(2))
        listens = ["--dashboard-host", self._address, "--dashboard-port", dashboard]
        self._start(
            [
                *("--head", "--port", "0", "--disable-usage-stats"),
                *("--ray-client-server-port", client),
                *("--resources", '{"trainer": 1}'),
                f"--include-dashboard={str(self._ray.has_dashboard).lower()}",
                *(listens if self._ray.has_dashboard else []),
            ]
        )

    def start_worker(self, gcs: str) -> None:
        self._start(["--address", gcs, "--resources", '{"worker": 1}'])

    def _start(self, more: List[str]) -> None:
        vcpus = count_vcpus(self._environ)
        command = [
            self._ray.program, "start", *more, "--block",
            "--node-ip-address", self._address,
            "--temp-dir", self._folder,
            "--dashboard-agent-listen-port", "0",
            *(["--num-cpus", str(vcpus)] if vcpus else []),
        ]  # fmt: skip
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, env=dict(self._environ), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def _log(self) -> str:
        return os.path.join(self._folder, "start.log")

    def gcs(self) -> str:
        """HOST:PORT of the cluster's GCS, once this node is part of the cluster; empty before."""
        try:
            with open(os.path.join(self._folder, "ray_current_cluster"), encoding="utf-8") as file:
                return file.read().strip()
        except OSError:
            return ""

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def last_words(self) -> str:
        """The last lines that Ray printed, in one line."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                lines = [_STAMP.sub("", _COLOURS.sub("", line)).strip() for line in file]
        except OSError:
            lines = []
        return " / ".join([line for line in lines if line][-_MOST_LINES:]) or "it printed nothing"

    def ask_to_end(self) -> None:
        if self._process is not None and not self.has_ended():
            self._process.send_signal(signal.SIGTERM)

    def end(self, limit: float) -> None:
        """Let it end within `limit` seconds, then kill whatever this process has started."""
        self.ask_to_end()
        if self._process is not None:
            try:
                self._process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
        kill_descendants()
        shutil.rmtree(self._folder, ignore_errors=True)


def count_vcpus(environ: Mapping[str, str], get: Optional[Get] = None) -> Optional[int]:
    """The vCPUs of the job, which may be fewer than the cores of its host; None if unknown."""
    vcpus = environ.get(VCPUS, "")
    if vcpus.isdigit():
        return max(1, int(vcpus))
    shares = (container_metadata(environ, get).get("Limits") or {}).get("CPU")  # 1024 are a vCPU
    return max(1, int(shares) // 1024) if isinstance(shares, (int, float)) and shares else None


def make_folder(environ: Mapping[str, str]) -> str:
    """Make a folder with a short path for Ray's sockets and logs. Raises OSError.

    It lies in the attempt's folder if possible, which is removed even if this process is killed.
    """
    attempt = os.path.dirname(environ.get(VERDICT, ""))
    places = [attempt, environ.get("TMPDIR", ""), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    short = [each for each in places if each and len(each) + len("/ray-12345678") <= _LONGEST]
    for place in short:
        try:
            return tempfile.mkdtemp(prefix="ray-", dir=place)
        except OSError:
            continue
    raise OSError("no folder for Ray's sockets can be made in " + ", ".join(short))
