"""Watch for GPUs that break while the run goes on: NVML's events report XID errors.

Source of the numbers: NVIDIA, "XID Errors". The severities are those of AWS's health agent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Dict, List, Optional, Tuple

from batchml.runtime.health.checks import (
    LIMIT,
    MONITOR,
    NOTICE,
    OK,
    REPLACE,
    RETRY,
    HostCheck,
    run_with_limit,
)
from batchml.runtime.health.gate import OFF, EndingAttempt, HealthSettings, end_on_unfit_host
from batchml.runtime.health.gpus import (
    check_clocks,
    check_gpu,
    check_recovery,
    describe_failure,
)
from batchml.runtime.protocol.exit_codes import TRY_ELSEWHERE
from batchml.runtime.protocol.log_marks import LAST_LINES
from batchml.runtime.telemetry import gpus
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY_EVENT, GpuEvent, Nvml, NvmlError

_MAX_EVENTS = 8  # in one tick

# Errors that need a reset, a reboot or another card: the run needs another host. NVIDIA's device
# plug-in for Kubernetes ignores 109 as the program's fault; NVIDIA's list and AWS's agent do not.
BROKEN: Dict[int, str] = {
    46: "it does not stop computing",
    48: "an ECC error that cannot be put right",
    54: "a power cable is not connected",
    62: "its own processor has halted",
    64: "bad rows of its memory could not be remapped",
    74: "a link to other GPUs failed (NVLink)",
    79: "it has fallen off the bus",
    95: "an ECC error that was not contained",
    109: "switching between programs took too long",
    110: "a security fault",
    119: "its own processor does not answer",
    120: "an error of its own processor",
    136: "a link to other GPUs could not be trained",
    140: "an ECC error that cannot be put right",
    142: "its video encoder failed",
    143: "it could not be started",
    151: "its key rotation failed",
    155: "an error of the links to other GPUs",
    156: "a part of it was retired, and it needs a reset",
    158: "a fatal timeout",
    168: "its memory protection failed",
}
# Errors that the program causes.
PROGRAMS: Dict[int, str] = {
    13: "an error of the program's kernel",
    31: "the program used memory that it does not have",
    126: "an error of the program",
}
# An ECC error that ends the program, and nothing else: the program is not the cause, and starts
# again. The row of memory is remapped at the next reset.
CONTAINED = 94
# The driver asks for an action, which is then read from NVML.
ACTION = 154
# Errors that follow other events, or are harmless.
SILENT = (43, 45, 63, 92, 121)

# Texts with which CUDA tells a program that the card is broken. Source: cudaGetErrorString.
_BROKEN_TEXTS = (
    "uncorrectable ECC error encountered", "uncorrectable NVLink error", "GPU is lost",
    "fallen off the bus",
)  # fmt: skip
_POLL = 10.0  # seconds between two questions to each GPU


def classify_xid(xid: int) -> HostCheck:
    """The severity of an XID for the run, and its meaning in words."""
    if xid in BROKEN:
        return HostCheck(f"XID {xid}", REPLACE, BROKEN[xid])
    if xid in SILENT:
        return HostCheck(f"XID {xid}", OK)
    if xid == CONTAINED:
        text = "an ECC error that affects only this program"
        return HostCheck(f"XID {xid}", MONITOR, text)
    return HostCheck(f"XID {xid}", MONITOR, PROGRAMS.get(xid, "see NVIDIA's list of XIDs"))


class GpuWatcher:
    """An attempt plug-in. It does nothing without GPUs.

    It gets events from the driver, and asks each GPU itself: a card may vanish without an event.
    After a command that failed it asks once more, because the program mostly ends first.
    """

    def __init__(
        self,
        attempt: EndingAttempt,
        open_nvml: Callable[[], Nvml] = Nvml,
        device: str = DEVICE,
        limit: float = LIMIT,
    ) -> None:
        """`limit`: the seconds within which the driver must answer after the command's end."""
        self._attempt, self._limit = attempt, limit
        settings = HealthSettings.read(attempt.environ)
        self._handles: Dict[str, Any] = {}
        self._names: Dict[int, str] = {}
        self._errors: Dict[str, int] = {}  # uncorrected ECC errors before the run
        self._contained: Optional[HostCheck] = None  # an ECC error that may have ended the program
        self._reported: List[Tuple[str, str]] = []
        self._next_poll: Optional[float] = None
        self._has_left = False
        self._has_answered = False  # the driver, after a command that failed
        self._nvml: Optional[Nvml] = None
        self._is_on = settings.checks != OFF and os.path.exists(device)
        if self._is_on:
            self._open(open_nvml, attempt.environ)

    def _open(self, open_nvml: Callable[[], Nvml], environ: Mapping[str, str]) -> None:
        try:
            nvml = open_nvml()
        except NvmlError:  # the checks before the command have reported this
            return
        found = gpus.gpu_handles(nvml, environ)
        self._handles = {name: handle for name, failed, handle in found if not failed}
        self._names = {handle.value or 0: name for name, handle in self._handles.items()}
        nvml.watch(list(self._handles.values()))
        for name, handle in self._handles.items():
            self._errors[name] = nvml.uncorrected_errors(handle) or 0
        self._nvml = nvml

    def tick(self, now: float) -> None:
        if self._nvml is None:
            return
        self._read_events(self._nvml)
        if self._next_poll is None:
            self._next_poll = now + _POLL
        elif now >= self._next_poll:
            self._next_poll = now + _POLL
            for name, handle in self._handles.items():
                self._poll(self._nvml, name, handle)

    def finish(self) -> None:
        if self._is_on and self._attempt.code and not self._has_left:
            self._ask_after_failure()
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _read_events(self, nvml: Nvml) -> None:
        for _ in range(_MAX_EVENTS):
            event = None if self._has_left else nvml.event()
            if event is None:
                return
            self._handle(nvml, event)

    def _handle(self, nvml: Nvml, event: GpuEvent) -> None:
        name = self._names.get(event.device)
        if name is None:  # a GPU of another run
            return
        if event.kind == gpus.UNAVAILABLE_EVENT:
            self._react(HostCheck(name, REPLACE, "the driver says that it cannot be used"))
        elif event.kind == RECOVERY_EVENT or event.data == ACTION:
            self._react(check_recovery(name, nvml.recovery_action(self._handles[name])))
        else:
            xid = classify_xid(event.data)
            found = HostCheck(name, xid.severity, xid.describe())
            if event.data == CONTAINED:
                self._contained = found
            self._react(found)

    def _poll(self, nvml: Nvml, name: str, handle: Any) -> None:
        """Ask whether a GPU answers, for its recovery action, ECC errors and lowered clocks."""
        failed = nvml.test(handle)
        if failed in gpus.GONE:
            self._react(describe_failure(nvml, name, failed))
        if failed:  # other errors may pass
            return
        self._react(check_recovery(name, nvml.recovery_action(handle)))
        self._react(self._new_errors(nvml, name, handle, MONITOR))
        self._react(check_clocks(name, nvml.slowdowns(handle)))

    def _new_errors(self, nvml: Nvml, name: str, handle: Any, severity: int) -> Optional[HostCheck]:
        count, before = nvml.uncorrected_errors(handle), self._errors.get(name, 0)
        if count is None or count <= before:
            return None
        return HostCheck(name, severity, f"{count - before} uncorrected ECC errors during the run")

    def _ask_after_failure(self) -> None:
        """Leave the host if a GPU is the reason why the command failed."""
        found: List[HostCheck] = []
        if self._nvml is not None:
            # A broken driver may never answer, and the attempt must end.
            found = run_with_limit("GPUs", self._limit, REPLACE, self._find_broken, self._nvml)
            if not self._has_answered:
                self._nvml = None  # it is not closed, because that would wait, too
        if self._contained is not None:
            found.append(self._contained._replace(severity=RETRY))
        lines = self._attempt.last_lines()
        at = next((i for i, line in enumerate(lines) if line.endswith(LAST_LINES)), len(lines))
        own, elsewhere = _broken_text(lines[:at]), _broken_text(lines[at:])
        if own:
            found.append(HostCheck("the program", RETRY, f"it got the CUDA error: {own}"))
        worst = max(found, key=lambda check: check.severity, default=HostCheck("GPUs"))
        if self._has_left:
            return
        if worst.severity >= RETRY:
            self._leave_host(worst)
        elif elsewhere:  # its own node records its host
            why = f"a GPU of another node is broken: {elsewhere}; the run goes on elsewhere"
            self._attempt.stop(why, TRY_ELSEWHERE)

    def _find_broken(self, nvml: Nvml) -> List[HostCheck]:
        self._read_events(nvml)
        found: List[HostCheck] = []
        for name, handle in self._handles.items():
            failed = nvml.test(handle)
            if failed:
                found.append(describe_failure(nvml, name, failed))
                continue
            found.append(self._new_errors(nvml, name, handle, RETRY) or HostCheck(name))
            found += check_gpu(nvml, name, handle)
        self._has_answered = True
        return found

    def _react(self, found: Optional[HostCheck]) -> None:
        if found is None or self._has_left:
            return
        if found.severity >= REPLACE:
            self._leave_host(found)
        elif found.severity == MONITOR and (found.name, _kind(found)) not in self._reported:
            self._reported.append((found.name, _kind(found)))
            self._attempt.say(f"{NOTICE}{found.describe()}")

    def _leave_host(self, found: HostCheck) -> None:
        self._has_left = True
        end_on_unfit_host(self._attempt, found)


def _broken_text(lines: Sequence[str]) -> str:
    """The text in the lines by which CUDA says that a card is broken; "" without one."""
    return next((text for line in lines for text in _BROKEN_TEXTS if text in line), "")


def _kind(found: HostCheck) -> str:
    """The text of a result up to its number, so that a growing number is reported once."""
    return re.sub(r"^[0-9]+", "", found.text)
