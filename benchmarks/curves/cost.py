"""How a cost is taken."""

import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

SIZES = (100, 1_000, 10_000, 100_000)
MILLION = 1_000_000
SOME = 50  # acts of which the median is taken


def sizes(full: bool, most: int = 100_000, full_most: int = MILLION) -> list[int]:
    """The sizes of a curve, up to what fits."""
    return [size for size in (*SIZES, MILLION) if size <= (full_most if full else most)]


def cpu(act: Callable[[], object]) -> float:
    """Seconds of processor time."""
    start = time.process_time()
    act()
    return time.process_time() - start


def each(act: Callable[[], object], count: int = SOME) -> float:
    """Microseconds of processor time of one: the median."""
    return median(cpu(act) for _ in range(count)) * 1e6


def cpu_of_command(words: Sequence[str], folder: str = "/") -> float:
    """Seconds of processor time of a command. Raises CalledProcessError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        words, cwd=folder, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cpu_of_process(pid: int) -> float:
    """Seconds of processor time that a process has had: proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of_process(pid: int) -> float:
    """MiB that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
