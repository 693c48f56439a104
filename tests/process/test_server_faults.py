"""A server in trouble says what is wrong, keeps what it has, and never answers with a traceback."""

import asyncio
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from botocore.exceptions import ClientError
from immutables import Map

from batchml.clock import SystemClock
from batchml.errors import (
    DiskFull,
    LocalServerError,
    StateDamaged,
    StateFolderBusy,
    StateFolderUnsafe,
)
from batchml.local import control
from batchml.local.batch import engine
from batchml.local.batch.core import Core
from batchml.local.batch.events import CallReceived
from batchml.local.batch.state import Job, JobAttempt, SubmittedSpec, empty_state
from batchml.local.home import Home, ServerEndpoint
from batchml.local.machine import MachineCapacity, Needs
from batchml.local.server.protocol import ApiError
from batchml.local.store.journal import Journal
from batchml.model.run import JobStatus
from batchml.runtime.storage.files import read_json, write_json
from tests.process.test_processes import is_alive
from tests.support.fault_world import fill_disk
from tests.support.local_server import client_for, define, wait_for, wait_for_job

CLOCK = SystemClock()
ONE_PARAGRAPH = re.compile(r"[^\n]+")


def kill_server(home: Home) -> None:
    pid = home.holder()
    if pid is not None and home.is_held():
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not home.is_held(), "the killed server is gone")


