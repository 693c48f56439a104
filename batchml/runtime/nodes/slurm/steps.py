"""The steps of `srun` on the nodes of a run: their tasks here, and on the other nodes.

As under Slurm, the script runs on the first node alone, and `srun` in it starts tasks on all nodes.
The first node has a server (`server.py`), whose address the others read in the run's store. `srun`
runs its own node's tasks itself, and sends the others theirs through the server.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Tuple

from batchml.runtime.entry.stopping import STOPS, Signals
from batchml.runtime.nodes.link.address import OWN_ADDRESS, interface_of, own_address
from batchml.runtime.nodes.link.connection import Heartbeats, Message, dispatch
from batchml.runtime.nodes.link.remote_start import (
    READING,
    ControlAddress,
    PreparedTasks,
    RemoteCommand,
    RemoteTasks,
    TaskCommand,
    write_output,
)
from batchml.runtime.nodes.link.server import Rendezvous
from batchml.runtime.nodes.link.uplink import ConnectLimits, MainNode, Uplink
from batchml.runtime.protocol.variables import RuntimeEnv, number_of
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import StoreError

FOLDER = "BATCHML_SLURM_FOLDER"  # with this node's tools, and the variables of the script's start
LOG = "BATCHML_SLURM_LOG"  # the device and inode of the script's own output

_START = "began.json"
_CONTROL = "control.json"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between two looks into the store
_FOREVER = float("inf")
_OF_ONE_NODE = frozenset(
    (FOLDER, LOG, "SLURMD_NODENAME", "_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME")
)  # each node has its own


class SrunStep(NamedTuple):
    """The step of one `srun`. `tasks`: on each of its nodes."""

    command: List[str]
    nodes: List[int] = [0]  # noqa: RUF012  (it is never changed)
    tasks: int = 1
    gpus: int = 0  # of each task; 0: all tasks see all
    label: bool = False
    wrong: str = ""  # why the step cannot be run


class StepNode(NamedTuple):
    """Where tasks run."""

    node: int
    environ: Mapping[str, str]
    folder: Optional[str] = None  # the current folder of this process, unless given


def count_nodes(environ: Mapping[str, str]) -> int:
    return number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1)


# --- Tasks ----------------------------------------------------------------------------------------


def task_variables(step: SrunStep, place: StepNode, task: int) -> Dict[str, str]:
    """The variables of one task: its number on its node, and among all.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    at, whole = step.nodes.index(place.node), str(step.tasks * len(step.nodes))
    found = {
        "SLURM_LOCALID": str(task),
        "SLURM_PROCID": str(at * step.tasks + task),
        "SLURM_NODEID": str(at),
        "SLURM_NNODES": str(len(step.nodes)),
        "SLURM_STEP_NUM_NODES": str(len(step.nodes)),
        "SLURM_NTASKS": whole,
        "SLURM_NPROCS": whole,
        "SLURM_STEP_NUM_TASKS": whole,
        "SLURM_NTASKS_PER_NODE": str(step.tasks),
    }
    if len(step.nodes) > 1 and "PET_RDZV_CONF" not in place.environ:
        # torchrun looks its address up by the name of the machine, which may not be known.
        # Source: torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, argparse_util.py.
        found["PET_RDZV_CONF"] = f"is_host={int(at == 0)}"
    visible = list(filter(None, place.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    if step.gpus and not visible:
        visible = [str(n) for n in range(number_of(place.environ.get("SLURM_GPUS_ON_NODE", ""), 0))]
    if step.gpus and visible:
        own = visible[task * step.gpus : (task + 1) * step.gpus]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return found


def _label(step: SrunStep, variables: Mapping[str, str]) -> bytes:
    return f"{variables['SLURM_PROCID']}: ".encode() if step.label else b""


class StepTasks:
    """The tasks of a step on this node. Raises OSError where the program is missing."""

    def __init__(self, step: SrunStep, place: StepNode) -> None:
        self._readers: List[threading.Thread] = []
        self._until = 0.0  # how long the rest of their output is read
        self._processes: List["subprocess.Popen[bytes]"] = []
        try:
            for task in range(step.tasks):
                self._processes.append(self._start(step, place, task))
        except OSError:
            self.signal(signal.SIGTERM)
            raise

    def _start(self, step: SrunStep, place: StepNode, task: int) -> "subprocess.Popen[bytes]":
        """Only the first task of the first node reads the input of the script."""
        variables = task_variables(step, place, task)
        rank = int(variables["SLURM_PROCID"])
        process = subprocess.Popen(
            step.command,
            cwd=place.folder,
            env={**place.environ, **variables},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if step.label else None,
            stderr=subprocess.STDOUT if step.label else None,
        )
        if step.label:
            reader = threading.Thread(target=_read, args=(process, _label(step, variables)))
            reader.daemon = True
            reader.start()
            self._readers.append(reader)
        return process

    def poll(self) -> Optional[List[int]]:
        """The exit codes, as a shell has them, once all have ended and their output is read.

        Processes that they leave behind may hold their output open; those are not waited for.
        """
        codes = [process.poll() for process in self._processes]
        if any(code is None for code in codes):
            return None
        self._until = self._until or time.monotonic() + READING
        if any(reader.is_alive() for reader in self._readers) and time.monotonic() < self._until:
            return None
        return [128 - code if code < 0 else code for code in codes if code is not None]

    def was_one_killed(self) -> bool:
        return any((process.poll() or 0) < 0 for process in self._processes)

    def signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _read(process: "subprocess.Popen[bytes]", label: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write_output(label + (line if line.endswith(b"\n") else line + b"\n"))


# --- The first node -------------------------------------------------------------------------------


def network(environ: Mapping[str, str]) -> Dict[str, str]:
    """The address of a node of several, and variables that PyTorch would else guess from the
    machine's name, which not every machine knows. PET_LOCAL_ADDR is torchrun's --local-addr.
    """
    if count_nodes(environ) < 2:
        return {}
    address = own_address(environ)
    found = {"SLURMD_NODENAME": address, "PET_LOCAL_ADDR": address}
    name = interface_of(address)
    if name:
        found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = name
    return found


def remember_start(tools: str, environ: Mapping[str, str], folder: str) -> None:
    """Keep the variables of the script's start: steps get the ones that it changed since."""
    path = os.path.join(tools, _START)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"environ": dict(environ), "folder": folder}, file)


def log_of(descriptor: int) -> str:
    """The device and inode of an open file."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def changes(start: Mapping[str, str], now: Mapping[str, str]) -> Dict[str, Optional[str]]:
    """The variables that the script has set, or removed (None).

    The others, a secret perhaps, are known to each node already, and are not sent.
    """
    found: Dict[str, Optional[str]] = {
        name: value
        for name, value in now.items()
        if start.get(name) != value and name not in _OF_ONE_NODE
    }
    removed = [name for name in start if name not in now and name not in _OF_ONE_NODE]
    return {**found, **dict.fromkeys(removed)}


def control_file(tools: str) -> str:
    """The file with the address of the first node's server."""
    return os.path.join(tools, _CONTROL)


def make_order(step: SrunStep, environ: Mapping[str, str]) -> Message:
    """The order of a step for other nodes. Raises OSError and ValueError."""
    with open(os.path.join(environ[FOLDER], _START), encoding="utf-8") as file:
        start = json.load(file)
    caught = log_of(1) != environ.get(LOG)
    return {
        **step._asdict(),
        "environ": changes(start["environ"], environ),
        "at": os.getcwd(),
        "folder": start["folder"],
        "tools": environ[FOLDER],
        "caught": caught,
        "joined": caught and log_of(1) == log_of(2),
    }


def send(step: SrunStep, environ: Mapping[str, str]) -> List[RemoteCommand]:
    """Start the tasks of a step on its other nodes. Raises OSError and ValueError."""
    order = make_order(step, environ)
    control = ControlAddress.read(control_file(environ[FOLDER]))
    return [RemoteCommand(control, node, order) for node in step.nodes if node]


# --- The other nodes ------------------------------------------------------------------------------


def prepare_tasks(order: Mapping[str, Any], place: StepNode) -> PreparedTasks:
    """The tasks of an order on this node, whose folders may have other paths."""
    home = place.folder or os.getcwd()

    def here(text: str) -> str:
        return text.replace(order["folder"], home).replace(order["tools"], place.environ[FOLDER])

    environ = dict(place.environ)
    for name, value in order["environ"].items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = here(value)
    folder = here(order["at"])
    folder = folder if os.path.isdir(folder) else home
    step = SrunStep(*(order[name] for name in SrunStep._fields))
    command = [here(word) for word in step.command]
    tasks = []
    for task in range(step.tasks):
        variables = task_variables(step, place._replace(environ=environ), task)
        label = _label(step, variables)
        tasks.append(TaskCommand(command, {**environ, **variables}, folder, label))
    joins = order["joined"] if order["caught"] else step.label
    return PreparedTasks(tasks, returns=order["caught"], joins=joins)


def server_document(attempt: int) -> str:
    """The name of the document in the run's store that says where the first node's server is."""
    return f"steps/{attempt}/server"


def follow(environ: Mapping[str, str], folder: str) -> NoReturn:
    """Run this node's tasks of every step, until the run ends, which ends the node."""
    signals = Signals()
    signals.listen()
    follower = _Follower(environ, folder, signals)
    number = follower.run()
    signals.ignore()
    sys.exit(128 + number)


class _Follower:
    def __init__(self, environ: Mapping[str, str], folder: str, signals: Signals) -> None:
        self._environ, self._signals = environ, signals
        node = number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0)
        place = StepNode(node, environ, folder)
        self._info: Message = {"index": node, "address": environ["SLURMD_NODENAME"]}
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, self._drain)
        self._children: Dict[int, Tuple["subprocess.Popen[bytes]", Callable[[int], None]]] = {}
        self._tasks = RemoteTasks(
            self._selector, self._send, lambda order: prepare_tasks(order, place), self._adopt
        )
        self._uplink: Optional[Uplink] = None
        self._stop = 0

    def run(self) -> int:
        """The signal that ended the node."""
        self._connect()
        while not (self._stop and self._tasks.is_empty):
            now = time.monotonic()
            pause = 1.0 if self._tasks.is_empty else 0.1
            if self._uplink is not None:
                pause = min(pause, self._uplink.until_due(now))
            self._turn(pause)
        if self._uplink is not None:
            self._uplink.close()
        return self._stop

    def _connect(self) -> None:
        """Wait until the first node has written where its server is."""
        env = RuntimeEnv.read(self._environ)
        documents = Rendezvous(open_store(env.store, self._environ))
        pause = _FIRST_PAUSE
        while not self._stop:
            try:
                found = documents.read(server_document(env.attempt))
            except StoreError as error:
                if not error.temporary:
                    raise
                found = None
            if found is not None:
                self._uplink = self._link(ControlAddress(**found))
                return
            self._turn(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    def _link(self, control: ControlAddress) -> Uplink:
        main = MainNode(control.address, [control.port], control.token)
        limits = ConnectLimits(_FOREVER, _FOREVER, _FOREVER)
        return Uplink(
            main, self._info, self._environ.get(OWN_ADDRESS, ""), Heartbeats(), limits,
            self._selector, self._tasks.hear, self._tasks.abandon, _say,
        )  # fmt: skip

    def _turn(self, pause: float) -> None:
        dispatch(self._selector, pause)
        for number in self._signals.take():
            if number in STOPS:
                self._stop = self._stop or number
            self._tasks.signal(number)
        for pid, (process, on_exit) in list(self._children.items()):
            code = process.poll()
            if code is not None:
                del self._children[pid]
                on_exit(code)
        now = time.monotonic()
        self._tasks.tick(now)
        if self._uplink is not None:
            self._uplink.tick(now, may_join=self._tasks.is_empty)

    def _send(self, message: Message) -> None:
        if self._uplink is not None:
            self._uplink.send(message)

    def _adopt(self, process: "subprocess.Popen[bytes]", on_exit: Callable[[int], None]) -> None:
        self._children[process.pid] = process, on_exit

    def _drain(self) -> None:
        try:
            os.read(self._signals.wake, 65_536)
        except BlockingIOError:
            pass


def _say(text: str) -> None:
    print(f"batchml notice: {text}", flush=True)
