"""The steps of `srun`: start their tasks on this node and on the other nodes of the run.

As under Slurm, the script runs on the first node alone, and `srun` in it starts tasks on all nodes.
The first node has a server (`server.py`), whose address the other nodes read in the run's store.
`srun` starts the tasks of its own node itself, and those of other nodes through the server.
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
from batchml.runtime.nodes.link.address import (
    OWN_ADDRESS,
    interface_of,
    interface_variables,
    own_address,
)
from batchml.runtime.nodes.link.connection import Heartbeats, Message, dispatch
from batchml.runtime.nodes.link.remote_start import (
    OUTPUT_LIMIT,
    ControlAddress,
    PreparedTasks,
    RemoteCommand,
    RemoteTasks,
    TaskCommand,
    write_output,
)
from batchml.runtime.nodes.link.server import Rendezvous
from batchml.runtime.nodes.link.uplink import ConnectLimits, MainNode, Uplink
from batchml.runtime.processes import shell_code
from batchml.runtime.processors import divide
from batchml.runtime.protocol.variables import RuntimeEnv, number_of
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import StoreError

FOLDER = "BATCHML_SLURM_FOLDER"  # folder of this node's Slurm programs and of the files below
LOG = "BATCHML_SLURM_LOG"  # the device and inode of the script's own output

_START = "began.json"  # the environment and the folder with which the script started
_CONTROL = "control.json"  # the address of the first node's server
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0  # seconds between two reads of the store
_FOREVER = float("inf")
# variables that each node has for itself
_OF_ONE_NODE = frozenset(
    (FOLDER, LOG, "SLURMD_NODENAME", "_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME")
)


class SrunStep(NamedTuple):
    """The step of one `srun`."""

    command: List[str]
    nodes: List[int] = [0]  # noqa: RUF012  (it is never changed)
    tasks: int = 1  # on each of its nodes
    gpus: int = 0  # of each task; 0: every task sees all GPUs
    label: bool = False  # print the number of the task before each line
    wrong: str = ""  # why the step cannot be run


class StepNode(NamedTuple):
    """A node on which tasks of a step run."""

    node: int
    environ: Mapping[str, str]
    folder: Optional[str] = None  # working folder of the tasks; None: that of this process


def count_nodes(environ: Mapping[str, str]) -> int:
    return number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1)


def node_number(environ: Mapping[str, str]) -> int:
    """The number of this node, from 0."""
    return number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0)


# --- Tasks ----------------------------------------------------------------------------------------


def task_variables(step: SrunStep, node: StepNode, task: int) -> Dict[str, str]:
    """The variables of one task. `task`: its number on its node.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES.
    """
    node_id, total = step.nodes.index(node.node), str(step.tasks * len(step.nodes))
    found = {
        "SLURM_LOCALID": str(task),
        "SLURM_PROCID": str(node_id * step.tasks + task),
        "SLURM_NODEID": str(node_id),
        "SLURM_NNODES": str(len(step.nodes)),
        "SLURM_STEP_NUM_NODES": str(len(step.nodes)),
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_STEP_NUM_TASKS": total,
        "SLURM_NTASKS_PER_NODE": str(step.tasks),
        **divide(node.environ, step.tasks),
    }
    if len(step.nodes) > 1 and "PET_RDZV_CONF" not in node.environ:
        # torchrun would look its address up by the name of the machine, which DNS may not know.
        # Source: torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, argparse_util.py.
        found["PET_RDZV_CONF"] = f"is_host={int(node_id == 0)}"
    visible = list(filter(None, node.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    if step.gpus and not visible:
        visible = [str(n) for n in range(number_of(node.environ.get("SLURM_GPUS_ON_NODE", ""), 0))]
    if step.gpus and visible:
        gpus = visible[task * step.gpus : (task + 1) * step.gpus]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return found


def _label(step: SrunStep, variables: Mapping[str, str]) -> bytes:
    return f"{variables['SLURM_PROCID']}: ".encode() if step.label else b""


class StepTasks:
    """The tasks of a step on this node. The constructor starts them; it raises OSError."""

    def __init__(self, step: SrunStep, node: StepNode) -> None:
        self._readers: List[threading.Thread] = []
        self._read_until = 0.0  # when reading the output of tasks that have ended is given up
        self._processes: List["subprocess.Popen[bytes]"] = []
        try:
            for task in range(step.tasks):
                self._processes.append(self._start(step, node, task))
        except OSError:
            self.signal(signal.SIGTERM)
            raise

    def _start(self, step: SrunStep, node: StepNode, task: int) -> "subprocess.Popen[bytes]":
        variables = task_variables(step, node, task)
        is_first = variables["SLURM_PROCID"] == "0"  # it alone reads the input of the script
        process = subprocess.Popen(
            step.command,
            cwd=node.folder,
            env={**node.environ, **variables},
            stdin=None if is_first else subprocess.DEVNULL,
            stdout=subprocess.PIPE if step.label else None,
            stderr=subprocess.STDOUT if step.label else None,
        )
        if step.label:
            arguments = (process, _label(step, variables))
            reader = threading.Thread(target=_copy_output, args=arguments, daemon=True)
            reader.start()
            self._readers.append(reader)
        return process

    def poll(self) -> Optional[List[int]]:
        """The exit codes as a shell reports them, once all have ended and their output was read.

        Processes that tasks leave behind may keep the output open. They are given `OUTPUT_LIMIT`.
        """
        codes = [process.poll() for process in self._processes]
        if None in codes:
            return None
        self._read_until = self._read_until or time.monotonic() + OUTPUT_LIMIT
        is_read = not any(reader.is_alive() for reader in self._readers)
        if not is_read and time.monotonic() < self._read_until:
            return None
        return [shell_code(code) for code in codes if code is not None]

    def was_one_killed(self) -> bool:
        """Whether a signal ended one of the tasks."""
        return any((process.poll() or 0) < 0 for process in self._processes)

    def signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _copy_output(process: "subprocess.Popen[bytes]", label: bytes) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write_output(label + (line if line.endswith(b"\n") else line + b"\n"))


# --- The first node -------------------------------------------------------------------------------


def network_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Variables with this node's address; none if the run has one node.

    PyTorch would otherwise derive them from the machine's name, which DNS may not know.
    PET_LOCAL_ADDR is torchrun's --local-addr.
    """
    if count_nodes(environ) < 2:
        return {}
    address = own_address(environ)
    return {
        "SLURMD_NODENAME": address,
        "PET_LOCAL_ADDR": address,
        **interface_variables(interface_of(address)),
    }


