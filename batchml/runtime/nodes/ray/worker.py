"""A worker of a Ray cluster, which ends with its head; and Ray's processes on any node."""

from __future__ import annotations

import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.launcher import OWN_PYTHONPATH, VERDICT
from batchml.runtime.nodes.link.address import (
    LOOPBACK,
    Get,
    container_metadata,
    free_port,
    interface_of,
    interface_variables,
    own_address,
)
from batchml.runtime.nodes.link.connection import (
    Heartbeats,
    LinkClosed,
    Message,
    Peer,
    dispatch,
    join,
)
from batchml.runtime.nodes.ray import rules
from batchml.runtime.nodes.ray.batch_api import BatchApi, attempts_of, is_head_over
from batchml.runtime.nodes.supervisor.settings import prepend_path
from batchml.runtime.processes import kill_descendants
from batchml.runtime.processors import count_processors, with_counts
from batchml.runtime.protocol.exit_codes import CONFIGURATION_ERROR
from batchml.runtime.protocol.launch import VCPUS, LaunchPlan
from batchml.runtime.storage.store import StoreError

# --- Ray's processes on one node ------------------------------------------------------------------
# Find Ray, run `ray start --block`, watch it, and end it. Never run `ray stop`: it ends every Ray
# that it can see on the host. What Ray does was measured and read in Ray 2.60.0.


DRAIN = 20.0  # seconds that Ray has to move work away from a node that ends
_MAX_PATH = 40  # characters of a folder; Ray's sockets add 60, and Linux allows 107
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t[A-Z]+ \S+ -- ")
_MAX_LINES = 8  # of Ray's output in a message

# `ray[default]` contains a dashboard, whose absence makes Ray Train repeat a warning.
_VERSIONS = """
import importlib.metadata, importlib.util, platform
has_dashboard = importlib.util.find_spec("aiohttp_cors") is not None
print(importlib.metadata.version("ray"), platform.python_version(), int(has_dashboard))
"""


class RayMissing(Exception):
    """This image has no usable Ray."""


class RayInstall(NamedTuple):
    """The Ray of an image."""

    program: str  # the path of `ray`
    version: str
    python: str  # the version of its Python
    has_dashboard: bool = False


def find_ray(environ: Mapping[str, str]) -> RayInstall:
    """Find Ray on the PATH. Raises RayMissing."""
    program = shutil.which("ray", path=environ.get("PATH"))
    if program is None:
        raise RayMissing(
            'this image has no Ray. Use an image with Ray: image = "ray", or one built on it'
        )
    python = os.path.join(os.path.dirname(program), "python")
    command = [python if os.path.exists(python) else "python3", "-c", _VERSIONS]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise RayMissing(f"{program} exists, but its Python has no Ray: {last}")
    version, python_version, has_dashboard = done.stdout.split()
    return RayInstall(program, version, python_version, has_dashboard == "1")


def describe_mismatch(head: Sequence[str], worker: Sequence[str]) -> str:
    """Why a worker with these versions of Ray and Python cannot join the head; "" if it can.

    Ray requires the same version of Ray, and pickled objects the same minor version of Python.
    """
    if head[0] != worker[0]:
        return f"the head has Ray {head[0]} and this worker {worker[0]}: use one image for both"
    ours, theirs = (python.split(".")[:2] for python in (head[1], worker[1]))
    if ours != theirs:
        return f"the head has Python {head[1]} and this worker {worker[1]}: use one image for both"
    return ""


def ray_variables(environ: Mapping[str, str], token: str, address: str) -> Dict[str, str]:
    """The variables of Ray's processes and of the program. A user's value wins over a default."""
    job = {"PYTHONPATH": environ.get(OWN_PYTHONPATH, environ.get("PYTHONPATH", ""))}
    defaults = {
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # Ray's default is 60
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(int(DRAIN)),
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
        # A silent node is given up after about 20 s; with Ray's defaults that takes minutes.
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # it prints each line of a trainer twice
        "RAY_COLOR_PREFIX": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would count the memory of the whole machine
        **interface_variables(interface_of(address)),
    }
    return {
        **{name: value for name, value in defaults.items() if name not in environ},
        # Tasks import the job's own modules on every node.
        "PYTHONPATH": prepend_path(job, "PYTHONPATH", os.getcwd()),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
    }


