"""The vCPUs, memory and GPUs that this machine has for jobs."""

import os
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import Struct

from batchml.runtime.protocol.launch import NEURON_DEVICE


class Needs(Struct, frozen=True):
    """The resources that one attempt occupies. Memory in MiB."""

    vcpus: int
    memory: int
    gpus: int = 0


class MachineCapacity(Struct, frozen=True):
    """The resources of this machine: all, or the free ones. Memory in MiB; GPUs by UUID."""

    vcpus: int
    memory: int
    gpus: tuple[str, ...] = ()

    def fits(self, needs: Needs) -> bool:
        return (
            needs.vcpus <= self.vcpus
            and needs.memory <= self.memory
            and needs.gpus <= len(self.gpus)
        )

    def minus(self, needs: Needs, gpus: tuple[str, ...]) -> "MachineCapacity":
        """The capacity without these needs and GPUs."""
        left = tuple(gpu for gpu in self.gpus if gpu not in gpus) if gpus else self.gpus
        return MachineCapacity(self.vcpus - needs.vcpus, self.memory - needs.memory, left)

    def plus(self, needs: Needs, gpus: tuple[str, ...]) -> "MachineCapacity":
        return MachineCapacity(
            self.vcpus + needs.vcpus,
            self.memory + needs.memory,
            tuple(sorted((*self.gpus, *gpus))),
        )


def read_machine(*, with_gpus: bool = True) -> MachineCapacity:
    """The capacity of this machine. Without `with_gpus`, no GPUs are searched for."""
    gpus = find_gpus() if with_gpus else ()
    return MachineCapacity(vcpus=count_vcpus(), memory=memory_mib(), gpus=gpus)


def count_vcpus() -> int:
    """The number of vCPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


class ProcessorMeter:
    """Measures how busy the processors of this machine are, with the programs of all users.

    `read` returns the text of /proc/stat; "" where there is none. `processors`: their numbers.
    """

    def __init__(
        self,
        read: Callable[[], str] = lambda: _read_text("/proc/stat"),
        processors: Collection[int] = (),
    ) -> None:
        self._read = read
        self._processors = processors or range(os.cpu_count() or 1)
        if not processors and hasattr(os, "sched_getaffinity"):
            self._processors = os.sched_getaffinity(0)
        self._last = self._ticks()

    def measure(self) -> float | None:
        """The fraction that was busy since the last call; None after too short a time."""
        before, now = self._last, self._ticks()
        passed = now[1] - before[1]
        if passed < _LEAST_TICKS * len(self._processors):
            return None
        self._last = now
        return min(1.0, max(0.0, (now[0] - before[0]) / passed))

    def _ticks(self) -> tuple[int, int]:
        """Busy ticks and all ticks, of 10 ms, since the start. Source: proc_stat(5)."""
        busy = total = 0
        for line in self._read().splitlines():
            name, *fields = line.split()
            if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in self._processors:
                ticks = [int(field) for field in fields[:8]]  # guests are counted in user
                total += sum(ticks)
                busy += sum(ticks) - sum(ticks[3:5])  # without idle and iowait
        return busy, total


_LEAST_TICKS = 15  # of each processor: less would be too rough


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("ascii")
    except OSError:  # not Linux
        return ""


def memory_mib() -> int:
    """The memory of this machine in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2


def count_neurons(dev: str = "/dev") -> int:
    """The number of AWS's Neuron chips in this machine."""
    try:
        names = os.listdir(dev)
    except OSError:
        return 0
    prefix = os.path.basename(NEURON_DEVICE)
    return sum(name.startswith(prefix) and name[len(prefix) :].isdecimal() for name in names)


def find_gpus() -> tuple[str, ...]:
    """The UUIDs of the GPUs that nvidia-smi lists; empty if it fails. The call can be slow."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
