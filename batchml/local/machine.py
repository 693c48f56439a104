"""What this machine has to give to jobs."""

import os
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.local.home import Home, read_record

if TYPE_CHECKING:
    from batchml.local.state import Machine

KEPT = "executor.json"  # how the server is started next: executors/choice.py


class Believed(Struct, frozen=True):
    """What the server was told to believe of this machine; 0: what there is."""

    vcpus: int = 0


def read_machine(*, with_gpus: bool = True) -> "Machine":
    """What there is, as the server counts it; without `with_gpus` none are looked for."""
    from batchml.local.state import Machine

    gpus = find_gpus() if with_gpus else ()
    return Machine(vcpus=count_vcpus(), memory=memory_mib(), gpus=gpus)


def believed_vcpus(home: Home) -> int:
    """Those that the server of this state folder gives out: `batchml local start --vcpus`."""
    told = read_record(home.local / KEPT, Believed)
    return told.vcpus if told and told.vcpus else count_vcpus()


def count_vcpus() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2


def find_gpus() -> tuple[str, ...]:
    """By UUID, where nvidia-smi names them. That takes its time."""
    import subprocess

    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
