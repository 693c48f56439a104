"""Clients of AWS Batch from PyPI, unmodified, against the embedded server: `make clients`.

Each has a virtual environment of its own, `.venv-clients/NAME`. The AWS CLI, which is a dependency
of the tests, has tests of its own: tests/server/test_aws_cli.py and test_aws_cli_everything.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from tests.support.local_server import define

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"

pytestmark = pytest.mark.clients

RunClient = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_client(home: Home, tmp_path: Path) -> RunClient:
    """Run a program of a client's environment, with what `batchml local env` prints."""
    words = [sys.executable, "-m", "batchml", "local", "env", "--json"]
    variables = json.loads(
        subprocess.check_output(words, env={**os.environ, "BATCHML_HOME": str(home.root)})
    )

    def run(name: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        bin_folder = ENVIRONMENTS / name / "bin"
        if not (ENVIRONMENTS / name / "installed").exists():
            missing = pytest.fail if os.environ.get("BATCHML_REQUIRE_CLIENTS") else pytest.skip
            missing(f"{name} is not installed in {ENVIRONMENTS}: make clients")
        environ = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        done = subprocess.run(
            [str(bin_folder / words[0]), *words[1:]], env=environ | more, cwd=tmp_path, text=True,
            capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    return run


def test_airflows_operator_submits_waits_reads_the_log_and_fails(
    run_client: RunClient, batch: Any, tmp_path: Path
) -> None:
    definition = define(batch, ["sh", "-c", "echo ends with $CODE; exit $CODE"])
    script = str(HERE / "airflow_operator.py")
    done = run_client(
        "airflow", "python", script, definition, AIRFLOW_HOME=str(tmp_path / "airflow")
    )
    first, second = [line for line in done.stdout.splitlines() if line.startswith(("succ", "fail"))]
    (job,) = batch.describe_jobs(jobs=[first.removeprefix("succeeded: ")])["jobs"]
    assert (job["status"], job["tags"]) == ("SUCCEEDED", {})
    assert "'exitCode': 3" in second
    for code in (0, 3):
        assert f"ends with {code}" in done.stdout + done.stderr


def test_miniwdl_runs_a_task_and_reads_its_output(
    run_client: RunClient, batch: Any, tmp_path: Path
) -> None:
    done = run_client(
        "miniwdl", "miniwdl", "run", str(HERE / "greet.wdl"), "who=world", "--dir",
        str(tmp_path / "run" / "."),
        MINIWDL__SCHEDULER__CONTAINER_BACKEND="aws_batch_job_no_efs",
        MINIWDL__AWS__TASK_QUEUE="default",
        MINIWDL__AWS__DESCRIBE_PERIOD="0.1",
        MINIWDL__FILE_IO__ROOT=str(tmp_path),
    )  # fmt: skip
    assert json.loads(done.stdout)["outputs"] == {"greet.greeting": "hello world"}
    (definition,) = batch.describe_job_definitions()["jobDefinitions"]
    assert definition["status"] == "INACTIVE", "deregistered once the task was over"


def test_torchx_runs_nodes_reads_a_log_and_lists(run_client: RunClient) -> None:
    done = run_client("torchx", "python", str(HERE / "torchx_run.py"))
    assert done.stdout.splitlines() == [
        "state SUCCEEDED", "log node 0 of 2", "listed True", "replicas 2",
    ]  # fmt: skip
