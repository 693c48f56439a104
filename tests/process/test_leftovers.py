"""Tests that are killed: their servers, runners and attempts end; nothing else does."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.local.home import Home
from batchml.runtime.processes import descendants
from tests.process.test_processes import is_alive
from tests.support.leftovers import end_with
from tests.support.local_server import define, processes_of, wait_for_job


@pytest.fixture
def pytest_process() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that stands for the one that is killed."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def test_the_server_and_a_running_attempt_end_with_the_tests_and_nothing_else(
    home: Home, batch: Any, tmp_path: Path, pytest_process: "subprocess.Popen[bytes]"
) -> None:
    job = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, ["sleep", "300"])
    )["jobId"]
    wait_for_job(batch, job, "RUNNING")
    server = home.holder()
    assert server is not None
    ours = [server, *descendants(server)]
    assert len(ours) >= 3  # a runner, and its program
    with subprocess.Popen(["sleep", "300"], cwd=tmp_path) as stranger:
        watching = end_with(pytest_process.pid, tmp_path)
        assert os.getsid(watching) == watching  # a signal to pytest's group does not reach it
        assert all(map(is_alive, ours))
        pytest_process.kill()
        pytest_process.wait()
        assert os.waitpid(watching, 0)[1] == 0
        assert not any(map(is_alive, ours))
        assert processes_of(home, job) == []
        assert stranger.poll() is None  # somebody looks at a file
        stranger.kill()
