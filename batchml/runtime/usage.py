"""A companion that tells what an attempt uses: CPU, memory, GPUs. Read from the kernel and NVML."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from typing import Any, Dict, List, Optional

from batchml.runtime.lines import MARK, usage_mark

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.companions import Attempt

FIRST = 5.0  # seconds from the start
EVERY = 30.0
_MIB = 1 << 20


class Usage:
    """Every half a minute a mark: `usage cpu=1.93 memory=812 gpu=45 gpu_memory=3000`."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._gpus = Gpus(attempt.environ)
        self._at: Optional[float] = None
        self._cpu = 0.0
        self._wait = FIRST

    def tick(self, now: float) -> None:
        if self._at is None:  # the program begins, and most end before there is anything to say
            self._at = now
        if now - self._at < self._wait:
            return
        pids = self._attempt.pids()
        cpu = cpu_seconds(pids)
        cores = max(0.0, cpu - self._cpu) / (now - self._at)
        sample = {"cpu": cores, "memory": float(memory_mib(pids)), **self._gpus.sample()}
        self._attempt.mark(usage_mark(sample)[len(MARK) :])
        self._at, self._cpu, self._wait = now, cpu, EVERY

    def finish(self) -> None:
        self._gpus.close()


def cpu_seconds(pids: List[int]) -> float:
    """What the descendants have used: those that live, and those that were waited for."""
    gone = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for pid in pids:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if fields:  # utime, stime, and the same of children that were waited for: proc(5), 14-17
            ticks += sum(map(int, fields[11:15]))
    return gone.ru_utime + gone.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(pids: List[int]) -> int:
    """What counts against the limit of a container; else what its processes hold, counted once."""
    held = _container_memory()
    if held is None:
        pages = [list(map(int, _read(f"/proc/{pid}/statm").split()[1:3])) for pid in pids]
        found = [each for each in pages if len(each) == 2]  # resident, and of these shared
        own = sum(resident - shared for resident, shared in found)
        held = (own + max((shared for _, shared in found), default=0)) * resource.getpagesize()
    return held // _MIB


def _container_memory(root: str = "/sys/fs/cgroup") -> Optional[int]:
    """Bytes of this control group, where it is the container's own (cgroup v2, a namespace).

    Without pages of files that were not used lately: the kernel takes them back before it kills.
    """
    if "0::/\n" not in _read("/proc/self/cgroup"):
        return None
    current = _read(f"{root}/memory.current").strip()  # the machine's root group has none
    if not current.isdigit():
        return None
    stat = dict(line.split(" ", 1) for line in _read(f"{root}/memory.stat").splitlines())
    return max(0, int(current) - int(stat.get("inactive_file", 0)))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:  # it has ended
        return ""


class Gpus:
    """The GPUs that this attempt may use, by NVML, which comes with the driver. None without it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._nvml: Any = None
        self._handles: List[Any] = []
        if os.path.exists("/dev/nvidiactl"):
            self._open(environ.get("NVIDIA_VISIBLE_DEVICES", ""))

    def _open(self, visible: str) -> None:
        import ctypes

        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if nvml.nvmlInit_v2() != 0:
            return
        self._nvml = nvml
        # ECS names the container's GPUs by their ids; a privileged container sees the others too.
        named = [word for word in visible.split(",") if word.startswith("GPU-")]
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for place in named or range(count.value):
            handle = ctypes.c_void_p()
            if isinstance(place, str):
                failed = nvml.nvmlDeviceGetHandleByUUID(place.encode(), ctypes.byref(handle))
            else:
                failed = nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle))
            if not failed:
                self._handles.append(handle)

    def sample(self) -> Dict[str, float]:
        """Percent of the time that they were busy, their mean, and MiB held on all of them."""
        import ctypes

        busy, held = [], []
        for handle in self._handles:
            rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
            memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
            if not self._nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)):
                busy.append(float(rates[0]))
            if not self._nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                held.append(memory[2] / _MIB)
        found = {"gpu": sum(busy) / len(busy)} if busy else {}
        return {**found, "gpu_memory": sum(held)} if held else found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml, self._handles = None, []
