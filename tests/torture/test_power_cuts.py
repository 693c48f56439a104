"""A machine that stops at once and starts again. docs/durability.md; faults B4 and B8.

An image of the disk is what lies there while the server stands still, as of a virtual machine that
is copied while it runs. What a disk may lose besides is in test_system_calls.py.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.batch.lifecycle import CONTAINER_EXITED, STOPPED_EARLY
from batchml.local.executors.supervisor import NO_EVIDENCE, RUNNER_LOST
from batchml.local.home import Home
from batchml.local.machine import read_machine
from batchml.local.store.journal import Journal
from batchml.runtime.processes import boot_id, send
from batchml.runtime.storage.files import read_json
from tests.process.test_kill9 import kill_server, started
from tests.process.test_processes import is_alive
from tests.support.generate import TORTURE
from tests.support.load import JOB, Client, Load, Told
from tests.support.local_server import (
    client_for,
    define,
    processes_of,
    reboot,
    wait_for,
    wait_for_job,
)
from tests.torture.test_kill9_rounds import unfinished

__all__ = ["started"]  # a fixture

CLOCK = SystemClock()
SEED = 20261121
_IMAGES = 8
SERVERS = 16 if TORTURE == 1 else 50
_STARTED = 3  # of them, with a server


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[list[Home]]:
    """State folders whose servers end with the test."""
    made: list[Home] = []
    yield made
    for home in made:
        kill_server(home)


def test_what_was_acknowledged_before_a_power_cut_is_there_after_it(
    home: Home, started: Path, copies: list[Home]
) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    ledgers = started.parent / "ledgers"
    ledgers.mkdir()
    definition = define(batch, ["sh", "-c", JOB])
    load = Load(str(home.root), str(started), str(ledgers), definition, seed=SEED)
    acknowledged: list[set[str]] = []
    over = Event()
    clients = [Client(load, f"client{number}") for number in range(2)]
    threads = [Thread(target=_go_on, args=(client, over)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        for number in range(_IMAGES):
            CLOCK.sleep(chance.uniform(0, 0.3))
            acknowledged.append(set(Told.read(str(ledgers)).jobs))
            copies.append(_image(home, started.parent / f"image{number}"))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    wait_for(lambda: not unfinished(batch), "the load ends", 60)
    control.stop_server(home, CLOCK)

    assert acknowledged[-1], "there was load"
    for copy, known in zip(copies[:-_STARTED], acknowledged, strict=False):
        store = Journal(copy.journal)
        assert store.jobs(sorted(known)).keys() == known
        store.close()
    for copy, known in list(zip(copies, acknowledged, strict=True))[-_STARTED:]:
        _check_that_it_goes_on(copy, known)


def _check_that_it_goes_on(copy: Home, known: set[str]) -> None:
    reboot(copy)
    batch = client_for(copy, control.ensure_server(copy, CLOCK), "batch")
    wait_for(lambda: not unfinished(batch), "nothing is stuck", 60)
    for job_id in known:
        job = batch.describe_jobs(jobs=[job_id])["jobs"][0]
        for attempt in job["attempts"]:
            stopped = attempt["container"].get("reason") == STOPPED_EARLY
            known_reasons = {RUNNER_LOST, NO_EVIDENCE, CONTAINER_EXITED}
            assert attempt["statusReason"] in known_reasons or stopped


def _go_on(client: Client, over: Event) -> None:
    while not over.is_set():
        client.act()
        client.nap(0.05)


def _stands_still(pid: int) -> bool:
    """A thread that runs on another core stops only when it next enters the kernel."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in stats)


def _image(home: Home, folder: Path) -> Home:
    """A copy of a state folder whose server stands still meanwhile."""
    pid = home.holder()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: _stands_still(pid), "the server stands still", 10)
        shutil.copytree(home.root, folder, ignore=shutil.ignore_patterns("work", "*.tmp"))
    finally:
        os.kill(pid, signal.SIGCONT)
    return Home(folder)


def test_after_a_reboot_what_ran_has_lost_its_host_and_what_waited_runs(
    home: Home, started: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    vcpus = str(read_machine().vcpus)
    script = 'echo >> "$STARTS/$NAME"; [ $AWS_BATCH_JOB_ATTEMPT -gt 1 ] || sleep $NAP'
    definition = define(batch, ["sh", "-c", script])

    def submit(name: str, nap: int, **more: Any) -> str:
        env = {"STARTS": str(started), "NAME": name, "NAP": str(nap)}
        overrides: dict[str, Any] = {
            "environment": [{"name": key, "value": value} for key, value in env.items()],
            "resourceRequirements": [{"type": "VCPU", "value": vcpus}],  # so one at a time
        }
        made = batch.submit_job(
            jobName=name, jobQueue="default", jobDefinition=definition,
            containerOverrides=overrides, **more,
        )  # fmt: skip
        return str(made["jobId"])

    rules = [{"onStatusReason": "Host EC2*", "action": "RETRY"}]
    tried_again = submit("tried-again", 600, retryStrategy={"attempts": 2, "evaluateOnExit": rules})
    wait_for((started / "tried-again").exists, "it runs")
    waits = submit("waits", 0)
    kill_server(home)
    (attempt,) = home.attempts.iterdir()
    runner = read_json(str(attempt / "runner.json"))["pid"]
    os.kill(runner, signal.SIGKILL)
    wait_for(lambda: not is_alive(runner), "the runner is dead")
    while left := processes_of(home, attempt.name):
        send(left, signal.SIGKILL)
    record = (attempt / "runner.json").read_text()
    (attempt / "runner.json").write_text(record.replace(boot_id(), "0" * len(boot_id())))
    reboot(home)

    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job = wait_for_job(batch, tried_again)
    assert [tried["statusReason"] for tried in job["attempts"]] == [
        RUNNER_LOST,
        CONTAINER_EXITED,
    ]
    assert wait_for_job(batch, waits)["status"] == "SUCCEEDED"
    assert (started / "tried-again").read_text().count("\n") == 2


def test_of_many_servers_that_start_at_once_one_serves_and_the_others_name_it(
    home: Home,
) -> None:
    """B8 of the fault matrix."""
    words = [sys.executable, "-m", "batchml.local.server.daemon", "--home", str(home.root)]
    servers = [
        subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(SERVERS)
    ]
    try:
        wait_for(lambda: sum(s.poll() is None for s in servers) == 1, "one is left", 120)
        (alive,) = [server for server in servers if server.poll() is None]
        assert {server.returncode for server in servers if server is not alive} == {1}
        endpoint = wait_for(lambda: control.find_server(home), "it serves")
        assert endpoint.pid == alive.pid
        assert client_for(home, endpoint, "batch").describe_job_queues()["jobQueues"]
        assert home.log.read_text().count(f"process {alive.pid} runs") == SERVERS - 1
    finally:
        for server in servers:
            server.kill()
            server.wait()
