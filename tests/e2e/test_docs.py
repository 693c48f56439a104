"""The documentation's programs run as they are written."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchml.config.environments import ConfigFile, read_environments
from batchml.local.home import Home, ServerEndpoint
from batchml.model.environment import (
    Budget,
    Compute,
    Environment,
    FairShare,
    Logs,
    Network,
    Queue,
    Storage,
)
from batchml.runtime.checkpoint import newest_step
from tests.support.aws_http import served
from tests.support.aws_world import Account
from tests.support.fakes import FastClock
from tests.support.s3 import moto_s3
from tests.support.worlds import Worlds

DOCS = Path(__file__).parents[2] / "docs"
SEARCH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": SEARCH, "HOME": str(tmp_path), "BATCHML_HOME": str(tmp_path / "state")}


def run(words: list[str], environ: dict[str, str], folder: Path) -> str:
    return subprocess.run(
        words, env=environ, cwd=folder, check=True, text=True, stdout=subprocess.PIPE, timeout=120
    ).stdout


@pytest.mark.journey
def test_the_boto3_program_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    program, *_ = blocks("clients.md", "python")
    told = json.loads(run(["batchml", "local", "env", "--json"], environ, tmp_path))
    try:
        assert run([sys.executable, "-c", program], environ | told, tmp_path) == "[0, 1, 4, 9]\n"
    finally:
        run(["batchml", "local", "stop"], environ, tmp_path)


def test_the_s3_store_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    """With moto's server, which the page starts on a port of its own. A project names it too."""
    _, program, _ = blocks("clients.md", "python")
    (table,) = blocks("clients.md", "toml")
    with moto_s3() as url:
        project = tmp_path / "project"
        project.mkdir()
        (project / "batchml.toml").write_text(table.replace("http://127.0.0.1:9000", url))
        told = json.loads(run(["batchml", "local", "env", "--json"], environ, project))
        try:
            assert told["AWS_ENDPOINT_URL_S3"] == url
            assert run([sys.executable, "-c", program], environ | told, project) == "42\n"
        finally:
            run(["batchml", "local", "stop"], environ, tmp_path)


def test_the_fixture_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    *_, fixture = blocks("clients.md", "python")
    (tmp_path / "conftest.py").write_text(fixture)
    (tmp_path / "test_mine.py").write_text(
        "import boto3\n"
        "def test_there_is_a_queue():\n"
        "    (queue,) = boto3.client('batch').describe_job_queues()['jobQueues']\n"
        "    assert queue['jobQueueName'] == 'default'\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    assert "1 passed" in run(words, environ, tmp_path)


def test_the_line_for_ci_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    (steps,) = blocks("clients.md", "yaml")
    script = re.search(r"run: \|\n(.*?)\n  - run: pytest", steps, re.DOTALL)
    assert script is not None
    lines = "\n".join(line.removeprefix("      ") for line in script[1].splitlines())
    target = tmp_path / "environment"
    try:
        run(["sh", "-ec", lines], {**environ, "GITHUB_ENV": str(target)}, tmp_path)
        assert "AWS_ENDPOINT_URL_BATCH=http://127.0.0.1:" in target.read_text()
    finally:
        run(["batchml", "local", "stop"], environ, tmp_path)


@pytest.fixture
def aws(home: Home, server: ServerEndpoint, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables with which commands reach the played account, AWS Batch being `server`."""
    folder = tmp_path / "account"
    folder.mkdir()
    account, keys = Account(folder, FastClock()), home.keys()
    with served(account) as url:
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ENDPOINT_URL_BATCH": server.url,
            "AWS_ACCESS_KEY_ID": keys.access_key_id,
            "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    account.close()


@pytest.mark.slow
def test_the_training_of_checkpoints_md(worlds: Worlds, tmp_path: Path) -> None:
    """Two ranks train, and one of them is asked to stop: both do, after the same step, saved. What
    goes on from there ends with the bits of a training that nobody stopped.
    """
    whole = next(block for block in blocks("checkpoints.md", "python") if "all_reduce" in block)
    short = whole.replace("STEPS, EVERY = 1000, 100", "STEPS, EVERY = 40, 20")
    stopped = short.replace("checkpoint.should_stop()", "rank == 1 and step == 24")
    assert whole != short != stopped
    for name, program, end in (("a", stopped, 25), ("a", short, 40), ("b", short, 40)):
        script = tmp_path / f"{name}-{end}.py"
        script.write_text(program)
        folder = tmp_path / name
        codes, printed = worlds.run(script, tmp_path, 2, BATCHML_CHECKPOINT_DIR=str(folder))
        assert codes == [0, 0], printed
        assert newest_step(str(folder)) == end, printed
    one, other = (tmp_path / name / "step-0000000040" / "state.pt" for name in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()


def sessions(page: str) -> Iterator[tuple[str, str]]:
    """Every command of a page's console blocks, with the output that stands below it."""
    for block in blocks(page, "console"):
        for each in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = each.partition("\n")
            yield command, output


_VOLATILE = {
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "ID",
    r"\d{4}-\d\d-\d\dT[0-9:.]+Z": "TIME",
    r"\d{4}-\d\d-\d\d": "DATE",
    r"\bin \d+:\d\d\b": "in TIME",
    r"(?<=It ran )\d+ (s|min)(?=\.)": "TIME",
    r"(?<=python:)[0-9a-f]{12}": "TAG",
    r"(?<=hello-)[0-9a-f]{10}": "HASH",
    r"[0-9.]+ KiB \([0-9a-f]{8}": "SIZE (HASH",  # of an archive: it depends on zlib
}


def plain(text: str) -> str:
    for pattern, word in _VOLATILE.items():
        text = re.sub(pattern, word, text)
    return text


def matches(expected: str, found: str) -> bool:
    """Whether an output is as it is written; a line of three dots stands for any lines."""
    parts = re.split(r"^\.\.\.\n", plain(expected), flags=re.MULTILINE)
    return bool(re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), plain(found)))


