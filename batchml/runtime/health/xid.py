"""A companion that hears of GPUs that break while the run goes on: XIDs, from NVML's events.

Source of the numbers: NVIDIA, "XID Errors", and what AWS's health agent makes of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Callable, Dict, List, Optional

from batchml.runtime.health.checks import MONITOR, NOTICE, OK, REPLACE, Check
from batchml.runtime.health.gate import OFF, Settings, enter, take_out
from batchml.runtime.health.gpus import recovery
from batchml.runtime.health.host_records import host_id
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.telemetry import gpus as nvml_library
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY_EVENT, Event, Nvml, NvmlError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.entry.attempt import Attempt

_MOST = 8  # events that are looked at in one tick

# Nothing but a reset, a reboot or another card helps: for a run all of these are another host.
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
# The program did it, or it ends a program and leaves the card well.
PROGRAMS: Dict[int, str] = {
    13: "an error of the program's kernel",
    31: "the program used memory that it does not have",
    94: "an ECC error that only this program met",
}
# What follows from other events, or is no trouble.
SILENT = (43, 45, 63, 92)


def judge(xid: int) -> Check:
    """What an XID means for the run."""
    if xid in BROKEN:
        return Check(f"XID {xid}", REPLACE, BROKEN[xid])
    if xid in SILENT:
        return Check(f"XID {xid}", OK)
    return Check(f"XID {xid}", MONITOR, PROGRAMS.get(xid, "see NVIDIA's list of XIDs"))


class Watch:
    """A companion. It does nothing where there is no GPU, or the driver tells no events."""

    def __init__(
        self,
        attempt: Attempt,
        open_nvml: Callable[[], Nvml] = Nvml,
        device: str = DEVICE,
    ) -> None:
        self._attempt = attempt
        settings = Settings.read(attempt.environ)
        self._quarantine = settings.quarantine
        self._names: Dict[int, str] = {}
        self._said: List[str] = []
        self._nvml: Optional[Nvml] = None
        if settings.checks != OFF and os.path.exists(device):
            self._open(open_nvml, attempt.environ)

    def _open(self, open_nvml: Callable[[], Nvml], environ: Mapping[str, str]) -> None:
        try:
            nvml = open_nvml()
        except NvmlError:  # the gate has said so
            return
        found = nvml_library.handles(nvml, environ.get("NVIDIA_VISIBLE_DEVICES", ""))
        given = [(name, handle) for name, failed, handle in found if not failed]
        self._names = {handle.value or 0: name for name, handle in given}
        if nvml.watch([handle for _, handle in given]):
            self._nvml = nvml
        else:
            nvml.close()

    def tick(self, now: float) -> None:
        for _ in range(_MOST):
            event = self._nvml.event() if self._nvml else None
            if event is None:
                return
            self._hear(event)

    def finish(self) -> None:
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _hear(self, event: Event) -> None:
        name = self._names.get(event.device)
        if name is None or self._nvml is None:  # another run's
            return
        if event.kind == RECOVERY_EVENT:
            import ctypes

            action = self._nvml.recovery_action(ctypes.c_void_p(event.device))
            found = recovery(name, action) or Check(name)
        else:
            xid = judge(event.data)
            found = Check(name, xid.severity, xid.words())
        if found.severity >= REPLACE:
            self._leave(found)
        elif found.severity == MONITOR and found.words() not in self._said:
            self._said.append(found.words())
            self._attempt.say(f"{NOTICE}{found.words()}")

    def _leave(self, found: Check) -> None:
        """It is not counted among the tries: the run may have got far on this host."""
        attempt = self._attempt
        host = host_id(attempt.environ)
        enter(attempt.env, attempt.environ, attempt.say, host, [found])
        attempt.stop(
            f"this host ({host}) is unfit: {found.words()}; the run saves and goes on elsewhere",
            TRY_ELSEWHERE,
        )
        self.finish()
        if self._quarantine:
            take_out(attempt.env, attempt.environ, attempt.say, host)
