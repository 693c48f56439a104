"""Check a run's GPUs through NVML before the command starts. This takes a second or two."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, List, Optional

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, REPLACE, RETRY, HostCheck
from batchml.runtime.telemetry import gpus
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY, Nvml, NvmlError

Open = Callable[[], Nvml]


def check_gpus(
    environ: Mapping[str, str], open_nvml: Open = Nvml, device: str = DEVICE
) -> List[HostCheck]:
    """The results of all checks of each GPU."""
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    given = len(gpus.named_gpus(visible))
    if not os.path.exists(device):
        return [HostCheck("GPUs", REPLACE, f"the run was given {given}, and the host has none")]
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
        failed = failed or nvml.test(handle)
        if failed:
            found.append(HostCheck(name, REPLACE, f"it does not answer: {nvml.error_text(failed)}"))
            continue
        working += 1
        found += check_gpu(nvml, name, handle)
    if given and working < given:
        found.append(HostCheck("GPUs", REPLACE, f"{working} of the run's {given} answer"))
    elif not found:
        found.append(HostCheck("GPUs", NOT_CHECKED, "NVML finds none"))
    return found


def check_gpu(nvml: Nvml, name: str, handle: Any) -> List[HostCheck]:
    """Check a GPU that answers. Values that its driver does not report are not checked."""
    action = nvml.recovery_action(handle)
    results = [
        ("recovery", check_recovery(name, action)),
        ("ECC", check_ecc(name, nvml.uncorrected_errors(handle), action)),
        ("remapped rows", check_remapped_rows(name, nvml.remapped_rows(handle))),
        ("clocks", check_clocks(name, nvml.slowdowns(handle))),
    ]
    checks = [result for _, result in results if result is not None]
    unknown = ", ".join(subject for subject, result in results if result is None)
    if unknown:
        checks.append(HostCheck(name, NOT_CHECKED, f"{unknown}: the driver does not report it"))
    return checks


def check_recovery(name: str, action: Optional[int]) -> Optional[HostCheck]:
    """Check the recovery action that the driver demands before the card is used again."""
    if action is None or action == 0:
        return None if action is None else HostCheck(name)
    words = RECOVERY[action] if action < len(RECOVERY) else f"action {action}"
    return HostCheck(name, REPLACE, f"the driver asks for: {words}")


def check_ecc(name: str, count: Optional[int], action: Optional[int]) -> Optional[HostCheck]:
    """Check for uncorrected ECC errors.

    Drivers that report a recovery action show with it which errors they have handled, so the number
    does not refuse the host. With older drivers any such error refuses it.
    """
    if count is None:
        return None
    if count == 0:
        return HostCheck(name)
    text = f"{count} uncorrected ECC errors since the driver was loaded"
    return HostCheck(name, RETRY if action is None else MONITOR, text)


def check_remapped_rows(name: str, found: Optional[gpus.RemappedRows]) -> Optional[HostCheck]:
    """Check the remapped rows of memory.

    Source: NVIDIA GPU Memory Error Management, "Row Remapping".
    """
    if found is None:
        return None
    if found.failed:
        return HostCheck(name, REPLACE, "a bad row of its memory could not be remapped")
    if found.is_pending:
        return HostCheck(name, REPLACE, "bad rows of its memory wait for a reset to be remapped")
    if found.uncorrected:
        return HostCheck(name, MONITOR, f"{found.uncorrected} bad rows of its memory were remapped")
    return HostCheck(name)


def check_clocks(name: str, why: Optional[List[str]]) -> Optional[HostCheck]:
    """Check for lowered clocks. They refuse no host: the card may cool down after its last job."""
    if not why:
        return None if why is None else HostCheck(name)
    return HostCheck(name, MONITOR, f"its clocks are lowered: {', '.join(why)}")