class RayNode:
    """The Ray processes of one node. They are started at most once."""

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
        """HOST:PORT of the cluster's Global Control Service; empty until this node has joined."""
        try:
            with open(os.path.join(self._folder, "ray_current_cluster"), encoding="utf-8") as file:
                return file.read().strip()
        except OSError:
            return ""

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def last_lines(self) -> str:
        """The last lines that Ray printed, joined into one line."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as file:
                lines = [_STAMP.sub("", _COLOURS.sub("", line)).strip() for line in file]
        except OSError:
            lines = []
        return " / ".join([line for line in lines if line][-_MAX_LINES:]) or "it printed nothing"

    def terminate(self) -> None:
        """Let Ray end by itself, without waiting for that."""
        if self._process is not None and not self.has_ended():
            self._process.send_signal(signal.SIGTERM)

    def end(self, limit: float) -> None:
        """Let Ray end within `limit` seconds, then kill all processes that this one has started."""
        self.terminate()
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
    limits = container_metadata(environ, get).get("Limits") or {}
    shares = limits.get("CPU")  # 1024 shares are a vCPU
    return max(1, int(shares) // 1024) if isinstance(shares, (int, float)) and shares else None


def make_folder(environ: Mapping[str, str]) -> str:
    """Make a folder with a short path for Ray's sockets and logs. Raises OSError.

    If possible it is in the attempt's folder, which is removed even if this process is killed.
    """
    attempt = os.path.dirname(environ.get(VERDICT, ""))
    folders = [attempt, environ.get("TMPDIR", ""), tempfile.gettempdir(), "/tmp", "/dev/shm"]
    short = [path for path in folders if path and len(path) + len("/ray-12345678") <= _MAX_PATH]
    for above in short:
        try:
            return tempfile.mkdtemp(prefix="ray-", dir=above)
        except OSError:
            continue
    raise OSError("no folder for Ray's sockets can be made in " + ", ".join(short))


# --- A worker -------------------------------------------------------------------------------------


GRACE = "BATCHML_HEAD_GRACE"  # seconds, instead of rules.HEAD_GRACE
# seconds between two reads of the head's documents, without a head: at first and at most
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_PAUSE_FACTOR = 1.1  # by which the pause grows, because thousands of workers may wait
_END_EVERY = 60.0  # seconds between two reads with a head, which also reports its end itself
_ASK_EVERY = 60.0  # about so many seconds between two questions about the job of a missing head
_ASK_FIRST = 5.0  # about so many seconds until the first question after a head was lost

Say = Callable[[str], None]


def run_worker(
    environ: Mapping[str, str], plan: LaunchPlan, token: str, signals: Signals, say: Say
) -> rules.LeaveCluster:
    """Work until the head has ended. Raises RayMissing, StoreError and OSError."""
    loop = _WorkerLoop(environ, plan, token, signals, say)
    try:
        return loop.run()
    finally:
        loop.close()


class _WorkerLoop:
    """The loop of a worker, which passes events to the rules and takes the actions they return."""

    def __init__(
        self, environ: Mapping[str, str], plan: LaunchPlan, token: str, signals: Signals, say: Say
    ) -> None:
        self._environ = environ
        self._token = token
        self._signals = signals
        self._say = say
        self._ray = find_ray(environ)
        self._rendezvous = rules.HeadRendezvous.of(environ)
        self._address = own_address(environ) or LOOPBACK
        env = {**environ, **ray_variables(environ, token, self._address)}
        self._env = with_counts(env, count_processors(environ))
        self._grace = _seconds(environ.get(GRACE, ""), rules.HEAD_GRACE)
        until = time.monotonic() + plan.start_within
        self._state = rules.WorkerState(until, attempts=attempts_of(environ))
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, signals.drain)
        self._head: Optional[Peer] = None
        self._node: Optional[RayNode] = None
        self._batch: Optional[BatchApi] = None
        self._next_read = 0.0  # when to read the head's documents again
        self._pause = _FIRST_PAUSE
        self._next_ask = _with_jitter(_ASK_EVERY)
        self._trouble = ""  # why the latest try to reach the head failed
        self._queue: List[rules.WorkerEvent] = []

    def run(self) -> rules.LeaveCluster:
        self._say(f"this worker has Ray {self._ray.version} and looks for the head")
        while True:
            self._queue.extend(self._events())
            while self._queue:
                event = self._queue.pop(0)
                self._state, actions = rules.worker_step(self._state, event, self._grace)
                for action in actions:
                    if isinstance(action, rules.LeaveCluster):
                        return action
                    self._do(action)
            self._wait()

    def close(self) -> None:
        """End Ray first, so that it can move its work; then close the connection to the head."""
        self._end_node(DRAIN if self._signals.stop_signal and self._head is not None else 1.0)
        if self._head is not None:
            self._head.close()
        self._selector.close()

    # --- Events ---------------------------------------------------------------------------------

    def _events(self) -> List[rules.WorkerEvent]:
        """New events, except those of the connection, whose callbacks put them into the queue."""
        now = time.monotonic()
        if self._head is not None:
            self._head.tick(now)
        events = self._ray_events(now)
        stops = [number for number in self._signals.take() if number in STOPS]
        if stops or now >= self._next_read:
            # before the stop signals: the end of a run also stops the jobs of its workers, and then
            # the documents of the head contain the reason
            events.append(self._read_rendezvous(now))
        return [*events, *map(rules.StopSignal, stops)]

    def _hear(self, _head: Peer, message: Message) -> None:
        if message.get("do") == "ended":
            self._queue.append(rules.HeadEnded(int(message.get("code", 0))))
        elif message.get("do") == "leaving" and self._head is not None:
            self._head.close()
            self._lost()

    def _lost(self) -> None:
        now = time.monotonic()
        self._head, self._pause, self._next_read = None, _FIRST_PAUSE, now
        self._next_ask = _with_jitter(_ASK_FIRST)
        self._queue.append(rules.HeadLost(now))

    def _ray_events(self, now: float) -> List[rules.WorkerEvent]:
        if self._node is None:
            return []
        if self._node.has_ended():
            words = self._node.last_lines()
            self._end_node(0.0)
            return [rules.RayDown(now, words)]
        return [rules.RayUp()] if not self._state.is_up and self._node.gcs() else []

    def _read_rendezvous(self, now: float) -> rules.RendezvousRead:
        """Read the documents of the head. If that fails, it is tried again later."""
        self._pause = min(_LONGEST_PAUSE, self._pause * _PAUSE_FACTOR)
        self._next_read = now + (_END_EVERY if self._head is not None else self._pause)
        try:
            end = self._rendezvous.end_code()
            needs_head = end is None and self._head is None
            head = self._rendezvous.head() if needs_head else None
        except StoreError as error:
            self._trouble = str(error)
            return rules.RendezvousRead(now, None, None, trouble=self._trouble)
        return rules.RendezvousRead(now, head, end, self._is_over(head, now), self._trouble)

    def _is_over(self, head: Optional[rules.HeadRecord], now: float) -> bool:
        """Whether the job of a missing head has ended. Asks AWS Batch rarely; False in between."""
        if self._head is not None or now < self._next_ask:
            return False
        self._next_ask = _with_jitter(_ASK_EVERY)
        try:
            self._batch = self._batch or BatchApi(self._environ)
            return is_head_over(self._batch, self._environ, head.run if head else "")
        except StoreError:
            return False  # not every job has the permission to ask

    def _wait(self) -> None:
        """Wait for an event, for a second at most."""
        if self._queue:
            return
        is_starting = self._node is not None and not self._state.is_up
        until_read = max(0.0, self._next_read - time.monotonic())
        dispatch(self._selector, min(until_read, 0.1 if is_starting else 1.0))

    # --- Actions --------------------------------------------------------------------------------

    def _do(self, action: rules.WorkerAction) -> None:
        if isinstance(action, rules.Announce):
            self._say(action.text)
        elif isinstance(action, rules.DialHead):
            self._dial(action.head)
        elif isinstance(action, rules.StartRay):
            self._node = RayNode(self._ray, self._address, self._env)
            self._node.start_worker(action.head.gcs)
        elif isinstance(action, rules.EndRay):
            self._end_node(1.0)
        elif isinstance(action, rules.ReportJoined) and self._head is not None:
            self._say("joined the Ray cluster")
            self._head.send({"do": "joined"})

    def _dial(self, head: rules.HeadRecord) -> None:
        why = describe_mismatch((head.ray, head.python), (self._ray.version, self._ray.python))
        try:
            link = join(head.address, head.control_port, self._token, self._info())
        except LinkClosed as closed:
            self._trouble = f"the head at {head.address}: {closed}"
            if closed.final or why:
                self._queue.append(rules.HeadRefused(CONFIGURATION_ERROR, why or str(closed)))
            return
        beats = Heartbeats(rules.BEAT, rules.SILENT)
        self._queue.append(rules.HeadConnected(time.monotonic(), head))
        self._head = Peer(link, self._selector, beats, self._hear, lambda *_: self._lost())
        self._head.start()

    def _info(self) -> Message:
        return {
            "key": self._environ.get("BATCHML_KEY", ""),
            "index": int(self._environ.get("AWS_BATCH_JOB_ARRAY_INDEX") or 0),
            "address": self._address,
            "ray": self._ray.version,
            "python": self._ray.python,
        }

    def _end_node(self, limit: float) -> None:
        """End Ray and all processes that it started, within `limit` seconds."""
        if self._node is not None:
            self._node.end(limit)
            self._node = None


def _with_jitter(seconds: float) -> float:
    """A time about so many seconds from now, so that thousands of workers do not call at once."""
    return time.monotonic() + seconds * random.uniform(0.8, 1.6)


def _seconds(text: str, default: float) -> float:
    """A number of seconds that a user may have set; `default` if it is not a number."""
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
