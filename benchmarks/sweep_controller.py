"""What it costs to control a sweep: processor time for each trial, calls, memory.

The trials are scripted and the time is simulated (tests/support/sweep_world.py), so that 10,000
trials take seconds; the controller, its ledger, sampler and messages are the real ones, on a store
in memory.
The processor time of the script itself is subtracted. Each size runs in a process of its own.
"""

import json
import subprocess
import sys
import time
import tracemalloc

from batchml.model.sweep import Dimension, SweepSpec
from batchml.sweeps.control.lease import AWS_INTERVALS
from batchml.sweeps.control.totals import SweepTotals
from tests.support.sweep_world import World, spec_of

SIZES = (100, 1_000, 10_000)
STEPS, PARALLEL, AT_ONCE = 27, 64, 10_000
STEP_SECONDS = 20.0
SPACE = {
    "x": Dimension("float", 0.0, 1.0),
    **{f"float{n}": Dimension("float", 1e-4, 1e-1, log=n > 1) for n in range(4)},
    **{f"int{n}": Dimension("int", 1, 256, log=n > 0) for n in range(2)},
    "choice": Dimension("choice", values=("sgd", "adamw", "lion")),
}


def main() -> None:
    print(f"{len(SPACE)} parameters, {STEPS} steps, TPE and asha, {PARALLEL} at once, pace of AWS")
    for size in SIZES:
        _show(_in_process("tpe", size, PARALLEL))
    print(f"An array of random trials with asha, {AT_ONCE:,} at once, pace of AWS")
    _show(_in_process("random", AT_ONCE, AT_ONCE))


def _show(found: dict[str, float]) -> None:
    print(
        f"{found['trials']:>7,.0f} trials  {found['ms']:6.2f} ms of processor time a trial  "
        f"{found['batch']:.3f} AWS Batch calls/s  {found['store']:.2f} store requests/s  "
        f"{found['mib']:.0f} MiB held  reload {found['reload']:.2f} s",
        flush=True,
    )


def _in_process(method: str, trials: int, parallel: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.sweep_controller",
        method,
        f"{trials}",
        f"{parallel}",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(spec: SweepSpec) -> dict[str, float]:
    """One sweep from its start to its end."""
    world = World(spec, intervals=AWS_INTERVALS, step_seconds=STEP_SECONDS)
    begun, cpu = world.clock.now(), time.process_time()
    world.clock.others = 0.0
    counted = 0
    for snapshot in world.controller().snapshots():
        counted = snapshot.over
    cpu = time.process_time() - cpu - world.clock.others
    seconds = world.clock.now() - begun
    reload = time.process_time()
    world.state()
    reload = time.process_time() - reload
    return {
        "trials": counted,
        "ms": cpu * 1000 / counted,
        "batch": sum(world.jobs.calls.values()) / seconds,
        "store": world.requests() / seconds,
        "mib": _mib(world),
        "reload": reload,
    }


def _mib(world: World) -> float:
    """What the controller holds of the sweep at its end."""
    tracemalloc.start()
    held = SweepTotals(world.spec, world.state())
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del held
    return taken / 1024**2


if __name__ == "__main__":
    if len(sys.argv) == 4:
        method, trials, parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        spec = spec_of(method, "asha", trials=trials, parallel=parallel, steps=STEPS, space=SPACE)
        print(json.dumps(measure(spec)))
    else:
        main()
