"""What this machine has to give to jobs."""

import os
import subprocess

from batchml.local.state import Machine


def read_machine(*, with_gpus: bool = True) -> Machine:
    """vCPUs this process may use, memory in MiB, and GPUs by UUID where nvidia-smi names them.

    nvidia-smi takes its time: without `with_gpus` it is not asked.
    """
    try:
        vcpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        vcpus = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2
    return Machine(vcpus=vcpus, memory=memory, gpus=_gpus() if with_gpus else ())


def _gpus() -> tuple[str, ...]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
