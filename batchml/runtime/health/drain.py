"""Take an unfit host out of service: set its ECS container instance to DRAINING.

AWS Batch then starts nothing more on it; running jobs continue, and the host is terminated when it
is empty. This happens only if the job asks for it, and only to a few hosts an hour: a bad image
looks like bad hardware, and could otherwise remove all hosts.
Source: ECS API Reference, UpdateContainerInstancesState; ECS Developer Guide, "Container
introspection" and "Task metadata endpoint version 4".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Dict, NamedTuple, Optional

from batchml.runtime.host_metadata import ECS_TASK, FetchUrl, fetch_url
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.credentials import CredentialsProvider, domain_of, sign
from batchml.runtime.storage.store import BRIEF, Store, StoreError

HOUR = 3600.0
SHARE = 0.2  # the part of a cluster's hosts that may be taken out in an hour; at least one host
_AGENT = "http://127.0.0.1:51678/v1/metadata"
_TARGET = "AmazonEC2ContainerServiceV20141113."
_TIMEOUT = 5.0


class DrainRefused(Exception):
    """ECS did not drain the host; the text is the reason."""


class DrainTarget(NamedTuple):
    """The ECS container instance of this host."""

    cluster: str  # name or ARN
    instance: str  # the container instance's ARN
    region: str


def drain(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    host: str,
    now: float,
    fetch: FetchUrl = fetch_url,
) -> str:
    """Take this host out of service. Return the result in one line. Never raises."""
    if not environ.get(ECS_TASK):
        return f"{host} is not taken out of service: it is not a host of ECS"
    try:
        ecs = _Ecs(environ, fetch, now)
        target = ecs.find_target()
        counts = _environment_store(env, environ)
        hosts = ecs.count_hosts(target)
        most = max_drains(hosts)
        if not _reserve_drain(counts, target, host, most, now):
            of = f" of {hosts} hosts" if hosts else ""
            return (
                f"{host} is not taken out of service: {most}{of} were taken out in the last hour, "
                "which is the limit"
            )
        ecs.drain(target)
    except (DrainRefused, StoreError) as error:
        return f"{host} is not taken out of service, but the run still leaves it: {error}"
    except Exception as error:
        return f"{host} is not taken out of service: {error_line(error)}"
    return f"{host} is taken out of service: AWS Batch starts nothing more on it"


def max_drains(hosts: int) -> int:
    """How many of a cluster's hosts may be taken out in an hour. `hosts`: 0 if unknown."""
    return max(1, int(hosts * SHARE))


def _environment_store(env: RuntimeEnv, environ: Mapping[str, str]) -> Store:
    """The store of all runs of the environment: the prefix above this run's store."""
    if not env.store:
        raise StoreError("without a store, hosts that are taken out of service cannot be counted")
    above = env.store.rstrip("/").rpartition("/")[0]
    return open_store(above, environ, limits=BRIEF)


