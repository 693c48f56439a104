"""`make bench`: every benchmark, one after the other."""

import os
import subprocess
from collections.abc import Callable

from benchmarks import (
    array,
    completion,
    ddp,
    environments,
    gang,
    lenet,
    logs,
    ray_gang,
    scaling,
    server,
    startup,
    submits,
    sweep_controller,
    sweep_ledger,
    sweep_lenet,
    sweep_local,
    sweep_quality,
    sweep_trial,
    tail,
    threads,
    usage,
    workspace,
)


def profile() -> None:
    """It needs PyTorch, so it runs with the interpreter of the job."""
    command = [str(lenet.interpreter("pytorch")), str(lenet.ROOT / "benchmarks/lenet_profile.py")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(lenet.ROOT)}, check=True)


BENCHMARKS: tuple[tuple[str, Callable[[], object]], ...] = (
    ("Starting a command (medians; ratios pair by pair)", startup.main),
    ("A tab key, with 10,000 runs in the history", completion.main),
    ("A thousand submissions", submits.main),
    ("Following a log, beside the AWS CLI", tail.main),
    ("Ten thousand jobs that do nothing, two at a time", array.main),
    ("The server: calls a second, and a long history", server.main),
    ("Logs: taking them in and reading them", lambda: logs.main([])),
    ("The search, beside random, grid and Optuna", lambda: sweep_quality.main(["--small"])),
    ("Controlling a sweep", sweep_controller.main),
    ("A sweep's ledger", sweep_ledger.main),
    ("What a trial adds to a run", sweep_trial.main),
    ("A thousand short trials", sweep_local.main),
    ("A sweep of programs with threads, beside threads set by hand", threads.main),
    ("Data-parallel training: two nodes beside one, and beside torchrun", lambda: ddp.main([])),
    ("Training with 1, 2 and 4 processes", lambda: scaling.main(["--rounds", "1"])),
    ("Leading ranks, beside torchrun", lambda: gang.main([])),
    ("A Ray gang: the head alone, with one and with two workers", ray_gang.main),
    ("What it costs to tell what a node uses", usage.main),
    ("Making environments, beside pip", environments.main),
    ("Data into the workspace, beside cp", workspace.main),
    ("LeNet, PyTorch beside MXNet (samples/s; ratios pair by pair)", lambda: lenet.main([])),
    ("A search on real trainings: LeNet, beside random search", sweep_lenet.main),
    ("Where PyTorch's time goes, by phase and by operator", profile),
)


def main() -> None:
    for title, run in BENCHMARKS:
        print(f"\n# {title}", flush=True)
        run()


if __name__ == "__main__":
    main()
