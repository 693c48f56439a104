"""LeNet on MNIST: samples per second of the PyTorch job against the MXNet job, on this machine.

The two programs run in turn, on the same data ($BATCHML_DATA_DIR) and with the environment of their
job.toml. `benchmarks/lenet_profile.py` says where PyTorch's time goes.

The interpreters are those of the jobs' environments on `local`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from batchml.config.settings import load_settings
from batchml.jobs.find import find_source
from batchml.local import environments, images
from batchml.local.home import Home
from benchmarks.rows import Finding, paired
from benchmarks.running import main

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


def speed(python: Path, job: Path, samples: int) -> float:
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


def measure(full: bool) -> Iterator[Finding]:
    samples, pairs = (32_000, 5) if full else (6_400, 3)
    jobs = {"pytorch": "lenet", "mxnet": "lenet-mxnet"}
    pythons = {name: interpreter(name) for name in jobs}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for pair in range(pairs):
        # Who goes first changes from pair to pair, so that neither always has the cooler machine.
        for name in sorted(jobs, reverse=pair % 2 == 1):
            found[name].append(speed(pythons[name], ROOT / "jobs" / jobs[name], samples))
    yield paired(
        "lenet/cpu", "LeNet in PyTorch", "samples/s",
        list(zip(found["pytorch"], found["mxnet"], strict=True)), beside="MXNet",
        goal=1.5, smaller=False,
    )  # fmt: skip


if __name__ == "__main__":
    main(measure)
