"""Checks of a run's GPUs by NVML, before the command. They take a second or two."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, List, Optional

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, OK, REPLACE, RETRY, HostCheck
from batchml.runtime.telemetry import gpus
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY, Nvml, NvmlError

Open = Callable[[], Nvml]


def check(
    environ: Mapping[str, str], open_nvml: Open = Nvml, device: str = DEVICE
) -> List[HostCheck]:
    """The results of all checks of each GPU."""
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    given = len(gpus.named_gpus(visible))
    if not os.path.exists(device):
        return [HostCheck("GPUs", REPLACE, f"{given} were given to the run, and none is here")]
    try:
        nvml = open_nvml()
    except NvmlError as error:
        # A missing library is a fault of the image or the container runtime, not of the card.
        return [HostCheck("GPUs", REPLACE if error.code else NOT_CHECKED, str(error))]
    try:
        return _check_all(nvml, visible, given)
    finally:
        nvml.close()


def _check_all(nvml: Nvml, visible: str, given: int) -> List[HostCheck]:
    found: List[HostCheck] = []
    working = 0
    for name, failed, handle in gpus.gpu_handles(nvml, visible):
        failed = failed or nvml.lost(handle)
        if failed:
            found.append(HostCheck(name, REPLACE, f"it does not answer: {nvml.error_text(failed)}"))
            continue
        working += 1
        found += check_gpu(nvml, name, handle)
    if given and working < given:
        found.append(HostCheck("GPUs", REPLACE, f"{working} of {given} that were given answer"))
    elif not found:
        found.append(HostCheck("GPUs", NOT_CHECKED, "NVML sees none"))
    return found


def check_gpu(nvml: Nvml, name: str, handle: Any) -> List[HostCheck]:
    """The checks of a GPU that answers. Values that its driver does not report are not checked."""
    action = nvml.recovery_action(handle)
    results = [
        ("recovery", recovery(name, action)),
        ("ECC", errors(name, nvml.uncorrected_errors(handle), action)),
        ("remapped rows", rows(name, nvml.remapped_rows(handle))),
        ("clocks", slowed(name, nvml.slowdowns(handle))),
    ]
    known = [result for _, result in results if result is not None]
    unknown = ", ".join(subject for subject, result in results if result is None)
    if unknown:
        known.append(HostCheck(name, NOT_CHECKED, f"{unknown}: the driver does not report it"))
    return known


def recovery(name: str, action: Optional[int]) -> Optional[HostCheck]:
    """The driver's recovery action: what must be done before the card is used again."""
    if action is None or action == 0:
        return None if action is None else HostCheck(name)
    words = RECOVERY[action] if action < len(RECOVERY) else f"action {action}"
    return HostCheck(name, REPLACE, f"the driver asks for: {words}")


def errors(name: str, count: Optional[int], action: Optional[int]) -> Optional[HostCheck]:
    """Uncorrected ECC errors. Old errors that the driver has handled do not refuse the host.

    Drivers that report a recovery action know this. With older drivers any such error refuses it.
    """
    if count is None:
        return None
    if count == 0:
        return HostCheck(name)
    text = f"{count} uncorrected ECC errors since the driver was loaded"
    return HostCheck(name, RETRY if action is None else MONITOR, text)


def rows(name: str, found: Optional[gpus.RemappedRows]) -> Optional[HostCheck]:
    """Remapped rows of memory. Source: NVIDIA GPU Memory Error Management, "Row Remapping"."""
    if found is None:
        return None
    if found.failed:
        return HostCheck(name, REPLACE, "a bad row of its memory could not be remapped")
    if found.is_pending:
        return HostCheck(name, REPLACE, "bad rows of its memory wait for a reset to be remapped")
    if found.uncorrected:
        return HostCheck(name, MONITOR, f"{found.uncorrected} bad rows of its memory were remapped")
    return HostCheck(name)


def slowed(name: str, why: Optional[List[str]]) -> Optional[HostCheck]:
    """Lowered clocks. They refuse no host: the card may be cooling down after its last job."""
    if why is None:
        return None
    return HostCheck(name, MONITOR if why else OK, f"held back by {', '.join(why)}" if why else "")
