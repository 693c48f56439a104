"""A server or a runner that is killed at a chosen moment. At random ones: test_kill9_rounds.py."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.executors.supervisor import NO_EVIDENCE, RUNNER_LOST
from batchml.local.home import Home
from batchml.runtime.processes import send
from batchml.runtime.storage.files import read_json
from tests.process.test_processes import is_alive
from tests.support.local_server import client_for, define, processes_of, wait_for, wait_for_job

CLOCK = SystemClock()
LINES = 40  # of a job's output

# Appends its pid to a file named after its job: a second start would be a second line.
JOB = r"""
echo $$ >> "$STARTS/$AWS_BATCH_JOB_ID"
i=0
while [ $i -lt $COUNT ]; do echo "line $i"; i=$((i+1)); [ $((i % 10)) -ne 0 ] || sleep $NAP; done
exit $CODE
"""

UNTIL_TOLD = r"""
echo $$ >> "$STARTS/$AWS_BATCH_JOB_ID"
i=0
while [ ! -e "$STARTS/go" ]; do echo "line $i"; i=$((i+1)); sleep 0.01; done
echo $i > "$STARTS/lines"; exit 5
"""


@pytest.fixture
def started(home: Home, tmp_path: Path) -> Iterator[Path]:
    """The folder where jobs write down that they have started. No attempt outlives the test."""
    folder = tmp_path / "starts"
    folder.mkdir()
    yield folder
    kill_server(home)
    for attempt in home.attempts.iterdir():
        runner = read_json(str(attempt / "runner.json"))
        if runner and not (attempt / "exit.json").exists():
            send([runner["pid"]], signal.SIGKILL)
        while left := processes_of(home, attempt.name):
            send(left, signal.SIGKILL)


def kill_server(home: Home) -> None:
    """kill -9, and wait until the kernel has let go of the folder."""
    pid = home.holder()
    if pid is not None and home.is_held():
        os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda: home.holder() != pid or not home.is_held(),  # somebody may start the next one
            "the killed server is gone",
        )


def submit(batch: Any, definition: str, starts: Path, **more: Any) -> str:
    given = {"STARTS": str(starts), "COUNT": str(LINES), "NAP": "0.02", "CODE": "0"}
    environment = {**given, **more.pop("env", {})}
    made = batch.submit_job(
        jobName=more.pop("name", "j"),
        jobQueue="default",
        jobDefinition=definition,
        containerOverrides={
            "environment": [{"name": key, "value": value} for key, value in environment.items()]
        },
        **more,
    )
    return str(made["jobId"])


def output(logs: Any, job: dict[str, Any], stream: str = "") -> list[str]:
    """The output of a job's last attempt, or of that with another stream, without our lines."""
    found = logs.get_log_events(
        logGroupName="/aws/batch/job",
        logStreamName=stream or job["container"]["logStreamName"],
        startFromHead=True,
    )
    lines = [event["message"] for event in found["events"]]
    ours = ("::batchml ", "batchml: ", "batchml notice: ")
    return [line for line in lines if not line.startswith(ours)]


@pytest.mark.parametrize("end", ["killed", "stopped"])
@pytest.mark.journey
def test_a_running_job_does_not_notice_the_end_of_its_server(
    home: Home, started: Path, end: str
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", UNTIL_TOLD]), started)
    pid = int(wait_for(lambda: _text(started / job_id), "the job has started"))
    for _ in range(2):
        if end == "killed":
            kill_server(home)
        else:
            assert control.stop_server(home, CLOCK)
        assert is_alive(pid)
        endpoint = control.ensure_server(home, CLOCK)
        batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
        found = batch.describe_jobs(jobs=[job_id])["jobs"][0]
        assert found["status"] in ("STARTING", "RUNNING")
    (started / "go").touch()
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 5)
    assert job["statusReason"] == "Essential container in task exited"
    assert int(_text(started / job_id)) == pid
    lines = output(logs, job)
    assert lines == [f"line {number}" for number in range(len(lines))]
    assert len(lines) == int(_text(started / "lines"))


def test_a_program_keeps_no_dead_servers_that_it_started(home: Home) -> None:
    first = control.ensure_server(home, SystemClock()).pid
    kill_server(home)
    second = control.ensure_server(home, SystemClock()).pid
    assert first != second
    assert not Path(f"/proc/{first}").exists()


def test_a_job_that_fits_only_into_the_next_server_is_prepared_once(
    home: Home, started: Path
) -> None:
    one = control.start_server(home, CLOCK, options=("--vcpus", "1"))
    batch = client_for(home, one, "batch")
    definition = define(batch, ["sh", "-c", UNTIL_TOLD])
    first, second = (submit(batch, definition, started) for _ in range(2))
    wait_for(lambda: _text(started / first), "the first job has started")
    kill_server(home)
    two = control.start_server(home, CLOCK, options=("--vcpus", "2"))
    wait_for(lambda: _text(started / second), "the second job has started")
    (started / "go").touch()
    batch = client_for(home, two, "batch")
    for job_id in (first, second):
        assert wait_for_job(batch, job_id)["container"]["exitCode"] == 5
    assert len(list(home.attempts.iterdir())) == 2


