"""The embedded AWS Batch as a server: calls a second, and what a long history costs.

Submissions are compared with a lower bound in the same run: the same sixteen boto3 clients, and a
server that answers each call with the same few bytes and does nothing.
"""

import os
import random
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.batch.events import Effect, SaveJob, SaveSpec
from batchml.local.batch.state import Job, Needs, SubmittedSpec
from batchml.local.home import Home, ServerEndpoint
from batchml.local.store.journal import Journal
from batchml.model.run import JobStatus

CLOCK = SystemClock()
HISTORY = 100_000  # finished jobs
CLIENTS = 16

# Runs in a process of its own: a client's work must not slow the server down by sharing its lock.
_SUBMITTERS = """
import sys, threading, time, boto3
from botocore.config import Config
url, key, secret, count, threads = sys.argv[1:4] + [int(text) for text in sys.argv[4:6]]
config = Config(max_pool_connections=threads, retries={"total_max_attempts": 1})
client = boto3.client("batch", "us-east-1", endpoint_url=url, aws_access_key_id=key,
                      aws_secret_access_key=secret, config=config)
def submit(many):
    for _ in range(many):
        client.submit_job(jobName="b", jobQueue="held", jobDefinition="true")
submit(20)
workers = [threading.Thread(target=submit, args=[count // threads]) for _ in range(threads)]
start = time.perf_counter()
for worker in workers: worker.start()
for worker in workers: worker.join()
print(count / (time.perf_counter() - start))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _submissions(Home(Path(folder) / "calls"))
        _history(Home(Path(folder) / "history"))


# --- submissions ----------------------------------------------------------------------------


def _submissions(home: Home) -> None:
    endpoint = control.ensure_server(home, CLOCK)
    try:
        client = _client(home, endpoint)
        _furnish(client)
        pairs = []
        for _ in range(5):
            with _Floor() as floor:
                pairs.append((_rate(endpoint.url, home), _rate(floor.url, home)))
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"SubmitJob, {CLIENTS} clients     {ours:7.0f} /s   beside a server that does nothing "
            f"{theirs:7.0f} /s   x{ratio:.2f}   goal 800 /s"
        )
        took = [_timed(lambda: _array(client, 10_000)) for _ in range(5)]
        print(
            f"array of 10,000 accepted   {statistics.median(took) * 1000:7.0f} ms   goal 1,000 ms"
        )
        ids = [client.list_jobs(jobQueue="held", jobStatus="PENDING")["jobSummaryList"]]
        parent = ids[0][0]["jobId"]
        took_one = _timed(lambda: client.terminate_job(jobId=parent, reason="benchmark"))
        print(f"array of 10,000 terminated {took_one * 1000:7.0f} ms   goal 5,000 ms")
    finally:
        control.stop_server(home, CLOCK)


def _rate(url: str, home: Home) -> float:
    keys = home.keys()
    arguments = [url, keys.access_key_id, keys.secret_access_key, "1600", str(CLIENTS)]
    done = subprocess.run(
        [sys.executable, "-c", _SUBMITTERS, *arguments], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def _array(client: Any, size: int) -> None:
    client.submit_job(
        jobName="a", jobQueue="held", jobDefinition="true", arrayProperties={"size": size}
    )


def _furnish(client: Any) -> None:
    """A queue whose jobs are accepted and never placed, and a definition."""
    client.create_compute_environment(
        computeEnvironmentName="held",
        type="MANAGED",
        state="DISABLED",
        computeResources={
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": 1,
            "subnets": [],
            "instanceRole": "r",
        },
    )
    order = [{"order": 1, "computeEnvironment": "held"}]
    client.create_job_queue(jobQueueName="held", priority=1, computeEnvironmentOrder=order)
    client.register_job_definition(
        jobDefinitionName="true",
        type="container",
        containerProperties={"image": "i", "command": ["true"], "vcpus": 1, "memory": 64},
    )


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b'{"jobArn": "a", "jobName": "b", "jobId": "c"}'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        self.wfile.write(head.encode() + b"\r\n\r\n" + body)

    def log_message(self, format: str, *args: Any) -> None: ...


class _Floor:
    """A server in a process of its own that gives everyone the same answer."""

    def __enter__(self) -> "_Floor":
        read_end, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            socketserver.ThreadingTCPServer.daemon_threads = True
            with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Answer) as server:
                os.write(write_end, str(server.server_address[1]).encode())
                server.serve_forever()
        port = os.read(read_end, 16).decode()
        os.close(read_end)
        os.close(write_end)
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)


# --- a long history -------------------------------------------------------------------------


def _history(home: Home) -> None:
    home.prepare()
    ids = _fill(home)
    start = time.perf_counter()
    endpoint = control.ensure_server(home, CLOCK)
    started = time.perf_counter() - start
    try:
        client = _client(home, endpoint)
        chance = random.Random(1)
        calls: dict[str, Callable[[], Any]] = {
            "DescribeJobs of 100": lambda: client.describe_jobs(jobs=chance.sample(ids, 100)),
            "DescribeJobs of 1": lambda: client.describe_jobs(jobs=[chance.choice(ids)]),
            "ListJobs by name": lambda: client.list_jobs(
                jobQueue="q",
                filters=[{"name": "JOB_NAME", "values": [f"name-{chance.randrange(HISTORY)}"]}],
            ),
            "ListJobs, 1,000 of a state": lambda: client.list_jobs(
                jobQueue="q", jobStatus="SUCCEEDED"
            ),
        }
        print(f"with {HISTORY:,} finished jobs: serves after {started:.2f} s (goal 3 s)")
        for name, call in calls.items():
            call()
            times = sorted(_timed(call) for _ in range(60))
            p50, p99 = times[30] * 1000, times[-1] * 1000
            goal = "   goal 25 ms" if name.endswith("100") else ""
            print(f"{name:<27}{p50:7.1f} ms p50 {p99:7.1f} ms worst{goal}")
        memory = _memory(endpoint.pid)
        before, begin = _cpu(endpoint.pid), time.perf_counter()
        threading.Event().wait(10)
        idle = (_cpu(endpoint.pid) - before) / (time.perf_counter() - begin) * 100
        print(f"memory {memory} MB (goal 300 MB), idle CPU {idle:.2f} % (goal 0.5 %)")
    finally:
        control.stop_server(home, CLOCK)


def _fill(home: Home) -> list[str]:
    """A journal with finished jobs, as the server itself writes it."""
    control.ensure_server(home, CLOCK)
    _furnish_q(_client(home, control.ensure_server(home, CLOCK)))
    control.stop_server(home, CLOCK)
    store = Journal(home.journal)
    container = {"image": "i", "command": ["python", "train.py"], "environment": []}
    detail = {
        "container": {"exitCode": 0, "taskArn": "arn", "logStreamName": "d/default/x"},
        "startedAt": 2, "stoppedAt": 3, "statusReason": "Essential container in task exited",
    }  # fmt: skip
    ids = []
    for first in range(0, HISTORY, 10_000):
        effects: list[Effect] = []
        for number in range(first, first + 10_000):
            ids.append(f"{number:08}-0000-4000-8000-000000000000")
            spec = SubmittedSpec(
                ids[-1], f"name-{number}", "q", "d:1", container, Needs(1, 64), number
            )
            job = Job(ids[-1], spec, number, JobStatus.SUCCEEDED, exit_code=0, attempts=(detail,))
            effects += [SaveSpec(spec), SaveJob(job, False)]
        store.commit(effects)
    store.close()
    return ids


def _furnish_q(client: Any) -> None:
    order = [{"order": 1, "computeEnvironment": "this-machine"}]
    client.create_job_queue(jobQueueName="q", priority=1, computeEnvironmentOrder=order)


def _client(home: Home, endpoint: ServerEndpoint) -> Any:
    import boto3

    keys = home.keys()
    return boto3.client(
        "batch", "us-east-1", endpoint_url=endpoint.url,
        aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
    )  # fmt: skip


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    return 0


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
