"""`make bench`: every benchmark, one after the other."""

import os
import subprocess

from benchmarks import array, completion, lenet, logs, server, startup, submits, tail


def main() -> None:
    print("# Starting a command (medians; ratios pair by pair)", flush=True)
    startup.main()
    print("\n# A tab key, with 10,000 runs in the history", flush=True)
    completion.main()
    print("\n# A thousand submissions", flush=True)
    submits.main()
    print("\n# Following a log, beside the AWS CLI", flush=True)
    tail.main()
    print("\n# A thousand submissions", flush=True)
    submits.main()
    print("\n# Ten thousand jobs that do nothing, two at a time", flush=True)
    array.main()
    print("\n# The server: calls a second, and a long history", flush=True)
    server.main()
    print("\n# Logs: taking them in and reading them", flush=True)
    logs.main([])
    print("\n# LeNet, PyTorch beside MXNet (samples/s; ratios pair by pair)", flush=True)
    lenet.main([])
    print("\n# Where PyTorch's time goes, by phase and by operator", flush=True)
    # It needs PyTorch, so it runs with the interpreter of the job.
    profile = [str(lenet.interpreter("pytorch")), str(lenet.ROOT / "benchmarks/lenet_profile.py")]
    subprocess.run(profile, env={**os.environ, "PYTHONPATH": str(lenet.ROOT)}, check=True)


if __name__ == "__main__":
    main()
