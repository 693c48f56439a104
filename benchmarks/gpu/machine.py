"""What the checks run on: which Python has PyTorch, the GPU's driver, the commit, the jobs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
_NO_PYTHON = "{tried}: name one with --python or in GPU_PYTHON"


def find_python(given: str, own: str = sys.executable) -> tuple[str, str]:
    """The Python that has PyTorch, and why there is none: one of the two is empty.

    `given` is the user's; without it, `own` and those on the PATH are tried.
    """
    if given:
        found = shutil.which(given)
        candidates = [found] if found else []
    else:
        on_path = [shutil.which(name) for name in ("python3", "python")]
        candidates = [own, *(each for each in on_path if each)]
    for python in dict.fromkeys(candidates):
        if _succeeds([python, "-c", _HAS_TORCH]):
            return python, ""
    tried = ", ".join(dict.fromkeys(candidates))
    return "", _NO_PYTHON.format(tried=f"not {tried}" if tried else f"{given} is no program")


def find_batchml(candidates: Iterable[str], probes: Mapping[str, Mapping[str, Any]]) -> str:
    """The first Python that lacks none of batchml's dependencies; empty if there is none."""
    return next((each for each in candidates if not probes[each].get("batchml_lacks", [""])), "")


def probe(python: str, seconds: float) -> dict[str, Any]:
    """What a Python has (`child.probe`). On failure: `torch_lacks` with the reason."""
    command = [python, "-m", "benchmarks.gpu.child", "--probe"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(os.environ), capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        reason = f"{python} did not import PyTorch within {seconds:g} s"
    except (OSError, ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        reason = f"{python}: {last[0]}"
    return {"torch": None, "torch_lacks": reason, "batchml_lacks": [reason], "nvml": reason}


def environment(environ: Mapping[str, str], scratch: str = "") -> dict[str, str]:
    """The environment of a check's process: the repository's modules, and no network.

    Compiled code goes to the scratch folder, so that compile times are those of a first time.
    """
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(scratch, "inductor"),
        "TRITON_CACHE_DIR": os.path.join(scratch, "triton"),
        "TMPDIR": scratch,
    }
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # A group of one process needs no network, and a machine without one has no other interface.
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
        **(caches if scratch else {}),
    }


def needs_not_met(found: Mapping[str, Any], no_python: str) -> dict[str, str]:
    """For each of NEEDS that the machine does not meet: why."""
    lacks = {}
    if no_python or not found.get("torch"):
        lacks["torch"] = no_python or str(found.get("torch_lacks"))
    elif not found.get("gpu"):
        lacks["gpu"] = str(found.get("gpu_lacks"))
    if found.get("nvml"):
        lacks["nvml"] = str(found["nvml"])
    if not found.get("batchml"):
        names = ", ".join(found.get("batchml_lacks") or ["dependencies of batchml"])
        lacks["batchml"] = f"no Python here has {names}"
    return lacks


def describe() -> dict[str, Any]:
    """This machine: processor, memory, system."""
    try:
        info = Path("/proc/cpuinfo").read_text("utf-8")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        info, memory = "", 0
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = model[1].strip() if model else platform.machine()
    return {
        "cpus": cpus,
        "processor": processor,
        "memory": memory,
        "system": f"{platform.system()} {platform.release()}",
        "description": f"{cpus} CPUs ({processor}), {memory / (1 << 30):.0f} GiB",
    }


def driver() -> str:
    """The version of the NVIDIA driver; empty without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else ""


def commit(root: Path = ROOT) -> str:
    """The commit of the repository, with a + if files differ from it; empty without git."""
    try:
        head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
        changed = _output(["git", "-C", str(root), "status", "--porcelain"])
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+" if changed else "")


def file_name(gpu: str | None, small: bool = False) -> str:
    """The name of the results of a kind of GPU: "NVIDIA H200" -> nvidia-h200."""
    words = f"{gpu or 'no GPU'}{' small' if small else ''}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def load_program(job: str) -> ModuleType:
    """The train.py of a job, as a module that its own imports find. It is no part of a package."""
    path = ROOT / "jobs" / job / "train.py"
    name = f"job_{job.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def load_module(job: str, name: str) -> Any:
    """A module beside the train.py of a job. A process loads modules of one job only."""
    folder = str(ROOT / "jobs" / job)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
