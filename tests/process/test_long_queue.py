"""A hundred thousand queued jobs on the embedded server: no operation takes it a second.

What is measured is the processor time of the server, which other programs of the machine disturb
least. The jobs lie in the journal as the server writes them (benchmarks/curves/jobs.py).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from benchmarks.curves.cost import cpu_of_process
from benchmarks.curves.jobs import job, write

JOBS = 100_000
LIMIT = 1.0  # seconds of processor time for one operation
RESTART = 4.0  # for a start, which reads all of them and checks the journal
IDLE = 0.01  # of a processor
pytestmark = pytest.mark.slow


class Rig:
    """The server, and what each operation took it."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "h")
        self.home.prepare()
        write(self.home.journal, JOBS, job, live=True)
        self.taken: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self.endpoint: ServerEndpoint = control.ensure_server(self.home, SystemClock())
        self.taken["start"] = cpu_of_process(self.endpoint.pid)
        keys = self.home.keys()
        self.batch: Any = boto3.client(
            "batch", "us-east-1", endpoint_url=self.endpoint.url,
            aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
            config=Config(read_timeout=300, retries={"total_max_attempts": 1}),
        )  # fmt: skip

    def kill(self) -> None:
        os.kill(self.endpoint.pid, signal.SIGKILL)
        os.waitpid(self.endpoint.pid, 0)  # until its last thread has ended

    def cpu(self) -> float:
        return cpu_of_process(self.endpoint.pid)

    def do(self, name: str, act: Callable[[], Any]) -> Any:
        before = self.cpu()
        answer = act()
        self.taken[name] = max(self.taken.get(name, 0.0), self.cpu() - before)
        return answer

    def count(self, status: str) -> int:
        found, more = 0, {"maxResults": 1000}
        while True:
            page = self.do(
                "ListJobs",
                lambda: self.batch.list_jobs(jobQueue="q", jobStatus=status, **more),
            )
            found += len(page["jobSummaryList"])
            if "nextToken" not in page:
                return found
            more["nextToken"] = page["nextToken"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("long"))
    try:
        yield made
    finally:
        control.stop_server(made.home, SystemClock())


def test_a_hundred_thousand_queued_jobs_are_served_within_a_second_each(rig: Rig) -> None:
    batch, do = rig.batch, rig.do
    one = {"jobName": "one", "jobQueue": "q", "jobDefinition": "d"}
    for _ in range(3):
        last = do("SubmitJob", lambda: batch.submit_job(**one))["jobId"]
        do("GetJobQueueSnapshot", lambda: batch.get_job_queue_snapshot(jobQueue="q"))
        do("UpdateJobQueue", lambda: batch.update_job_queue(jobQueue="q", priority=7))
        do("CancelJob", lambda: batch.cancel_job(jobId=last, reason="r"))  # noqa: B023
    array = do("an array", lambda: batch.submit_job(arrayProperties={"size": 10_000}, **one))
    do("its end", lambda: batch.terminate_job(jobId=array["jobId"], reason="r"))
    ids = [job(number).id for number in range(1, JOBS, JOBS // 100)]
    found = do("DescribeJobs", lambda: batch.describe_jobs(jobs=ids))["jobs"]
    assert {each["status"] for each in found} == {"RUNNABLE"} and len(found) == 100
    filters = [{"name": "JOB_NAME", "values": ["name-1*"]}]
    do("names", lambda: batch.list_jobs(jobQueue="q", filters=filters, maxResults=1000))

    before, begun = rig.cpu(), time.monotonic()
    time.sleep(5)  # idle is what is measured
    assert (rig.cpu() - before) / (time.monotonic() - begun) < IDLE

    rig.kill()
    rig.start()
    assert rig.count("RUNNABLE") == JOBS
    assert rig.taken.pop("start") < RESTART
    assert {name: taken for name, taken in rig.taken.items() if taken >= LIMIT} == {}


def test_all_are_cancelled_as_a_whole_while_calls_are_answered(rig: Rig) -> None:
    batch = rig.batch
    batch.update_job_queue(jobQueue="q", state="DISABLED")
    rig.do("DeleteJobQueue", lambda: batch.delete_job_queue(jobQueue="q"))
    while rig.do("DescribeJobQueues", lambda: batch.describe_job_queues(jobQueues=["q"]))[
        "jobQueues"
    ]:
        rig.do("DescribeJobs", lambda: batch.describe_jobs(jobs=[job(JOBS).id]))
    last = batch.describe_jobs(jobs=[job(1).id, job(JOBS).id])["jobs"]
    assert [each["statusReason"] for each in last] == ["JobQueue deleted"] * 2
    assert {name: taken for name, taken in rig.taken.items() if name != "start"} == {
        name: taken for name, taken in rig.taken.items() if taken < LIMIT and name != "start"
    }
