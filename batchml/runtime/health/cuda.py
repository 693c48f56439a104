"""Check that CUDA starts in this container: the driver is mounted, and it suits the image's CUDA.

Another process loads libcuda.so.1 and calls cuInit, without a context on any GPU: about a second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Dict, List, Tuple

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, REPLACE, RETRY, HostCheck
from batchml.runtime.health.deep import run_probe

LIMIT = 60.0  # seconds: without the persistence daemon the driver starts each GPU anew
MOUNT = "/usr/local/nvidia/lib64"  # of the driver, with gpu_access = "driver-mount"
_NAME = "CUDA"

# Errors of cuInit. Source: CUDA Driver API, CUresult. For 304 and 999 the usual cause is a missing
# /dev/nvidia-uvm, or a driver that needs a reboot.
_ECC, _NO_DEVICE, _NOT_READY = 214, 100, 802
_ERRORS = {
    34: "libcuda.so.1 is the stub of the CUDA toolkit, and not the driver's",
    46: "another process holds the GPU for itself",
    _NO_DEVICE: "CUDA finds no GPU",
    _ECC: "an uncorrectable ECC error",
    304: "the operating system refuses it: see whether /dev/nvidia-uvm is in the container",
    _NOT_READY: "the GPUs' fabric is not ready: the fabric manager must run, in the same version "
    "as the driver",
    803: "the driver's libraries in the container are of another version than the host's driver",
    804: "the image's CUDA compatibility libraries do not support this GPU with this driver",
    999: "the driver has failed",
}
# The oldest driver for a CUDA version. Source: NVIDIA, CUDA Minor Version Compatibility.
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}

PROBE = r"""
import ctypes, importlib.util, json, os, re
found = {}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    found["missing"] = str(error)
else:
    number = ctypes.c_int()
    found["init"] = cuda.cuInit(0)
    if not cuda.cuDriverGetVersion(ctypes.byref(number)):
        found["driver"] = number.value
try:
    torch = importlib.util.find_spec("torch")
    with open(os.path.join(os.path.dirname(torch.origin), "version.py")) as file:
        found["torch"] = re.search(r"(?m)^cuda\b[^=]*= *'([0-9.]+)'", file.read()).group(1)
except Exception:
    pass
print(json.dumps(found))
"""


def check_cuda(
    environ: Mapping[str, str], python: str = sys.executable, limit: float = LIMIT
) -> List[HostCheck]:
    """One result. Call it only if the run has GPUs."""
    # A job may hide the GPUs from a part of it.
    own = {name: text for name, text in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    probed = run_probe(PROBE, own, python, limit)
    if probed is None:
        return [HostCheck(_NAME, REPLACE, f"no answer within {limit:g} s")]
    try:
        found: Dict[str, Any] = json.loads(probed[0])
        return [judge_cuda(found, environ, os.path.exists(f"{MOUNT}/libcuda.so.1"))]
    except (ValueError, TypeError, AttributeError):
        return [HostCheck(_NAME, NOT_CHECKED, f"its check ended with code {probed[1]}")]


def judge_cuda(found: Mapping[str, Any], environ: Mapping[str, str], is_mounted: bool) -> HostCheck:
    """The result of the probe. `is_mounted`: whether the driver is at `MOUNT`.

    `found`: `missing`, the loader's error; or `init`, cuInit's code, and `driver`, the CUDA version
    that the driver supports, as 12040; and `torch`, the CUDA version that torch was built for.
    """
    if "missing" in found:
        text = f"the container has no driver ({found['missing']})"
        if is_mounted:
            text = f"the driver is at {MOUNT}, which is not in LD_LIBRARY_PATH"
        return HostCheck(_NAME, RETRY, text, is_setup=True)
    code, driver = int(found.get("init", 0)), int(found.get("driver", 0))
    needed, what = _needed(found, environ)
    if driver and needed > driver // 1000:
        oldest = OLDEST_DRIVER.get(needed)
        newer = f"driver {oldest} or newer" if oldest else "a newer driver"
        text = (
            f"{what} is for CUDA {needed}, which needs {newer}; the host's supports CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}"
        )
        # The program may use another CUDA than that of its base image.
        severity = RETRY if "torch" in found or code else MONITOR
        return HostCheck(_NAME, severity, text, is_setup=True)
    if code:
        text = f"cuInit: error {code}: {_ERRORS.get(code, 'see the CUDA Driver API')}"
        return HostCheck(_NAME, REPLACE if code == _ECC else RETRY, text, is_setup=code != _ECC)
    return HostCheck(_NAME)


def _needed(found: Mapping[str, Any], environ: Mapping[str, str]) -> Tuple[int, str]:
    """The major version of the image's CUDA, 0 if it is unknown, and what needs it.

    CUDA_VERSION is a variable of NVIDIA's base images.
    """
    for text, what in (
        (str(found.get("torch", "")), "the image's torch"),
        (environ.get("CUDA_VERSION", ""), "the image"),
    ):
        major = text.partition(".")[0]
        if major.isdigit():
            return int(major), what
    return 0, ""
