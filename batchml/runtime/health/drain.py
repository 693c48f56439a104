"""Taking a bad host out of service: its ECS container instance is set to DRAINING.

AWS Batch then places nothing more there; what runs there runs on, and the host goes when it is
empty. Only where the job asks for it, and never many hosts at once: a bad image looks like bad
hardware, and could otherwise take a fleet away.
Source: ECS API Reference, UpdateContainerInstancesState; ECS Developer Guide, "Container
introspection" and "Task metadata endpoint version 4".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Dict, NamedTuple, Optional

from batchml.runtime.health.host_records import METADATA
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.credentials import Ask, Keyring, ask, sign
from batchml.runtime.storage.store import BRIEF, Store, StoreError, open_store

HOUR = 3600.0
SHARE = 0.2  # of the cluster's hosts in an hour, and one host in any case
_AGENT = "http://127.0.0.1:51678/v1/metadata"
_TARGET = "AmazonEC2ContainerServiceV20141113."
_TIMEOUT = 5.0


class Refused(Exception):
    """ECS did not do it; the text says why."""


class Place(NamedTuple):
    """Where a container runs."""

    cluster: str  # name or ARN
    instance: str  # the container instance's ARN
    region: str


def drain(
    env: RuntimeEnv,
    environ: Mapping[str, str],
    host: str,
    now: float,
    ask: Ask = ask,
    store: Optional[Store] = None,
) -> str:
    """Take this host out of service; what became of it, in one line. Never raises.

    `store`: where it is counted how many were taken out; the environment's, unless given.
    """
    if not environ.get(METADATA):
        return f"{host} is not taken out of service: it is no host of ECS"
    try:
        ecs = _Ecs(environ, ask, now)
        place = ecs.place()
        books = store or _fleet(env, environ)
        hosts = ecs.hosts(place)
        if not _may_take(books, place, host, allowed(hosts), now):
            many = f"of {hosts} " if hosts else ""
            return (
                f"{host} is not taken out of service: {allowed(hosts)} {many}were in the last hour"
            )
        ecs.drain(place)
    except (Refused, StoreError) as error:
        return f"{host} is not taken out of service, the run goes elsewhere all the same: {error}"
    except Exception as error:
        words = " ".join(str(error).split()) or type(error).__name__
        return f"{host} is not taken out of service: {words[:300]}"
    return f"{host} is taken out of service: AWS Batch places nothing more on it"


def allowed(hosts: int) -> int:
    """How many of `hosts` may be taken out in an hour; 0 for a number that is not known."""
    return max(1, int(hosts * SHARE))


def _fleet(env: RuntimeEnv, environ: Mapping[str, str]) -> Store:
    """Beside the stores of all runs of the environment, which have its bucket in common."""
    if not env.store:
        raise StoreError("nothing keeps count of hosts that were taken out (no store)")
    above = env.store.rstrip("/").rpartition("/")[0]
    return open_store(above, environ, patience=BRIEF)


def _may_take(store: Store, place: Place, host: str, most: int, now: float) -> bool:
    """Take one of the places of this hour, if any is left. A place is created, never overwritten:
    of two hosts at once only one has it.
    """
    cluster = place.cluster.rpartition("/")[2]
    prefix = f"quarantine/{cluster}/"
    hour = int(now // HOUR)
    before = [
        key for key in store.keys(f"{prefix}{hour - 1}/")
        if _time(store.get(key)) > now - HOUR
    ]  # fmt: skip
    for number in range(most - len(before)):
        record = json.dumps({"host": host, "instance": place.instance, "at": round(now, 3)})
        if store.create(f"{prefix}{hour}/{number}", record.encode()):
            return True
    return False


def _time(data: Optional[bytes]) -> float:
    try:
        return float(json.loads(data or b"{}")["at"])
    except (ValueError, TypeError, KeyError):
        return float("inf")  # it was taken, at a time that nobody knows


class _Ecs:
    """The few calls that this needs, signed: no SDK is needed in images."""

    def __init__(self, environ: Mapping[str, str], ask: Ask, now: float) -> None:
        self._environ = environ
        self._ask = ask
        self._now = now
        self._keys = Keyring(environ, lambda: now, ask)
        self._region = ""

    def place(self) -> Place:
        """From the agent on this host where it can be reached, else from ECS itself."""
        task = self._read(f"{self._environ[METADATA]}/task")
        name = str(task.get("TaskARN", ""))  # arn:aws:ecs:REGION:ACCOUNT:task/CLUSTER/ID
        parts = name.split(":")
        cluster = str(task.get("Cluster", ""))
        if len(parts) < 6 or not cluster:
            raise Refused("ECS's metadata names no task and cluster")
        self._region = parts[3]
        instance = ""
        try:
            instance = str(self._read(_AGENT).get("ContainerInstanceArn", ""))
        except Refused:
            pass  # nodes of multi-node jobs have a network of their own
        if not instance:
            found = self.call("DescribeTasks", {"cluster": cluster, "tasks": [name]})
            tasks = found.get("tasks") or [{}]
            instance = str(tasks[0].get("containerInstanceArn", ""))
        if not instance:
            raise Refused("ECS does not say on which container instance this task runs")
        return Place(cluster, instance, self._region)

    def hosts(self, place: Place) -> int:
        """How many the cluster has; 0 where that may not be asked."""
        try:
            found = self.call("DescribeClusters", {"clusters": [place.cluster]})
            return int(
                (found.get("clusters") or [{}])[0].get("registeredContainerInstancesCount", 0)
            )
        except Refused:
            return 0

    def drain(self, place: Place) -> None:
        asked = {
            "cluster": place.cluster,
            "containerInstances": [place.instance],
            "status": "DRAINING",
        }
        failures = self.call("UpdateContainerInstancesState", asked).get("failures")
        if failures:
            raise Refused(f"ECS: {failures[0].get('reason', 'it failed')}")

    def call(self, action: str, asked: Mapping[str, Any]) -> Dict[str, Any]:
        """The answer of one operation. Raises Refused, and StoreError without credentials."""
        import hashlib
        import urllib.error
        import urllib.request
        from urllib.parse import urlsplit

        body = json.dumps(asked).encode()
        base = self._endpoint()
        headers = {
            "content-type": "application/x-amz-json-1.1",
            "x-amz-target": _TARGET + action,
        }
        parts = urlsplit(base)
        path = parts.path.rstrip("/") + "/"
        signed = sign(
            self._keys.get(), self._region, "POST", parts.netloc, path, "", headers,
            hashlib.sha256(body).hexdigest(), self._now, service="ecs",
        )  # fmt: skip
        url = f"{parts.scheme}://{parts.netloc}{path}"
        request = urllib.request.Request(url, body, signed, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                found = json.loads(answer.read(1 << 20))
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(f"ecs:{action}: {_why(error.read(65_536), error.code)}") from error
        except (OSError, ValueError) as error:
            raise Refused(f"ecs:{action}: {error}") from error
        return found if isinstance(found, dict) else {}

    def _endpoint(self) -> str:
        given = self._environ.get("AWS_ENDPOINT_URL_ECS") or self._environ.get("AWS_ENDPOINT_URL")
        end = "amazonaws.com.cn" if self._region.startswith("cn-") else "amazonaws.com"
        return given or f"https://ecs.{self._region}.{end}"

    def _read(self, url: str) -> Dict[str, Any]:
        try:
            found = json.loads(self._ask("GET", url, {}, 2.0))
        except (OSError, ValueError) as error:
            raise Refused(f"{url} does not answer: {error}") from error
        return found if isinstance(found, dict) else {}


def _why(body: bytes, status: int) -> str:
    """AWS's words for a refusal, with its name."""
    try:
        found = json.loads(body)
        name = str(found.get("__type", "")).rpartition("#")[2]
        words = str(found.get("message") or found.get("Message") or "")
        return f"{name}: {words}".strip(": ") or f"HTTP {status}"
    except (ValueError, AttributeError):
        return f"HTTP {status}"
