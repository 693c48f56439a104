"""NVIDIA's management library, which comes with the driver, through ctypes: no package is needed.

Whatever a driver, a card or a virtual machine does not tell is None here, and never a mistake.
Source: NVML API Reference; numbers and layouts are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

LIBRARY = "libnvidia-ml.so.1"
DEVICE = "/dev/nvidiactl"  # there, when the host has GPUs that this container may use

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13

UNCORRECTED, VOLATILE = 1, 0  # ECC errors: the kind, and "since the driver was loaded"
RECOVERY_ACTION = 230  # a field; drivers from 570 on have it
RECOVERY = (
    "none", "reset", "reboot", "drain P2P", "drain and reset", "recover the IMEX domain",
    "reset the bus", "reboot the system",
)  # fmt: skip
# Why clocks are lower than they could be: those that hardware does by itself, for heat or power.
SLOWDOWNS = ((0x8, "hardware slowdown"), (0x40, "heat"), (0x80, "the power supply"))
XID_EVENT, RECOVERY_EVENT = 0x8, 0x8000
_PROCESSES = 128  # of one card, at most
_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE

Load = Callable[[str], Any]


class _Field(ctypes.Structure):  # nvmlFieldValue_t
    _fields_ = [
        ("field", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latency", ctypes.c_int64),
        ("kind", ctypes.c_uint),
        ("failed", ctypes.c_int),
        ("value", ctypes.c_uint64),  # a union; what is read here is an unsigned int
    ]


class _Event(ctypes.Structure):  # nvmlEventData_t
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Process(ctypes.Structure):  # nvmlProcessInfo_t
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("held", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class NvmlError(Exception):
    """The library could not be had; `code` is its own, 0 where there is no library."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class Event(NamedTuple):
    """Something happened to a GPU: an XID, or another recovery action."""

    kind: int
    data: int
    device: int  # the handle's value


class Remapped(NamedTuple):
    """Rows of memory that were replaced by spare ones: R-series driver, A100 and later."""

    uncorrected: int
    is_pending: bool  # the next reset does it
    failed: bool  # no spare row is left


