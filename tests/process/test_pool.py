"""Runners that are used again, seen through a server: none is needed twice, none is missed."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.executors import cgroup
from batchml.local.executors.runner.files import AttemptLog, LogDigest
from batchml.local.executors.supervisor import NO_EVIDENCE, RUNNER_LOST
from batchml.local.home import Home, ServerEndpoint
from batchml.local.reset import forget
from batchml.model.logcheck import HEADER, parse_header
from batchml.runtime.processes import send, start_time
from batchml.runtime.storage.files import read_json
from tests.process.test_processes import is_alive
from tests.support.local_server import (
    client_for,
    define,
    processes_of,
    reboot,
    wait_for,
    wait_for_job,
)

CLOCK = SystemClock()
UNTIL_TOLD = 'while [ ! -e "$GO" ]; do sleep 0.02; done; exit 3'


@pytest.fixture
def tidy(home: Home) -> Iterator[Home]:
    yield home
    kill_server(home)
    for folder in home.attempts.glob("*"):
        while left := processes_of(home, folder.name):
            send(left, signal.SIGKILL)


def kill_server(home: Home) -> None:
    pid = home.holder()
    if pid is not None and home.is_held():
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not home.is_held(), "the killed server is gone")


def submit(batch: Any, definition: str, **env: str) -> str:
    given = [{"name": name, "value": value} for name, value in env.items()]
    made = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=definition,
        containerOverrides={"environment": given},
    )  # fmt: skip
    return str(made["jobId"])


def records(home: Home) -> list[dict[str, Any]]:
    return [dict(read_json(str(folder / "exit.json"))) for folder in home.attempts.iterdir()]


def runners(home: Home) -> list[int]:
    """The pids of all runners of a state folder's server."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if any(b"executors.runner" in word for word in words) and int(stat[1]) == home.holder():
            found.append(int(entry.name))
    return found


@pytest.mark.journey
def test_jobs_one_after_the_other_share_one_runner(batch: Any, home: Home) -> None:
    definition = define(batch, ["true"])
    for _ in range(5):
        wait_for_job(batch, submit(batch, definition))
    assert len({record["pid"] for record in records(home)}) == 1
    assert len(runners(home)) == 1


def test_a_runner_killed_while_idle_is_replaced_and_no_job_notices(batch: Any, home: Home) -> None:
    definition = define(batch, ["true"])
    wait_for_job(batch, submit(batch, definition))
    (runner,) = runners(home)
    os.kill(runner, signal.SIGKILL)
    # At once: the server may not have heard of it yet.
    job = wait_for_job(batch, submit(batch, definition))
    assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)


def test_an_attempt_that_a_dying_runner_has_not_taken_in_is_given_to_another(
    batch: Any, home: Home
) -> None:
    definition = define(batch, ["true"])
    wait_for_job(batch, submit(batch, definition))
    (runner,) = runners(home)
    os.kill(runner, signal.SIGSTOP)
    job_id = submit(batch, definition)
    wait_for_job(batch, job_id, "STARTING")
    os.kill(runner, signal.SIGKILL)
    job = wait_for_job(batch, job_id)
    assert (job["status"], len(job["attempts"])) == ("SUCCEEDED", 1)


def test_a_killed_runner_loses_its_own_attempt_alone(
    batch: Any, home: Home, tmp_path: Path
) -> None:
    definition = define(batch, ["sh", "-c", UNTIL_TOLD])
    jobs = [submit(batch, definition, GO=str(tmp_path / "go")) for _ in range(2)]
    for job_id in jobs:
        wait_for_job(batch, job_id, "RUNNING")
    first = batch.describe_jobs(jobs=jobs[:1])["jobs"][0]["container"]["taskArn"]
    record = read_json(str(home.attempt(first.rpartition("/")[2]) / "runner.json"))
    os.kill(record["pid"], signal.SIGKILL)
    assert wait_for_job(batch, jobs[0])["statusReason"] == RUNNER_LOST
    assert not any(map(os.path.isdir, record["groups"])) or wait_for(
        lambda: not any(map(os.path.isdir, record["groups"])), "its slot is gone"
    )
    (tmp_path / "go").touch()
    assert wait_for_job(batch, jobs[1])["container"]["exitCode"] == 3


