"""Watch for GPUs that break while the run goes on: NVML's events report XID errors.

Source of the numbers: NVIDIA, "XID Errors". The severities are those of AWS's health agent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable, Dict, List, Optional

from batchml.runtime.health.checks import MONITOR, NOTICE, OK, REPLACE, HostCheck
from batchml.runtime.health.gate import OFF, HealthSettings, quarantine_host, record_unfit
from batchml.runtime.health.gpus import check_recovery
from batchml.runtime.health.host_records import host_id
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.telemetry import gpus
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY_EVENT, GpuEvent, Nvml, NvmlError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import AttemptHandle

_MAX_EVENTS = 8  # in one tick

# Errors that need a reset, a reboot or another card: the run needs another host.
BROKEN: Dict[int, str] = {
    48: "an ECC error that cannot be put right",
    54: "a power cable is not connected",
    64: "bad rows of its memory could not be remapped",
    79: "it has fallen off the bus",
    95: "an ECC error that was not contained",
    109: "switching between programs took too long",
    110: "a security fault",
    119: "its own processor does not answer",
    120: "an error of its own processor",
    136: "a link to other GPUs failed",
    140: "an ECC error that cannot be put right",
    143: "it could not be started",
    151: "its key rotation failed",
    155: "a link to other GPUs is down",
    156: "it needs a reset",
    158: "an error of its fabric",
    168: "its memory protection failed",
}
# Errors that the program causes, or that end a program but do not damage the card.
PROGRAMS: Dict[int, str] = {
    13: "an error of the program's kernel",
    31: "the program used memory that it does not have",
    94: "an ECC error that affects only this program",
}
# Errors that follow other events, or are harmless.
SILENT = (43, 45, 63, 92)


def classify_xid(xid: int) -> HostCheck:
    """The severity of an XID for the run, and its meaning in words."""
    if xid in BROKEN:
        return HostCheck(f"XID {xid}", REPLACE, BROKEN[xid])
    if xid in SILENT:
        return HostCheck(f"XID {xid}", OK)
    return HostCheck(f"XID {xid}", MONITOR, PROGRAMS.get(xid, "see NVIDIA's list of XIDs"))


class GpuWatcher:
    """An attempt plug-in. It does nothing without GPUs, or if the driver cannot report events."""

    def __init__(
        self,
        attempt: AttemptHandle,
        open_nvml: Callable[[], Nvml] = Nvml,
        device: str = DEVICE,
    ) -> None:
        self._attempt = attempt
        settings = HealthSettings.read(attempt.environ)
        self._quarantine = settings.quarantine
        self._names: Dict[int, str] = {}
        self._reported: List[str] = []
        self._nvml: Optional[Nvml] = None
        if settings.checks != OFF and os.path.exists(device):
            self._open(open_nvml, attempt.environ)

    def _open(self, open_nvml: Callable[[], Nvml], environ: Mapping[str, str]) -> None:
        try:
            nvml = open_nvml()
        except NvmlError:  # the checks before the command have reported this
            return
        found = gpus.gpu_handles(nvml, environ.get("NVIDIA_VISIBLE_DEVICES", ""))
        working = [(name, handle) for name, failed, handle in found if not failed]
        self._names = {handle.value or 0: name for name, handle in working}
        if nvml.watch([handle for _, handle in working]):
            self._nvml = nvml
        else:
            nvml.close()

    def tick(self, now: float) -> None:
        for _ in range(_MAX_EVENTS):
            event = self._nvml.event() if self._nvml else None
            if event is None:
                return
            self._handle(event)

    def finish(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _handle(self, event: GpuEvent) -> None:
        name = self._names.get(event.device)
        if name is None or self._nvml is None:  # a GPU of another run
            return
        if event.kind == RECOVERY_EVENT:
            import ctypes

            action = self._nvml.recovery_action(ctypes.c_void_p(event.device))
            found = check_recovery(name, action) or HostCheck(name)
        else:
            xid = classify_xid(event.data)
            found = HostCheck(name, xid.severity, xid.describe())
        if found.severity >= REPLACE:
            self._leave_host(found)
        elif found.severity == MONITOR and found.describe() not in self._reported:
            self._reported.append(found.describe())
            self._attempt.say(f"{NOTICE}{found.describe()}")

    def _leave_host(self, found: HostCheck) -> None:
        """Stop the run. This does not count as a try, because the run may have done much here."""
        attempt = self._attempt
        host = host_id(attempt.environ)
        record_unfit(attempt.env, attempt.environ, attempt.say, host, [found])
        attempt.stop(
            f"this host ({host}) is unfit: {found.describe()}; the run saves and goes on elsewhere",
            TRY_ELSEWHERE,
        )
        self.finish()
        if self._quarantine:
            quarantine_host(attempt.env, attempt.environ, attempt.say, host)
