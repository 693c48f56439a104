"""The vCPUs, memory and GPUs that this machine has for jobs."""

import os
import subprocess

from batchml.local.batch.state import MachineCapacity
from batchml.local.executors.choice import read_choice
from batchml.local.home import Home


def read_machine(*, with_gpus: bool = True) -> MachineCapacity:
    """The capacity of this machine. Without `with_gpus`, no GPUs are searched for."""
    gpus = find_gpus() if with_gpus else ()
    return MachineCapacity(vcpus=count_vcpus(), memory=memory_mib(), gpus=gpus)


def server_vcpus(home: Home) -> int:
    """The number of vCPUs that the server of this state folder gives to jobs: that of `batchml
    local start --vcpus`, or that of this machine.
    """
    return read_choice(home).vcpus or count_vcpus()


def count_vcpus() -> int:
    """The number of vCPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory_mib() -> int:
    """The memory of this machine in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2


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