def test_idle_runners_end_with_a_killed_server_and_busy_ones_after_their_attempt(
    tidy: Home, tmp_path: Path
) -> None:
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    definition = define(batch, ["sh", "-c", UNTIL_TOLD])
    go = tmp_path / "first"
    jobs = [
        submit(batch, definition, GO=str(go)),
        submit(batch, definition, GO=str(tmp_path / "go")),
    ]
    for job_id in jobs:
        wait_for_job(batch, job_id, "RUNNING")
    pids = runners(home)
    go.touch()
    wait_for_job(batch, jobs[0])
    kill_server(home)
    wait_for(lambda: sum(map(is_alive, pids)) == 1, "the idle one ends")
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    (tmp_path / "go").touch()
    assert wait_for_job(batch, jobs[1])["container"]["exitCode"] == 3
    wait_for(lambda: not any(map(is_alive, pids)), "so does the other")
    folders = {path for record in records(home) for path in record["groups"]}
    wait_for(lambda: not any(map(os.path.isdir, folders)), "their slots are gone")


def test_an_orphan_that_forgot_everything_dies_with_its_runner_and_server(
    tidy: Home, tmp_path: Path
) -> None:
    if not cgroup.find(tmp_path.name):
        pytest.skip("control groups may not be written here")
    cgroup.remove(list(cgroup.find(tmp_path.name).values()))
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    pids = tmp_path / "pids"
    # The parent of the one that has cleared its environment ends, so no tag leads to it.
    script = (
        f"""setsid sh -c 'env -i sh -c "echo \\$\\$ >> {pids}; exec sleep 300" & :' & sleep 300"""
    )
    job_id = submit(batch, define(batch, ["sh", "-c", script]))
    orphan = int(wait_for(lambda: pids.exists() and pids.read_text(), "the orphan lives"))
    wait_for_job(batch, job_id, "RUNNING")
    (attempt,) = home.attempts.iterdir()
    kill_server(home)
    os.kill(read_json(str(attempt / "runner.json"))["pid"], signal.SIGKILL)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    assert wait_for_job(batch, job_id)["statusReason"] == RUNNER_LOST
    assert not is_alive(orphan)


def test_what_forgot_everything_dies_with_a_reset_and_the_slots_are_gone(
    tidy: Home, tmp_path: Path
) -> None:
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    pids = tmp_path / "pids"
    script = f"setsid env -i sh -c 'echo $$ >> {pids}; exec sleep 300' & sleep 300"
    wait_for_job(batch, submit(batch, define(batch, ["sh", "-c", script])), "RUNNING")
    orphan = int(wait_for(lambda: pids.exists() and pids.read_text(), "the orphan lives"))
    groups = read_json(str(home.groups)) or {}
    kill_server(home)
    assert forget(home, CLOCK) == 1
    assert not is_alive(orphan)
    left = [folder for folder in groups.values() if os.path.isdir(folder)]
    assert left == [] or list(groups) == ["all"]


def test_a_record_of_a_pid_that_is_somebody_elses_by_now_is_a_lost_runner(
    tidy: Home, tmp_path: Path
) -> None:
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sh", "-c", UNTIL_TOLD]), GO=str(tmp_path / "go"))
    wait_for_job(batch, job_id, "RUNNING")
    (attempt,) = home.attempts.iterdir()
    kill_server(home)
    record = read_json(str(attempt / "runner.json"))
    os.kill(record["pid"], signal.SIGKILL)
    wait_for(lambda: not is_alive(record["pid"]), "the runner is dead")
    # As if its pid had come round, to this very test.
    assert start_time(os.getpid()) != record["start_time"]
    (attempt / "runner.json").write_text(json.dumps({**record, "pid": os.getpid()}))
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    assert wait_for_job(batch, job_id)["statusReason"] == RUNNER_LOST
    assert processes_of(home, attempt.name) == []


def test_after_a_power_cut_an_attempt_without_a_record_is_a_lost_host(tidy: Home) -> None:
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    job_id = submit(batch, define(batch, ["sleep", "300"]))
    wait_for_job(batch, job_id, "RUNNING")
    (attempt,) = home.attempts.iterdir()
    kill_server(home)
    os.kill(read_json(str(attempt / "runner.json"))["pid"], signal.SIGKILL)
    while left := processes_of(home, attempt.name):
        send(left, signal.SIGKILL)
    (attempt / "runner.json").write_bytes(b"")  # it was never on disk
    reboot(home)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    assert wait_for_job(batch, job_id)["statusReason"] == NO_EVIDENCE