def run_daemon(home: Home, *options: str) -> subprocess.CompletedProcess[str]:
    """A server in the foreground that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "batchml.local.server.daemon", "--home", str(home.root), *options],
        capture_output=True,
        text=True,
        timeout=30,
    )


# --- who holds the folder ---------------------------------------------------------------------


def test_a_second_server_is_refused_and_names_the_first(home: Home, server: ServerEndpoint) -> None:
    with pytest.raises(StateFolderBusy, match=f"process {server.pid} runs") as caught:
        control.start_server(home, CLOCK, port=_free_port())
    assert caught.value.pid == server.pid
    done = run_daemon(home)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert f"process {server.pid} runs" in home.log.read_text()
    assert control.find_server(home) == server


def test_ten_clients_that_start_a_server_at_once_get_one(home: Home) -> None:
    with ThreadPoolExecutor(10) as pool:
        found = set(pool.map(lambda _: control.ensure_server(home, CLOCK), range(10)))
    assert found == {control.find_server(home)}
    assert home.log.read_text().count("serving on") == 1


def test_a_client_that_meets_a_stopping_server_gets_the_next_one(home: Home) -> None:
    """One that stops still holds the folder, but takes no connections any more."""
    lock = home.hold()
    home.write_endpoint(ServerEndpoint(os.getpid(), _free_port()))
    assert control.find_server(home)
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(control.ensure_server, home, CLOCK)
            wait_for(
                lambda: home.log.exists() and "is in use" in home.log.read_text(),
                "it has met the one that stops",
            )
            assert not asked.done()
        finally:
            (home.local / "endpoint.json").unlink()  # or the missing journal would be noticed
            os.close(lock)
        endpoint = asked.result(30)
    assert endpoint.pid != os.getpid()
    assert client_for(home, endpoint, "batch").describe_job_queues()["jobQueues"]


def test_stopping_twice_is_harmless(home: Home, server: ServerEndpoint) -> None:
    assert control.stop_server(home, CLOCK)
    wait_for(lambda: not is_alive(server.pid), "its process has ended")
    assert not control.stop_server(home, CLOCK)


def test_a_stop_signal_in_the_first_moment_is_an_orderly_end(home: Home) -> None:
    endpoint = control.start_server(home, CLOCK)
    os.kill(endpoint.pid, signal.SIGTERM)
    wait_for(lambda: not home.is_held(), "the server has let go")
    assert "stopped: by a signal" in home.log.read_text()


def test_a_relative_state_folder_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home(Path("here"))
    try:
        assert control.ensure_server(home, CLOCK) == control.find_server(Home(tmp_path / "here"))
    finally:
        kill_server(home)


# --- ports ------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Somebody else's server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def test_a_port_in_use_is_a_clear_error(home: Home, stranger: socket.socket) -> None:
    port = stranger.getsockname()[1]
    with pytest.raises(LocalServerError, match=f"Port {port} cannot be used: Address already"):
        control.start_server(home, CLOCK, port=port)
    assert control.find_server(home) is None


def test_a_port_that_is_bound_but_silent_is_in_use_too(home: Home) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LocalServerError, match=f"Port {port} cannot be used"):
            control.start_server(home, CLOCK, port=port)


def test_a_port_that_cannot_be_is_a_clear_error(home: Home) -> None:
    with pytest.raises(LocalServerError, match="Port 70000 cannot be used: there is no such port"):
        control.start_server(home, CLOCK, port=70_000)


def test_nobody_is_fooled_by_a_stranger_on_the_recorded_port(home: Home) -> None:
    first = control.ensure_server(home, CLOCK)
    kill_server(home)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", first.port))
        stranger.listen()
        assert control.find_server(home) is None
        second = control.ensure_server(home, CLOCK)
        assert second.port != first.port
        assert client_for(home, second, "batch").describe_job_queues()["jobQueues"]
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):  # nothing, let alone a signature, was sent to it
            stranger.accept()


def test_the_port_is_kept_over_a_restart(home: Home, server: ServerEndpoint) -> None:
    kill_server(home)
    assert control.ensure_server(home, CLOCK).port == server.port


# --- what lies in the folder ------------------------------------------------------------------


def test_a_folder_that_others_can_enter_is_refused_with_the_remedy(home: Home) -> None:
    home.root.chmod(0o755)
    with pytest.raises(StateFolderUnsafe, match=f"chmod 700 {home.root}"):
        control.start_server(home, CLOCK)
    home.root.chmod(0o700)
    control.start_server(home, CLOCK)


def test_keys_that_others_can_read_are_refused_with_the_remedy(home: Home) -> None:
    keys = home.keys()
    path = home.local / "keys.json"
    path.chmod(0o644)
    with pytest.raises(StateFolderUnsafe, match="Delete the file"):
        control.start_server(home, CLOCK)
    path.unlink()
    control.start_server(home, CLOCK)
    assert home.keys() != keys


@pytest.mark.parametrize("content", [b"", b"[]", b'{"access_key_id": 1}', bytes(20)])
def test_keys_that_are_not_keys_are_refused_with_the_remedy(home: Home, content: bytes) -> None:
    path = home.local / "keys.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(LocalServerError, match=r"keys\.json does not hold keys\. Delete the file"):
        control.start_server(home, CLOCK)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b'{"pid": 1, "port": "x"}', b'{"pid": 1, "port": 1}']
)
def test_a_dead_or_damaged_endpoint_file_is_passed_over(home: Home, content: bytes) -> None:
    control.ensure_server(home, CLOCK)
    control.stop_server(home, CLOCK)
    (home.local / "endpoint.json").write_bytes(content)
    assert control.find_server(home) is None
    endpoint = control.ensure_server(home, CLOCK)
    assert control.find_server(home) == endpoint


def test_a_left_over_lock_is_no_hindrance(home: Home) -> None:
    (home.local / "lock").write_text("999999999\n")
    assert control.find_server(home) is None
    assert control.ensure_server(home, CLOCK) == control.find_server(home)


def test_a_state_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalServerError, match="cannot be made: File exists"):
        control.ensure_server(Home(tmp_path / "file"), CLOCK)


def test_a_state_folder_that_no_path_variable_can_hold_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(LocalServerError, match=r"has ':' in its path.* Set BATCHML_HOME to a"):
        control.ensure_server(Home(tmp_path / "a:b"), CLOCK)
    assert not (tmp_path / "a:b").exists()


# --- the journal ------------------------------------------------------------------------------


def _flip(data: bytes) -> bytes:
    """Damage in the middle of every page but the first."""
    pages = [bytearray(data[at : at + 4096]) for at in range(0, len(data), 4096)]
    for page in pages[1:]:
        page[:64] = bytes(byte ^ 0xFF for byte in page[:64])
    return b"".join(pages)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: b"this was a journal once\n" * 200,
    "zeroed": lambda data: bytes(len(data)),
    "halved": lambda data: data[: len(data) // 2 // 512 * 512],
    "emptied": lambda data: b"",
    "flipped": _flip,
}


def _filled_journal(home: Home) -> None:
    """A journal of many pages, and no write-ahead log beside it."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    for number in range(8):
        define(batch, ["echo", "x" * 4000], name=f"d{number}")
    control.stop_server(home, CLOCK)
    assert home.journal.stat().st_size > 40_000
    assert not home.journal.with_name("journal.db-wal").exists()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_refused_and_its_bytes_are_kept(home: Home, damage: str) -> None:
    _filled_journal(home)
    home.journal.write_bytes(DAMAGES[damage](home.journal.read_bytes()))
    before = home.journal.read_bytes()
    for _ in range(2):
        with pytest.raises(StateDamaged, match="Nothing was changed") as caught:
            control.ensure_server(home, CLOCK)
        assert str(home.journal) in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert home.journal.read_bytes() == before
    assert control.find_server(home) is None


