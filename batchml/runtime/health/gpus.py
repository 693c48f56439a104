"""What is asked of the GPUs of a run, by NVML: a second or two, before the command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable, List, Optional

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, OK, REPLACE, RETRY, Check
from batchml.runtime.telemetry import gpus as nvml_library
from batchml.runtime.telemetry.gpus import DEVICE, RECOVERY, Nvml, NvmlError

Open = Callable[[], Nvml]


def check(environ: Mapping[str, str], open_nvml: Open = Nvml, device: str = DEVICE) -> List[Check]:
    """One answer for each thing that is asked of each GPU; one line where all are well."""
    visible = environ.get("NVIDIA_VISIBLE_DEVICES", "")
    asked = len(nvml_library.named(visible))
    if not os.path.exists(device):
        return [Check("GPUs", REPLACE, f"{asked} were given to the run, and none is here")]
    try:
        nvml = open_nvml()
    except NvmlError as error:
        # Without the library the image or the container's runtime is at fault, not the card.
        return [Check("GPUs", REPLACE if error.code else NOT_CHECKED, str(error))]
    try:
        return _all(nvml, visible, asked)
    finally:
        nvml.close()


def _all(nvml: Nvml, visible: str, asked: int) -> List[Check]:
    found: List[Check] = []
    there = 0
    for name, failed, handle in nvml_library.handles(nvml, visible):
        failed = failed or nvml.lost(handle)
        if failed:
            found.append(Check(name, REPLACE, f"it does not answer: {nvml.words(failed)}"))
            continue
        there += 1
        found += one(nvml, name, handle)
    if asked and there < asked:
        found.append(Check("GPUs", REPLACE, f"{there} of {asked} that were given answer"))
    elif not found:
        found.append(Check("GPUs", NOT_CHECKED, "NVML sees none"))
    return found


def one(nvml: Nvml, name: str, handle: Any) -> List[Check]:
    """A GPU that answers. What its driver does not tell is said, as not checked."""
    action = nvml.recovery_action(handle)
    answers = [
        ("recovery", recovery(name, action)),
        ("ECC", errors(name, nvml.uncorrected_errors(handle), action)),
        ("remapped rows", rows(name, nvml.remapped_rows(handle))),
        ("clocks", slowed(name, nvml.slowdowns(handle))),
    ]
    told = [answer for _, answer in answers if answer is not None]
    unknown = [what for what, answer in answers if answer is None]
    if unknown:
        told.append(Check(name, NOT_CHECKED, f"{', '.join(unknown)}: the driver does not tell"))
    return told


def recovery(name: str, action: Optional[int]) -> Optional[Check]:
    """What the driver wants done to the card before it is used again."""
    if action is None or action == 0:
        return None if action is None else Check(name)
    words = RECOVERY[action] if action < len(RECOVERY) else f"action {action}"
    return Check(name, REPLACE, f"the driver asks for: {words}")


def errors(name: str, count: Optional[int], action: Optional[int]) -> Optional[Check]:
    """Errors of long ago that the driver has dealt with are no reason to leave a host.

    Drivers that name an action know; with older ones any such error is one too many.
    """
    if count is None:
        return None
    if count == 0:
        return Check(name)
    told = f"{count} uncorrected ECC errors since the driver was loaded"
    return Check(name, RETRY if action is None else MONITOR, told)


def rows(name: str, found: Optional[nvml_library.Remapped]) -> Optional[Check]:
    """Source: NVIDIA GPU Memory Error Management, "Row Remapping"."""
    if found is None:
        return None
    if found.failed:
        return Check(name, REPLACE, "a bad row of its memory could not be remapped")
    if found.is_pending:
        return Check(name, REPLACE, "bad rows of its memory wait for a reset to be remapped")
    if found.uncorrected:
        return Check(name, MONITOR, f"{found.uncorrected} bad rows of its memory were remapped")
    return Check(name)


def slowed(name: str, why: Optional[List[str]]) -> Optional[Check]:
    """A card that is cooling down after its last job is fit: it is watched, not refused."""
    if why is None:
        return None
    return Check(name, MONITOR if why else OK, f"held back by {', '.join(why)}" if why else "")
