"""State folders that are copied, moved and deleted while their jobs run, with real servers."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.executors.supervisor import COPIED
from batchml.local.home import Home
from batchml.local.reset import forget
from batchml.runtime.processes import send
from batchml.runtime.storage.files import read_json
from tests.process.test_processes import is_alive
from tests.support.cli import Cli
from tests.support.local_server import client_for, define, processes_of, wait_for, wait_for_job
from tests.support.needs import unavailable

CLOCK = SystemClock()
UNTIL_GO = 'echo $$ >> "$T/pids"; while [ ! -e "$T/go" ]; do sleep 0.02; done; echo end; exit 3'


def submit(batch: Any, folder: Path) -> str:
    definition = define(batch, ["sh", "-c", UNTIL_GO])
    variables = [{"name": "T", "value": str(folder)}]
    made = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=definition,
        containerOverrides={"environment": variables},
    )  # fmt: skip
    wait_for(lambda: pids(folder), "the program runs")
    return str(made["jobId"])


def pids(folder: Path) -> list[int]:
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def copy(home: Home, tmp_path: Path) -> Home:
    """Where a test copies the state folder to."""
    return Home(tmp_path / "copy")


def test_a_copy_is_only_read_and_its_looks_kill_nothing(
    home: Home, copy: Home, tmp_path: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, tmp_path)
    wait_for_job(batch, job_id, "RUNNING")
    shutil.copytree(home.root, copy.root, symlinks=True)

    endpoint = control.ensure_server(copy, CLOCK)
    try:
        assert f"is a copy of {home.root}" in endpoint.read_only
        other = client_for(copy, endpoint, "batch")
        assert other.describe_jobs(jobs=[job_id])["jobs"][0]["status"] == "RUNNING"
        with pytest.raises(ClientError, match="batchml local adopt"):
            other.terminate_job(jobId=job_id, reason="mine")
    finally:
        control.stop_server(copy, CLOCK)
    assert forget(copy, CLOCK) == 0, "a reset of a copy signals nothing"
    (tmp_path / "go").touch()
    job = wait_for_job(batch, job_id)
    assert (job["container"]["exitCode"], len(pids(tmp_path))) == (3, 1)


def test_a_copy_that_is_adopted_ends_what_ran_and_the_other_folder_goes_on(
    cli: Cli, copy: Home, tmp_path: Path
) -> None:
    batch = client_for(cli.home, control.ensure_server(cli.home, CLOCK), "batch")
    job_id = submit(batch, tmp_path)
    wait_for_job(batch, job_id, "RUNNING")
    shutil.copytree(cli.home.root, copy.root, symlinks=True)
    there = str(copy.root)
    assert "is a copy of" in cli("ls", BATCHML_HOME=there).err
    assert "is a copy of" in cli("local", "status", BATCHML_HOME=there).out
    assert cli("local", "adopt", BATCHML_HOME=there).code == 2
    adopted = cli("local", "adopt", "--yes", BATCHML_HOME=there)
    assert "1 running job ends as a lost host" in adopted.out
    assert cli("local", "adopt", "--yes", BATCHML_HOME=there).code == 1

    other = client_for(copy, control.ensure_server(copy, CLOCK), "batch")
    try:
        lost = wait_for_job(other, job_id)
        assert lost["statusReason"] == COPIED.format(cli.home.root)
    finally:
        control.stop_server(copy, CLOCK)
    (pid,) = pids(tmp_path)
    assert is_alive(pid)
    (tmp_path / "go").touch()
    assert wait_for_job(batch, job_id)["container"]["exitCode"] == 3


def test_a_server_whose_folder_is_moved_stops_and_the_next_one_finds_its_jobs(
    home: Home, tmp_path: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, tmp_path)
    server = home.holder()
    assert server is not None
    there = Home(tmp_path / "there")
    home.root.rename(there.root)
    wait_for(lambda: not is_alive(server), "the server stops by itself")
    assert "was moved, deleted or replaced" in there.log.read_text()
    try:
        batch = client_for(there, control.ensure_server(there, CLOCK), "batch")
        (tmp_path / "go").touch()
        job = wait_for_job(batch, job_id)
        assert (job["container"]["exitCode"], len(pids(tmp_path))) == (3, 1)
    finally:
        control.stop_server(there, CLOCK)


def test_an_attempt_whose_folder_is_deleted_ends_with_its_own_code(
    home: Home, tmp_path: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, tmp_path)
    (attempt,) = home.attempts.iterdir()
    shutil.rmtree(attempt)
    (tmp_path / "go").touch()
    job = wait_for_job(batch, job_id)
    assert (job["container"]["exitCode"], len(pids(tmp_path))) == (3, 1)


def test_another_journal_in_the_place_of_one_that_is_served_is_left_alone(
    home: Home, copy: Home
) -> None:
    """SQLite deletes the write-ahead log by name as it closes: not that of the other folder."""
    control.ensure_server(home, CLOCK)
    server = home.holder()
    assert server is not None
    shutil.copytree(home.root, copy.root)
    home.root.rename(home.root.with_name("before"))
    copy.root.rename(home.root)
    log = home.local / "journal.db-wal"
    before = log.read_bytes()
    wait_for(lambda: not is_alive(server), "the server stops by itself")
    assert log.read_bytes() == before
    assert before, "there was a log"
    assert os.path.exists(home.local / "endpoint.json")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, in an image: `disk.img` beside it."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    if not mount(folder):
        unavailable("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=False)


def mount(folder: Path) -> bool:
    words = ["mount", "-o", "loop,errors=remount-ro", f"{folder}.img", str(folder)]
    return subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode == 0


def test_a_file_system_that_aborts_and_is_mounted_again_starts_nothing_twice(
    disk: Path, tmp_path: Path
) -> None:
    """What was not synced is gone then, without a reboot: the journal alone says what has begun."""
    home = Home(disk / "home")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, tmp_path)
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
    with pytest.raises(ClientError, match="is read-only"):
        batch.terminate_job(jobId=job_id, reason="it cannot be written")
    assert batch.describe_jobs(jobs=[job_id])["jobs"], "it is served all the same"

    server, task = home.holder(), home_task(batch, job_id)
    assert server is not None
    runner = int(read_json(str(home.attempt(task) / "runner.json"))["pid"])
    send([server, runner], signal.SIGKILL)
    while left := processes_of(home, task):
        send(left, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, (server, runner))), "all are dead")
    umounted = ["umount", str(disk)]
    wait_for(lambda: subprocess.run(umounted, check=False).returncode == 0, "nobody uses it")
    subprocess.run(["fsck.ext4", "-p", disk.with_suffix(".img")], check=False)
    assert mount(disk)
    try:
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
        job = wait_for_job(batch, job_id)
        assert job["statusReason"].startswith("Host EC2"), "it may have begun"
        assert len(pids(tmp_path)) == 1
    finally:
        control.stop_server(home, CLOCK)


def home_task(batch: Any, job_id: str) -> str:
    (job,) = batch.describe_jobs(jobs=[job_id])["jobs"]
    return str(job["container"]["taskArn"]).rpartition("/")[2]