def _reserve_drain(store: Store, target: DrainTarget, host: str, most: int, now: float) -> bool:
    """Create one of the numbered records of this hour, if any is left.

    A record is never overwritten: if two hosts want the last one, only one host gets it.
    """
    cluster = target.cluster.rpartition("/")[2]
    prefix = f"quarantine/{cluster}/"
    hour = int(now // HOUR)
    before = [
        key for key in store.keys(f"{prefix}{hour - 1}/")
        if _time(store.get(key)) > now - HOUR
    ]  # fmt: skip
    for number in range(most - len(before)):
        record = json.dumps({"host": host, "instance": target.instance, "at": round(now, 3)})
        if store.create(f"{prefix}{hour}/{number}", record.encode()):
            return True
    return False


def _time(data: Optional[bytes]) -> float:
    try:
        return float(json.loads(data or b"{}")["at"])
    except (ValueError, TypeError, KeyError):
        return float("inf")  # a record without a valid time counts


class _Ecs:
    """Calls to ECS, signed with the standard library, so that images need no SDK."""

    def __init__(self, environ: Mapping[str, str], fetch: FetchUrl, now: float) -> None:
        self._environ = environ
        self._fetch = fetch
        self._now = now
        self._credentials = CredentialsProvider(environ, lambda: now, fetch)
        self._region = ""

    def find_target(self) -> DrainTarget:
        """Find this host's container instance: from the ECS agent on the host, else from ECS."""
        task = self._read(f"{self._environ[ECS_TASK]}/task")
        name = str(task.get("TaskARN", ""))  # arn:aws:ecs:REGION:ACCOUNT:task/CLUSTER/ID
        parts = name.split(":")
        cluster = str(task.get("Cluster", ""))
        if len(parts) < 6 or not cluster:
            raise DrainRefused("ECS's metadata names no task and cluster")
        self._region = parts[3]
        instance = ""
        try:
            instance = str(self._read(_AGENT).get("ContainerInstanceArn", ""))
        except DrainRefused:
            pass  # nodes of multi-node jobs have their own network, which does not reach the agent
        if not instance:
            found = self.call("DescribeTasks", {"cluster": cluster, "tasks": [name]})
            tasks = found.get("tasks") or [{}]
            instance = str(tasks[0].get("containerInstanceArn", ""))
        if not instance:
            raise DrainRefused("ECS does not say on which container instance this task runs")
        return DrainTarget(cluster, instance, self._region)

    def count_hosts(self, target: DrainTarget) -> int:
        """The number of hosts of the cluster; 0 if this job may not ask ECS for it."""
        try:
            found = self.call("DescribeClusters", {"clusters": [target.cluster]})
            clusters = found.get("clusters") or [{}]
            return int(clusters[0].get("registeredContainerInstancesCount", 0))
        except DrainRefused:
            return 0

    def drain(self, target: DrainTarget) -> None:
        parameters = {
            "cluster": target.cluster,
            "containerInstances": [target.instance],
            "status": "DRAINING",
        }
        failures = self.call("UpdateContainerInstancesState", parameters).get("failures")
        if failures:
            raise DrainRefused(f"ECS: {failures[0].get('reason', 'it failed')}")

    def call(self, action: str, parameters: Mapping[str, Any]) -> Dict[str, Any]:
        """Call one operation. Raises DrainRefused, and StoreError without credentials."""
        import hashlib
        import urllib.error
        import urllib.request
        from urllib.parse import urlsplit

        body = json.dumps(parameters).encode()
        base = self._endpoint()
        headers = {"content-type": "application/x-amz-json-1.1", "x-amz-target": _TARGET + action}
        parts = urlsplit(base)
        path = parts.path.rstrip("/") + "/"
        signed = sign(
            self._credentials.get(), self._region, "POST", parts.netloc, path, "", headers,
            hashlib.sha256(body).hexdigest(), self._now, service="ecs",
        )  # fmt: skip
        url = f"{parts.scheme}://{parts.netloc}{path}"
        request = urllib.request.Request(url, body, signed, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                found = json.loads(answer.read(1 << 20))
        except urllib.error.HTTPError as error:
            with error:
                why = _error_text(error.read(65_536), error.code)
            raise DrainRefused(f"ecs:{action}: {why}") from error
        except (OSError, ValueError) as error:
            raise DrainRefused(f"ecs:{action}: {error}") from error
        return found if isinstance(found, dict) else {}

    def _endpoint(self) -> str:
        given = self._environ.get("AWS_ENDPOINT_URL_ECS") or self._environ.get("AWS_ENDPOINT_URL")
        return given or f"https://ecs.{self._region}.{domain_of(self._region)}"

    def _read(self, url: str) -> Dict[str, Any]:
        try:
            found = json.loads(self._fetch("GET", url, {}, 2.0))
        except (OSError, ValueError) as error:
            raise DrainRefused(f"{url} does not answer: {error}") from error
        return found if isinstance(found, dict) else {}


def _error_text(body: bytes, status: int) -> str:
    """The error code and the message of AWS's answer."""
    try:
        found = json.loads(body)
        name = str(found.get("__type", "")).rpartition("#")[2]
        words = str(found.get("message") or found.get("Message") or "")
        return f"{name}: {words}".strip(": ") or f"HTTP {status}"
    except (ValueError, AttributeError):
        return f"HTTP {status}"
