"""The rules of the layout (docs/architecture.md). Each names all offenders in one failure."""

import sys
from pathlib import Path

import pytest

from tests.support import house
from tests.support.house import PACKAGE, ROOT, imports, paths, place

# Imports of ours stand at the top of a module, except for optional features and registries.
LIMITS = {"imports of ours in functions": 250}

# Rooms whose commands are modules of their own, or a folder.
COMMANDS = tuple(
    f"{room}/commands"
    for room in (
        "jobs", "cost", "runs", "cluster", "explain", "sessions", "workspace", "setup", "sweeps",
        "adopt", "prove", "dashboard",
    )
)  # fmt: skip

# Third parties, each imported by these alone.
BORDERS = {
    "boto3": ("aws/session.py",),
    # local/secrets.py asks the user's own AWS for secrets, when a job first names one.
    "botocore": (
        "aws/session.py",
        "aws/errors.py",
        "aws/batch/direct.py",
        "local/server/protocol.py",
        "local/secrets.py",
    ),
    "typer": ("cli", *COMMANDS),
    "rich": ("cli", *COMMANDS),
    "uvicorn": ("local/server/daemon.py", "local/server/app.py", "dashboard/service.py"),
    "sqlite3": ("local/store/journal.py", "history_index.py"),
    "immutables": ("local",),
    "docker": ("local/executors/docker.py", "aws/ecr.py"),
    "optuna": ("sweeps/samplers/optuna.py",),
}

MAY_SLEEP = {
    "clock.py",
    "local/executors/runner/files.py",  # a full disk
    "local/executors/runner/process.py",  # a machine without room for another process
    "local/executors/cgroup.py",  # processes that are dying
    "local/home.py",  # a lock held for a moment
    "runtime/health/all_reduce.py",  # a network that a fault file makes slow
    "runtime/processes.py",  # processes that are dying
    "runtime/nodes/ray/head.py",  # Ray, which tells nobody that it is up
    "runtime/nodes/slurm/server.py",  # a process that is about to end
}


def listed(offenders: list[str]) -> str:
    return "\n".join(["", *offenders])


@pytest.mark.parametrize("rule", house.RULES)
def test_a_rule_has_no_offenders(rule: str) -> None:
    offenders = house.RULES[rule]()
    assert len(offenders) <= LIMITS.get(rule, 0), listed(offenders)


def test_third_parties_are_imported_by_few_modules() -> None:
    offenders = [
        f"{place(path)}:{found.line} imports {found.name}"
        for path in paths()
        for found in imports(path)
        if not place(path).startswith(BORDERS.get(found.name.split(".")[0], ("",)))
    ]
    assert not offenders, listed(offenders)


def test_the_runtime_imports_the_standard_library_alone() -> None:
    offenders = [
        f"{place(path)}:{found.line} imports {found.name}"
        for path in paths(PACKAGE / "runtime")
        for found in imports(path)
        if found.name.split(".")[0] not in sys.stdlib_module_names
        and not found.name.startswith("batchml.runtime")
    ]
    assert not offenders, listed(offenders)


def test_jobs_import_the_runtime_alone_of_ours() -> None:
    offenders = [
        f"{path}:{found.line} imports {found.name}"
        for path in paths(ROOT / "jobs")
        for found in imports(path)
        if found.name.split(".")[0] == "batchml" and not found.name.startswith("batchml.runtime")
    ]
    assert not offenders, listed(offenders)


def test_no_test_patches() -> None:
    offenders = [
        str(path)
        for path in paths(ROOT / "tests")
        if path != Path(__file__) and "mock.patch" in path.read_text("utf-8")
    ]
    assert not offenders, listed(offenders)


def test_only_modules_that_wait_for_the_system_sleep() -> None:
    offenders = [
        place(path)
        for path in paths()
        if "time.sleep(" in path.read_text("utf-8") and place(path) not in MAY_SLEEP
    ]
    assert not offenders, listed(offenders)
