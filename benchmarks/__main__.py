"""`make bench`: every benchmark, one after the other."""

import os
import subprocess

from benchmarks import (
    array,
    completion,
    lenet,
    logs,
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
)


def main() -> None:
    print("# Starting a command (medians; ratios pair by pair)", flush=True)
    startup.main()
    print("\n# A tab key, with 10,000 runs in the history", flush=True)
    completion.main()
    print("\n# A thousand submissions", flush=True)
    submits.main()
    print("\n# Following a log, beside the AWS CLI", flush=True)
    tail.main()
    print("\n# Ten thousand jobs that do nothing, two at a time", flush=True)
    array.main()
    print("\n# The server: calls a second, and a long history", flush=True)
    server.main()
    print("\n# Logs: taking them in and reading them", flush=True)
    logs.main([])
    print("\n# The search, beside random, grid and Optuna", flush=True)
    sweep_quality.main(["--small"])
    print("\n# Controlling a sweep", flush=True)
    sweep_controller.main()
    print("\n# A sweep's ledger", flush=True)
    sweep_ledger.main()
    print("\n# What a trial adds to a run", flush=True)
    sweep_trial.main()
    print("\n# A thousand short trials", flush=True)
    sweep_local.main()
    print("\n# LeNet, PyTorch beside MXNet (samples/s; ratios pair by pair)", flush=True)
    lenet.main([])
    print("\n# A search on real trainings: LeNet, beside random search", flush=True)
    sweep_lenet.main()
    print("\n# Where PyTorch's time goes, by phase and by operator", flush=True)
    # It needs PyTorch, so it runs with the interpreter of the job.
    profile = [str(lenet.interpreter("pytorch")), str(lenet.ROOT / "benchmarks/lenet_profile.py")]
    subprocess.run(profile, env={**os.environ, "PYTHONPATH": str(lenet.ROOT)}, check=True)


if __name__ == "__main__":
    main()
