"""Read the state and usage of GPUs through NVML, NVIDIA's management library, with ctypes.

The library comes with the driver. A value that the driver, the card or a virtual machine does not
report is None, and no error.
Source: NVML API Reference; numbers and layouts are from nvml.h.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from batchml.runtime.protocol.launch import GPUS
from batchml.runtime.protocol.variables import number_of

LIBRARY = "libnvidia-ml.so.1"
DEVICE = "/dev/nvidiactl"  # exists if the container may use GPUs of the host

VISIBLE = "NVIDIA_VISIBLE_DEVICES"  # set by ECS, and on `local` by the server
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13
GONE = (15, 16, 28)  # GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND

UNCORRECTED, VOLATILE = 1, 0  # ECC errors: their kind, and those since the driver was loaded
RECOVERY_ACTION = 230  # a field of drivers from 570 on
RECOVERY = (
    "none", "reset", "reboot", "drain P2P", "drain and reset", "recover the IMEX domain",
    "reset the bus", "reboot the system",
)  # fmt: skip
# Reasons for lower clocks: only those for which the hardware itself lowers the clocks.
SLOWDOWNS = ((0x8, "hardware slowdown"), (0x40, "heat"), (0x80, "the power supply"))
XID_EVENT, UNAVAILABLE_EVENT, RECOVERY_EVENT = 0x8, 0x4000, 0x8000
EVENTS = XID_EVENT | UNAVAILABLE_EVENT | RECOVERY_EVENT
_MAX_PROCESSES = 128  # that are read of one card
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
        ("value", ctypes.c_uint64),  # a union; the recovery action is an unsigned int
    ]


class _Memory(ctypes.Structure):  # nvmlMemory_v2_t, in bytes
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _SramErrors(ctypes.Structure):  # nvmlEccSramErrorStatus_v1_t
    _fields_ = [
        ("version", ctypes.c_uint),
        ("counts", ctypes.c_ulonglong * 11),
        ("is_above_threshold", ctypes.c_uint),
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
    """The library could not be loaded or started. `code` is NVML's error, 0 without the library."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class GpuEvent(NamedTuple):
    """An event of a GPU: an XID, a new recovery action, or that it cannot be used any more."""

    kind: int  # XID_EVENT, RECOVERY_EVENT or UNAVAILABLE_EVENT
    data: int  # of an XID event: the number of the XID
    device: int  # the value of the GPU's handle


class RemappedRows(NamedTuple):
    """Rows of a card's memory that spare rows have replaced: A100 and later."""

    uncorrected: int  # rows that were replaced because of uncorrectable errors
    is_pending: bool  # whether the next reset will replace a row
    failed: bool  # whether a row could not be replaced