def test_the_commands_of_setup_md(
    environ: dict[str, str], aws: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    played = 0
    try:
        for command, expected in sessions("setup.md"):
            there = aws if "--env dev" in command else {}
            done = subprocess.run(
                command.split(), env=environ | there, cwd=folder, text=True, timeout=120,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode in ((0, 2) if "--plan" in command else (0,)), done.stdout
            assert matches(expected, done.stdout), f"$ {command}\n{done.stdout}"
            played += 1
    finally:
        run(["batchml", "local", "stop"], environ, folder)
    assert played >= 12, "console blocks were not found"


def test_an_output_that_differs_is_seen() -> None:
    assert matches("a\n...\nc\n", "a\nb\nb\nc\n")
    assert matches("a\n...\n", "a\n")
    assert not matches("a\nc\n", "a\nb\nc\n")
    assert not matches("a\n...\nc\n", "a\nb\n")


_SECTIONS = {
    "": ConfigFile,
    "env.NAME": Environment,
    "env.NAME.network": Network,
    "env.NAME.storage": Storage,
    "env.NAME.logs": Logs,
    "env.NAME.budget": Budget,
    "env.NAME.compute.NAME": Compute,
    "env.NAME.queues.NAME": Queue,
    "env.NAME.queues.NAME.fair_share": FairShare,
}


def documented() -> dict[str, dict[str, str]]:
    """The default of every key in the table of setup.md, by section and key, as it is written."""
    text = (DOCS / "setup.md").read_text("utf-8").partition("\n## Every key\n")[2]
    found: dict[str, dict[str, str]] = {"": {}}
    section = ""
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE):
        first, _, default, _ = map(str.strip, line.split("|"))
        header = re.fullmatch(r"\*\*`\[(.*)\]`\*\*", first)
        if header:
            section = header[1]
            found[section] = {}
        elif re.fullmatch(r"`\w+`", first):
            found[section][first.strip("`")] = default
    return found


@pytest.mark.parametrize("section", _SECTIONS)
@pytest.mark.journey
def test_every_key_of_batchml_toml_is_in_setup_md(section: str) -> None:
    kind, rows = _SECTIONS[section], documented()[section]
    # A field that is a table of its own has a section of its own.
    inner = {each.rpartition(".")[2] for each in _SECTIONS} | {"env", "compute", "queues"}
    keys = [key for key in kind.__struct_fields__ if kind is Queue or key not in inner]
    assert sorted(rows) == sorted(keys)
    for key in keys:
        if rows[key] not in ("*must*", "none"):
            (default,) = tomllib.loads(f"it = {rows[key].strip('`')}").values()
            assert default == plain_value(getattr(kind(), key)), key


def plain_value(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.journey
def test_the_files_of_setup_md_can_be_read() -> None:
    first, network = blocks("setup.md", "toml")
    assert read_environments(tomllib.loads(first), "setup.md")[1]["dev"].compute["gpu"].has_gpus
    whole = tomllib.loads(first + network)
    assert read_environments(whole, "setup.md")[1]["dev"].network.is_given
