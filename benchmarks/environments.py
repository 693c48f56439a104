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
from pathlib import Path

from batchml.local import environments
from batchml.local.images import uv_program
from batchml.runtime.entry.folders import size_text

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


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        by_pip, by_uv = Path(scratch) / "pip", Path(scratch) / "uv"
        by_pip.mkdir()
        by_uv.mkdir()
        pip = make(by_pip, "first", "", "")
        first = make(by_uv, "first", "", uv_program())
        row("the first environment", first, "pip", pip)
        others = [make(by_uv, name, name, uv_program()) for name in MORE]
        row("the second environment", others[0], "the first", first)
        copies, shared = disk(by_pip) * (1 + len(MORE)), disk(by_uv)
        print(
            f"{'disk after five':<28} {size_text(shared):>9}   beside "
            f"{size_text(copies)} by pip (five times its first)   "
            f"x{shared / copies:.2f}"
        )


def row(name: str, seconds: float, beside: str, floor: float) -> None:
    print(
        f"{name:<28} {seconds:7.1f} s   beside {beside} {floor:7.1f} s   x{seconds / floor:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