class Nvml:
    """The library, opened. `close` it."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        """Raises NvmlError, with code 0 where there is no library."""
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise NvmlError(str(error)) from error
        failed = self._library.nvmlInit_v2()
        if failed:
            raise NvmlError(f"nvmlInit: {self.words(failed)}", failed)
        self._events: Optional[ctypes.c_void_p] = None

    def words(self, code: int) -> str:
        """What an error code means."""
        try:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            found = self._library.nvmlErrorString(code)
        except AttributeError:
            found = None
        return found.decode("utf-8", "replace") if found else f"error {code}"

    def count(self) -> int:
        """GPUs that can be seen: all of the host, in a privileged container."""
        found = ctypes.c_uint()
        return 0 if self._library.nvmlDeviceGetCount_v2(ctypes.byref(found)) else found.value

    def by_index(self, index: int) -> Tuple[int, Any]:
        """An error code, 0 for none, and a handle."""
        handle = ctypes.c_void_p()
        call = self._library.nvmlDeviceGetHandleByIndex_v2
        return call(ctypes.c_uint(index), ctypes.byref(handle)), handle

    def by_id(self, name: str) -> Tuple[int, Any]:
        """As `by_index`, of `GPU-...`."""
        handle = ctypes.c_void_p()
        call = self._library.nvmlDeviceGetHandleByUUID
        return call(name.encode(), ctypes.byref(handle)), handle

    def recovery_action(self, handle: Any) -> Optional[int]:
        """An index of RECOVERY."""
        field = _Field(field=RECOVERY_ACTION)
        if self._call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(field)):
            return None
        return None if field.failed else int(field.value & 0xFFFFFFFF)

    def uncorrected_errors(self, handle: Any) -> Optional[int]:
        """ECC errors of memory that could not be put right, since the driver was loaded."""
        found = ctypes.c_ulonglong()
        kinds = (ctypes.c_int(UNCORRECTED), ctypes.c_int(VOLATILE))
        failed = self._call("nvmlDeviceGetTotalEccErrors", handle, *kinds, ctypes.byref(found))
        return None if failed else found.value

    def remapped_rows(self, handle: Any) -> Optional[Remapped]:
        told = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        if self._call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, told)):
            return None
        return Remapped(told[1].value, bool(told[2].value), bool(told[3].value))

    def slowdowns(self, handle: Any) -> Optional[List[str]]:
        """Why the hardware holds this GPU back."""
        found = ctypes.c_ulonglong()
        for name in ("ClocksEventReasons", "ClocksThrottleReasons"):  # the older name comes second
            if not self._call(f"nvmlDeviceGetCurrent{name}", handle, ctypes.byref(found)):
                return [words for bit, words in SLOWDOWNS if found.value & bit]
        return None

    def lost(self, handle: Any) -> int:
        """The error with which a GPU answers that has fallen off the bus; 0 for one that works."""
        memory = (ctypes.c_ulonglong * 3)()
        failed = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return 0 if failed in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND) else failed

    def usage(self, handle: Any) -> Dict[str, float]:
        """`busy`, percent of the last moment, and `held`, bytes; what the driver tells of them."""
        rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        found: Dict[str, float] = {}
        if not self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
            found["busy"] = float(rates[0])
        if not self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            found["held"] = float(memory[2])
        return found

    def processes(self, handle: Any) -> Dict[int, int]:
        """Process id -> bytes that it holds on the card, of those that compute. Empty where the
        driver does not tell, or counts processes of another container.
        """
        count, room = ctypes.c_uint(_PROCESSES), (_Process * _PROCESSES)()
        where = (ctypes.byref(count), room)
        for name in ("_v3", "_v2"):  # drivers before 510 have the older one, of the same layout
            if not self._call(f"nvmlDeviceGetComputeRunningProcesses{name}", handle, *where):
                told = [(each.pid, each.held) for each in room[: count.value]]
                return {pid: 0 if held == _UNKNOWN else held for pid, held in told}
        return {}

    # --- events ---------------------------------------------------------------------------------

    def watch(self, handles: List[Any]) -> bool:
        """Collect events of these GPUs from now on. False where the driver cannot."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)):
            return False
        self._events = events
        watched = 0
        for handle in handles:
            for kinds in (XID_EVENT | RECOVERY_EVENT, XID_EVENT):  # older drivers know one of them
                mask = ctypes.c_ulonglong(kinds)
                if not self._call("nvmlDeviceRegisterEvents", handle, mask, events):
                    watched += 1
                    break
        return watched > 0

    def event(self) -> Optional[Event]:
        """The next one that has come; None when there is none. It does not wait."""
        data = _Event()
        if self._events is None:
            return None
        wait = (ctypes.byref(data), ctypes.c_uint(0))
        if self._call("nvmlEventSetWait_v2", self._events, *wait):
            return None
        return Event(data.kind, data.data, data.device or 0)

    def close(self) -> None:
        if self._events is not None:
            self._call("nvmlEventSetFree", self._events)
            self._events = None
        self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: Any) -> int:
        """The error code; FUNCTION_NOT_FOUND for what this driver's library does not have."""
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError:
            return FUNCTION_NOT_FOUND


def named(visible: str) -> List[str]:
    """The GPUs that ECS gave the container, from NVIDIA_VISIBLE_DEVICES; none where it names none.

    A privileged container sees the host's other GPUs, too.
    """
    return [word for word in visible.split(",") if word.startswith("GPU-")]


def handles(nvml: Nvml, visible: str) -> List[Tuple[str, int, Any]]:
    """Each GPU of this container: its name, an error code, a handle."""
    given = named(visible)
    if given:
        return [(name, *nvml.by_id(name)) for name in given]
    return [(f"GPU {index}", *nvml.by_index(index)) for index in range(nvml.count())]


# --- GPUs in use ----------------------------------------------------------------------------------
# What the GPUs of an attempt do, by NVML, which comes with the driver. Nothing without it.


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

        try:
            self._nvml = (load or Nvml)()
        except NvmlError:
            return
        found = handles(self._nvml, visible)
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
