"""The kept results: one file of JSON for each kind of machine, in `benchmarks/results/`.

`make bench` compares with the file as it is in the last commit, so that a second run does not hide
what the first one found; committing the file keeps it. Each row has its own date and commit: a run
of some rows leaves the others as they are.
"""

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from benchmarks.rows import Curve, Row, noise

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "results"
PACKAGES = ("boto3", "msgspec", "immutables", "typer", "optuna")


class Machine(msgspec.Struct, frozen=True):
    processor: str
    cpus: int
    memory_gib: int
    system: str

    @property
    def kind(self) -> str:
        """Results of one kind are compared with each other. It is the name of their file."""
        words = re.sub(r"\((?:R|TM)\)|\b(?:CPU|Processor)\b|@.*", " ", self.processor)
        return "-".join([f"{self.cpus}x", *re.findall(r"[a-z0-9]+", words.lower())])


class KeptRow(msgspec.Struct, frozen=True):
    row: Row
    noise: float
    date: str
    commit: str


class KeptCurve(msgspec.Struct, frozen=True):
    curve: Curve
    date: str
    commit: str


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    versions: dict[str, str] = {}  # of the last run
    rows: dict[str, KeptRow] = {}
    curves: dict[str, KeptCurve] = {}

    def plain_rows(self) -> dict[str, Row]:
        return {name: kept.row for name, kept in self.rows.items()}


def merge(
    kept: Results, rows: Sequence[Row], curves: Sequence[Curve], *, date: str, commit: str,
    versions: Mapping[str, str], modules: Sequence[str],
) -> Results:  # fmt: skip
    """`kept` with what a run has found. Rows of modules that are gone go, too. Pure."""
    left = {name: each for name, each in kept.rows.items() if each.row.module in modules}
    left |= {row.name: KeptRow(row, round(noise(row), 3), date, commit) for row in rows}
    drawn = kept.curves | {curve.name: KeptCurve(curve, date, commit) for curve in curves}
    return Results(
        kept.machine, dict(versions), dict(sorted(left.items())), dict(sorted(drawn.items()))
    )


def to_json(results: Results) -> bytes:
    """With a line for each value, so that git shows which row has changed."""
    return msgspec.json.format(msgspec.json.encode(_rounded(results)), indent=1) + b"\n"


def _rounded(value: object) -> object:
    """With four digits: more would only be noise in the repository."""
    plain = msgspec.to_builtins(value)

    def walk(each: object) -> object:
        if isinstance(each, float):
            return float(f"{each:.4g}")
        if isinstance(each, dict):
            return {key: walk(inner) for key, inner in each.items()}
        return [walk(inner) for inner in each] if isinstance(each, list) else each

    return walk(plain)


def from_json(text: bytes) -> Results:
    return msgspec.json.decode(text, type=Results)


def this_machine() -> Machine:
    models = re.findall(r"^model name\s*: (.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        " ".join((models or [platform.machine()])[0].split()), os.cpu_count() or 1,
        round(pages / 1024**3), f"{platform.system()} {platform.machine()}",
    )  # fmt: skip


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The short id of the commit, with a + when files have changed since; empty without git."""
    found = _git("describe", "--always", "--dirty=+", "--exclude=*")
    return found.decode().strip()


def path_of(machine: Machine) -> Path:
    return FOLDER / f"{machine.kind}.json"


def load_committed(machine: Machine) -> Results:
    """The results of this kind of machine in the last commit; without git, those of the file."""
    path = path_of(machine)
    text = _git("show", f"HEAD:{path.relative_to(ROOT)}")
    return from_json(text) if text else load(machine)


def load(machine: Machine) -> Results:
    path = path_of(machine)
    return from_json(path.read_bytes()) if path.exists() else Results(machine)


def save(results: Results) -> Path:
    path = path_of(results.machine)
    FOLDER.mkdir(exist_ok=True)
    path.write_bytes(to_json(results))
    return path


def _git(*words: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""