def test_a_journal_that_is_gone_is_not_taken_for_a_first_start(home: Home) -> None:
    _filled_journal(home)
    home.journal.unlink()
    with pytest.raises(StateDamaged, match="is gone or empty"):
        control.ensure_server(home, CLOCK)
    assert not home.journal.exists()


def test_a_journal_of_a_newer_batchml_is_refused_and_kept(home: Home) -> None:
    _filled_journal(home)
    with sqlite3.connect(home.journal) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    before = home.journal.read_bytes()
    with pytest.raises(LocalServerError, match=r"newer batchml \(format 999, .*Update batchml"):
        control.ensure_server(home, CLOCK)
    assert home.journal.read_bytes() == before


# --- a full disk ------------------------------------------------------------------------------


_PRINTS_UNTIL_TOLD = """
i=0
while [ ! -e "$GO" ]; do echo "line $i"; i=$((i+1)); sleep 0.01; done
echo "last $i"; exit 3
"""


def test_a_full_disk_refuses_new_work_and_loses_none(small_disk: Path, tmp_path: Path) -> None:
    home = Home(small_disk / "home")
    go = tmp_path / "go"
    try:
        endpoint = control.ensure_server(home, CLOCK)
        batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
        definition = define(batch, ["sh", "-c", _PRINTS_UNTIL_TOLD])
        submit: dict[str, Any] = {
            "jobName": "j",
            "jobQueue": "default",
            "jobDefinition": definition,
            "containerOverrides": {"environment": [{"name": "GO", "value": str(go)}]},
        }
        running = batch.submit_job(**submit)["jobId"]
        wait_for_job(batch, running, "RUNNING")
        filler = fill_disk(small_disk)

        refused = wait_for(lambda: _refusal(batch, submit), "a submission is refused")
        assert refused["Error"]["Code"] == "ServerException"
        assert refused["ResponseMetadata"]["HTTPStatusCode"] == 500
        assert "No space left to keep the journal" in refused["Error"]["Message"]
        assert "Traceback" not in refused["Error"]["Message"]
        assert batch.describe_jobs(jobs=[running])["jobs"][0]["status"] == "RUNNING"
        assert batch.describe_job_queues()["jobQueues"]

        go.touch()  # the job ends now, and its end has nowhere to go yet
        CLOCK.sleep(1.5)  # as long as it takes to try and fail, at least once
        assert batch.describe_jobs(jobs=[running])["jobs"][0]["status"] == "RUNNING"
        filler.unlink()
        job = wait_for_job(batch, running)
        assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 3)
        lines = [line for line in _output(logs, job) if not line.startswith("::batchml")]
        assert lines[:-1] == [f"line {number}" for number in range(len(lines) - 1)]
        assert lines[-1] == f"last {len(lines) - 1}"
        assert wait_for_job(batch, batch.submit_job(**submit)["jobId"])["status"] == "FAILED"
    finally:
        kill_server(home)


def _refusal(batch: Any, submit: dict[str, Any]) -> Any:
    try:
        batch.submit_job(**submit)
    except ClientError as error:
        return error.response
    return None


