"""The supervisors of a Ray gang, as programs, with a stand-in for Ray that starts at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from batchml.runtime.nodes.ray.rules import HeadRecord, HeadRendezvous
from tests.support.local_server import wait_for

RAY = f"""#!{sys.executable} -IS
import os, sys, time
words = sys.argv[1:]
folder = words[words.index("--temp-dir") + 1]
own = words[words.index("--node-ip-address") + 1]
address = words[words.index("--address") + 1] if "--address" in words else own + ":6379"
assert os.environ["RAY_AUTH_MODE"] == "token" and os.environ["RAY_AUTH_TOKEN"]
if os.environ.get("BROKEN"):
    sys.exit("no space left on the device")
with open(folder + "/ray_current_cluster", "w") as file:
    file.write(address)
parent = os.getppid()  # its supervisor, which a test may kill
while os.getppid() == parent:
    time.sleep(0.05)
"""
GROUP = {"name": "cpu", "size": 2, "least": 1, "job_name": "x-cpu-wk", "queue": "q"}
TOKEN = "0123456789abcdef0123456789abcdef"
PROGRAM = "import os; print(os.environ['RAY_ADDRESS'], flush=True)"
HELD = """
import os, time
print('held', flush=True)
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.05)
"""


class Batch:
    """A stand-in for AWS Batch: every job is as `jobs` has it, every call is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.head: dict[str, Any] = {"jobId": "head", "status": "RUNNING"}
        self.workers: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                name = self.path.rpartition("/")[2]
                outer.calls.append((name, asked))
                told = {
                    "describejobs": {"jobs": [outer.head]},
                    "listjobs": {"jobSummaryList": outer.workers},
                }.get(name, {})
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(told).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    @property
    def ended(self) -> list[str]:
        return [asked["jobId"] for name, asked in self.calls if name == "terminatejob"]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Gang:
    """Supervisors in one folder, each with files for what it prints and for its verdict."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        self.folder, self.batch = folder, batch
        self.endpoint = f"http://127.0.0.1:{batch.server.server_port}"
        self.members: list[subprocess.Popen[bytes]] = []
        self.short = tempfile.mkdtemp(prefix="rg-", dir="/tmp")  # for the paths of sockets
        self.make_ray("2.60.0")

    def make_ray(self, version: str) -> Path:
        where = self.folder / f"ray-{version}"
        where.mkdir()
        (where / "ray").write_text(RAY)
        (where / "python").write_text(f"#!/bin/sh\necho {version} 3.11.7 0\n")
        for name in ("ray", "python"):
            (where / name).chmod(0o755)
        return where

    def start(self, name: str, plan: dict[str, Any], *command: str, **more: str) -> None:
        ray = self.folder / f"ray-{more.pop('version', '2.60.0')}"
        environ = {
            "PATH": f"{ray}:/usr/bin:/bin",
            "PYTHONPATH": str(Path(__file__).parent.parent.parent),
            "BATCHML_OWN_PYTHONPATH": "",
            "BATCHML_GANG_TOKEN": TOKEN,
            "BATCHML_GANG_KEY": "key",
            "BATCHML_KEY": "key",
            "AWS_BATCH_JOB_ID": name,
            "BATCHML_WORKSPACE": str(self.folder),
            "BATCHML_ENDPOINT_URL": self.endpoint,
            "BATCHML_ACCESS_KEY_ID": "a",
            "BATCHML_SECRET_ACCESS_KEY": "s",
            "BATCHML_VERDICT": str(self.folder / f"{name}.verdict"),
            "BATCHML_TASK": name,
            "TMPDIR": self.short,
            "BATCHML_LAUNCH": json.dumps({"kind": "ray", "start_within": 60.0, **plan}),
            "AWS_BATCH_JOB_ATTEMPT": "1",
            **more,
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            self.members.append(
                subprocess.Popen(
                    [sys.executable, "-m", "batchml.runtime.nodes.ray.main", "--", *command],
                    env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder,
                )
            )  # fmt: skip

    def head(
        self, program: str, least: int, size: int = 2, limit: float = 60.0, **more: str
    ) -> None:
        plan = {"groups": [{**GROUP, "size": size, "least": least}], "start_within": limit}
        self.start("head", plan, sys.executable, "-c", program, **more)

    def worker(self, number: int, limit: float = 60.0, **more: str) -> None:
        given = {"AWS_BATCH_JOB_ARRAY_INDEX": str(number), "BATCHML_KEY": "wk", **more}
        self.start(f"worker-{number}", {"role": "worker", "start_within": limit}, **given)

    def codes(self) -> list[int]:
        return [each.wait(60) for each in self.members]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until_said(self, name: str, words: str, count: int = 1) -> None:
        wait_for(lambda: self.log(name).count(words) >= count, f"{name} says {words!r}", 60)

    def verdict(self, name: str) -> Any:
        path = self.folder / f"{name}.verdict"
        return json.loads(path.read_text()) if path.exists() else None

    def close(self) -> None:
        for each in self.members:
            if each.poll() is None:
                each.terminate()
                each.wait(60)
        shutil.rmtree(self.short)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    batch = Batch()
    made = Gang(tmp_path, batch)
    yield made
    made.close()
    batch.close()


@pytest.mark.journey
def test_a_gang_comes_together_and_ends_together(gang: Gang) -> None:
    """One worker before the head, and one of three that is still in the queue at the end; two that
    do not belong are turned away, each with one line on both sides.
    """
    gang.batch.workers = [{"jobId": "w", "status": "PENDING"}, {"jobId": "v", "status": "FAILED"}]
    gang.make_ray("2.59.0")
    gang.worker(0)
    gang.head(PROGRAM, least=2, size=3)
    gang.until_said("head", "runs on this head")
    gang.worker(7, version="2.59.0")
    gang.worker(8, limit=0.3, BATCHML_GANG_TOKEN="f" * 32)
    old, strange = gang.members[2:]
    gang.members = gang.members[:2]

    why = "the head has Ray 2.60.0 and this worker 2.59.0: use one image for both"
    assert old.wait(60) == 78
    assert gang.verdict("worker-7") == {"code": 78, "why": why}
    assert gang.log("worker-7").count("2.59.0:") == 1
    gang.until_said("head", f"cannot join: {why}")
    assert strange.wait(60) == 75
    assert "no head was found in time; latest error: the head at 127." in gang.log("worker-8")
    assert "a connection was refused: it does not have the token of this run" in gang.log("head")

    gang.worker(1)
    assert gang.codes() == [0, 0, 0]
    said = gang.log("head")
    assert "batchml: 2 of 3 cpu; the program starts\n127." in said
    assert ":6379\n" in said
    assert "the head has ended (exit 0)" in gang.log("worker-0")
    assert gang.verdict("head") is gang.verdict("worker-0") is None
    assert gang.batch.ended == ["w"]


def test_a_failure_is_the_program_s_own_and_ends_the_gang(gang: Gang) -> None:
    gang.batch.head["retryStrategy"] = {"attempts": 1}
    gang.head("import sys; sys.exit(3)", least=1, size=1)
    gang.worker(0)
    assert gang.codes() == [3, 0]
    assert gang.verdict("head") is None
    assert "the head has ended (exit 3)" in gang.log("worker-0")
    assert gang.batch.ended == []  # all of them had come


def test_a_head_waits_for_workers_only_so_long(gang: Gang) -> None:
    gang.batch.workers = [{"jobId": "w", "status": "RUNNABLE"}]
    gang.batch.head["retryStrategy"] = {"attempts": 1}
    gang.head(PROGRAM, least=1, limit=0.2)
    assert gang.codes() == [75]
    why = "not enough workers joined in time: 0 of 1 cpu have joined (job x-cpu-wk)"
    assert gang.verdict("head") == {"code": 75, "why": why}
    assert gang.batch.ended == ["w"]  # this was the last attempt
    assert ":6379" not in gang.log("head").partition("runs on this head")[2].partition("\n")[2]


def test_a_head_that_comes_again_finds_its_workers(gang: Gang) -> None:
    """Its host was lost, so nobody was told of an end; the worker starts Ray anew for it."""
    gang.head(HELD, least=1)
    gang.worker(0)
    gang.until_said("head", "held")
    gang.members[0].kill()
    assert gang.members.pop(0).wait(60) == -signal.SIGKILL
    gang.until_said("worker-0", "the head does not answer")
    gang.head(PROGRAM, least=1, AWS_BATCH_JOB_ATTEMPT="2")
    assert gang.codes() == [0, 0]
    assert gang.log("worker-0").count("joined the Ray cluster") == 2


def test_a_head_that_does_not_come_again_frees_its_workers(gang: Gang) -> None:
    """Who knows that it had no attempt left has done all there was to do."""
    gang.head(HELD, least=2)
    gang.worker(0, BATCHML_HEAD_GRACE="0.2")
    gang.worker(1, BATCHML_HEAD_GRACE="0.2", BATCHML_GANG_ATTEMPTS="1")
    gang.until_said("head", "held")
    gang.members[0].kill()
    gang.members.pop(0).wait(60)
    assert gang.codes() == [75, 0]
    assert "the head has not started again, and it has no attempt left" in gang.log("worker-1")
    assert gang.verdict("worker-0")["why"].startswith("the head has not started again in time")


def test_a_stopped_head_that_batch_brings_back_keeps_its_workers(gang: Gang) -> None:
    """The program hears of it, and says itself how it ends."""
    gang.batch.head["retryStrategy"] = {"attempts": 2}
    program = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9))" + HELD
    gang.head(program, least=1)
    gang.worker(0)
    gang.until_said("head", "held")
    gang.members[0].terminate()
    assert gang.members[0].wait(60) == 9
    gang.until_said("worker-0", "the head does not answer")
    gang.members[1].terminate()
    assert gang.members[1].wait(60) == 143


def test_a_head_that_a_person_ended_ends_its_gang(gang: Gang) -> None:
    gang.batch.head |= {"retryStrategy": {"attempts": 2}, "isTerminated": True}
    gang.head(HELD, least=1, size=1)
    gang.worker(0)
    gang.until_said("head", "held")
    gang.members[0].terminate()
    assert gang.codes() == [143, 0]


def test_an_attempt_that_others_think_dead_does_not_lure_workers_away(gang: Gang) -> None:
    card = HeadRecord("head", 2, "127.1.1.1", 1, 2, "2.60.0", "3.11.7", 0.0)
    place = {"BATCHML_WORKSPACE": str(gang.folder), "BATCHML_GANG_KEY": "key"}
    HeadRendezvous.of(place).publish(card)
    gang.head(PROGRAM, least=0)
    assert gang.codes() == [75]
    assert gang.verdict("head")["why"] == "attempt 2 of this head runs already"
    assert HeadRendezvous.of(place).head() == card


def test_ray_that_does_not_start_is_told_in_one_line(gang: Gang) -> None:
    gang.head(PROGRAM, least=1, BROKEN="1")
    assert gang.codes() == [75]
    assert gang.verdict("head")["why"] == (
        "Ray does not start on the head: no space left on the device"
    )


def test_a_head_that_cannot_begin_lets_its_workers_go(gang: Gang) -> None:
    """Also where Batch cannot be asked, and whoever comes later."""
    gang.endpoint = "http://127.0.0.1:9"
    gang.worker(0)
    gang.until_said("worker-0", "looks for the head")
    gang.start("head", {"groups": [GROUP]}, "no-such-program", BATCHML_GANG_ATTEMPTS="1")
    assert gang.codes() == [0, 127]
    gang.worker(1)
    assert gang.codes() == [0, 127, 0]
    assert "no such command in this image" in gang.log("head")
    assert "the job of group cpu could not be ended (" in gang.log("head")


def test_an_image_without_ray_is_told_in_one_line(gang: Gang) -> None:
    """And a head in such an image ends the gang."""
    gang.batch.workers = [{"jobId": "w", "status": "RUNNABLE"}]
    gang.start("head", {"groups": [GROUP]}, "true", PATH=os.defpath)
    gang.start("worker-0", {"role": "worker"}, PATH=os.defpath)
    assert gang.codes() == [78, 78]
    assert "this image has no Ray" in gang.log("worker-0")
    assert gang.verdict("head")["why"].startswith("this image has no Ray")
    assert gang.batch.ended == ["w"]
