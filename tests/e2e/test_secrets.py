"""Secrets of jobs, from the user's file and from AWS. docs/behaviours.md B220-B227."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.home import Home
from tests.process.test_kill9 import kill_server
from tests.support.cli import Cli
from tests.support.executor_rig import IMAGE, need_engine
from tests.support.local_server import client_for, define, wait_for_job

VALUE = "correct-horse-battery-staple-7f3a"
REGION = "eu-west-1"

# Prints what proves that it has them, and not what they are.
TELL = """
import hashlib, os
for name in sorted(os.environ):
    if name.startswith("S_"):
        print(name, hashlib.sha256(os.environ[name].encode()).hexdigest())
print("none of the user's" if "AWS_SESSION_TOKEN" not in os.environ else "leaked")
"""


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def keep(home: Home, name: str, text: str, mode: int = 0o600) -> None:
    path = home.root / name
    path.write_text(text)
    path.chmod(mode)


def serve(home: Home) -> tuple[Any, Any]:
    endpoint = control.ensure_server(home, SystemClock())
    return client_for(home, endpoint, "batch"), client_for(home, endpoint, "logs")


def submit(batch: Any, secrets: dict[str, str], command: list[str] | None = None) -> str:
    """A job with these secrets, by variable."""
    given = [{"name": name, "valueFrom": source} for name, source in secrets.items()]
    command = command or [sys.executable, "-c", TELL]
    definition = define(batch, command, container={"secrets": given})
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)
    return str(made["jobId"])


def printed(logs: Any, job: dict[str, Any]) -> list[str]:
    events = logs.get_log_events(
        logGroupName="/aws/batch/job", logStreamName=job["container"]["logStreamName"],
        startFromHead=True,
    )["events"]  # fmt: skip
    return [event["message"] for event in events if not event["message"].startswith("::batchml")]


def places_of(value: str, root: Path) -> list[str]:
    """The files below a folder that hold a value, its own place apart."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file()
        and not path.name.startswith("secrets.")
        and value.encode() in path.read_bytes()
    ]


def in_command_lines(value: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if value.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False


@pytest.mark.journey
def test_a_secret_of_the_users_file_reaches_the_program_and_no_other_place(home: Home) -> None:
    """(B220, B224)"""
    keep(home, "secrets.toml", f'wandb = "{VALUE}"\n"/team/db" = "second-{VALUE}"\n')
    batch, logs = serve(home)
    wait = [sys.executable, "-c", f"import time{TELL}import sys; sys.stdout.flush(); time.sleep(3)"]
    job_id = submit(batch, {"S_A": "wandb", "S_B": "/team/db"}, wait)
    running = wait_for_job(batch, job_id, "RUNNING")
    assert not in_command_lines(VALUE)
    assert places_of(VALUE, home.root) == []
    assert VALUE not in json.dumps(running, default=str)
    assert running["container"]["secrets"] == [
        {"name": "S_A", "valueFrom": "wandb"},
        {"name": "S_B", "valueFrom": "/team/db"},
    ]
    job = wait_for_job(batch, job_id)
    assert job["status"] == "SUCCEEDED"
    assert printed(logs, job)[:2] == [
        f"S_A {digest(VALUE)}",
        f"S_B {digest(f'second-{VALUE}')}",
    ]
    control.stop_server(home, SystemClock())
    assert places_of(VALUE, home.root) == []


def test_json_will_do_as_well(home: Home) -> None:
    """(B220)"""
    keep(home, "secrets.json", json.dumps({"wandb": VALUE}))
    batch, logs = serve(home)
    job = wait_for_job(batch, submit(batch, {"S_A": "wandb"}))
    assert printed(logs, job)[0] == f"S_A {digest(VALUE)}"


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (f'wandb = "{VALUE}"', 0o644, "others can read"),
        (f"wandb = {VALUE}", 0o600, "is not TOML (line 1)"),
        (f'wandb = ["{VALUE}"]', 0o600, "'wandb' is not text"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_ends_the_attempt_without_a_word_of_it(
    text: str, mode: int, why: str, home: Home
) -> None:
    """(B221, B223)"""
    keep(home, "secrets.toml", text, mode)
    batch, _ = serve(home)
    job = wait_for_job(batch, submit(batch, {"S_A": "wandb"}))
    assert (job["status"], job["statusReason"]) == ("FAILED", "Task failed to start")
    reason = job["container"]["reason"]
    assert reason.startswith("ResourceInitializationError: unable to pull secrets ")
    assert "S_A: wandb: " in reason
    assert why in reason or len(reason) == 255
    assert "exitCode" not in job["container"]
    assert VALUE not in json.dumps(job, default=str)
    assert places_of(VALUE, home.root) == []


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Somebody else's idea of AWS (moto), to which the server's environment points; its address."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    for name, value in {
        "HOME": str(tmp_path),
        "AWS_ENDPOINT_URL_SSM": f"http://{host}:{port}",
        "AWS_ENDPOINT_URL_SECRETS_MANAGER": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "AKIAUSERSOWN",
        "AWS_SECRET_ACCESS_KEY": "the user's own",
        "AWS_SESSION_TOKEN": "the user's token",
        "AWS_REGION": REGION,
    }.items():
        monkeypatch.setenv(name, value)
    yield f"http://{host}:{port}"
    moto.stop()


def test_secrets_manager_and_parameter_store_are_asked_with_the_server_s_credentials(
    home: Home, aws: str
) -> None:
    """(B222, B224)"""
    manager, store = (
        boto3.client(service, REGION, endpoint_url=aws) for service in ("secretsmanager", "ssm")
    )
    content = json.dumps({"user": f"user-{VALUE}", "port": 5432})
    arn = manager.create_secret(Name="db", SecretString=content)["ARN"]
    manager.put_secret_value(SecretId="db", SecretString=f"new-{VALUE}")
    store.put_parameter(Name="/team/wandb", Value=f"param-{VALUE}", Type="SecureString")
    batch, logs = serve(home)
    by_arn = f"arn:aws:ssm:{REGION}:123456789012:parameter/team/wandb"
    job = wait_for_job(batch, submit(batch, {
        "S_A": arn, "S_B": f"{arn}:user:AWSPREVIOUS:", "S_C": f"{arn}:port:AWSPREVIOUS:",
        "S_D": "/team/wandb", "S_E": by_arn,
    }))  # fmt: skip
    assert printed(logs, job) == [
        f"S_A {digest(f'new-{VALUE}')}",
        f"S_B {digest(f'user-{VALUE}')}",
        f"S_C {digest('5432')}",
        f"S_D {digest(f'param-{VALUE}')}",
        f"S_E {digest(f'param-{VALUE}')}",
        "none of the user's",
    ]
    assert places_of(VALUE, home.root) == []
    assert places_of("the user's own", home.root) == []


def test_what_aws_does_not_have_ends_the_attempt_and_counts_for_the_retry_rules(
    home: Home, aws: str
) -> None:
    """(B223)"""
    arn = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:none-AbCdEf"
    batch, _ = serve(home)
    definition = define(
        batch, ["true"], container={"secrets": [{"name": "S_A", "valueFrom": arn}]},
        retryStrategy={"attempts": 2, "evaluateOnExit": [
            {"onReason": "ResourceInitializationError*", "action": "RETRY"}
        ]},
    )  # fmt: skip
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)
    job = wait_for_job(batch, made["jobId"], limit=60)
    assert len(job["attempts"]) == 2
    reason = job["attempts"][0]["container"]["reason"]
    assert reason.startswith("ResourceInitializationError: unable to pull secrets ")
    assert "ResourceNotFoundException" in reason and "S_A" in reason


