"""An array of ten thousand children, seen from outside. Fault B22; docs/behaviours.md B133.

What it takes is printed. The limits here are loose, because others may use the machine meanwhile.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.process.test_kill9 import kill_server, started
from tests.support.local_server import client_for, define, wait_for

__all__ = ["started"]  # a fixture

CLOCK = SystemClock()
SIZE = 10_000


@contextmanager
def taking(what: str, aim: float) -> Iterator[None]:
    before = time.monotonic()
    yield
    took = time.monotonic() - before
    print(f"{what}: {took:.2f} s (aim: {aim} s)")
    assert took < 8 * aim, what


@pytest.fixture
def array(home: Home, started: Path) -> str:
    """Ten thousand children, of which those that fit run."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    definition = define(batch, ["sleep", "600"])
    with taking("submit", 1):
        made = batch.submit_job(
            jobName="many", jobQueue="default", jobDefinition=definition,
            arrayProperties={"size": SIZE},
        )  # fmt: skip
    return str(made["jobId"])


def counts(batch: Any, job_id: str) -> dict[str, int]:
    """How many children there are by status, counted one by one, page by page."""
    found = {}
    for status in ("PENDING", "RUNNABLE", "STARTING", "RUNNING", "SUCCEEDED", "FAILED"):
        pages = batch.get_paginator("list_jobs").paginate(arrayJobId=job_id, jobStatus=status)
        ids = [job["jobId"] for page in pages for job in page["jobSummaryList"]]
        assert len(set(ids)) == len(ids)
        if ids:
            found[status] = len(ids)
    return found


def summary(batch: Any, job_id: str) -> dict[str, int]:
    job = batch.describe_jobs(jobs=[job_id])["jobs"][0]
    return {status: n for status, n in job["arrayProperties"]["statusSummary"].items() if n}


def memory(home: Home) -> int:
    """MiB that the server has in memory."""
    status = Path(f"/proc/{home.holder()}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024


def test_ten_thousand_children_are_submitted_listed_survived_and_stopped(
    home: Home, array: str
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    wait_for(lambda: "RUNNING" in summary(batch, array), "some run")
    with taking("list all", 3):
        listed = counts(batch, array)
    assert sum(listed.values()) == SIZE
    with taking("describe a hundred", 0.5):
        ids = [f"{array}:{index}" for index in range(0, SIZE, 100)]
        assert len(batch.describe_jobs(jobs=ids)["jobs"]) == 100
    kill_server(home)
    with taking("restart", 3):
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    assert summary(batch, array) == listed == counts(batch, array)
    print(f"memory: {memory(home)} MiB (aim: 300)")
    assert memory(home) < 450
    with taking("terminate", 5):
        batch.terminate_job(jobId=array, reason="enough")
        wait_for(lambda: summary(batch, array) == {"FAILED": SIZE}, "all have ended", 60)
    assert batch.describe_jobs(jobs=[array])["jobs"][0]["status"] == "FAILED"
    print(f"memory: {memory(home)} MiB (aim: 300)")
    assert memory(home) < 450
    assert os.listdir(home.attempts)
