"""Check a run's GPUs through NVML before the command starts. This takes a second or two."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, List, Optional

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, REPLACE, RETRY, HostCheck
from batchml.runtime.telemetry import gpus
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY, VISIBLE, Nvml, NvmlError

Open = Callable[[], Nvml]

# NVML's errors at its start whose cause is seldom a card. Source: NVML API Reference, nvmlReturn_t.
_OF_SETUP = {
    9: "the host's NVIDIA driver is not loaded",
    12: "the driver's libraries are not all in the container",
    18: "the driver's libraries in the container are of another version than the host's driver",
}


def check_gpus(
    environ: Mapping[str, str], open_nvml: Open = Nvml, device: str = DEVICE
) -> List[HostCheck]:
    """The results of all checks of each GPU."""
    asked = gpus.asked_gpus(environ)
    if not os.path.exists(device):
        return [
            HostCheck(
                "GPUs", RETRY,
                f"the run requested {asked}, and its container has no NVIDIA device: the AMI needs "
                "the driver and the container toolkit, or the container must be privileged",
                is_setup=True,
            )
        ]  # fmt: skip
    try:
        nvml = open_nvml()
    except NvmlError as error:
        if error.code in _OF_SETUP:
            text = f"{error}: {_OF_SETUP[error.code]}"
            return [HostCheck("GPUs", RETRY, text, is_setup=True)]
        # Without the library NVIDIA's `utility` capability may be off, which is no fault.
        return [HostCheck("GPUs", REPLACE if error.code else NOT_CHECKED, str(error))]
    try:
        return _check_all(nvml, environ, asked)
    finally:
        nvml.close()


def _check_all(nvml: Nvml, environ: Mapping[str, str], asked: int) -> List[HostCheck]:
    found: List[HostCheck] = []
    working = 0
    for name, failed, handle in gpus.gpu_handles(nvml, environ):
        failed = failed or nvml.test(handle)
        if failed:
            found.append(describe_failure(nvml, name, failed))
            continue
        working += 1
        found += check_gpu(nvml, name, handle)
    if working < asked:
        found.append(HostCheck("GPUs", REPLACE, f"{working} of the run's {asked} answer"))
    elif not found:
        found.append(HostCheck("GPUs", NOT_CHECKED, "NVML finds none"))
    if 0 < asked < working and not gpus.named_gpus(environ.get(VISIBLE, "")):
        text = f"the container sees {working}, and the run requested {asked}: other runs may use"
        found.append(HostCheck("GPUs", MONITOR, f"{text} the same; set CUDA_VISIBLE_DEVICES"))
    return found


def describe_failure(nvml: Nvml, name: str, code: int) -> HostCheck:
    """A GPU that answers with an error of NVML, or that NVML does not find."""
    return HostCheck(name, REPLACE, f"it does not answer: {nvml.error_text(code)}")


def check_gpu(nvml: Nvml, name: str, handle: Any) -> List[HostCheck]:
    """Check a GPU that answers. Values that its driver does not report are not checked."""
    action = nvml.recovery_action(handle)
    rows = check_remapped_rows(name, nvml.remapped_rows(handle))
    results = [
        ("recovery", check_recovery(name, action)),
        ("ECC", check_ecc(name, nvml.uncorrected_errors(handle), action)),
        ("remapped rows", rows or check_retired_pages(name, nvml.pages_wait_for_reboot(handle))),
        ("clocks", check_clocks(name, nvml.slowdowns(handle))),
    ]
    checks = [result for _, result in results if result is not None]
    if nvml.sram_is_above_threshold(handle):
        text = "its on-chip memory (SRAM) had more ECC errors than NVIDIA allows"
        checks.append(HostCheck(name, REPLACE, text))
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


def check_retired_pages(name: str, is_pending: Optional[bool]) -> Optional[HostCheck]:
    """Check for pages of memory that are to be retired: cards before the A100 have no rows.

    Source: NVIDIA Dynamic Page Retirement.
    """
    if not is_pending:
        return None if is_pending is None else HostCheck(name)
    return HostCheck(name, REPLACE, "bad pages of its memory wait for a reboot to be retired")


def check_clocks(name: str, why: Optional[List[str]]) -> Optional[HostCheck]:
    """Check for lowered clocks. They refuse no host: the card may cool down after its last job."""
    if not why:
        return None if why is None else HostCheck(name)
    return HostCheck(name, MONITOR, f"its clocks are lowered: {', '.join(why)}")