class Nvml:
    """The open library. Call `close` at the end."""

    def __init__(self, load: Load = ctypes.CDLL) -> None:
        """Load and start the library. Raises NvmlError."""
        try:
            self._library = load(LIBRARY)
        except OSError as error:
            raise NvmlError(str(error)) from error
        failed = self._library.nvmlInit_v2()
        if failed:
            raise NvmlError(f"nvmlInit: {self.error_text(failed)}", failed)
        self._events: Optional[ctypes.c_void_p] = None

    def error_text(self, code: int) -> str:
        """NVML's text for an error code."""
        try:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            found = self._library.nvmlErrorString(code)
        except AttributeError:
            found = None
        return found.decode("utf-8", "replace") if found else f"error {code}"

    def driver(self) -> str:
        """The driver's version, such as `580.95.05`; empty if it is unknown."""
        text = ctypes.create_string_buffer(80)
        failed = self._call("nvmlSystemGetDriverVersion", text, ctypes.c_uint(80))
        return "" if failed else text.value.decode("ascii", "replace")

    def count(self) -> int:
        """The number of visible GPUs; in a privileged container all GPUs of the host."""
        found = ctypes.c_uint()
        return 0 if self._library.nvmlDeviceGetCount_v2(ctypes.byref(found)) else found.value

    def by_index(self, index: int) -> Tuple[int, Any]:
        """NVML's error code, or 0, and the handle of a GPU."""
        handle = ctypes.c_void_p()
        call = self._library.nvmlDeviceGetHandleByIndex_v2
        return call(ctypes.c_uint(index), ctypes.byref(handle)), handle

    def by_id(self, name: str) -> Tuple[int, Any]:
        """Like `by_index`, for a GPU with a name such as `GPU-8a1b...`."""
        handle = ctypes.c_void_p()
        call = self._library.nvmlDeviceGetHandleByUUID
        return call(name.encode(), ctypes.byref(handle)), handle

    def properties(self, handle: Any) -> Optional[Tuple[str, int, Tuple[int, int]]]:
        """The name of a GPU, its memory in bytes, and CUDA's compute capability."""
        name = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
        memory, version = (ctypes.c_ulonglong * 3)(), (ctypes.c_int(), ctypes.c_int())
        failed = (
            self._call("nvmlDeviceGetName", handle, name, ctypes.c_uint(96))
            or self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            or self._call("nvmlDeviceGetCudaComputeCapability", handle, *map(ctypes.byref, version))
        )
        if failed:
            return None
        text = name.value.decode("utf-8", "replace")
        return text, memory[0], (version[0].value, version[1].value)

    def recovery_action(self, handle: Any) -> Optional[int]:
        """The recovery action that the driver demands: an index of RECOVERY."""
        field = _Field(field=RECOVERY_ACTION)
        if self._call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(field)):
            return None
        return None if field.failed else int(field.value & 0xFFFFFFFF)

    def uncorrected_errors(self, handle: Any) -> Optional[int]:
        """The number of uncorrectable ECC memory errors since the driver was loaded."""
        found = ctypes.c_ulonglong()
        kinds = (ctypes.c_int(UNCORRECTED), ctypes.c_int(VOLATILE))
        failed = self._call("nvmlDeviceGetTotalEccErrors", handle, *kinds, ctypes.byref(found))
        return None if failed else found.value

    def remapped_rows(self, handle: Any) -> Optional[RemappedRows]:
        values = [ctypes.c_uint() for _ in range(4)]  # corrected, uncorrected, pending, failed
        if self._call("nvmlDeviceGetRemappedRows", handle, *map(ctypes.byref, values)):
            return None
        return RemappedRows(values[1].value, bool(values[2].value), bool(values[3].value))

    def pages_wait_for_reboot(self, handle: Any) -> Optional[bool]:
        """Whether the next reboot will retire a page of memory: cards before the A100."""
        found = ctypes.c_uint()
        failed = self._call("nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(found))
        return None if failed else bool(found.value)

    def sram_is_above_threshold(self, handle: Any) -> Optional[bool]:
        """Whether the card's on-chip memory had more errors than NVIDIA allows: H100 and later."""
        found = _SramErrors(version=ctypes.sizeof(_SramErrors) | 1 << 24)
        failed = self._call("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(found))
        return None if failed else bool(found.is_above_threshold)

    def slowdowns(self, handle: Any) -> Optional[List[str]]:
        """The reasons for which the hardware lowers this GPU's clocks."""
        found = ctypes.c_ulonglong()
        for name in ("ClocksEventReasons", "ClocksThrottleReasons"):  # the newer name comes first
            if not self._call(f"nvmlDeviceGetCurrent{name}", handle, ctypes.byref(found)):
                return [words for bit, words in SLOWDOWNS if found.value & bit]
        return None

    def test(self, handle: Any) -> int:
        """NVML's error code if the GPU does not answer, as after it fell off the bus; else 0."""
        memory = (ctypes.c_ulonglong * 3)()
        failed = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return 0 if failed in (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND) else failed

    def usage(self, handle: Any) -> Dict[str, float]:
        """`busy` in percent and `held` in bytes, if the driver reports them."""
        rates = (ctypes.c_uint * 2)()  # nvmlUtilization_t: gpu, memory
        found: Dict[str, float] = {}
        if not self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
            found["busy"] = float(rates[0])
        held = self._held(handle)
        return found if held is None else {**found, "held": float(held)}

    def _held(self, handle: Any) -> Optional[int]:
        """The bytes that programs hold. Drivers before 510 add those that they keep themselves."""
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        if not self._call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory)):
            return int(memory.used)
        older = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        failed = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(older))
        return None if failed else older[2]

    def processes(self, handle: Any) -> Dict[int, int]:
        """Process id -> bytes on the card, of compute processes. Empty if the driver does not
        report them, or numbers processes differently than the container.
        """
        count, buffer = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
        arguments = (ctypes.byref(count), buffer)
        for name in ("_v3", "_v2"):  # drivers before 510 have only v2, which has the same layout
            if not self._call(f"nvmlDeviceGetComputeRunningProcesses{name}", handle, *arguments):
                found = [(each.pid, each.held) for each in buffer[: count.value]]
                return {pid: 0 if held == _UNKNOWN else held for pid, held in found}
        return {}

    # --- Events -----------------------------------------------------------------------------------

    def watch(self, handles: List[Any]) -> bool:
        """Collect events of these GPUs from now on. False if the driver cannot report events."""
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)):
            return False
        self._events = events
        watched = 0
        for handle in handles:
            known = self.event_types(handle)
            wanted = EVENTS if known is None else known & EVENTS
            for kinds in (wanted, XID_EVENT):  # older drivers know only XIDs
                mask = ctypes.c_ulonglong(kinds)
                if not self._call("nvmlDeviceRegisterEvents", handle, mask, events):
                    watched += 1
                    break
        return watched > 0

    def event_types(self, handle: Any) -> Optional[int]:
        """The kinds of events that the driver reports of a GPU, as bits."""
        known = ctypes.c_ulonglong()
        failed = self._call("nvmlDeviceGetSupportedEventTypes", handle, ctypes.byref(known))
        return None if failed else known.value

    def event(self) -> Optional[GpuEvent]:
        """The next event that has come, without waiting; None without one."""
        data = _Event()
        if self._events is None:
            return None
        wait = (ctypes.byref(data), ctypes.c_uint(0))
        if self._call("nvmlEventSetWait_v2", self._events, *wait):
            return None
        return GpuEvent(data.kind, data.data, data.device or 0)

    def close(self) -> None:
        if self._events is not None:
            self._call("nvmlEventSetFree", self._events)
            self._events = None
        self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: Any) -> int:
        """Return the error code; FUNCTION_NOT_FOUND if the library lacks the function."""
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError:
            return FUNCTION_NOT_FOUND


