"""Failures rehearsed with a real server and real jobs: docs/behaviours.md B200-B213."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from batchml.clock import SystemClock
from batchml.errors import StateFolderBusy
from batchml.local import control
from batchml.local.home import Home, ServerEndpoint
from batchml.local.reset import kill_attempts
from tests.support.cli import Cli, write_job
from tests.support.local_server import (
    client_for,
    define,
    identity_of,
    processes_of,
    wait_for,
    wait_for_job,
)

CLOCK = SystemClock()
# Runs with this machine's programs.
JOB = 'image = "docker.io/library/alpine:3"\ncommand = ["true"]\ncode = false\n'
HOST_LOST = re.compile(r"Host EC2 \(instance i-[0-9a-f]{17}\) terminated\.")
SPOT_RULES = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}
# The first attempt waits for what comes, and says what it hears.
FIRST_WAITS = """
trap 'echo heard TERM; exit 143' TERM
echo attempt $AWS_BATCH_JOB_ATTEMPT
[ $AWS_BATCH_JOB_ATTEMPT -gt 1 ] || { sleep 300 & wait; }
"""


def start(home: Home, words: str) -> ServerEndpoint:
    return control.start_server(home, CLOCK, options=[f"--chaos={words}"])


def submit(batch: Any, script: str = "true", **more: Any) -> str:
    definition = define(batch, ["sh", "-c", script])
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition, **more)
    return str(made["jobId"])


def log_of(home: Home, endpoint: ServerEndpoint, attempt: dict[str, Any]) -> list[str]:
    found = client_for(home, endpoint, "logs").get_log_events(
        logGroupName="/aws/batch/job",
        logStreamName=attempt["container"]["logStreamName"],
        startFromHead=True,
    )
    return [event["message"] for event in found["events"] if "::batchml" not in event["message"]]


def kill_server(home: Home) -> None:
    pid = home.holder()
    if pid is not None and home.is_held():
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not home.is_held(), "the killed server is gone")


@pytest.fixture
def stopped(home: Home) -> Iterator[Home]:
    """A state folder without a server, where no attempt outlives the test."""
    yield home
    kill_server(home)
    kill_attempts(home, identity_of(home), CLOCK)


@pytest.mark.journey
def test_a_job_that_loses_its_host_goes_on_elsewhere(stopped: Home) -> None:
    """B200, B202: with the rules for spot that AWS recommends."""
    endpoint = start(stopped, "host-lost@1s")
    batch = client_for(stopped, endpoint, "batch")
    job_id = submit(batch, FIRST_WAITS, retryStrategy=SPOT_RULES)
    job = wait_for_job(batch, job_id)
    assert job["status"] == "SUCCEEDED"
    first, second = job["attempts"]
    assert HOST_LOST.fullmatch(first["statusReason"])
    assert "exitCode" not in first["container"]
    assert "reason" not in first["container"]
    assert first["stoppedAt"] - first["startedAt"] >= 1000
    assert second["container"]["exitCode"] == 0
    assert second["statusReason"] == "Essential container in task exited"
    assert log_of(stopped, endpoint, first) == [
        "attempt 1",
        "batchml: injected fault: host-lost@1s",
    ]
    assert log_of(stopped, endpoint, second) == ["attempt 2"]
    assert not processes_of(stopped, first["container"]["taskArn"].rpartition("/")[2])
    assert f"chaos: host-lost@1s for {job_id}" in stopped.log.read_text()


def test_a_reclaim_is_announced_by_TERM(stopped: Home) -> None:
    """B203."""
    endpoint = start(stopped, "spot")
    batch = client_for(stopped, endpoint, "batch")
    job = wait_for_job(batch, submit(batch, FIRST_WAITS, retryStrategy=SPOT_RULES))
    first, _ = job["attempts"]
    assert job["status"] == "SUCCEEDED"
    assert HOST_LOST.fullmatch(first["statusReason"])
    assert log_of(stopped, endpoint, first) == ["attempt 1", "heard TERM"]


def test_a_job_that_is_killed_for_memory_says_so(stopped: Home) -> None:
    """B204: the rules for spot do not bring it back."""
    endpoint = start(stopped, "oom@1s")
    batch = client_for(stopped, endpoint, "batch")
    job = wait_for_job(batch, submit(batch, FIRST_WAITS, retryStrategy=SPOT_RULES))
    assert job["status"] == "FAILED"
    assert job["container"]["exitCode"] == 137
    assert job["container"]["reason"] == "OutOfMemoryError: Container killed due to memory usage"
    assert len(job["attempts"]) == 1
    assert log_of(stopped, endpoint, job["attempts"][0])[0] == "attempt 1"


def test_throttled_calls_are_typed_and_clients_that_try_again_survive(stopped: Home) -> None:
    """B208."""
    import boto3
    from botocore.config import Config

    endpoint = start(stopped, "throttle=40%, seed=7")
    batch, logs = (client_for(stopped, endpoint, name) for name in ("batch", "logs"))
    said = set()
    accepted = 0
    for _ in range(40):
        try:
            batch.describe_job_queues()
            accepted += 1
            logs.describe_log_groups()
        except ClientError as error:
            answer = error.response
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            said.add((status, answer["Error"]["Code"], answer["Error"]["Message"]))
    assert said == {
        (429, "TooManyRequestsException", "Too Many Requests"),
        (400, "ThrottlingException", "Rate exceeded"),
    }
    assert 10 < accepted < 35
    keys = stopped.keys()
    patient = boto3.client(
        "batch", region_name="us-east-1", endpoint_url=endpoint.url,
        aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key,
        config=Config(retries={"total_max_attempts": 20, "mode": "standard"}),
    )  # fmt: skip
    jobs = [submit(patient) for _ in range(3)]
    assert [wait_for_job(patient, job_id)["status"] for job_id in jobs] == ["SUCCEEDED"] * 3
    listed = patient.list_jobs(jobQueue="default", filters=[{"name": "JOB_NAME", "values": ["j"]}])[
        "jobSummaryList"
    ]
    assert {job["jobId"] for job in listed} == set(jobs), "none was submitted twice"


def test_batchml_survives_throttling(stopped: Home, cli: Cli) -> None:
    """B208: a command that follows a run goes on, however often it is put off."""
    cli("local", "start", "--chaos", "throttle=20%, seed=1")
    write_job(cli.folder, "t", JOB)
    done = cli("submit", "--wait", "t", "--", "sh", "-c", "echo hello; sleep 2")
    assert done.code == 0, done.err
    assert "hello" in done.out
    assert done.out.endswith("SUCCEEDED\n")


@pytest.mark.journey
def test_without_capacity_jobs_wait_and_say_why(stopped: Home) -> None:
    """B210."""
    batch = client_for(stopped, start(stopped, "no-capacity=3s"), "batch")
    first, second = submit(batch), submit(batch)
    job = wait_for_job(batch, first, "RUNNABLE", "SUCCEEDED")
    assert job["statusReason"] == (
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested "
        "for instance type [optimal]"
    )
    for job_id in (first, second):
        job = wait_for_job(batch, job_id)
        assert (job["status"], job["container"]["exitCode"]) == ("SUCCEEDED", 0)


def test_a_tag_rehearses_one_run_on_any_server(stopped: Home, cli: Cli) -> None:
    """B205: the words pass AWS's rules for tags as well."""
    words = "host-lost@1s oom"
    assert re.fullmatch(r"[\w +\-=._:/@]*", words, re.ASCII)
    write_job(cli.folder, "t", JOB)
    done = cli(
        "submit", "--wait", "t", "--attempts", "3", "--retry-on", "host-lost",
        "--tag", f"batchml:chaos={words}", "--", "sh", "-c", "sleep 60",
    )  # fmt: skip
    assert done.code == 137, done.err
    assert "batchml: injected fault: host-lost@1s" in done.out
    assert "batchml: injected fault: oom" in done.out
    wrong = cli("submit", "t", "--tag", "batchml:chaos=ooom")
    assert wrong.code == 1
    assert "Did you mean 'oom'?" in wrong.err


