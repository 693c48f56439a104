"""`checks = "deep"`: multiply and copy numbers on each GPU with torch, and verify the results.

This runs in another process, because a broken card may crash its program, or never answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import List, Optional, Sequence, Tuple

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, OK, REPLACE, RETRY, HostCheck

_NAME = "a small computation"
# Texts of errors for which the image does not fit the GPU or its driver.
_OF_SETUP = (
    "no kernel image is available", "driver version is insufficient", "driver combination",
    "forward compatibility was attempted", "NVIDIA driver on your system is too old",
)  # fmt: skip
LIMIT = 90.0  # seconds for all GPUs together; importing torch from a cold disk takes most of it

# Products of whole numbers that floats represent exactly, so that any difference is an error. Then
# a pattern is copied to the device, inverted there and copied back: 1/16 of the free memory, at
# most 1 GiB.
PROBE = """
import json, sys, time
try:
    import torch
except Exception as error:
    print(json.dumps([["torch", "unknown", str(error)[:200]]]))
    sys.exit(3)
found = []
devices = ["cuda:%d" % i for i in range(torch.cuda.device_count())] or ["cpu"]
for device in devices:
    try:
        began = time.perf_counter()
        g = torch.Generator().manual_seed(7)
        a = torch.randint(-8, 9, (512, 512), generator=g).float()
        b = torch.randint(-8, 9, (512, 512), generator=g).float()
        expected = (a.long() @ b.long())
        got = (a.to(device) @ b.to(device)).cpu().long()
        wrong = int((got != expected).sum())
        if wrong:
            found.append([device, "wrong", "%d of %d products are wrong" % (wrong, got.numel())])
            continue
        size = 1 << 22
        if device != "cpu":
            size = min(1 << 30, torch.cuda.mem_get_info(device)[0] // 16)
        data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        back = (255 - data.to(device)).cpu()
        wrong = int((back != 255 - data).sum())
        if wrong:
            found.append([device, "wrong", "%d of %d bytes came back wrong" % (wrong, size)])
            continue
        found.append([device, "ok", "%.2f s" % (time.perf_counter() - began)])
    except Exception as error:
        found.append([device, "failed", " ".join(str(error).split())[:200]])
print(json.dumps(found))
"""


def check_by_computing(
    environ: Mapping[str, str], python: str = sys.executable, limit: float = LIMIT
) -> List[HostCheck]:
    """One result for each GPU; for the CPU if there is no GPU."""
    probed = run_probe(PROBE, environ, python, limit)
    if probed is None:
        return [HostCheck(_NAME, REPLACE, f"no answer within {limit:g} s")]
    return read_results(*probed)


def run_probe(
    program: str, environ: Mapping[str, str], python: str, limit: float
) -> Optional[Tuple[bytes, int]]:
    """The output and exit code of a Python program; None if it takes more than `limit` seconds."""
    process = subprocess.Popen(
        # Without the working directory in `sys.path`: the job may have a `json.py` in it.
        [python, "-c", "import sys; sys.path = [p for p in sys.path if p]\n" + program],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        _end(process)
        return None
    return output, process.returncode


def read_results(output: bytes, code: int) -> List[HostCheck]:
    """The results that the probe printed. A probe that crashed before is a failed check."""
    try:
        found: Sequence[Sequence[str]] = json.loads(output)
        return [_check(device, result, text) for device, result, text in found]
    except (ValueError, TypeError):
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return [HostCheck(_NAME, RETRY, f"the program that computes it ended {how}")]


def _check(device: str, result: str, text: str) -> HostCheck:
    if result == "unknown":
        return HostCheck(_NAME, NOT_CHECKED, text)
    severity = {"ok": OK, "failed": RETRY, "wrong": REPLACE}.get(result, MONITOR)
    is_setup = result == "failed" and any(words in text for words in _OF_SETUP)
    return HostCheck(f"{_NAME} on {device}", severity, text, is_setup)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        pass  # it hangs in the driver, where signals do not reach it
