"""The tasks of a step on one node: each a process that knows its number, as srun starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Callable, Dict, List, NamedTuple, Optional

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
