"""The rules of the layout (docs/architecture.md). Each names all offenders in one failure.

A rule that is not met yet has a ceiling: the number of its offenders may fall, and then the ceiling
is lowered with it; it never rises.
"""

import sys
from pathlib import Path

import pytest

from tests import house
from tests.house import PACKAGE, ROOT, imports, paths, place

CEILINGS = {
    "files in cycles": 58,
    "imports of ours in functions": 1_031,
    "public class names used twice": 125,
    "folders of more than 20 files": 6,
    "prefixes that four files of a folder share": 3,
    "errors outside errors.py": 15,
    "words that the glossary replaces": 167,
    "references of documents to what is not there": 0,
}

# What each part may import of ours, beside itself.
_BELOW = {"errors", "clock", "model"}
_CLIENT = {*_BELOW, "resources", "settings", "aws", "ops", "sweep", "local", "runtime"}
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "resources": set(),
    "runtime": set(),
    "model": {"errors"},
    "sweep": {*_BELOW, "runtime"},
    "settings": {"errors", "model"},
    "aws": _BELOW,
    "ops": {*_BELOW, "aws", "runtime"},
    "local": {*_BELOW, "runtime"},
    "client": _CLIENT,
    "cli": {*_CLIENT, "client"},
}

# How a command is filled in, how it is started on its nodes, and what exit codes mean: client and
# container have to agree on it, so it is said once, on the container's side.
AGREED = {
    "batchml.runtime.protocol.variables",
    "batchml.runtime.protocol.exit_codes",
    "batchml.runtime.protocol.launch",
}

# Third parties, each imported by these alone.
BORDERS = {
    "boto3": ("aws/session.py",),
    # local/secrets.py asks the user's own AWS for secrets, when a job first names one.
    "botocore": ("aws/session.py", "aws/errors.py", "local/server/protocol.py", "local/secrets.py"),
    "typer": ("cli",),
    "rich": ("cli",),
    "uvicorn": ("local/server/daemon.py", "local/server/app.py"),
    "sqlite3": ("local/store/journal.py",),
    "immutables": ("local",),
    "docker": ("local/executors/docker.py", "aws/ecr.py"),
    "optuna": ("sweep/optuna_door.py",),
}

MAY_SLEEP = {
    "clock.py",
    "local/executors/runner/files.py",  # a full disk
    "local/executors/runner/process.py",  # a machine without room for another process
    "local/executors/cgroup.py",  # processes that are dying
    "local/home.py",  # a lock held for a moment
    "runtime/processes.py",  # processes that are dying
    "runtime/nodes/ray/head.py",  # Ray, which tells nobody that it is up
    "runtime/nodes/slurm/srun.py",  # tasks, some of them on other nodes
}


def listed(offenders: list[str]) -> str:
    return "\n".join(["", *offenders])


@pytest.mark.parametrize("rule", house.RULES)
def test_a_rule_has_no_more_offenders_than_its_ceiling(rule: str) -> None:
    offenders = house.RULES[rule]()
    assert len(offenders) <= CEILINGS[rule], listed(offenders)
    assert len(offenders) == CEILINGS[rule], f"lower the ceiling of {rule!r} to {len(offenders)}"


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_allowed(part: str, module: str) -> bool:
    target = module.split(".")[1]
    return (
        target == part or target in ALLOWED[part] or (part in ("model", "aws") and module in AGREED)
    )


def test_modules_import_only_what_their_part_may() -> None:
    offenders = [
        f"{place(path)}:{found.line} imports {found.name}"
        for path in paths()
        if part_of(path) not in ("__init__", "__main__")
        for found in imports(path)
        if "." in found.module and not is_allowed(part_of(path), found.module)
    ]
    assert not offenders, listed(offenders)


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