def _output(logs: Any, job: dict[str, Any]) -> list[str]:
    found = logs.get_log_events(
        logGroupName="/aws/batch/job",
        logStreamName=job["container"]["logStreamName"],
        startFromHead=True,
    )
    return [event["message"] for event in found["events"]]


def test_a_stop_reaches_a_job_that_waits_for_space(small_disk: Path) -> None:
    home = Home(small_disk / "home")
    try:
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
        definition = define(batch, ["sh", "-c", "while :; do echo line; done"])
        job_id = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)[
            "jobId"
        ]
        wait_for_job(batch, job_id, "RUNNING")
        (attempt,) = home.attempts.iterdir()
        fill_disk(small_disk)
        runner = read_json(str(attempt / "runner.json"))["pid"]
        threads = Path(f"/proc/{runner}/task").glob("*/children")
        (program,) = [pid for thread in threads for pid in thread.read_text().split()]
        os.kill(runner, signal.SIGTERM)
        wait_for(lambda: not is_alive(int(program)), "the program is ended", 15)
        (small_disk / "filler").unlink()
        job = wait_for_job(batch, job_id)
        assert job["container"]["exitCode"] in (128 + signal.SIGTERM, 128 + signal.SIGPIPE)
    finally:
        kill_server(home)


@pytest.mark.parametrize("used_before", [False, True])
def test_a_start_on_a_full_disk_is_a_clear_error(small_disk: Path, used_before: bool) -> None:
    home = Home(small_disk / "home")
    try:
        if used_before:
            control.ensure_server(home, CLOCK)
            control.stop_server(home, CLOCK)
        fill_disk(small_disk)
        with pytest.raises(LocalServerError, match=r"(?i)no space left") as caught:
            control.ensure_server(home, CLOCK)
        assert ONE_PARAGRAPH.fullmatch(str(caught.value))
        assert isinstance(caught.value, DiskFull)
        (small_disk / "filler").unlink()
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
        assert batch.describe_job_queues()["jobQueues"]
    finally:
        kill_server(home)


class _FullStore:
    """A journal with no space left, or with another trouble."""

    def __init__(self, trouble: Exception) -> None:
        self.trouble = trouble
        self.commits = 0

    def commit(self, effects: Any, calls: Any) -> None:
        self.commits += 1
        raise self.trouble


def _core_with_an_overdue_job(store: _FullStore) -> Core:
    attempt = JobAttempt(1, "t", "this-machine", (), "g", "s", started_at=0)
    spec = SubmittedSpec("j", "j", "default", "d:1", {}, Needs(1, 64), timeout=60)
    job = Job("j", spec, 1, status=JobStatus.RUNNING, attempt=attempt)
    state = msgspec.structs.replace(empty_state(MachineCapacity(1, 1024)), jobs=Map({"j": job}))
    return Core(engine.restore(state), cast(Journal, store), CLOCK)


def test_a_timeout_that_cannot_be_written_is_tried_again_without_haste() -> None:
    store = _FullStore(DiskFull("no space"))
    core = _core_with_an_overdue_job(store)

    async def for_a_while() -> None:
        loop = asyncio.create_task(core.run())
        await asyncio.sleep(1.2)
        core.close()
        await asyncio.wait_for(loop, 5)

    asyncio.run(for_a_while())
    assert 1 <= store.commits <= 4


def test_nobody_waits_for_a_core_that_has_failed() -> None:
    core = _core_with_an_overdue_job(_FullStore(StateDamaged("the journal is gone")))
    event = CallReceived("TerminateJob", {"jobId": "j", "reason": "r"}, 0, "id")

    async def ask() -> None:
        loop = asyncio.create_task(core.run())
        for _ in range(2):  # one in the round that fails, one after it
            with pytest.raises(ApiError, match="has failed and stops: the journal is gone"):
                await asyncio.wait_for(core.request(event), 5)
        with pytest.raises(StateDamaged):
            await loop

    asyncio.run(ask())


# --- mistakes of ours -------------------------------------------------------------------------


