"""What users see of the package: public names, help, version, prose."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import batchml

ROOT = Path(__file__).parent.parent
HELP = ROOT / "batchml" / "cli" / "help"

COMMANDS = [
    [], ["local"], ["doctor"], ["init"],
    ["sweep"], ["sweeps"], ["sweeps", "ls"], ["sweeps", "show"], ["sweeps", "best"],
    ["sweeps", "report"], ["sweeps", "resume"], ["sweeps", "stop"],
    ["sweeps", "top-up"], ["sweeps", "rerun"], ["sweeps", "confirm"],
    ["submit"], ["adopt"], ["alloc"], ["ls"], ["show"], ["logs"], ["shell"], ["forward"], ["wait"],
    ["cancel"], ["rerun"], ["get"], ["diff"], ["compare"], ["dashboard"],
    ["notebook"], ["tensorboard"], ["explain"], ["cost"], ["top"], ["reconcile"], ["completion"],
    ["local", "start"], ["local", "stop"], ["local", "status"], ["local", "env"],
    ["local", "adopt"], ["local", "clean"], ["local", "reset"],
    ["jobdef"], ["jobdef", "list"], ["jobdef", "register"], ["jobdef", "delete"], ["jobdef", "gc"],
    ["env"], ["env", "list"], ["env", "show"], ["env", "use"],
    ["setup"], ["teardown"], ["prove"],
    ["compute"], ["compute", "list"], ["compute", "create"], ["compute", "update"],
    ["compute", "delete"], ["compute", "score"], ["compute", "hosts"],
    ["queue"], ["queue", "list"], ["queue", "show"], ["queue", "create"], ["queue", "update"],
    ["queue", "delete"],
    ["image"], ["image", "build"], ["image", "push"], ["image", "list"],
    ["workspace"], ["workspace", "ls"], ["workspace", "push"], ["workspace", "pull"],
    ["workspace", "archive"], ["workspace", "restore"], ["workspace", "rm"],
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchml", *arguments],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=False,
    )  # fmt: skip


_SAY_ALL = """
import io, json, sys
from contextlib import redirect_stdout
from batchml.cli.app import run

said = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out:
        try:
            run([*words, "-h"])
        except SystemExit:
            pass
    said.append(out.getvalue())
print(json.dumps(said))
"""


def typed_helps() -> dict[str, str]:
    """What the commands themselves say, without the stored help texts: all in one process."""
    shown = subprocess.run(
        [sys.executable, "-c", _SAY_ALL, json.dumps(COMMANDS)],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=True,
    )  # fmt: skip
    return dict(zip(map(" ".join, COMMANDS), json.loads(shown.stdout), strict=True))


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return typed_helps()


def test_public_names_are_sorted_and_resolve() -> None:
    assert batchml.__all__ == sorted(batchml.__all__)
    for name in batchml.__all__:
        assert getattr(batchml, name) is not None
    with pytest.raises(AttributeError):
        batchml.nothing_of_the_kind  # noqa: B018


def test_importing_batchml_imports_nothing_heavy() -> None:
    program = (
        "import sys; before = set(sys.modules); import batchml;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.strip() == "['batchml']"


def test_who_submits_waits_for_no_other_command() -> None:
    program = (
        "import sys; from batchml.cli.app import run; run(['submit', '-h']);"
        "others = ('sweep', 'optuna', 'cli.top', 'cli.workspace', 'cli.notebook');"
        "print([name for name in sys.modules if any(each in name for each in others)])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.splitlines()[-1] == "[]", shown


def test_everyday_commands_import_no_module_and_compile_no_pattern_that_few_runs_need() -> None:
    """Each module costs such a command about a millisecond, each pattern a tenth.

    Patterns that are tried on each line of a log are compiled at once.
    """
    program = """
import re, sys
compiled, compile_pattern = set(), re.compile
def note(*given):
    compiled.add(sys._getframe(1).f_globals["__name__"])
    return compile_pattern(*given)
re.compile = note
from batchml.runs.commands import cost, list, logs, show, submit
import batchml.runtime.storage.folder  # keeps the code of runs
print(sorted(each for each in compiled if each.startswith("batchml")))
few = {"asyncio", "boto3", "concurrent", "logging", "rich", "ssl", "tomllib"}
print(sorted(few & {*sys.modules}))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    compiled, imported = shown.stdout.splitlines()
    assert compiled == "['batchml.runs.metrics.pace', 'batchml.runs.metrics.series']", shown
    assert imported == "[]", shown


def test_ls_imports_nothing_that_reads_logs_or_files_of_users() -> None:
    program = """
import sys
from batchml.runs.commands import list
few = ("batchml.config.environments", "batchml.model.job", "batchml.runs.metrics.series",
       "batchml.runs.metrics.usage", "batchml.runtime.protocol.instance_types")
print([each for each in few if each in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout.splitlines() == ["[]"], shown


def test_version_is_printed() -> None:
    assert run("--version").stdout == f"batchml {batchml.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_stored_help_is_what_the_command_says(
    command: list[str], helps: dict[str, str]
) -> None:
    """`--help` prints a file. After a change of a command: make help-texts"""
    stored = (HELP / f"{'-'.join(['batchml', *command])}.txt").read_text("utf-8")
    assert helps[" ".join(command)] == stored
    assert run(*command, "--help").stdout == stored
    assert "Example: " in stored


def test_h_is_short_for_help() -> None:
    for command in ([], ["submit"], ["sweeps", "stop"]):
        assert run(*command, "-h").stdout == run(*command, "--help").stdout != ""


def test_every_command_has_its_help_stored() -> None:
    assert {path.stem for path in HELP.iterdir()} == {
        "-".join(["batchml", *command]) for command in COMMANDS
    }


def test_a_wrong_option_is_a_usage_error() -> None:
    shown = run("ls", "--nonsense")
    assert shown.returncode == 2
    assert "--nonsense" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_error_tree_in_the_docstring_is_the_tree() -> None:
    from batchml import errors

    drawn = dict(re.findall(r"(\w+) +(\d+)", errors.__doc__ or ""))
    found = {
        name: str(kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.BatchmlError)
    }
    assert found == drawn


def test_the_tests_that_documents_name_exist() -> None:
    named = {
        (name, function)
        for page in (ROOT / "docs").glob("*.md")
        for name, function in re.findall(
            r"`tests/([a-z0-9]+/test_\w+\.py)(?:::(test_\w+))?`", page.read_text("utf-8")
        )
    }
    assert len(named) > 40
    for name, function in named:
        path = ROOT / "tests" / name
        assert path.is_file(), name
        assert f"def {function}" in path.read_text("utf-8"), f"{name}::{function}"
