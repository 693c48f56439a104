"""`make gpu`: run every check, write a JSON file and a table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchml.runtime.processes import become_reaper, kill_descendants
from benchmarks.gpu import machine
from benchmarks.gpu.checks import CHECKS, PROBE_SECONDS, SECONDS, Check
from benchmarks.gpu.report import Result, failures, table
from benchmarks.gpu.runner import Runner

RESULTS = Path(__file__).resolve().parent / "results"
INTERRUPTED = 128 + signal.SIGINT
RESERVE = 12.0  # seconds to end a check that takes too long, and to write the results


def parse(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Check a machine with a GPU: what batchml's jobs reach there, and whether "
        "batchml sees it right.",
    )
    add = parser.add_argument
    add(
        "--python",
        default=environ.get("GPU_PYTHON", ""),
        help="run the checks with this Python, which has PyTorch (default: $GPU_PYTHON, else this "
        "Python, else python3)",
    )
    add("--checks", default="", metavar="NAME,...", help="run only these checks")
    add("--list", action="store_true", help="list the checks and their time limits, and end")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="compute on this device; on the CPU with small sizes",
    )
    add("--small", action="store_true", help="use the smallest sizes, to try the checks out")
    add(
        "--seconds", type=float, default=SECONDS, help="end within this time (default: %(default)s)"
    )
    add("--out", type=Path, default=RESULTS, help="write the results to this folder")
    add("--show", type=Path, metavar="FILE", help="print the table of a JSON file, and end")
    add(
        "--prices",
        default="head=1.408,worker=0.816",
        help="price the steps of the vision transformer with these dollars an hour (default: those "
        "of a g5.xlarge and a c5.4xlarge of SageMaker)",
    )
    options = parser.parse_args(arguments)
    try:
        machine.load_module("vit-ray", "figures").read_prices(options.prices)
    except ValueError as error:
        parser.error(f"--prices: {error}")
    options.small = options.small or options.device == "cpu"
    options.chosen = choose(options.checks, parser)
    if not options.seconds > 0:
        parser.error("--seconds is a number greater than 0")
    return options


def choose(names: str, parser: argparse.ArgumentParser) -> list[Check]:
    """The named checks, in the order of the table; all of them for no names."""
    asked = [name.strip() for name in names.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    unknown = [name for name in asked if name not in known]
    if unknown:
        parser.error(f"--checks: unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return [check for check in CHECKS if not asked or check.name in asked]


def look_at_machine(given: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The Python of the checks, the facts of the machine, and why needs are not met."""
    python, missing = machine.find_python(given)
    own = str(machine.ROOT / ".venv" / "bin" / "python")
    candidates = [
        each for each in dict.fromkeys([own, python, sys.executable]) if os.access(each, os.X_OK)
    ]
    seconds = PROBE_SECONDS
    probes = {each: machine.probe(each, seconds) for each in candidates}
    found = dict(probes.get(python, {"torch": None, "torch_lacks": missing, "nvml": missing}))
    if missing:
        found |= {key: probes[sys.executable].get(key) for key in ("nvml", "batchml_lacks")}
    found["batchml"] = machine.find_batchml(candidates, probes)
    found |= {"driver": machine.driver(), **machine.describe()}
    return python or sys.executable, found, machine.needs_not_met(found, missing)


def to_json(
    options: argparse.Namespace, facts: Mapping[str, Any], results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    gpu = facts.get("gpu") if options.device == "cuda" else None
    return {
        "version": 1,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": machine.commit(),
        "device": options.device,
        "small": options.small,
        "seconds": round(seconds, 1),
        "machine": {
            "description": facts["description"],
            "system": facts["system"],
            "cpus": facts["cpus"],
            "memory": facts["memory"],
            "python": facts.get("python"),
            "torch": facts.get("torch"),
            "torch_lacks": facts.get("torch_lacks", ""),
            "cuda": facts.get("cuda"),
            "ray": facts.get("ray"),
            "driver": facts["driver"],
            "gpu": gpu["name"] if gpu else None,
            "gpu_lacks": facts.get("gpu_lacks", ""),
            "gpu_details": gpu,
        },
        "checks": [result.to_json() for result in results],
    }


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """Write the report as JSON and as a table; return the path of the JSON file."""
    path = folder / f"{machine.file_name(report['machine']['gpu'], report['small'])}.json"
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    path.with_suffix(".txt").write_text(table(report) + "\n", "utf-8")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 if a check failed or ran out of time. A check that this machine cannot do
    is no failure.
    """
    began = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left behind
    become_reaper()  # of processes that Ray starts in sessions of their own
    options = parse(arguments, os.environ)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:<14}{check.seconds:>4} s  {check.title}")
        return 0
    if options.show:
        try:
            print(table(json.loads(options.show.read_text("utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{options.show} is no report of these checks: {error!r}", file=sys.stderr)
            return 2
        return 0
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        print(f"--out: the results cannot be written to {options.out}: {error}", file=sys.stderr)
        return 2
    try:
        return run_checks(options, began)
    except KeyboardInterrupt:
        print("Interrupted before the first check", file=sys.stderr)
        return INTERRUPTED


def run_checks(options: argparse.Namespace, began: float) -> int:
    """Run the checks and write the report; return the exit code."""
    python, facts, lacks = look_at_machine(options.python)
    code = 0
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        runner = Runner(
            python,
            Path(scratch),
            {"machine": facts, "options": {"prices": options.prices}},
            device=options.device,
            small=options.small,
            seconds=options.seconds - RESERVE - (time.monotonic() - began),
            clean_up=lambda: kill_descendants(5.0),
        )
        try:
            runner.run(options.chosen, lacks, lambda line: print(line, flush=True))
        except KeyboardInterrupt:
            code = INTERRUPTED
    report = to_json(options, facts, runner.results, time.monotonic() - began)
    path = write(report, options.out)
    print(f"\n{table(report)}\n\nWritten: {path}, and the table beside it")
    if code:
        print("Interrupted: this check and those after it are missing", file=sys.stderr)
        return code
    return 1 if failures(runner.results) else 0


if __name__ == "__main__":
    sys.exit(main())
