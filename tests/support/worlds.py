"""Programs of many ranks: started here, without a launcher, and found among the processes."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchml.jobs.find import ImageSource
from batchml.local import environments, images
from batchml.local.home import Home
from tests.support.local_server import wait_for

ROOT = Path(__file__).parent.parent.parent


def make_pytorch(home: Home) -> Path:
    """The Python of the environment in which jobs of the image `pytorch` run, made when missing."""
    return make_python(home, ImageSource(ROOT / "images" / "pytorch"))


def make_python(home: Home, source: ImageSource) -> Path:
    """The Python of the environment of an image, made when missing."""
    made = images.find(home.images, images.publish_recipe(home.images, source.recipe()))
    assert made is not None
    target = home.envs / made.label
    environments.make(str(made.requirements), str(target), str(made.python()), images.uv_program())
    return target / "bin" / "python"


class Worlds:
    """Runs of programs, each with as many ranks as it is told; see ranks.py."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def run(
        self, program: Path, folder: Path, world: int, *arguments: object, **environ: object
    ) -> tuple[list[int], str]:
        """The exit codes of all ranks, and what they printed. `folder` is where they run."""
        assert self._process.stdin is not None and self._process.stdout is not None
        before = self._log.stat().st_size
        asked = {
            "program": str(program), "folder": str(folder), "world": world,
            "arguments": [str(word) for word in arguments],
            "environ": {"BATCHML_WORKSPACE": str(folder), **environ},
        }  # fmt: skip
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        codes = self._process.stdout.readline()
        printed = self._log.read_text()[before:]
        assert codes, printed
        return json.loads(codes), printed


@contextmanager
def open_worlds(python: Path, folder: Path) -> Iterator[Worlds]:
    """For programs that need PyTorch, which this `python` has. `folder` is for their output."""
    log = folder / "ranks.log"
    ours = {name: text for name, text in os.environ.items() if not name.startswith("BATCHML_")}
    with (
        open(log, "w") as written,
        subprocess.Popen(
            [python, ROOT / "tests" / "support" / "ranks.py"], text=True,
            env={**ours, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written,
        ) as process,
    ):  # fmt: skip
        yield Worlds(process, log)
        assert process.stdin is not None
        process.stdin.close()


def find_rank(rank: int, **environ: str) -> int:
    """The process of this rank, by its own variables, among those that have `environ` too."""
    wanted = {f"{name}={text}".encode() for name, text in {"RANK": str(rank), **environ}.items()}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted <= {*(entry / "environ").read_bytes().split(b"\0")}:
                return int(entry.name)
        except OSError:
            pass  # it has ended, or is not ours
    raise AssertionError(f"no process of rank {rank}")


def kill_a_rank(folder: Path, world: int) -> None:
    """Any one of the training that has its checkpoints in `folder`, once it has saved one."""
    wait_for(lambda: [*folder.glob("step-*"), *folder.glob("*.pt")], "something is saved", 240)
    pid = find_rank(random.randrange(world), BATCHML_CHECKPOINT_DIR=str(folder))
    os.kill(pid, signal.SIGKILL)
