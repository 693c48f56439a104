"""batchml's health checks on a real driver: what NVML says, CUDA's start, a small computation.

nvidia-smi is asked the same, because a wrong layout of a structure would not be noticed otherwise.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from batchml.runtime.health.checks import OK, RETRY, WORDS, HostCheck, worst
from batchml.runtime.health.cuda import check_cuda
from batchml.runtime.health.deep import check_by_computing
from batchml.runtime.health.gpus import check_gpus
from batchml.runtime.protocol.launch import GPUS
from batchml.runtime.telemetry.gpus import DEVICE, EVENTS, SLOWDOWNS, XID_EVENT, Nvml, gpu_handles
from benchmarks.gpu.checks import CheckRun
from benchmarks.gpu.smi import number, query

T = TypeVar("T")
LOAD_SECONDS = 3.0


class Compared(NamedTuple):
    """A value that NVML and nvidia-smi both have."""

    name: str
    field: str  # of nvidia-smi
    ours: Callable[[Nvml, Any], float | None]
    within: float = 0.0  # the difference that the time between the two questions explains


def _rows(name: str) -> Callable[[Nvml, Any], float | None]:
    def read(nvml: Nvml, handle: Any) -> float | None:
        rows = nvml.remapped_rows(handle)
        return None if rows is None else float(getattr(rows, name))

    return read


def _errors(nvml: Nvml, handle: Any) -> float | None:
    found = nvml.uncorrected_errors(handle)
    return None if found is None else float(found)


def _held(nvml: Nvml, handle: Any) -> float | None:
    found = nvml.usage(handle).get("held")
    return None if found is None else found / (1 << 20)


COMPARED = (
    Compared("uncorrected ECC errors", "ecc.errors.uncorrected.volatile.total", _errors),
    Compared("rows remapped", "remapped_rows.uncorrectable", _rows("uncorrected")),
    Compared("rows that wait", "remapped_rows.pending", _rows("is_pending")),
    Compared("memory held, MiB", "memory.used", _held, within=64.0),
)


def measure(run: CheckRun, open_nvml: Callable[[], Nvml] = Nvml, device: str = DEVICE) -> None:
    nvml = open_nvml()
    try:
        environ = {**os.environ, GPUS: str(max(1, nvml.count()))}
        handles = [
            (name, handle) for name, failed, handle in gpu_handles(nvml, environ) if not failed
        ]
        run.detail("driver", nvml.driver())
        ask_host(run, environ, open_nvml, device)
        differences = compare(run, nvml, handles)
        watch_events(run, nvml, handles)
        load(run, nvml, handles)
    finally:
        nvml.close()
    if differences:
        raise RuntimeError(f"batchml and nvidia-smi differ: {'; '.join(differences)}")


def ask_host(
    run: CheckRun, environ: dict[str, str], open_nvml: Callable[[], Nvml], device: str
) -> None:
    """The checks before a run, each with its time."""
    found: list[HostCheck] = []
    for name, check in (
        ("NVML's checks", lambda: check_gpus(environ, open_nvml, device)),
        ("CUDA's start", lambda: check_cuda(environ)),
        ("computation", lambda: check_by_computing(environ, sys.executable)),
    ):
        seconds, results = _timed(check)
        run.figure(f"{name}, time", seconds, "s")
        run.detail(name, [[each.name, WORDS[each.severity], each.text] for each in results])
        found += results
    said = "; ".join(each.describe() for each in found if each.severity != OK)
    fit = "refuses" if worst(found) >= RETRY else "accepts"
    run.finding(f"The health checks' gate {fit} this host{f': {said}' if said else ''}.")


def _timed(check: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    found = check()
    return time.perf_counter() - began, found


def compare(run: CheckRun, nvml: Nvml, handles: list[tuple[str, Any]]) -> list[str]:
    """Compare values with nvidia-smi's. Return the differences in words."""
    same: list[str] = []
    unknown: list[str] = []
    differences: list[str] = []
    for each in COMPARED:
        rows = {row["uuid"]: row[each.field] for row in query("uuid", each.field)}
        order = list(rows.values())
        pairs = [
            (each.ours(nvml, handle), number(rows.get(name, order[at] if at < len(order) else "")))
            for at, (name, handle) in enumerate(handles)
        ]
        known = [
            (ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None
        ]
        wrong = [pair for pair in known if abs(pair[0] - pair[1]) > each.within]
        if wrong:
            differences.append(f"{each.name}: {wrong[0][0]:g} and {wrong[0][1]:g}")
        (same if known and not wrong else unknown if not known else []).append(each.name)
        run.detail(each.name, pairs)
    if same:
        run.finding(f"batchml and nvidia-smi agree: {', '.join(same)}.")
    if unknown:
        run.finding(f"Not compared, as one of the two does not report it: {', '.join(unknown)}.")
    return differences


def watch_events(run: CheckRun, nvml: Nvml, handles: list[tuple[str, Any]]) -> None:
    """Whether the driver would report an XID. None is caused here."""
    types = [nvml.event_types(handle) for _, handle in handles]
    run.detail("event types", types)
    if not nvml.watch([handle for _, handle in handles]):
        run.finding("The driver reports no events here: batchml asks each GPU every 10 s instead.")
        return
    known = [each for each in types if each is not None]
    kinds = " and ".join(
        ["XIDs"] * any(each & XID_EVENT for each in known)
        + ["recovery actions"] * any(each & EVENTS & ~XID_EVENT for each in known)
    )
    waiting = nvml.event()
    said = "none came" if waiting is None else f"one came: {waiting}"
    run.finding(f"The driver reports {kinds or 'events'}; {said} during this check.")


def load(run: CheckRun, nvml: Nvml, handles: list[tuple[str, Any]]) -> None:
    """How often the hardware lowers the first GPU's clocks while it multiplies matrices."""
    try:
        import torch
    except ImportError:
        torch = None
    if run.device != "cuda" or torch is None or not torch.cuda.is_available():
        run.finding("Clocks under load were not measured: that needs a GPU that PyTorch sees.")
        return
    size = 512 if run.small else 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    lowered: dict[str, int] = {}
    asked, end = 0, time.perf_counter() + LOAD_SECONDS
    while time.perf_counter() < end:
        for _ in range(4):
            a @ a
        asked += 1
        for reason in nvml.slowdowns(handles[0][1]) or []:
            lowered[reason] = lowered.get(reason, 0) + 1
        torch.cuda.synchronize()
    run.detail("reasons of lowered clocks", lowered)
    share = 100 * max(lowered.values(), default=0) / max(1, asked)
    known = ", ".join(words for _, words in SLOWDOWNS)
    run.figure("clocks lowered under load", share, "%", f"asked {asked} times; of {known}")