def remember_start(tools: str, environ: Mapping[str, str], folder: str) -> None:
    """Record the environment and the folder with which the script starts.

    A step on another node gets the variables that the script has changed since.
    """
    path = os.path.join(tools, _START)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"environ": dict(environ), "folder": folder}, file)


def file_id(descriptor: int) -> str:
    """The device and inode of an open file; empty if it is closed."""
    try:
        state = os.fstat(descriptor)
    except OSError:
        return ""
    return f"{state.st_dev}:{state.st_ino}"


def changes(start: Mapping[str, str], now: Mapping[str, str]) -> Dict[str, Optional[str]]:
    """The variables that the script has set, or removed (None).

    Each node has all other variables already, so they are not sent; one may be a secret.
    """
    names = (start.keys() | now.keys()) - _OF_ONE_NODE
    return {name: now.get(name) for name in names if start.get(name) != now.get(name)}


def control_file(tools: str) -> str:
    """The path of the file with the address of the first node's server."""
    return os.path.join(tools, _CONTROL)


def make_order(step: SrunStep, environ: Mapping[str, str]) -> Message:
    """The order of a step for other nodes. Raises OSError and ValueError."""
    with open(os.path.join(environ[FOLDER], _START), encoding="utf-8") as file:
        start = json.load(file)
    caught = file_id(1) != environ.get(LOG)  # the output of this srun does not go to the run's log
    return {
        **step._asdict(),
        "environ": changes(start["environ"], environ),
        "at": os.getcwd(),
        "folder": start["folder"],
        "tools": environ[FOLDER],
        "caught": caught,
        "joined": caught and file_id(1) == file_id(2),
    }


def start_remote_tasks(step: SrunStep, environ: Mapping[str, str]) -> List[RemoteCommand]:
    """Start the tasks of a step on its other nodes. Raises OSError and ValueError."""
    order = make_order(step, environ)
    control = ControlAddress.read(control_file(environ[FOLDER]))
    return [RemoteCommand(control, node, order) for node in step.nodes if node]


# --- The other nodes ------------------------------------------------------------------------------


def prepare_tasks(order: Mapping[str, Any], node: StepNode) -> PreparedTasks:
    """The tasks of an order on this node, where folders may have other paths than on the first."""
    home = node.folder or os.getcwd()

    def translate(text: str) -> str:
        return text.replace(order["folder"], home).replace(order["tools"], node.environ[FOLDER])

    environ = dict(node.environ)
    for name, value in order["environ"].items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = translate(value)
    folder = translate(order["at"])
    folder = folder if os.path.isdir(folder) else home
    step = SrunStep(*(order[name] for name in SrunStep._fields))
    command = [translate(word) for word in step.command]
    tasks = []
    for task in range(step.tasks):
        variables = task_variables(step, node._replace(environ=environ), task)
        label = _label(step, variables)
        tasks.append(TaskCommand(command, {**environ, **variables}, folder, label))
    joins_errors = order["joined"] if order["caught"] else step.label
    return PreparedTasks(tasks, returns_output=order["caught"], joins_errors=joins_errors)


def server_document(attempt: int) -> str:
    """The name of the document in the run's store with the address of the first node's server."""
    return f"steps/{attempt}/server"


def follow(environ: Mapping[str, str], folder: str) -> NoReturn:
    """Run this node's tasks of every step, until a stop signal comes at the end of the run."""
    signals = Signals()
    signals.listen()
    follower = _Follower(environ, folder, signals)
    number = follower.run()
    signals.ignore()
    sys.exit(128 + number)


class _Follower:
    """The loop of a node other than the first."""

    def __init__(self, environ: Mapping[str, str], folder: str, signals: Signals) -> None:
        self._environ, self._signals = environ, signals
        node = StepNode(node_number(environ), environ, folder)
        self._info: Message = {"index": node.node, "address": environ["SLURMD_NODENAME"]}
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.wake, selectors.EVENT_READ, signals.drain)
        self._children: Dict[int, Tuple["subprocess.Popen[bytes]", Callable[[int], None]]] = {}
        self._tasks = RemoteTasks(
            self._selector, self._send, lambda order: prepare_tasks(order, node), self._adopt
        )
        self._uplink: Optional[Uplink] = None
        self._stop = 0  # the first stop signal

    def run(self) -> int:
        """Return the signal that ended the node."""
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
        """Wait until the first node has written the address of its server, and connect to it."""
        env = RuntimeEnv.read(self._environ)
        documents = Rendezvous(open_store(env.store, self._environ))
        pause = _FIRST_PAUSE
        while not self._stop:
            try:
                address = documents.read(server_document(env.attempt))
            except StoreError as error:
                if not error.temporary:
                    raise
                address = None
            if address is not None:
                self._uplink = self._make_uplink(ControlAddress(**address))
                return
            self._turn(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)

    def _make_uplink(self, control: ControlAddress) -> Uplink:
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


def _say(text: str) -> None:
    print(f"batchml notice: {text}", flush=True)