def test_a_server_that_was_started_again_strikes_once(stopped: Home) -> None:
    """B207: its attempts go on in the care of others' runners."""
    batch = client_for(stopped, control.ensure_server(stopped, CLOCK), "batch")
    tags = {"batchml:chaos": "host-lost@3s"}
    job_id = submit(batch, FIRST_WAITS, retryStrategy=SPOT_RULES, tags=tags)
    wait_for_job(batch, job_id, "RUNNING")
    kill_server(stopped)
    batch = client_for(stopped, control.ensure_server(stopped, CLOCK), "batch")
    job = wait_for_job(batch, job_id)
    assert [bool(HOST_LOST.fullmatch(tried["statusReason"])) for tried in job["attempts"]] == [
        True, False,
    ]  # fmt: skip
    assert job["status"] == "SUCCEEDED"


def test_a_server_that_is_killed_as_it_strikes_has_struck(stopped: Home) -> None:
    """B207: it is on disk before anything is killed."""
    endpoint = start(stopped, "host-lost@1s")
    batch = client_for(stopped, endpoint, "batch")
    job_id = submit(batch, FIRST_WAITS, retryStrategy=SPOT_RULES)
    wait_for(lambda: "for " + job_id in stopped.log.read_text(), "it strikes")
    kill_server(stopped)
    batch = client_for(stopped, control.ensure_server(stopped, CLOCK), "batch")
    job = wait_for_job(batch, job_id)
    assert job["status"] == "SUCCEEDED"
    assert len(job["attempts"]) == 2
    assert HOST_LOST.fullmatch(job["attempts"][0]["statusReason"])


