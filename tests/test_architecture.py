"""Who may import whom, kept by a walk over the syntax trees (docs/architecture.md)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "batchml"

# What each part may import of ours, beside itself.
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "resources": set(),
    "runtime": set(),
    "model": {"errors"},
    "sweep": {"errors", "clock", "model", "runtime"},
    "settings": {"errors", "model"},
    "aws": {"errors", "clock", "model"},
    "ops": {"errors", "clock", "model", "aws", "runtime"},
    "local": {"errors", "clock", "model", "runtime"},
    "client": {
        "errors", "clock", "resources", "settings", "model", "aws", "ops", "sweep", "local",
        "runtime",
    },
    "cli": {
        "errors", "clock", "resources", "settings", "model", "aws", "ops", "sweep", "local",
        "runtime", "client",
    },
}  # fmt: skip

# Third parties, each behind one door.
DOORS = {
    "boto3": {"aws/session.py"},
    # local/secrets.py asks the user's own AWS for secrets, when a job first names one.
    "botocore": {"aws/session.py", "aws/failures.py", "local/protocol.py", "local/secrets.py"},
    "typer": {"cli"},
    "rich": {"cli"},
    "uvicorn": {"local/daemon.py", "local/guard.py"},
    "sqlite3": {"local/store.py"},
    "immutables": {"local"},
    "docker": {"local/executors/docker.py", "aws/registry.py"},
    "optuna": {"sweep/optuna_door.py"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


# How a command is filled in, how it is started on its nodes, and what exit codes mean.
AGREED = ("batchml.runtime.arguments", "batchml.runtime.codes", "batchml.runtime.launch")


def is_allowed(part: str, name: str) -> bool:
    """What client and container have to agree on is said once, on the container's side."""
    target = name.split(".")[1]
    shared = part in ("model", "aws") and name in AGREED
    return target == part or target in ALLOWED[part] or shared


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    for name in imports(path):
        if name.startswith("batchml."):
            assert is_allowed(part, name), f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_parties_are_imported_behind_their_door_only(path: Path) -> None:
    place = str(path.relative_to(PACKAGE))
    for name in imports(path):
        doors = DOORS.get(name.split(".")[0])
        if doors is not None:
            assert any(place.startswith(door) for door in doors), f"{place} imports {name}"


def test_the_runtime_imports_the_standard_library_alone() -> None:
    for path in sorted((PACKAGE / "runtime").glob("*.py")):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or name.startswith("batchml.runtime"), (
                f"{path} imports {name}"
            )


def test_jobs_import_the_runtime_alone_of_ours() -> None:
    for path in sorted((ROOT / "jobs").rglob("*.py")):
        for name in imports(path):
            if name.split(".")[0] == "batchml":
                assert name.startswith("batchml.runtime"), f"{path} imports {name}"


def test_no_module_of_ours_imports_in_a_circle() -> None:
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): top_level_imports(path)
        for path in modules()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for target in graph.get(name, ()):
            visit(target, (*trail, name))
        done.add(name)

    for name in graph:
        visit(name, ())


def top_level_imports(path: Path) -> set[str]:
    """What is imported when the module is, leaving out imports inside functions."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchml."):
            found.add(node.module or "")
    return found


def test_no_test_patches_and_no_module_sleeps_but_the_clock_and_who_waits_on_the_system() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != Path(__file__):
            assert "mock.patch" not in path.read_text("utf-8"), path
    may_sleep = {
        "clock.py",
        "local/executors/attempt_files.py",  # a full disk
        "local/executors/program.py",  # a machine without room for another process
        "local/executors/cgroup.py",  # processes that are dying
        "local/home.py",  # a lock held for a moment
        "runtime/processes.py",  # processes that are dying
        "runtime/ray_head.py",  # Ray, which tells nobody that it is up
        "runtime/slurm_srun.py",  # tasks, some of them on other nodes
    }
    for path in modules():
        if "time.sleep(" in path.read_text("utf-8"):
            assert str(path.relative_to(PACKAGE)) in may_sleep, path