def named_gpus(visible: str) -> List[str]:
    """The GPUs that ECS gave the container, from NVIDIA_VISIBLE_DEVICES; empty if it names none.

    A privileged container sees all GPUs of the host.
    """
    return [word for word in visible.split(",") if word.startswith("GPU-")]


def asked_gpus(environ: Mapping[str, str]) -> int:
    """The number of GPUs that the run requested on this node; else the number that ECS names."""
    return number_of(environ.get(GPUS), 0) or len(named_gpus(environ.get(VISIBLE, "")))


def has_gpus(environ: Mapping[str, str], device: str = DEVICE) -> bool:
    """Whether this container has GPUs, or should have some."""
    return bool(asked_gpus(environ)) or (os.path.exists(device) and not _is_hidden(environ))


def _is_hidden(environ: Mapping[str, str]) -> bool:
    """Whether the host's GPUs are of no concern, because the run requested none.

    Our images have `void`, too, which is left unchanged in privileged containers.
    """
    return environ.get(VISIBLE) in ("void", "none") and not asked_gpus(environ)


def gpu_handles(nvml: Nvml, environ: Mapping[str, str]) -> List[Tuple[str, int, Any]]:
    """Each GPU of this container: its name, NVML's error code or 0, a handle."""
    names = named_gpus(environ.get(VISIBLE, ""))
    if names:
        return [(name, *nvml.by_id(name)) for name in names]
    if _is_hidden(environ):
        return []
    return [(f"GPU {index}", *nvml.by_index(index)) for index in range(nvml.count())]


def with_own_gpus(environ: Mapping[str, str], devices: Sequence[str]) -> Dict[str, str]:
    """The variables with CUDA_VISIBLE_DEVICES if the container sees GPUs of other runs.

    A privileged container sees all GPUs of its host, and programs would all take the first. ECS
    names the run's own. `devices`: the names in /dev. A value of the job or image wins.
    """
    names = named_gpus(environ.get(VISIBLE, ""))
    seen = sum(1 for name in devices if name.startswith("nvidia") and name[6:].isdigit())
    if not names or seen <= len(names) or "CUDA_VISIBLE_DEVICES" in environ:
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(names)}


# --- Usage of the GPUs ----------------------------------------------------------------------------


_MIB = 1 << 20


class GpuUse(NamedTuple):
    """The usage of one card."""

    values: Dict[str, float]  # `busy` in percent, `held` in bytes of memory
    processes: Dict[int, int]  # process id -> bytes of memory


class GpuMonitor:
    """Measures the GPUs of this attempt. Without a driver it finds none."""

    def __init__(
        self,
        environ: Mapping[str, str],
        load: Callable[[], Nvml] = Nvml,
        device: str = DEVICE,
    ) -> None:
        self._nvml: Optional[Nvml] = None
        self._handles: List[Any] = []
        if os.path.exists(device):
            try:
                self._nvml = load()
            except NvmlError:
                return
            found = gpu_handles(self._nvml, environ)
            self._handles = [handle for _, failed, handle in found if not failed]

    def read(self) -> List[GpuUse]:
        if self._nvml is None:
            return []
        nvml = self._nvml
        return [GpuUse(nvml.usage(each), nvml.processes(each)) for each in self._handles]

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml, self._handles = None, []


def gpu_totals(gpus: List[GpuUse]) -> Dict[str, float]:
    """The usage of all cards: `gpu` is their mean in percent, `gpu_memory` the sum in MiB."""
    busy = [each.values["busy"] for each in gpus if "busy" in each.values]
    held = [each.values["held"] / _MIB for each in gpus if "held" in each.values]
    found = {"gpu": sum(busy) / len(busy)} if busy else {}
    return {**found, "gpu_memory": sum(held)} if held else found


def gpu_use_of(gpus: List[GpuUse], pids: "set[int]") -> Dict[str, float]:
    """The totals, as in `gpu_totals`, of the cards that these processes use, as far as known.

    If other processes use a card, too, only the memory is known. If the driver numbers processes
    differently than the container, the result is empty.
    """
    used = [(gpu, pids & set(gpu.processes)) for gpu in gpus]
    mine = [(gpu, found) for gpu, found in used if found]
    if not mine:
        return {}
    held = sum(gpu.processes[pid] for gpu, found in mine for pid in found) / _MIB
    busy = [gpu.values["busy"] for gpu, found in mine if "busy" in gpu.values]
    alone = all(set(gpu.processes) <= pids for gpu, _ in mine) and len(busy) == len(mine)
    return {**({"gpu": sum(busy) / len(busy)} if alone else {}), "gpu_memory": held}