def test_a_log_that_is_only_in_the_journal_is_whole_after_a_power_cut(tidy: Home) -> None:
    """A longer file is not what a power cut leaves: it stays."""
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    definition = define(batch, ["true"])
    jobs = [submit(batch, definition, BATCHML_KEY="k") for _ in range(5)]
    ended = [wait_for_job(batch, job_id)["attempts"][0] for job_id in jobs]
    streams = [attempt["container"]["logStreamName"] for attempt in ended]
    files = [home.attempt(stream.rpartition("/")[2]) / "log" for stream in streams]
    texts = [file.read_bytes() for file in files]
    kill_server(home)
    files[0].unlink()
    shutil.rmtree(files[1].parent)
    files[2].write_bytes(b"")
    files[3].write_bytes(bytes(20))
    files[4].write_bytes(b"9" * 600)
    reboot(home)

    logs = client_for(home, control.ensure_server(home, CLOCK), "logs")
    group = "/aws/batch/job"
    found = logs.filter_log_events(logGroupName=group, startTime=1)["events"]
    assert {event["logStreamName"] for event in found} == set(streams[:4])
    described = logs.describe_log_streams(logGroupName=group)["logStreams"]
    assert sum("lastEventTimestamp" in stream for stream in described) == 4
    assert [file.read_bytes() for file in files] == [*texts[:4], b"9" * 600]
    assert all(b"::batchml end code=0" in text for text in texts)
    for stream in streams[:4]:
        page = logs.get_log_events(logGroupName=group, logStreamName=stream, startFromHead=True)
        check = parse_header(page["ResponseMetadata"]["HTTPHeaders"][HEADER])
        assert check is not None and check.is_complete


def test_a_record_that_survived_a_power_cut_brings_its_log_back(tidy: Home) -> None:
    home = tidy
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    go = home.root.parent / "go"
    job_id = submit(batch, define(batch, ["sh", "-c", f"until [ -e {go} ]; do sleep 0.02; done"]))
    wait_for_job(batch, job_id, "RUNNING")
    (folder,) = home.attempts.iterdir()
    kill_server(home)
    go.touch()
    wait_for((folder / "exit.json").exists, "the attempt has ended")
    record, text = read_json(str(folder / "exit.json")), "1 ::batchml host x\n"
    digest = LogDigest()
    digest.add(text.encode(), 1)
    record["log"] = {**digest.proof(), "text": text}
    (folder / "exit.json").write_text(json.dumps(record))
    reboot(home)
    batch = client_for(home, control.ensure_server(home, CLOCK), "batch")
    assert wait_for_job(batch, job_id)["status"] == "SUCCEEDED"
    assert (folder / "log").read_text() == text


def test_output_that_a_killed_runner_has_written_is_synced_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"1 printed\n")
    folder = os.open(tmp_path, os.O_PATH)
    try:
        assert AttemptLog(folder, lambda: None).must_persist
    finally:
        os.close(folder)


def test_a_stop_at_any_moment_of_a_reused_runner_ends_its_own_attempt_alone(
    batch: Any, server: ServerEndpoint
) -> None:
    sleeps, ends = define(batch, ["sleep", "300"]), define(batch, ["true"], name="ends")
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        stopped = submit(batch, sleeps)
        CLOCK.sleep(delay)
        batch.terminate_job(jobId=stopped, reason="enough")
        after = submit(batch, ends)
        assert wait_for_job(batch, stopped, limit=10)["statusReason"] == "enough"
        assert wait_for_job(batch, after)["status"] == "SUCCEEDED"


def test_an_array_of_jobs_uses_as_many_runners_as_there_is_room_for(batch: Any, home: Home) -> None:
    definition = define(batch, ["sh", "-c", "echo $BATCHML_RUN"])
    jobs = [submit(batch, definition) for _ in range(40)]
    for job_id in jobs:
        assert wait_for_job(batch, job_id)["status"] == "SUCCEEDED"
    assert len({record["pid"] for record in records(home)}) <= (os.cpu_count() or 1) + 1
    for job_id in jobs:
        # A folder that a job did not use may have become another's.
        assert not list((home.runs / job_id).glob("*/*"))


def test_a_job_that_a_retry_follows_keeps_its_folders(batch: Any, home: Home) -> None:
    script = 'ls -d "$BATCHML_CHECKPOINT_DIR" "$BATCHML_OUTPUT_DIR" || exit 9; exit 1'
    made = batch.submit_job(
        jobName="j", jobQueue="default", jobDefinition=define(batch, ["sh", "-c", script]),
        retryStrategy={"attempts": 3},
    )  # fmt: skip
    job = wait_for_job(batch, made["jobId"])
    assert [tried["container"]["exitCode"] for tried in job["attempts"]] == [1, 1, 1]


def test_the_limits_of_an_attempt_are_named_in_its_first_line(batch: Any, logs: Any) -> None:
    ours = {"environment": [{"name": "BATCHML_PARAMS", "value": "{}"}]}
    job = wait_for_job(batch, submit(batch, define(batch, ["true"], container=ours)))
    found = logs.get_log_events(
        logGroupName="/aws/batch/job", logStreamName=job["container"]["logStreamName"]
    )
    (line,) = [event["message"] for event in found["events"]]
    assert line.startswith("::batchml host executor=process image=any limits=")
