"""Runners, runtimes that wait for the next child, and servers are killed while an array runs.

Each child writes that it begins and that it ends. A program begins once for each attempt that the
journal has, and a child that SUCCEEDED has ended.
"""

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.process.test_kill9 import kill_server
from tests.support.generate import TORTURE
from tests.support.local_server import client_for, wait_for
from tests.torture.test_kill9_rounds import runners

CLOCK = SystemClock()
SEED = 20261128
CHILDREN = 150 * TORTURE

_CHILD = """
echo "begins $AWS_BATCH_JOB_ID $BATCHML_TASK" >> $LEDGER
test $((AWS_BATCH_JOB_ARRAY_INDEX % 7)) -ne 0 || sleep 0.05
echo "ends $AWS_BATCH_JOB_ID $BATCHML_TASK" >> $LEDGER
"""


def waiting_runtimes(home: Home) -> list[int]:
    """The processes that runners have forked, by their parents."""
    found = []
    for runner in runners(home):
        for task in Path(f"/proc/{runner}/task").glob("*/children"):
            try:
                found += [int(pid) for pid in task.read_text().split()]
            except OSError:
                continue
    return found


def submit(home: Home, ledger: Path, children: int) -> str:
    """Submit the array as a user does; its job id."""
    words = [
        sys.executable, "-m", "batchml", "submit", "--detach", "--array", str(children),
        "--attempts", "9", "--retry-on", "host-lost",
        "--", "sh", "-c", f"LEDGER={ledger}\n{_CHILD}",
    ]  # fmt: skip
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "BATCHML_"))}
    subprocess.run(
        words, cwd=home.root.parent, check=True, capture_output=True,
        env={**environ, "BATCHML_HOME": str(home.root)},
    )  # fmt: skip
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    (job,) = batch.list_jobs(
        jobQueue="default", filters=[{"name": "AFTER_CREATED_AT", "values": ["0"]}]
    )["jobSummaryList"]
    return str(job["jobId"])


def test_whatever_is_killed_each_attempt_of_a_child_begins_once(home: Home, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    ledger = tmp_path / "ledger"
    array = submit(home, ledger, CHILDREN)
    killed: Counter[str] = Counter()

    def status() -> str:
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
        (job,) = batch.describe_jobs(jobs=[array])["jobs"]
        return str(job["status"])

    while status() not in ("SUCCEEDED", "FAILED"):
        CLOCK.sleep(chance.uniform(0, 0.3))
        victim = chance.choices(("runtime", "runner", "server"), (6, 2, 1))[0]
        killed[victim] += 1
        if victim == "server":
            kill_server(home)
            continue
        found = waiting_runtimes(home) if victim == "runtime" else runners(home)
        if found:
            try:
                os.kill(chance.choice(found), signal.SIGKILL)
            except ProcessLookupError:
                continue
    print(f"killed: {dict(killed)}")

    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    begun, ended = Counter[str](), Counter[str]()
    for line in ledger.read_text().splitlines():
        word, child, task = line.split()
        (begun if word == "begins" else ended)[f"{child} {task}"] += 1
    assert set(begun.values()) <= {1}, "a program began twice for one task"
    for start in range(0, CHILDREN, 100):
        ids = [f"{array}:{index}" for index in range(start, min(start + 100, CHILDREN))]
        for job in batch.describe_jobs(jobs=ids)["jobs"]:
            assert job["status"] in ("SUCCEEDED", "FAILED")
            ends = [key for key in ended if key.startswith(f"{job['jobId']} ")]
            if job["status"] == "SUCCEEDED":
                assert ends, f"{job['jobId']} succeeded without its program"
            codes = [attempt["container"].get("exitCode") for attempt in job["attempts"]]
            assert set(codes) <= {0, 137, None}, (job["jobId"], codes)
    wait_for(lambda: not waiting_runtimes(home), "no runtime waits for ever", 60)
