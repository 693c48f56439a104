"""The embedded AWS Batch as a server: calls a second, arrays, and its idle CPU.

Submissions are compared with a lower bound in the same run: the same sixteen boto3 clients, and a
server that answers each call with the same few bytes and does nothing. What a long history and
long queues cost is in `curves.py`.
"""

import os
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from benchmarks.rows import Finding, alone, paired
from benchmarks.running import main

CLOCK = SystemClock()
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


def measure(full: bool) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _submissions(Home(Path(folder) / "calls"), 1600 if full else 320)


def _submissions(home: Home, count: int) -> Iterator[Finding]:
    endpoint = control.ensure_server(home, CLOCK)
    try:
        client = _client(home, endpoint)
        _furnish(client)
        pairs = []
        for _ in range(5 if count > 1000 else 3):
            with _Floor() as floor:
                pairs.append((_rate(endpoint.url, home, count), _rate(floor.url, home, count)))
        yield paired(
            "server/submit", f"SubmitJob from {CLIENTS} clients", "calls/s", pairs,
            beside="a server that does nothing", goal=0.5, smaller=False,
        )  # fmt: skip
        took = [_timed(lambda: _array(client, 10_000)) * 1000 for _ in range(5)]
        yield alone("server/array", "SubmitJob of an array of 10,000", "ms", took, goal=1000)
        parents = client.list_jobs(jobQueue="held", jobStatus="PENDING")["jobSummaryList"]
        took = [
            _timed(partial(client.terminate_job, jobId=each["jobId"], reason="benchmark")) * 1000
            for each in parents[:3]
        ]
        yield alone("server/terminate", "TerminateJob of an array of 10,000", "ms", took, goal=1000)
        before, begin = _cpu(endpoint.pid), time.perf_counter()
        threading.Event().wait(10)
        idle = (_cpu(endpoint.pid) - before) / (time.perf_counter() - begin) * 100
        yield alone("server/idle", "idle CPU with 20,000 queued jobs", "%", [idle], goal=1)
    finally:
        control.stop_server(home, CLOCK)


def _rate(url: str, home: Home, count: int) -> float:
    keys = home.keys()
    arguments = [url, keys.access_key_id, keys.secret_access_key, str(count), str(CLIENTS)]
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


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(measure)