def test_an_attempt_that_waits_for_a_secret_can_be_stopped_and_survives_its_server(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that hangs holds up others. (B225, B226)"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSM", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUSERSOWN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the user's own")
        batch, logs = serve(home)
        waiting = submit(batch, {"S_A": "slow"})
        wait_for_job(batch, waiting, "STARTING")
        quick = batch.submit_job(
            jobName="q", jobQueue="default", jobDefinition=define(batch, ["true"], "quick")
        )
        assert wait_for_job(batch, quick["jobId"])["status"] == "SUCCEEDED"
        kill_server(home)
        keep(home, "secrets.toml", f'slow = "{VALUE}"')
        batch, logs = serve(home)
        job = wait_for_job(batch, waiting)
        assert printed(logs, job)[0] == f"S_A {digest(VALUE)}"
        stopped = submit(batch, {"S_A": "unknown"})
        wait_for_job(batch, stopped, "STARTING")
        batch.terminate_job(jobId=stopped, reason="enough")
        assert wait_for_job(batch, stopped, limit=4)["statusReason"] == "enough"


def test_a_reset_keeps_the_users_file(home: Home, cli: Cli) -> None:
    keep(home, "secrets.toml", "")
    serve(home)
    assert cli("local", "reset", "--yes").code == 0
    assert (home.root / "secrets.toml").exists()


def test_a_container_has_them_too(home: Home) -> None:
    """(B220)"""
    need_engine()
    keep(home, "secrets.toml", f'wandb = "{VALUE}"')
    endpoint = control.start_server(home, SystemClock(), options=("--executor", "docker"))
    batch, logs = (client_for(home, endpoint, service) for service in ("batch", "logs"))
    given = [{"name": "S_A", "valueFrom": "wandb"}]
    tell = ["sh", "-c", "printf %s $S_A | sha256sum"]
    definition = define(batch, tell, container={"secrets": given, "image": IMAGE})
    made = batch.submit_job(jobName="j", jobQueue="default", jobDefinition=definition)
    job = wait_for_job(batch, made["jobId"], limit=120)
    assert printed(logs, job) == [f"{digest(VALUE)}  -"]
    assert places_of(VALUE, home.root) == []
