"""The notice that a spot instance is taken back: heard within seconds, and only on EC2."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.telemetry.spot import (
    SpotNotice,
    SpotWatcher,
    describe,
    read_notice,
    service_of,
)
from tests.support.local_server import wait_for

ROOT = str(Path(__file__).parents[2])
ACTION = {"action": "terminate", "time": "2026-09-18T08:22:00Z"}
AT = 1_789_719_720.0


class Metadata:
    """IMDSv2, as far as it is asked here."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.token = "t1"
        self.asked: list[str] = []
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                assert self.path == "/latest/api/token"
                assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self._answer(200, outer.token.encode())

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.may_answer.wait(30)
                found = outer.answers.get(self.path.partition("/meta-data/")[2])
                if self.headers["X-aws-ec2-metadata-token"] != outer.token:
                    self._answer(401, b"")
                elif outer.status != 200:
                    self._answer(outer.status, b"<html>")
                elif found is None:
                    self._answer(404, b"not found")
                else:
                    self._answer(200, json.dumps(found).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


class Run:
    """An attempt that notes what it is told."""

    def __init__(self, **environ: str) -> None:
        self.environ = environ
        self.said: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        self.left = 0.0

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop(self, reason: str, code: int, within: float) -> None:
        self.stopped.append((reason, code))
        self.left = within


def listening(run: Run, now: float = AT - 118) -> SpotWatcher:
    """A companion whose thread looks once and rests: later looks are the test's."""
    return SpotWatcher(run, interval=3600, now=lambda: now)  # type: ignore[arg-type]


def test_a_notice_says_what_is_done_and_when() -> None:
    assert read_notice(json.dumps(ACTION).encode()) == SpotNotice("terminate", AT)
    assert read_notice(b'{"action": "stop"}') == SpotNotice("stop", 0.0)
    assert read_notice(b'{"action": "stop", "time": "soon"}') == SpotNotice("stop", 0.0)
    for body in (b"", b"<html>", b"[]", b"{}", b"null"):
        assert read_notice(body) is None


def test_the_line_says_how_long_there_is() -> None:
    assert describe(SpotNotice("terminate", AT), AT - 118) == (
        "spot notice: EC2 will terminate this host in 118 s, at 08:22:00Z. The run saves and stops."
    )
    assert "in 0 s" in describe(SpotNotice("stop", AT), AT + 5)
    assert describe(SpotNotice("stop", 0), AT).startswith("spot notice: EC2 will stop this host. ")


def test_only_hosts_of_ec2_are_asked() -> None:
    """The embedded AWS Batch says AWS_ECS_EC2 as well, and may itself run on an instance."""
    ecs = {"AWS_EXECUTION_ENV": "AWS_ECS_EC2"}
    agent = {"ECS_CONTAINER_METADATA_URI_V4": "http://169.254.170.2/v4/x"}
    assert service_of({}) == service_of(ecs) == service_of(agent) == ""
    assert service_of({**ecs, **agent}) == "http://169.254.169.254"
    assert service_of({"AWS_EXECUTION_ENV": "AWS_ECS_FARGATE", **agent}) == ""
    named = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1/"}
    assert service_of(named) == "http://127.0.0.1:1"
    assert service_of({**named, "AWS_EC2_METADATA_DISABLED": "true"}) == ""


def test_a_run_is_stopped_once_its_host_is_taken_back(metadata: Metadata) -> None:
    run = Run(AWS_EC2_METADATA_SERVICE_ENDPOINT=metadata.address)
    notice = listening(run)
    wait_for(lambda: len(metadata.asked) == 2, "it has looked")
    notice.tick(0)
    assert not run.stopped and not run.said
    metadata.answers["spot/instance-action"] = ACTION
    metadata.token = "t2"  # the first one has ended
    for _ in range(2):
        notice.poll()
    notice.tick(1)
    [(reason, code)] = run.stopped
    assert code == 75
    assert "in 118 s" in reason
    assert run.left == 118
    notice.finish()


def test_an_advice_to_leave_is_told_and_the_run_goes_on(metadata: Metadata) -> None:
    """It comes before many interruptions, and before many that never come."""
    run = Run(AWS_EC2_METADATA_SERVICE_ENDPOINT=metadata.address)
    metadata.answers["events/recommendations/rebalance"] = {"noticeTime": "2026-09-18T08:00:00Z"}
    notice = listening(run)

    def is_told() -> bool:
        notice.tick(0)
        return bool(run.said)

    wait_for(is_told, "it is told")
    notice.poll()
    notice.tick(1)
    assert len(run.said) == 1
    assert run.stopped == []
    notice.finish()


def test_the_host_may_write_it_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    run = Run(BATCHML_NOTICE_FILE=str(path))
    notice = listening(run)
    notice.poll()
    path.write_text(json.dumps(ACTION))
    notice.poll()
    notice.tick(0)
    assert len(run.stopped) == 1
    notice.finish()


def test_elsewhere_no_thread_is_started_and_nothing_is_asked() -> None:
    before = threading.active_count()
    notice = listening(Run(AWS_EXECUTION_ENV="AWS_ECS_EC2"))
    assert threading.active_count() == before
    notice.tick(0)
    notice.finish()


PROGRAM = """
import sys, time
from batchml.runtime import checkpoint
checkpoint.should_stop()  # from here on, SIGTERM does not end it
print("trains", flush=True)
while not checkpoint.should_stop():
    time.sleep(0.01)
checkpoint.save(lambda path: open(path + "/model", "w").write("x"), 7)
"""


def test_a_run_that_needs_no_http_starts_without_it(tmp_path: Path) -> None:
    """The modules of HTTP alone take longer to import than all that is done before a command."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "batchml.runtime.run", "true"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "AWS_BATCH_JOB_ID": "job",
            "BATCHML_STORE": str(tmp_path / "store"), "BATCHML_KEY": "k",
        },
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "batchml.runtime.telemetry.spot" in imported
    assert not imported & {"http.client", "urllib.request", "ssl", "email", "datetime", "socket"}


def test_a_program_that_looks_saves_before_its_host_goes(
    metadata: Metadata, tmp_path: Path
) -> None:
    """Through the entry: exit code 75, by the runtime, and the checkpoint is there.

    The notice comes once the program looks: before that, SIGTERM ends it as any other.
    """
    metadata.may_answer.clear()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchml.runtime.run", sys.executable, "-c", PROGRAM],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": ROOT, "AWS_BATCH_JOB_ID": "job",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.address,
            "BATCHML_CHECKPOINT_DIR": str(tmp_path / "checkpoint"),
        },
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    metadata.answers["spot/instance-action"] = ACTION
    metadata.may_answer.set()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert first == "trains\n"
    assert "batchml: spot notice: EC2 will terminate this host in 0 s" in output
    assert (tmp_path / "checkpoint" / "step-0000000007" / "model").exists(), output
