"""What the GPUs of an attempt do, by NVML, which comes with the driver. Nothing without it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from batchml.runtime.nvml import DEVICE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.nvml import Nvml

_MIB = 1 << 20


class Gpu(NamedTuple):
    """One card: what it does, and the bytes that each process holds on it."""

    told: Dict[str, float]  # `busy` percent, `held` bytes
    processes: Dict[int, int]


class Gpus:
    """Those that this attempt may use."""

    def __init__(
        self,
        environ: Mapping[str, str],
        load: Optional[Callable[[], Nvml]] = None,
        device: str = DEVICE,
    ) -> None:
        self._nvml: Optional[Nvml] = None
        self._handles: List[Any] = []
        if os.path.exists(device):
            self._open(environ.get("NVIDIA_VISIBLE_DEVICES", ""), load)

    def _open(self, visible: str, load: Optional[Callable[[], Nvml]]) -> None:
        from batchml.runtime import nvml

        try:
            self._nvml = (load or nvml.Nvml)()
        except nvml.NvmlError:
            return
        found = nvml.handles(self._nvml, visible)
        self._handles = [handle for _, failed, handle in found if not failed]

    def look(self) -> List[Gpu]:
        if self._nvml is None:
            return []
        nvml = self._nvml
        return [Gpu(nvml.usage(each), nvml.processes(each)) for each in self._handles]

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml, self._handles = None, []


def together(gpus: List[Gpu]) -> Dict[str, float]:
    """Percent of the time that they were busy, their mean, and MiB held on all of them."""
    busy = [each.told["busy"] for each in gpus if "busy" in each.told]
    held = [each.told["held"] / _MIB for each in gpus if "held" in each.told]
    found = {"gpu": sum(busy) / len(busy)} if busy else {}
    return {**found, "gpu_memory": sum(held)} if held else found


def by_process(gpus: List[Gpu], pids: "set[int]") -> Dict[str, float]:
    """The same of the cards that these processes use, as far as the driver tells.

    Of a card that others use as well only the memory is theirs. A driver may count processes
    otherwise than the container does; then nothing is found.
    """
    used = [(gpu, pids & set(gpu.processes)) for gpu in gpus]
    mine = [(gpu, found) for gpu, found in used if found]
    if not mine:
        return {}
    held = sum(gpu.processes[pid] for gpu, found in mine for pid in found) / _MIB
    busy = [gpu.told["busy"] for gpu, found in mine if "busy" in gpu.told]
    alone = all(set(gpu.processes) <= pids for gpu, _ in mine) and len(busy) == len(mine)
    return {**({"gpu": sum(busy) / len(busy)} if alone else {}), "gpu_memory": held}
