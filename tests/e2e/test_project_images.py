"""Jobs whose environment is made of their own files, and jobs with secrets, as a user runs them."""

import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.local.home import Home
from tests.e2e.test_secrets import VALUE, digest, keep, places_of
from tests.support.cli import Cli, write_job
from tests.support.executor_rig import IMAGE, docker, need_engine

# As conda's tools are called: CREATE --prefix FOLDER --file FILE. Each call is a line of its log.
CONDA = """\
#!{python}
import json, os, sys
words = sys.argv[1:]
wanted = json.load(open(words[words.index("--file") + 1]))
prefix = words[words.index("--prefix") + 1]
with open({log!r}, "a") as log:
    print(words[0], os.environ["MAMBA_ALWAYS_YES"], wanted["dependencies"], file=log)
if "broken" in wanted["dependencies"]:
    os.makedirs(prefix + "/bin")
    sys.exit("ERROR: nothing provides broken")
os.makedirs(prefix + "/bin")
os.symlink(sys.executable, prefix + "/bin/python")
"""
TELL = "import os, sys; print(os.environ['CONDA_PREFIX'], sys.argv)"


@pytest.fixture
def project(cli: Cli) -> Iterator[Path]:
    yield cli.folder
    cli("local", "stop")


@pytest.mark.own_envs
def test_an_environment_yml_is_made_once_for_each_content_and_a_failure_leaves_nothing(
    cli: Cli, home: Home, project: Path, tmp_path: Path
) -> None:
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    (tools / "micromamba").write_text(CONDA.format(python=sys.executable, log=str(log)))
    (tools / "micromamba").chmod(0o755)
    job = write_job(project, "vision", f'command = ["python", "-c", {TELL!r}]\ncode = false\n')

    def run(*packages: str) -> tuple[int, str]:
        listed = ", ".join(["python=3.11", *packages])
        (job / "environment.yml").write_text(f"name: vision\ndependencies: [{listed}]\n")
        path = f"{tools}:{cli.environ['PATH']}"
        shown = cli("submit", "--wait", "vision", PATH=path)
        return shown.code, shown.out + shown.err

    code, said = run("numpy")
    assert code == 0, said
    (made,) = [path for path in home.envs.iterdir() if path.is_dir()]
    assert f"{made} ['-c']" in said
    assert f"in the environment {made.name}" in said
    assert run("numpy")[0] == 0
    assert log.read_text() == "create true ['python=3.11', 'numpy']\n"
    code, said = run("broken")
    assert (code, "nothing provides broken" in said) == (125, True)
    assert [path for path in home.envs.iterdir() if path.is_dir()] == [made]
    assert len(log.read_text().splitlines()) == 2
    cli("local", "stop")  # its idle runners may be in the environment
    gone = cli("local", "clean", "--all", "--json").json["environments"]
    assert made.name in [each["name"] for each in gone]
    assert not made.exists()


def test_a_secret_reaches_every_run_and_nothing_else_has_its_value(
    cli: Cli, home: Home, project: Path
) -> None:
    home.prepare()
    keep(home, "secrets.toml", f'"ssm:/team/wandb" = "{VALUE}"\n"secretsmanager:db" = '
         f"'{{\"password\": \"second-{VALUE}\"}}'\n")  # fmt: skip
    hashed = "hashlib.sha256(os.environ[n].encode()).hexdigest()"
    script = f"import hashlib, os; print(*({hashed} for n in 'AB'))"
    write_job(project, "train", textwrap.dedent(f"""\
        command = ["python", "-c", "{script}"]
        code = false
        [secrets]
        A = "ssm:/team/wandb"
        B = "secretsmanager:db#password"
        """), requirements__txt="")  # fmt: skip
    told = f"{digest(VALUE)} {digest(f'second-{VALUE}')}"
    shown = [
        cli("submit", "--wait", "--array", "2", "train"),
        cli("rerun", "--wait", "@last"),
        cli("show", "@last", "--json"),
    ]
    assert [each.code for each in shown] == [0] * 3, [each.err for each in shown]
    assert [each.out.count(told) for each in shown[:2]] == [2, 2]
    assert not any(VALUE in each.out + each.err for each in shown)
    assert cli("local", "stop").code == 0
    assert places_of(VALUE, home.root) == []


def test_a_dockerfile_of_a_job_is_built_once_and_runs_its_code(cli: Cli, project: Path) -> None:
    need_engine()
    name = f"test-{uuid.uuid4().hex[:8]}"
    job = write_job(
        project, name, 'command = ["python3", "train.py"]\n',
        Dockerfile=f"FROM {IMAGE}\nCOPY start.sh /usr/bin/start\nRUN start echo built > /about\n"
        'ENTRYPOINT ["start"]\n',
        start__sh='#!/bin/sh\necho started\nexec "$@"\n',
        train__py="import os; print(os.getuid(), os.environ['HOME'], open('/about').read())\n",
    )  # fmt: skip
    (job / "start.sh").chmod(0o755)
    try:
        assert cli("local", "start", "--executor", "docker").code == 0
        shown = cli("submit", "--wait", name)
        assert shown.code == 0, shown.out + shown.err
        assert "started\n" in shown.out
        assert "1000 /job started\n" in shown.out
        (one,) = cli("image", "build", name, "--json").json
        assert (one["built"], one["pushed"]) == (False, False), "the very image that was built"
    finally:
        for reference in docker("image", "ls", "-q", f"batchml/{name}").stdout.split():
            docker("image", "rm", "-f", reference)
