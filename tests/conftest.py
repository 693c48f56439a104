"""Fixtures: a state folder, a real server in a process of its own, and clients for it."""

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import JSONFileLoader, Loader
from hypothesis import settings
from msgspec.structs import replace

from batchml.clock import SystemClock
from batchml.local import control
from batchml.local.executors import cgroup
from batchml.local.executors.record import find_processes, mark_of
from batchml.local.home import Home, ServerEndpoint
from batchml.local.store.identity import observe
from batchml.local.store.journal import read_identity, write_identity

# A busy machine is no mistake. CI tries the same examples each time, people's runs new ones.
settings.register_profile("suite", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("suite")

# A session of botocore reads a service's description once; ours, of all tests, read each once. They
# are files of its package, which all clients of a session share as it is.
_load_file = JSONFileLoader.load_file


@cache
def _load_once(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


def _load(loader: JSONFileLoader, path: str) -> Any:
    ours = path.startswith(f"{Loader.BUILTIN_DATA_PATH}{os.sep}")
    return _load_once(path) if ours else _load_file(loader, path)


JSONFileLoader.load_file = _load

# A shell makes what it runs behind it deaf to Ctrl-C, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A fresh state folder; whatever server holds it at the end is killed."""
    made = Home(tmp_path / "home")
    made.prepare()
    yield made
    pid = made.holder()
    if pid is not None and made.is_held():
        os.kill(pid, signal.SIGKILL)


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


@pytest.fixture
def server(home: Home) -> ServerEndpoint:
    """A running embedded AWS Batch."""
    return control.ensure_server(home, SystemClock())


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


@pytest.fixture
def client(home: Home, server: ServerEndpoint) -> Callable[[str], Any]:
    return lambda service: client_for(home, server, service)


@pytest.fixture
def batch(client: Callable[[str], Any]) -> Any:
    return client("batch")


@pytest.fixture
def logs(client: Callable[[str], Any]) -> Any:
    return client("logs")


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[cgroup.Groups]:
    """Control groups of a folder of the test's own; skipped where none may be made."""
    found = cgroup.find(tmp_path.name)
    if not found:
        pytest.skip("control groups may not be written here")
    yield found
    cgroup.kill(list(found.values()))
    assert cgroup.remove(list(found.values()), 10)


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
    end = clock.monotonic() + limit
    while clock.monotonic() < end:
        found = condition()
        if found:
            return found
        clock.sleep(0.02)
    raise AssertionError(f"not within {limit} s: {what}")


def wait_for_job(batch: Any, job_id: str, *statuses: str, limit: float = 30.0) -> dict[str, Any]:
    """The job's detail once it is in one of `statuses` (SUCCEEDED or FAILED unless given)."""
    wanted = statuses or ("SUCCEEDED", "FAILED")

    def look() -> Any:
        found = batch.describe_jobs(jobs=[job_id])["jobs"]
        return found[0] if found and found[0]["status"] in wanted else None

    return dict(wait_for(look, f"{job_id} {wanted}", limit))
