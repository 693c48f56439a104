"""The documentation's programs run as they are written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_the_boto3_program_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    program, _ = blocks("clients.md", "python")
    told = json.loads(run(["batchml", "local", "env", "--json"], environ, tmp_path))
    try:
        assert run([sys.executable, "-c", program], environ | told, tmp_path) == "[0, 1, 4, 9]\n"
    finally:
        run(["batchml", "local", "stop"], environ, tmp_path)


def test_the_fixture_of_clients_md(environ: dict[str, str], tmp_path: Path) -> None:
    _, fixture = blocks("clients.md", "python")
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
