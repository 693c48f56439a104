"""Steps on the nodes of a run: as under Slurm, the script runs on the first node alone, and `srun`
in it starts tasks on all.

They meet in the run's store, below `steps/ATTEMPT/`: no port is open and no key is handed out. A
node enters its address as `node/NODE`. `srun` writes a step under the next free number,
`NUMBER/step`; the nodes it names start their part, and write what it prints, where that is caught,
as `NUMBER/NODE/out/BLOCK`, and its codes as `NUMBER/NODE/end`. `NUMBER/stop` has a signal to pass
on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Tuple, TypeVar

from batchml.runtime.nodes.ray.rendezvous import own_address
from batchml.runtime.nodes.torchrun.rank_env import interface_of
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.store import Store, StoreError, open_store

# --- tasks of a step ------------------------------------------------------------------------------
# The tasks of a step on one node: each a process that knows its number, as srun starts them.


_READING = 2.0  # seconds for the rest of the output of tasks that have ended


class Step(NamedTuple):
    """What an srun asks for. `tasks` are those of each of its nodes."""

    command: List[str]
    nodes: List[int] = [0]  # noqa: RUF012  (it is not changed)
    tasks: int = 1
    gpus: int = 0  # of each task; 0: all see all
    label: bool = False
    wrong: str = ""  # why it cannot be done


class Place(NamedTuple):
    """Where tasks run. `take` gets their output instead of the log, `joined` with their stderr."""

    node: int
    environ: Mapping[str, str]
    folder: Optional[str] = None  # the current one
    take: Optional[Callable[[bytes], None]] = None
    joined: bool = False


def number_of(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default


def task_variables(step: Step, place: Place, task: int) -> Dict[str, str]:
    """What one task is told: its number on its node, and among all.

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
        # torchrun looks its address up by the name of the machine, which not every one knows.
        # Source: torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py, argparse_util.py.
        found["PET_RDZV_CONF"] = f"is_host={int(at == 0)}"
    visible = list(filter(None, place.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    if step.gpus and not visible:
        visible = [str(n) for n in range(number_of(place.environ.get("SLURM_GPUS_ON_NODE", ""), 0))]
    if step.gpus and visible:
        own = visible[task * step.gpus : (task + 1) * step.gpus]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return found


class Tasks:
    """Those of a step on this node, started. Raises OSError where the program is not there."""

    def __init__(self, step: Step, place: Place) -> None:
        self._readers: List[threading.Thread] = []
        self._until = 0.0  # how long their output is waited for
        self._processes: List["subprocess.Popen[bytes]"] = []
        try:
            for task in range(step.tasks):
                self._processes.append(self._start(step, place, task))
        except OSError:
            self.pass_on(signal.SIGTERM)
            raise

    def _start(self, step: Step, place: Place, task: int) -> "subprocess.Popen[bytes]":
        """Only the first of the first node reads what the script reads."""
        variables = task_variables(step, place, task)
        rank = int(variables["SLURM_PROCID"])
        caught = step.label or place.take is not None
        joined = step.label if place.take is None else place.joined
        process = subprocess.Popen(
            step.command,
            cwd=place.folder,
            env={**place.environ, **variables},
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if caught else None,
            stderr=subprocess.STDOUT if joined else None,
        )
        if caught:
            mark = b"%d: " % rank if step.label else b""
            reader = threading.Thread(target=_read, args=(process, mark, place.take or _write))
            reader.daemon = True
            reader.start()
            self._readers.append(reader)
        return process

    def poll(self) -> Optional[List[int]]:
        """The codes, a signal's as a shell has it, once all have ended and all is read: what they
        leave behind may hold their output open, which is not waited for."""
        codes = [process.poll() for process in self._processes]
        if any(code is None for code in codes):
            return None
        self._until = self._until or time.monotonic() + _READING
        if any(reader.is_alive() for reader in self._readers) and time.monotonic() < self._until:
            return None
        return [128 - code if code < 0 else code for code in codes if code is not None]

    def was_one_killed(self) -> bool:
        return any((process.poll() or 0) < 0 for process in self._processes)

    def pass_on(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)


def _read(process: "subprocess.Popen[bytes]", mark: bytes, take: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        take(mark + (line if line.endswith(b"\n") or not mark else line + b"\n"))


def _write(block: bytes) -> None:
    sys.stdout.flush()
    while block:
        block = block[os.write(1, block) :]


# --- steps ----------------------------------------------------------------------------------------


FOLDER = "BATCHML_SLURM_FOLDER"  # this node's tools, and what the script began with
LOG = "BATCHML_SLURM_LOG"  # which file the script's own output is

_BEGAN = "began.json"
_SOON = 0.1  # seconds between two looks into the store, ever longer,
_LONGEST, _LONGEST_HERE = 1.0, 0.25  # up to so many; in a folder of this machine
_SAID_AFTER = 60.0  # seconds of waiting for the other nodes
_OF_ONE = frozenset(
    (FOLDER, LOG, "SLURMD_NODENAME", "_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME")
)  # each node has its own

T = TypeVar("T")


class Book:
    """What the nodes of an attempt tell each other. Every method raises StoreError."""

    def __init__(self, store: Store, attempt: int, longest: float = _LONGEST) -> None:
        """`longest`: seconds between two looks of those who wait for something in it."""
        self._store = store
        self._top = f"steps/{attempt}"
        self.longest = longest

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Book:
        env = RuntimeEnv.read(environ)
        longest = _LONGEST if "://" in env.store else _LONGEST_HERE
        return cls(open_store(env.store, environ), env.attempt, longest)

    def enter(self, node: int, address: str) -> bool:
        self._store.put(f"{self._top}/node/{node}", address.encode())
        return True

    def address(self, node: int) -> Optional[str]:
        found = self._store.get(f"{self._top}/node/{node}")
        return None if found is None else found.decode()

    def begin(self, order: Mapping[str, Any], least: int) -> int:
        """Write a step; its number, the first free one from `least`."""
        data = json.dumps({**order, "id": os.urandom(8).hex()}).encode()
        while not self._store.create(f"{self._top}/{least}/step", data):
            least += 1
        return least

    def order(self, number: int) -> Optional[Dict[str, Any]]:
        return self._read(f"{number}/step")

    def forget(self, number: int) -> None:
        """Nothing of what it was told stays; its number does, by which nodes count."""
        self._write(f"{number}/step", {"nodes": []})

    def stop(self, number: int, signalled: int) -> None:
        self._write(f"{number}/stop", {"signal": signalled})

    def stopped(self, number: int) -> int:
        """The signal to pass on, 0 for none."""
        return int((self._read(f"{number}/stop") or {"signal": 0})["signal"])

    def put_out(self, number: int, node: int, block: int, data: bytes) -> None:
        self._store.put(f"{self._top}/{number}/{node}/out/{block}", data)

    def out(self, number: int, node: int, block: int) -> Optional[bytes]:
        return self._store.get(f"{self._top}/{number}/{node}/out/{block}")

    def end(self, number: int, node: int, codes: List[int], blocks: int) -> None:
        self._write(f"{number}/{node}/end", {"codes": codes, "blocks": blocks})

    def ended(self, number: int, node: int) -> Optional[Dict[str, Any]]:
        return self._read(f"{number}/{node}/end")

    def _read(self, key: str) -> Optional[Dict[str, Any]]:
        data = self._store.get(f"{self._top}/{key}")
        found: Optional[Dict[str, Any]] = None if data is None else json.loads(data)
        return found

    def _write(self, key: str, value: Mapping[str, Any]) -> None:
        self._store.put(f"{self._top}/{key}", json.dumps(value).encode())


# --- on the first node ----------------------------------------------------------------------------


def gather(
    environ: Mapping[str, str],
    *,
    book: Optional[Book] = None,
    sleep: Callable[[float], None] = time.sleep,
) -> List[str]:
    """The addresses of all nodes, the first one's first, once all are there; a run of one node has
    its own."""
    count = number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1)
    if count < 2:
        return ["127.0.0.1"]
    book = book or Book.of(environ)
    found, waited, pause = [own_address(environ)], 0.0, _SOON
    while len(found) < count:
        address = _patiently(partial(book.address, len(found)))
        if address is not None:
            found.append(address)
            continue
        sleep(pause)
        if waited < _SAID_AFTER <= waited + pause:
            _say(f"node {len(found)} of {count} is waited for")
        waited, pause = waited + pause, min(book.longest, pause * 1.5)
    return found


def network(environ: Mapping[str, str]) -> Dict[str, str]:
    """Of a node of several: its address, and what PyTorch would else guess from the machine's name,
    which not every machine knows. PET_LOCAL_ADDR is torchrun's --local-addr."""
    if number_of(environ.get("AWS_BATCH_JOB_NUM_NODES", ""), 1) < 2:
        return {}
    address = own_address(environ)
    found = {"SLURMD_NODENAME": address, "PET_LOCAL_ADDR": address}
    name = interface_of(address)
    if name:
        found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = name
    return found


def remember(tools: str, environ: Mapping[str, str], folder: str) -> None:
    """Keep what the program was given: what differs from that later goes with its steps."""
    path = os.path.join(tools, _BEGAN)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"environ": dict(environ), "folder": folder}, file)