@pytest.mark.journey
def test_a_job_that_ended_while_no_server_lived_is_recorded_at_the_next_start(
    home: Home, started: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", JOB]), started, env={"CODE": "7"})
    wait_for(lambda: _text(started / job_id), "the job has started")
    kill_server(home)
    (attempt,) = home.attempts.iterdir()
    wait_for((attempt / "exit.json").exists, "the job ends without a server")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("FAILED", 7)
    assert job["stoppedAt"] == read_json(str(attempt / "exit.json"))["stopped_at"]


def test_a_job_that_nothing_is_left_of_is_lost_and_not_started_again(
    home: Home, started: Path
) -> None:
    """A missing file is no evidence that a program never began: the journal has its start."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", JOB]), started, env={"NAP": "60"})
    wait_for(lambda: _text(started / job_id), "the job has started")
    kill_server(home)
    (attempt,) = home.attempts.iterdir()
    _kill_runner(attempt)
    while left := processes_of(home, attempt.name):
        send(left, signal.SIGKILL)
    shutil.rmtree(attempt)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", NO_EVIDENCE)
    assert len(job["attempts"]) == 1
    assert _text(started / job_id).count("\n") == 1


@pytest.mark.parametrize("server_dies_too", [False, True])
@pytest.mark.journey
def test_a_killed_runner_takes_its_tree_along_and_the_job_fails_as_if_its_host_had(
    home: Home, started: Path, tmp_path: Path, server_dies_too: bool
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    script = """setsid env -i sh -c 'echo $$ >> "$0"; exec sleep 300' "$PIDS" &
        echo $$ >> "$PIDS"; sleep 300"""
    pids = tmp_path / "pids"
    env = {"PIDS": str(pids)}
    job_id = submit(batch, define(batch, ["sh", "-c", script]), started, env=env)
    wait_for(lambda: _text(pids).count("\n") == 2, "the tree is there")
    wait_for_job(batch, job_id, "RUNNING")
    (attempt,) = home.attempts.iterdir()
    if server_dies_too:
        kill_server(home)
        _kill_runner(attempt)
        batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    else:
        _kill_runner(attempt)
    job = wait_for_job(batch, job_id)
    assert not any(is_alive(int(pid)) for pid in _text(pids).split())
    assert (job["status"], job["statusReason"]) == ("FAILED", RUNNER_LOST)
    assert job["statusReason"].startswith("Host EC2")
    assert "exitCode" not in job["container"]
    assert ["exitCode" in tried["container"] for tried in job["attempts"]] == [False]


def test_a_job_whose_runner_was_killed_is_retried_when_its_strategy_says_so(
    home: Home, started: Path
) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    script = 'echo $$ >> "$STARTS/try"; [ $AWS_BATCH_JOB_ATTEMPT -gt 1 ] || sleep 300'
    rules = [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ]
    job_id = submit(
        batch, define(batch, ["sh", "-c", script]), started,
        retryStrategy={"attempts": 3, "evaluateOnExit": rules},
    )  # fmt: skip
    wait_for(lambda: _text(started / "try"), "the first try has started")
    (attempt,) = home.attempts.iterdir()
    _kill_runner(attempt)
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["container"]["exitCode"]) == ("SUCCEEDED", 0)
    assert [tried["statusReason"] for tried in job["attempts"]] == [
        RUNNER_LOST,
        "Essential container in task exited",
    ]


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.3])
def test_a_stop_that_was_acknowledged_is_carried_out_by_the_next_server(
    home: Home, started: Path, delay: float
) -> None:
    """The job may be anywhere on its way when the stop is asked for and the server is killed."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", JOB]), started, env={"NAP": "300"})
    CLOCK.sleep(delay)
    batch.terminate_job(jobId=job_id, reason="not needed")
    kill_server(home)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job = wait_for_job(batch, job_id, limit=15)
    assert (job["status"], job["statusReason"]) == ("FAILED", "not needed")
    assert not any(is_alive(int(pid)) for pid in _text(started / job_id).split())


def test_an_exit_record_that_is_not_one_counts_as_a_lost_runner(home: Home, started: Path) -> None:
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", UNTIL_TOLD]), started)
    wait_for(lambda: _text(started / job_id), "the job has started")
    kill_server(home)
    (started / "go").touch()
    (attempt,) = home.attempts.iterdir()
    wait_for((attempt / "exit.json").exists, "the job ends without a server")
    (attempt / "exit.json").write_bytes(bytes(100))
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job = wait_for_job(batch, job_id)
    assert (job["status"], job["statusReason"]) == ("FAILED", NO_EVIDENCE)


def test_what_runners_write_for_people_is_empty(home: Home, started: Path) -> None:
    """`runners.log` is where a runner's own mistakes would show."""
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    definition = define(batch, ["sh", "-c", JOB])
    jobs = [submit(batch, definition, started, env={"CODE": str(code)}) for code in (0, 1)]
    for job_id in jobs:
        wait_for_job(batch, job_id)
    assert (home.local / "runners.log").read_text() == ""
    assert not re.search("Traceback|ERROR", home.log.read_text())


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _kill_runner(attempt: Path) -> None:
    pid = int(read_json(str(attempt / "runner.json"))["pid"])
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), "the runner is dead")