def test_a_failure_inside_is_a_server_exception_without_a_traceback(
    home: Home, server: ServerEndpoint, batch: Any
) -> None:
    """Here the journal loses a table under the running server."""
    with sqlite3.connect(home.journal) as db:
        db.execute("DROP TABLE calls")
    db.close()
    definition: dict[str, Any] = {"jobDefinitionName": "d", "type": "container"}
    definition["containerProperties"] = {"image": "any", "vcpus": 1, "memory": 64}
    with pytest.raises(ClientError) as caught:
        batch.register_job_definition(**definition)
    assert caught.value.response["Error"]["Code"] == "ServerException"
    assert not re.search(r"Traceback|File \"", str(caught.value))


@pytest.mark.parametrize("grace", ["abc", "", "-1", "9" * 5000, "²", "1e3"])
def test_a_variable_of_a_job_cannot_harm_the_server(
    home: Home, server: ServerEndpoint, batch: Any, grace: str
) -> None:
    job_id = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, ["true"]),
        containerOverrides={"environment": [{"name": "BATCHML_GRACE", "value": grace}]},
    )["jobId"]  # fmt: skip
    assert wait_for_job(batch, job_id)["status"] == "SUCCEEDED"
    assert control.find_server(home) == server


# --- idleness, and what a job sees ------------------------------------------------------------


def test_an_idle_server_ends_by_itself_and_everything_is_there_at_the_next_start(
    home: Home,
) -> None:
    first = control.start_server(home, CLOCK, idle=1)
    batch = client_for(home, first, "batch")
    script = "sleep 2; echo slept; exit 4"
    job_id = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, ["sh", "-c", script])
    )["jobId"]
    wait_for(lambda: not home.is_held(), "the idle server ends", 20)
    assert control.find_server(home) is None
    assert "stopped: idle" in home.log.read_text()
    (attempt,) = home.attempts.iterdir()
    assert (attempt / "exit.json").exists(), "not before its job had ended"
    endpoint = control.ensure_server(home, CLOCK)
    assert (endpoint.pid != first.pid, endpoint.port) == (True, first.port)
    batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
    job = batch.describe_jobs(jobs=[job_id])["jobs"][0]
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 4)
    assert "slept" in _output(logs, job)


def test_a_job_sees_no_secrets_of_the_server(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIAHUSHHUSH",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "AWS_SESSION_TOKEN": "hush-hush",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": "hush-hush",
        "SSH_AUTH_SOCK": "/hush-hush",
        "GITHUB_TOKEN": "hush-hush",
        "BATCHML_SECRET": "hush-hush",
        "PIP_INDEX_URL": "https://user:hush-hush@index",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LANG", "C.UTF-8")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    seen = tmp_path / "seen"
    command = ["sh", "-c", f"env -0 > {seen}; ls -l /proc/self/fd | wc -l"]
    job_id = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, command)
    )["jobId"]  # fmt: skip
    assert wait_for_job(batch, job_id)["status"] == "SUCCEEDED"
    pairs = [entry.partition("=") for entry in seen.read_text().split("\0") if entry]
    env = {name: value for name, _, value in pairs}
    # Two of these names are in use in a job, for keys of its own.
    assert secrets.keys() & env.keys() <= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert not {*secrets.values()} & {*env.values()}
    assert not re.search("hush-?hush", seen.read_text(), re.IGNORECASE)
    assert home.keys().secret_access_key not in seen.read_text()
    assert home.keys().access_key_id not in seen.read_text()
    assert (env["LANG"], env["AWS_BATCH_JOB_ID"]) == ("C.UTF-8", job_id)


def test_a_job_holds_no_file_of_the_server_or_its_runner_open(batch: Any, logs: Any) -> None:
    command = ["ls", "/proc/self/fd"]
    job_id = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, command)
    )["jobId"]  # fmt: skip
    lines = _output(logs, wait_for_job(batch, job_id))
    assert lines == ["0", "1", "2", "3"]  # the last is the folder that ls reads


def test_a_leftover_attempt_that_nobody_knows_is_no_hindrance(home: Home) -> None:
    stray = home.attempt("0" * 32)
    stray.mkdir()
    write_json(str(stray / "runner.json"), {"pid": 1, "start_time": 0, "boot_id": ""})
    assert control.ensure_server(home, CLOCK)
    shutil.rmtree(stray)
    assert control.find_server(home)