def log_of(descriptor: int) -> str:
    """Which file a descriptor is."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def changes(began: Mapping[str, str], now: Mapping[str, str]) -> Dict[str, Optional[str]]:
    """The variables that the script has set, or, None, removed. What it found as it began, such as
    a secret, is known to each node already, and is not written down."""
    found: Dict[str, Optional[str]] = {
        name: value
        for name, value in now.items()
        if began.get(name) != value and name not in _OF_ONE
    }
    return {**found, **{name: None for name in began if name not in now and name not in _OF_ONE}}


def send(step: Step, environ: Mapping[str, str]) -> List[Far]:
    """Give a step to its other nodes."""
    with open(os.path.join(environ[FOLDER], _BEGAN), encoding="utf-8") as file:
        began = json.load(file)
    caught = log_of(1) != environ.get(LOG)
    order = {
        **step._asdict(),
        "environ": changes(began["environ"], environ),
        "at": os.getcwd(),
        "folder": began["folder"],
        "tools": environ[FOLDER],
        "caught": caught,
        "joined": caught and log_of(1) == log_of(2),
    }
    book = Book.of(environ)
    number = book.begin(order, _last(environ[FOLDER]))
    _keep_last(environ[FOLDER], number)
    return [Far(book, number, node) for node in step.nodes if node]


def _last(folder: str) -> int:
    with suppress(OSError, ValueError), open(os.path.join(folder, "last-step")) as file:
        return int(file.read()) + 1
    return 0


def _keep_last(folder: str, number: int) -> None:
    with open(os.path.join(folder, "last-step"), "w") as file:
        file.write(str(number))


class Far:
    """The part of a step that another node does; to srun like `Tasks`."""

    def __init__(self, book: Book, number: int, node: int) -> None:
        self._book, self._number, self._node = book, number, node
        self._blocks = 0
        self._codes: Optional[List[int]] = None
        self._next, self._pause = 0.0, _SOON

    def poll(self) -> Optional[List[int]]:
        now = time.monotonic()
        if self._codes is None and now >= self._next:
            self._codes = _patiently(self._look)
            self._next, self._pause = now + self._pause, min(self._book.longest, self._pause * 1.5)
        return self._codes

    def _look(self) -> Optional[List[int]]:
        ended = self._book.ended(self._number, self._node)
        while True:
            block = self._book.out(self._number, self._node, self._blocks)
            if block is None:
                break
            sys.stdout.buffer.write(block)
            sys.stdout.buffer.flush()
            self._blocks += 1
        if ended is None or self._blocks < ended["blocks"]:
            return None
        return [int(code) for code in ended["codes"]]

    def was_one_killed(self) -> bool:
        return any(code > 128 for code in self._codes or ())

    def pass_on(self, number: int) -> None:
        with suppress(StoreError):
            self._book.stop(self._number, number)

    def forget(self) -> None:
        with suppress(StoreError):
            self._book.forget(self._number)


# --- on the other nodes ---------------------------------------------------------------------------


class Part:
    """This node's tasks of a step."""

    def __init__(self, book: Book, number: int, order: Mapping[str, Any], place: Place) -> None:
        self._book, self._number, self._node = book, number, place.node
        self._blocks = 0
        self._printed: List[bytes] = []
        self._signal = 0
        self._tasks: Optional[Tasks] = None
        step, place = _as_here(order, place)
        if order["caught"]:
            place = place._replace(take=self._printed.append, joined=order["joined"])
        try:
            self._tasks = Tasks(step, place)
        except OSError as error:
            print(f"srun: {step.command[0]}: {error}", file=sys.stderr, flush=True)

    def look(self) -> bool:
        """Tell the first node what is new; whether all is told."""
        codes = self._tasks.poll() if self._tasks is not None else [127]
        if self._printed:
            count = len(self._printed)
            data = b"".join(self._printed[:count])
            self._book.put_out(self._number, self._node, self._blocks, data)
            del self._printed[:count]
            self._blocks += 1
        if codes is not None:
            self._book.end(self._number, self._node, codes, self._blocks)
            return True
        told = self._book.stopped(self._number)
        if told and told != self._signal:
            self._signal = told
            self.pass_on(told)
        return False

    def pass_on(self, number: int) -> None:
        if self._tasks is not None:
            self._tasks.pass_on(number)


