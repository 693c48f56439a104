"""Submissions one after the other by `batchml.Client`, beside a loop of boto3 and the AWS CLI.

boto3's loop sends the same request and keeps nothing. Ours writes each submission to disk first,
and looks whether the folder's code has changed. No job runs meanwhile: its compute environment is
disabled.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchml.client import Client
from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from benchmarks.pairs import compare, rows
from benchmarks.rows import Finding, LeftOut, paired
from benchmarks.running import main

COUNT = 1000
ROUNDS = 5  # in turn; the ratio is the median of theirs
COMMANDS = 5  # of each kind


def measure(full: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        home, work = Home(Path(folder) / "home"), Path(folder) / "work"
        work.mkdir()
        (work / "train.py").write_text("print(1)\n")
        endpoint = control.ensure_server(home, SystemClock())
        try:
            yield from _measure(home, work, endpoint.url, COUNT if full else COUNT // 10)
        finally:
            control.stop_server(home, SystemClock())


def _measure(home: Home, work: Path, url: str, count: int) -> Iterator[Finding]:
    environ = {"BATCHML_HOME": str(home.root)}
    client = Client("local", work, environ={**os.environ, **environ})
    theirs = _boto3(home, url)
    _hold(theirs)
    command = ["python", "train.py"]
    run = client.submit(command=command, queue="held").describe()
    request = {
        "jobName": "python", "jobQueue": "held", "jobDefinition": run.definition,
        "containerOverrides": {"command": command},
    }  # fmt: skip
    each = count // ROUNDS
    pairs = [
        (
            _timed(lambda: client.submit(command=command, queue="held"), each),
            _timed(lambda: theirs.submit_job(**request), each),
        )
        for _ in range(ROUNDS)
    ]
    yield paired(
        "submits/client", f"Client.submit, {count:,} one after the other", "ms each", pairs,
        beside="boto3's submit_job", goal=1.5,
    )  # fmt: skip
    yield from _commands(home, work, url, run.definition)


def _commands(home: Home, work: Path, url: str, definition: str) -> Iterator[Finding]:
    aws = shutil.which("aws", path=os.pathsep.join((str(Path(sys.executable).parent), _PATH)))
    if aws is None:
        yield LeftOut(name="submits/command", why="the AWS CLI is not here")
        return
    ours = [str(Path(sys.executable).parent / "batchml"), "submit", "--queue", "held", "--"]
    keys = home.keys()
    environ = {
        "BATCHML_HOME": str(home.root),
        "AWS_ENDPOINT_URL_BATCH": url,
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    theirs = [
        aws, "batch", "submit-job", "--job-name", "python", "--job-queue", "held",
        "--job-definition", definition,
    ]  # fmt: skip
    found = compare(
        [*ours, "python", "train.py"], theirs, environ=environ, folder=str(work), pairs=COMMANDS
    )
    yield from rows("submits/command", "batchml submit", found, beside="the AWS CLI", goal=1)


_PATH = os.environ.get("PATH", os.defpath)


def _timed(submit: Callable[[], Any], count: int) -> float:
    """Milliseconds of each."""
    start = time.perf_counter()
    for _ in range(count):
        submit()
    return (time.perf_counter() - start) / count * 1000


def _boto3(home: Home, url: str) -> Any:
    import boto3

    keys = home.keys()
    return boto3.client(
        "batch", "us-east-1", endpoint_url=url,
        aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
    )  # fmt: skip


def _hold(client: Any) -> None:
    """A queue whose jobs wait: its compute environment takes no work."""
    client.create_compute_environment(
        computeEnvironmentName="held", type="UNMANAGED", state="DISABLED"
    )
    client.create_job_queue(
        jobQueueName="held", state="ENABLED", priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": "held"}],
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (queue,) = client.describe_job_queues(jobQueues=["held"])["jobQueues"]
        if queue["status"] == "VALID":
            return
        time.sleep(0.1)
    raise subprocess.SubprocessError("the queue did not become VALID")


if __name__ == "__main__":
    main(measure)
