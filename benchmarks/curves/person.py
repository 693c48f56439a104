"""What a person has: runs in the history, environments of batchml.toml and of this machine, images.

The cost is that of a whole command, beside the start of Python.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from batchml.clock import SystemClock
from batchml.config.project import folder_project
from batchml.local import control
from batchml.local.environments import COMPLETE
from batchml.local.home import Home
from batchml.resources import shipped_folder
from benchmarks.curves.cost import cpu_of_command, sizes
from benchmarks.rows import Curve

TIMES = 3  # of which the median is taken
_BIN = Path(sys.executable).parent
_WEEK = 100  # runs of the last week, whatever the size: what `cost` sums
_HISTORY = {
    "ls": ["ls"],
    "metric": ["ls", "--metric", "acc>2"],  # no run has it: all are compared
    "sort": ["ls", "--sort=-acc"],
    "running": ["ls", "--status", "RUNNING"],
    "show": ["show", "@last"],
    "cost": ["cost"],
    "completion": ["__complete", "show", ""],
}
_FEW = (10, 100, 1_000)


def history(full: bool) -> Iterator[Curve]:
    """`ls`, `show`, `cost` and a tab key with a long history."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in _HISTORY}
    floor: list[tuple[int, float]] = []
    for size in sizes(False):
        with tempfile.TemporaryDirectory(prefix="batchml-bench-") as folder:
            home, work = Home(Path(folder) / "home"), Path(folder) / "work"
            work.mkdir()
            control.ensure_server(home, SystemClock())
            try:
                write_history(home.root / "history.jsonl", size, folder_project(str(work)))
                floor.append((size, _cost([str(_BIN / "python"), "-c", "pass"], home, work)))
                for name, words in _HISTORY.items():
                    cost = _cost([str(_BIN / "batchml"), *words], home, work)
                    points[name].append((size, cost))
            finally:
                control.stop_server(home, SystemClock())
    for name, words in _HISTORY.items():
        yield Curve(
            name=f"curves/history_{name}", title=f"batchml {' '.join(words)}",
            axis="runs in the history", unit="ms of CPU", how=f"median of {TIMES} commands",
            points=points[name], peers={"python -c pass": floor},
        )  # fmt: skip


def environments(full: bool) -> Iterator[Curve]:
    """Commands that list environments of batchml.toml, of this machine, and images."""
    listed, kept, images = [], [], []
    for size in _FEW:
        with tempfile.TemporaryDirectory(prefix="batchml-bench-") as folder:
            home, work = Home(Path(folder) / "home"), Path(folder) / "work"
            home.prepare()
            text = '[env.e{}]\nregion = "us-east-1"\nprofile = "p"\n'
            work.mkdir()
            (work / "batchml.toml").write_text("".join(map(text.format, range(size))))
            listed.append((size, _cost([str(_BIN / "batchml"), "env", "list"], home, work)))
            (work / "batchml.toml").unlink()
            for number in range(size):
                made = home.root / "envs" / f"python-{number:012x}"
                made.mkdir(parents=True)
                (made / COMPLETE).write_text("{}")
                shutil.copytree(shipped_folder("images") / "python", work / "images" / f"i{number}")
            clean = [str(_BIN / "batchml"), "local", "clean", "--all", "--dry-run"]
            kept.append((size, _cost(clean, home, work)))
            images.append((size, _cost([str(_BIN / "batchml"), "image", "list"], home, work)))
    for name, title, axis, points in (
        ("environments", "batchml env list", "environments of batchml.toml", listed),
        ("python_environments", "batchml local clean --all --dry-run", "Python environments", kept),
        ("images", "batchml image list", "folders in images/", images),
    ):
        yield Curve(
            name=f"curves/{name}", title=title, axis=axis, unit="ms of CPU",
            how=f"median of {TIMES} commands", points=points, whole=True,
        )  # fmt: skip


def write_history(path: Path, runs: int, project: str) -> None:
    """A history of runs that have ended, with metrics; the last week has always as many."""
    now = int(SystemClock().now() * 1000)
    day = 86_400_000
    with open(path, "w") as file:
        path.chmod(0o600)
        for number in range(runs):
            age = (runs - number) * 7 * day // _WEEK
            key, job_id = f"2{number:016d}", f"{number:08x}-1111-4111-8111-111111111111"
            intent = {
                "key": key, "name": f"lenet-{number % 100}", "env": "local", "queue": "default",
                "job_name": f"lenet-{number % 100}-{key}", "project": project, "at": now - age,
                "command": ["python", "train.py", "--epochs", "10"], "vcpus": 1,
            }  # fmt: skip
            end = {
                "key": key, "job_id": job_id, "status": "SUCCEEDED", "outcome": "succeeded",
                "exit_code": 0, "created_at": now - age, "started_at": now - age + 1,
                "stopped_at": now - age + 9, "metrics": {"acc": number / runs, "loss": 0.1},
                "ranges": {"acc": [0, 0, 1], "loss": [0, 0, 1]}, "measured": True,
            }  # fmt: skip
            for line in (intent, {"key": key, "job_id": job_id}, end):
                file.write(json.dumps(line) + "\n")


def _cost(words: Sequence[str], home: Home, work: Path) -> float:
    """Milliseconds of CPU of a command, after one that is not counted."""
    before = os.environ.get("BATCHML_HOME")
    os.environ["BATCHML_HOME"] = str(home.root)
    try:
        cpu_of_command(words, str(work))
        return median(cpu_of_command(words, str(work)) * 1000 for _ in range(TIMES))
    finally:
        if before is None:
            del os.environ["BATCHML_HOME"]
        else:
            os.environ["BATCHML_HOME"] = before