def _as_here(order: Mapping[str, Any], place: Place) -> Tuple[Step, Place]:
    """The step in this node's words: its files may lie elsewhere."""
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
    step = Step(*(order[name] for name in Step._fields))
    step = step._replace(command=[here(word) for word in step.command])
    return step, place._replace(environ=environ, folder=folder)


def follow(
    environ: Mapping[str, str], folder: str, *, sleep: Callable[[float], None] = time.sleep
) -> NoReturn:
    """Do this node's part of every step, until the run ends, which ends the node."""
    node = number_of(environ.get("AWS_BATCH_JOB_NODE_INDEX", ""), 0)
    place, parts, ended = Place(node, environ, folder), [], []  # type: Place, List[Part], List[int]

    def end(number: int, _frame: object) -> None:
        ended.append(number)
        for part in parts:
            part.pass_on(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    book = Book.of(environ)
    while not ended and not _patiently(partial(book.enter, node, environ["SLURMD_NODENAME"])):
        sleep(book.longest)
    number, pause = 0, _SOON
    while parts or not ended:
        order = None if ended else _patiently(partial(book.order, number))
        if order is not None:
            if node in order["nodes"]:
                parts.append(Part(book, number, order, place))
            number, pause = number + 1, _SOON
        for part in list(parts):
            if _patiently(part.look):
                parts.remove(part)
                pause = _SOON
        sleep(pause)
        pause = min(book.longest, pause * 1.5)
    sys.exit(128 + ended[0])


def _patiently(ask: Callable[[], T]) -> Optional[T]:
    """The answer; None where the store cannot be had just now."""
    try:
        return ask()
    except StoreError as error:
        if not error.temporary:
            raise
        return None


def _say(text: str) -> None:
    print(f"batchml notice: {text}", flush=True)
