"""`checks = "deep"`: each GPU multiplies and copies, and has to be right. By torch, if it is there.

In a process of its own: a card that is broken may take its program along, or never answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import List, Sequence

from batchml.runtime.health.checks import MONITOR, NOT_CHECKED, OK, REPLACE, RETRY, Check

_NAME = "a small product"
LIMIT = 90.0  # seconds for all GPUs together; importing torch from a cold disk takes most of it

# Whole numbers that floats hold exactly, so that any other answer is a wrong one. The pattern goes
# to the device, is turned over there, and comes back: a sixteenth of what is free, 1 GiB at most.
PROBE = """
import json, sys, time
try:
    import torch
except Exception as error:
    print(json.dumps([["torch", "unknown", str(error)[:200]]]))
    sys.exit(3)
told = []
places = ["cuda:%d" % i for i in range(torch.cuda.device_count())] or ["cpu"]
for place in places:
    try:
        began = time.perf_counter()
        g = torch.Generator().manual_seed(7)
        a = torch.randint(-8, 9, (512, 512), generator=g).float()
        b = torch.randint(-8, 9, (512, 512), generator=g).float()
        expected = (a.long() @ b.long())
        got = (a.to(place) @ b.to(place)).cpu().long()
        wrong = int((got != expected).sum())
        if wrong:
            told.append([place, "wrong", "%d of %d products are wrong" % (wrong, got.numel())])
            continue
        size = 1 << 22
        if place != "cpu":
            size = min(1 << 30, torch.cuda.mem_get_info(place)[0] // 16)
        data = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        back = (255 - data.to(place)).cpu()
        wrong = int((back != 255 - data).sum())
        if wrong:
            told.append([place, "wrong", "%d of %d bytes came back wrong" % (wrong, size)])
            continue
        told.append([place, "ok", "%.2f s" % (time.perf_counter() - began)])
    except Exception as error:
        told.append([place, "failed", " ".join(str(error).split())[:200]])
print(json.dumps(told))
"""


def check(
    environ: Mapping[str, str], python: str = sys.executable, limit: float = LIMIT
) -> List[Check]:
    """One answer for each GPU, or for the CPU where there is none."""
    process = subprocess.Popen(
        # Not in the working directory, which is the job's: it may hold a `json.py`.
        [python, "-c", "import sys; sys.path = [p for p in sys.path if p]\n" + PROBE],
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
        return [Check(_NAME, REPLACE, f"no answer within {limit:g} s")]
    return read(output, process.returncode)


def read(output: bytes, code: int) -> List[Check]:
    """The probe's answers. One that died without any has told enough."""
    try:
        told: Sequence[Sequence[str]] = json.loads(output)
        return [_check(place, how, text) for place, how, text in told]
    except (ValueError, TypeError):
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return [Check(_NAME, RETRY, f"the program that computes it ended {how}")]


def _check(place: str, how: str, text: str) -> Check:
    if how == "unknown":
        return Check(_NAME, NOT_CHECKED, text)
    severity = {"ok": OK, "failed": RETRY, "wrong": REPLACE}.get(how, MONITOR)
    return Check(f"{_NAME} on {place}", severity, text)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        pass  # in the driver, where no signal reaches it
