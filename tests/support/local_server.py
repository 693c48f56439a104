"""A real server of a test: clients for it, its jobs, the processes of its attempts."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local.executors.record import find_processes, mark_of
from batchml.local.home import Home, ServerEndpoint
from batchml.local.store.identity import observe
from batchml.local.store.journal import read_identity, write_identity


def identity_of(home: Home) -> str:
    """The identity of a state folder, as its last server wrote it down; empty before the first."""
    if not (home.local / "identity.json").exists():
        return ""
    return str(json.loads((home.local / "identity.json").read_text())["id"])


def reboot(home: Home) -> None:
    """Let it seem that the machine has started again since the last server of a state folder."""
    with closing(sqlite3.connect(home.journal)) as db:
        kept = read_identity(db)
        assert kept is not None
        write_identity(db, replace(observe(home, kept.id), boot="another boot of this machine"))
        db.commit()


def processes_of(home: Home, task_id: str) -> list[int]:
    """What runs of an attempt."""
    return find_processes(mark_of(identity_of(home), task_id))


def client_for(home: Home, endpoint: ServerEndpoint, service: str) -> Any:
    """A plain boto3 client that knows nothing of batchml."""
    import boto3
    from botocore.config import Config

    keys = home.keys()
    return boto3.client(
        service,
        region_name="us-east-1",
        endpoint_url=endpoint.url,
        aws_access_key_id=keys.access_key_id,
        aws_secret_access_key=keys.secret_access_key,
        config=Config(retries={"total_max_attempts": 1, "mode": "standard"}),
    )


def define(batch: Any, command: list[str], name: str = "d", **more: Any) -> str:
    """Register a job definition of one vCPU that runs on this machine; its name and revision."""
    container = {
        "image": "any",
        "command": command,
        "resourceRequirements": [
            {"type": "VCPU", "value": "1"},
            {"type": "MEMORY", "value": "64"},
        ],
        **more.pop("container", {}),
    }
    made = batch.register_job_definition(
        jobDefinitionName=name, type="container", containerProperties=container, **more
    )
    return f"{made['jobDefinitionName']}:{made['revision']}"


def wait_for(condition: Callable[[], Any], what: str, limit: float = 30.0) -> Any:
    """Poll until the condition gives something true; fail with `what` after `limit` seconds."""
    clock = SystemClock()
    begin = now = clock.monotonic()
    while now < begin + limit:
        found = condition()
        if found:
            return found
        # On a busy machine, questions would keep what is waited for from going on.
        clock.sleep(min(0.06, 0.02 + (now - begin) / 50))
        now = clock.monotonic()
    raise AssertionError(f"not within {limit} s: {what}")


def wait_for_job(batch: Any, job_id: str, *statuses: str, limit: float = 30.0) -> dict[str, Any]:
    """The job's detail once it is in one of `statuses` (SUCCEEDED or FAILED unless given)."""
    wanted = statuses or ("SUCCEEDED", "FAILED")

    def look() -> Any:
        found = batch.describe_jobs(jobs=[job_id])["jobs"]
        return found[0] if found and found[0]["status"] in wanted else None

    return dict(wait_for(look, f"{job_id} {wanted}", limit))