# --- the command --------------------------------------------------------------------------------


def test_the_server_says_that_it_rehearses_and_the_next_does_not(stopped: Home, cli: Cli) -> None:
    """B211, B212."""
    started = cli("local", "start", "--chaos", "host-lost@60s,throttle=1%", "--json").json
    assert re.fullmatch(r"host-lost@1m, throttle=1%, seed=[0-9]+", started["chaos"])
    shown = cli("local", "status", "--json").json
    del shown["disk"]
    assert shown == started
    assert f"Injects failures until it stops: {started['chaos']}\n" in cli("local", "status").out
    assert f"chaos: {started['chaos']}\n" in stopped.log.read_text()
    again = cli("local", "start", "--chaos", "oom")
    assert again.code == 1
    assert "batchml local stop" in again.err
    cli("local", "stop")
    assert cli("local", "start", "--json").json.keys() == {
        "state",
        "pid",
        "endpoint",
        "executor",
        "home",
    }


def test_a_mistake_is_told_before_a_server_starts(stopped: Home, cli: Cli) -> None:
    """B213."""
    shown = cli("local", "start", "--chaos", "host-lots@60s, throttle=2")
    assert shown.code == 2
    assert "--chaos: 2 mistakes, no server was started." in shown.err
    assert "Did you mean 'host-lost'?" in shown.err
    assert "throttle=20%" in shown.err
    assert cli("local", "status").code == 1
    assert not stopped.log.exists()


def test_who_asks_for_failures_never_gets_somebody_else_s_server(stopped: Home) -> None:
    control.ensure_server(stopped, CLOCK)
    with pytest.raises(StateFolderBusy):
        start(stopped, "oom")


def test_the_text_is_no_other_option(stopped: Home, cli: Cli) -> None:
    shown = cli("local", "start", "--chaos=--home")
    assert shown.code == 2
    assert not os.listdir(stopped.local / "attempts")
