"""Making the environment of `lenet`: by uv beside pip, a second one beside the first, and the disk
that five environments with PyTorch take.

The first environments start with empty caches: what they fetch, and how fast, depends on the
network, and on whether the index has PyTorch's build for CPUs. Each is made once, since it takes
tens of seconds.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from batchml.local import environments
from batchml.local.images import uv_program
from benchmarks.rows import Finding, paired
from benchmarks.running import main

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "images" / "pytorch" / "requirements.txt"
MORE = ("rich", "tqdm", "click", "pyyaml")  # what the other four environments have beside it


def make(folder: Path, name: str, more: str, uv: str) -> float:
    """The seconds that it takes to make an environment `name` with a package more."""
    requirements = folder / f"{name}.txt"
    requirements.write_text(f"{REQUIREMENTS.read_text()}\n{more}\n")
    paths = [str(requirements), str(folder / "envs" / name)]
    command = [*environments.maker_command(sys.executable), *paths, sys.executable, uv]
    environ = {**os.environ, "PIP_CACHE_DIR": str(folder / "pip-cache")}
    began = time.monotonic()
    subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def disk(folder: Path) -> int:
    """The bytes that a folder of environments takes, with the packages that they share."""
    return environments.add_up(str(folder / "envs"), {})[0]


def measure(full: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as scratch:
        by_pip, by_uv = Path(scratch) / "pip", Path(scratch) / "uv"
        by_pip.mkdir()
        by_uv.mkdir()
        pip = make(by_pip, "first", "", "")
        first = make(by_uv, "first", "", uv_program())
        yield paired(
            "environments/first", "the first environment", "s", [(first, pip)],
            beside="pip", goal=1,
        )  # fmt: skip
        others = [make(by_uv, name, name, uv_program()) for name in MORE]
        yield paired(
            "environments/second", "another environment", "s", [(other, first) for other in others],
            beside="the first", goal=0.2,
        )  # fmt: skip
        copies = disk(by_pip) * (1 + len(MORE)) / 1024**2
        yield paired(
            "environments/disk", "five environments on disk", "MiB",
            [(disk(by_uv) / 1024**2, copies)], beside="five of pip's", goal=0.4,
        )  # fmt: skip


if __name__ == "__main__":
    main(measure)
