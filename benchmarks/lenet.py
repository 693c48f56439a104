"""LeNet on MNIST: samples per second of the PyTorch job against the MXNet job, on this machine.

    python -m benchmarks.lenet [--pytorch PY --mxnet PY] [--samples N] [--pairs K]

The two programs run in turn, K pairs of them, on the same data ($BATCHML_DATA_DIR) and with the
environment of their job.toml. A machine does other work too, which disturbs both of a pair alike:
trust the ratios, pair by pair, before the numbers. `benchmarks/lenet_profile.py` says where
PyTorch's time goes.

The default interpreters are those of the jobs' environments on `local`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from batchml.config.settings import load_settings
from batchml.jobs.find import find_source
from batchml.local import environments, images
from batchml.local.home import Home

ROOT = Path(__file__).resolve().parent.parent
SPEED = re.compile(r"Speed: ([0-9.]+) samples/sec")


def job_environment(job: Path, scratch: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The variables a job runs with: those of its job.toml, and the runtime where it finds it."""
    own = tomllib.loads((job / "job.toml").read_text()).get("env", {})
    folders = {"BATCHML_OUTPUT_DIR": str(scratch), "BATCHML_CHECKPOINT_DIR": ""}
    return {**base, **own, **folders, "PYTHONPATH": str(ROOT)}


def speeds(python: Path, job: Path, scratch: Path, lines: int) -> Iterator[float]:
    """Run the job's program and yield the first `lines` of its speeds, in samples per second.

    The program ends there. Raises RuntimeError with its last words when it fails before.
    """
    said = []
    epochs = lines // 9 + 1  # an epoch of MNIST prints nine lines
    with subprocess.Popen(
        [python, job / "train.py", "--epochs", str(epochs)],
        env=job_environment(job, scratch, os.environ),
        cwd=scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            said.append(line)
            if match := SPEED.search(line):
                yield float(match[1])
                lines -= 1
            if lines == 0:
                program.send_signal(signal.SIGTERM)
                program.stdout.read()
                return
    raise RuntimeError(f"{job.name} ended with code {program.returncode}: {''.join(said[-5:])}")


def measure(python: Path, job: Path, samples: int) -> float:
    """The median speed of a run over `samples` images, after a first line that only warms up."""
    lines = max(1, samples // 6400)
    with tempfile.TemporaryDirectory() as scratch:
        return median(list(speeds(python, job, Path(scratch), lines + 1))[1:])


def interpreter(image: str, job: Path = ROOT) -> Path:
    """The Python of the image's environment, the one that its jobs run in, made when missing. `job`
    has the requirements.txt that the image may name.

    Raises RuntimeError when it cannot be made.
    """
    home = Home(Path(load_settings(os.environ, ROOT, "local").home.value))
    home.prepare()
    source = find_source(image, [ROOT / "images"], job)
    assert source is not None, f"there is no image {image}"
    made = images.find(home.images, images.publish_recipe(home.images, source.recipe()))
    assert made is not None and made.python() is not None, f"no Python here for {image}"
    target = home.envs / made.label
    environments.make(str(made.requirements), str(target), str(made.python()), images.uv_program())
    return target / "bin" / "python"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pytorch", type=Path, metavar="PY", help="a Python with PyTorch")
    parser.add_argument("--mxnet", type=Path, metavar="PY", help="a Python with MXNet")
    parser.add_argument("--samples", type=int, default=32_000, help="images a run is timed over")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.samples < 6400 or options.pairs < 1:
        parser.error("--samples starts at 6400 (one line of output), --pairs at 1")
    runs = {
        "pytorch": (options.pytorch or interpreter("pytorch"), ROOT / "jobs" / "lenet"),
        "mxnet": (options.mxnet or interpreter("mxnet"), ROOT / "jobs" / "lenet-mxnet"),
    }
    results: dict[str, list[float]] = {name: [] for name in runs}
    print(f"{'pair':>4} {'pytorch':>9} {'mxnet':>9} {'ratio':>6}   samples/s")
    for pair in range(1, options.pairs + 1):
        # Who goes first changes from pair to pair, so that neither always has the cooler machine.
        for name in sorted(runs, reverse=pair % 2 == 0):
            results[name].append(measure(*runs[name], options.samples))
        torch, mxnet = results["pytorch"][-1], results["mxnet"][-1]
        print(f"{pair:>4} {torch:>9.0f} {mxnet:>9.0f} {torch / mxnet:>6.2f}", flush=True)
    ratios = [a / b for a, b in zip(results["pytorch"], results["mxnet"], strict=True)]
    middle = [median(results["pytorch"]), median(results["mxnet"]), median(ratios)]
    print(f"{'mid':>4} {middle[0]:>9.0f} {middle[1]:>9.0f} {middle[2]:>6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
