"""The id of this host, and a run's records of unfit hosts.

The records are in the run's store: `hosts/bad/HOST` has what is wrong with a host, for all children
and attempts of the run; each `hosts/tried/CHILD/ATTEMPT-NODE` is a try on an unfit host.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from batchml.runtime.health.checks import REPLACE, RETRY, WORDS, HostCheck, worst
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.storage.credentials import FetchUrl

METADATA = "ECS_CONTAINER_METADATA_URI_V4"  # only the ECS agent sets this variable
_BAD, _TRIED = "hosts/bad/", "hosts/tried/"
_CONTAINER_NAME = re.compile(r"[0-9a-f]{12}")  # Docker's host name for a container
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def host_id(environ: Mapping[str, str], fetch: Optional[FetchUrl] = None) -> str:
    """The EC2 instance's id; in the environment `local` a node's address or the machine's name.

    If the metadata service is closed to containers, it is made from the boot id. BATCHML_HOST_ID
    replaces it. Source: EC2 User Guide, "Use the Instance Metadata Service".
    """
    given = environ.get("BATCHML_HOST_ID") or environ.get("BATCHML_NODE_ADDRESS")
    if given:
        return given
    name = os.uname().nodename
    if environ.get(METADATA):
        # A container's host name is lost with the container, but the boot id is the host's.
        return _instance_id(environ, fetch) or _boot_name() or name
    return _boot_name() or name if _CONTAINER_NAME.fullmatch(name) else name


def _instance_id(environ: Mapping[str, str], fetch: Optional[FetchUrl]) -> str:
    """Empty if the metadata service does not answer: it may be closed to containers."""
    from http.client import HTTPException

    from batchml.runtime.storage.credentials import fetch_url

    fetch = fetch or fetch_url
    base = environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        token = fetch("PUT", f"{base}/latest/api/token", lifetime, 2.0).decode()
        headers = {"X-aws-ec2-metadata-token": token}
        return fetch("GET", f"{base}/latest/meta-data/instance-id", headers, 2.0).decode().strip()
    except (OSError, ValueError, HTTPException):
        return ""


def _boot_name() -> str:
    """A name of the machine for all its containers, until it boots again; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"machine-{file.read()[:8]}"
    except OSError:
        return ""


class UnfitHost(NamedTuple):
    """A host that was found unfit, and the reason."""

    host: str
    why: str
    is_for_good: bool = True  # False for faults that may be repaired, such as a full disk


class HostRecords:
    """The records of one run. Every method raises StoreError."""

    def __init__(self, store: Store, env: RuntimeEnv, node: str = "0") -> None:
        self._store = store
        self._child = str(env.array_index or 0)
        self._try = f"{env.attempt}-{node}"

    @classmethod
    def open(cls, env: RuntimeEnv, environ: Mapping[str, str]) -> HostRecords:
        node = environ.get("AWS_BATCH_JOB_NODE_INDEX", "0")
        return cls(open_store(env.store, environ, limits=BRIEF), env, node)

    def has_any(self) -> bool:
        return bool(self._store.keys(_BAD))

    def find(self, host: str) -> Optional[UnfitHost]:
        """The record of a host; None without one."""
        return _read(self._store.get(_BAD + _name(host)))

    def add(self, host: str, checks: Sequence[HostCheck], now: float) -> None:
        """Record what is wrong with a host, with the results of all checks."""
        record = {
            "host": host,
            "why": reason(checks),
            "is_for_good": worst(checks) >= REPLACE,
            "at": round(now, 3),
            "checks": [[each.name, WORDS[each.severity], each.text] for each in checks],
        }
        self._store.put(_BAD + _name(host), json.dumps(record).encode())

    def add_try(self, host: str, why: str) -> List[UnfitHost]:
        """Record this try on an unfit host. Return all such tries of this child, in order."""
        prefix = f"{_TRIED}{self._child}/"
        own = json.dumps({"host": host, "why": why}).encode()
        self._store.put(prefix + self._try, own)
        numbered = sorted((_order(key[len(prefix) :]), key) for key in self._store.keys(prefix))
        found = [_read(self._store.get(key)) for _, key in numbered]
        return [each for each in found if each is not None]


def reason(checks: Sequence[HostCheck]) -> str:
    """The checks that make a host unfit, in words."""
    return "; ".join(check.describe() for check in checks if check.severity >= RETRY)


def _read(data: Optional[bytes]) -> Optional[UnfitHost]:
    try:
        found: Dict[str, Any] = json.loads(data or b"")
        return UnfitHost(
            str(found["host"]), str(found["why"]), bool(found.get("is_for_good", True))
        )
    except (ValueError, TypeError, KeyError):
        return None


def _order(name: str) -> List[int]:
    return [int(part) if part.isdigit() else 0 for part in name.split("-")]


def _name(host: str) -> str:
    """A host's id as part of a key."""
    return "h-" + _UNSAFE.sub("-", host)[:120]
