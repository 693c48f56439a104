"""The process of one check, and the first look at what its Python has.

python -m benchmarks.gpu.child --probe
python -m benchmarks.gpu.child --module MODULE --facts FILE --record FILE --seconds N
    [--device cpu] [--small]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import traceback
from typing import Any

from batchml.runtime.telemetry.gpus import Nvml, NvmlError
from benchmarks.gpu.checks import CannotRun, CheckRun, first_line

# What batchml's commands import, from pyproject.toml.
DEPENDENCIES = (
    "boto3", "docker", "h11", "immutables", "msgspec", "platformdirs", "yaml", "rich", "typer",
    "uvicorn",
)  # fmt: skip


def probe() -> dict[str, Any]:
    """What this Python has: PyTorch, its GPU, NVML, batchml's dependencies. Raises nothing."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "executable": sys.executable}
    missing = [name for name in DEPENDENCIES if importlib.util.find_spec(name) is None]
    found["batchml_lacks"] = missing
    try:
        Nvml().close()
        found["nvml"] = ""
    except NvmlError as error:
        found["nvml"] = str(error)
    try:
        found["ray"] = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        found["ray"] = None
    try:
        import torch
    except Exception as error:  # a library that a broken installation lacks is no ImportError
        return {**found, "torch": None, "torch_lacks": first_line(error)}
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    found["gpu"], found["gpu_lacks"] = None, ""
    if torch.version.cuda is None:
        found["gpu_lacks"] = f"PyTorch {torch.__version__} is not built for CUDA"
        return found
    try:
        torch.cuda.init()
        found["gpu"] = _gpu(torch)
    except Exception as error:  # no driver, no device, a driver that is too old
        found["gpu_lacks"] = first_line(error)
    return found


def _gpu(torch: Any) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": device.name,
        "count": torch.cuda.device_count(),
        "capability": [device.major, device.minor],
        "multiprocessors": device.multi_processor_count,
        "memory": total,
        "free": free,
        "cudnn": torch.backends.cudnn.version(),
    }


def perform(module: str, run: CheckRun) -> dict[str, str]:
    """Do the check. Return the last line of its record: `end` is done, not done, or failed."""
    try:
        importlib.import_module(module).measure(run)
    except CannotRun as reason:
        return {"end": "not done", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"end": "failed", "reason": first_line(error)}
    return {"end": "done", "reason": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--probe", action="store_true")
    for name in ("module", "facts", "record"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(probe()))
        return 0
    # So that `finally` clauses run when the time is over: Ray, for example, has processes to end.
    if options.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # sizes are small, and threads would wait for each other
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with open(options.facts, encoding="utf-8") as file:
        facts = json.load(file)
    with open(options.record, "a", encoding="utf-8") as record:
        run = CheckRun(
            record, facts, device=options.device, small=options.small, seconds=options.seconds
        )
        print(json.dumps(perform(options.module, run)), file=record, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # All is recorded. A library's threads or handlers could crash or hang the interpreter's end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
