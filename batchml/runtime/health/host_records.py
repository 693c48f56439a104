"""The id of this host, and a run's records of unfit hosts.

The records are in the run's store. `hosts/bad/HOST` says why a host is unfit, for all children and
attempts of the run. Each `hosts/tried/CHILD/ATTEMPT-NODE` is a try of the run on an unfit host.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from batchml.runtime.health.checks import REPLACE, RETRY, WORDS, HostCheck, worst
from batchml.runtime.host_metadata import (
    ECS_TASK,
    FetchUrl,
    InstanceMetadata,
    fetch_url,
    instance_address,
)
from batchml.runtime.processes import boot_id
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.backends import open_store
from batchml.runtime.storage.store import BRIEF, Store

_BAD, _TRIED = "hosts/bad/", "hosts/tried/"
_CONTAINER_NAME = re.compile(r"[0-9a-f]{12}")  # Docker's host name for a container
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def host_id(environ: Mapping[str, str], fetch: FetchUrl = fetch_url) -> str:
    """The EC2 instance's id; in the environment `local` a node's address or the machine's name.

    If the instance metadata service is closed to containers, the id is made from the boot id.
    BATCHML_HOST_ID replaces it.
    """
    given = environ.get("BATCHML_HOST_ID") or environ.get("BATCHML_NODE_ADDRESS")
    if given:
        return given
    name = os.uname().nodename
    if environ.get(ECS_TASK):
        # A container's host name is lost with the container, but the boot id is the host's.
        return _instance_id(environ, fetch) or _boot_name() or name
    return _boot_name() or name if _CONTAINER_NAME.fullmatch(name) else name


def _instance_id(environ: Mapping[str, str], fetch: FetchUrl) -> str:
    """The EC2 instance's id; empty if the instance metadata service does not answer."""
    from http.client import HTTPException

    try:
        service = InstanceMetadata(instance_address(environ), fetch)
        return service.get("instance-id").decode().strip()
    except (OSError, ValueError, HTTPException):
        return ""


def _boot_name() -> str:
    """A name of the machine for all its containers, until it boots again; empty if unknown."""
    boot = boot_id()
    return f"machine-{boot[:8]}" if boot else ""


class UnfitHost(NamedTuple):
    """A host that was found unfit, and the reason."""

    host: str
    why: str
    is_for_good: bool = (
        True  # False for a fault that may be repaired meanwhile, such as a full disk
    )
    setup: str = ""  # its faults of which the image, the AMI or the job may be the cause


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
            "why": describe_unfit(checks),
            "is_for_good": worst(checks) >= REPLACE,
            "at": round(now, 3),
            "checks": [[each.name, WORDS[each.severity], each.text] for each in checks],
        }
        self._store.put(_BAD + _name(host), json.dumps(record).encode())

    def add_try(self, unfit: UnfitHost) -> List[UnfitHost]:
        """Record this try on an unfit host. Return all such tries of this child, in order."""
        prefix = f"{_TRIED}{self._child}/"
        record = {"host": unfit.host, "why": unfit.why, "setup": unfit.setup}
        self._store.put(prefix + self._try, json.dumps(record).encode())
        keys = sorted(self._store.keys(prefix), key=lambda key: _order(key[len(prefix) :]))
        return list(filter(None, map(_read, map(self._store.get, keys))))


def describe_unfit(checks: Sequence[HostCheck]) -> str:
    """The failed checks that make a host unfit, in words."""
    return "; ".join(check.describe() for check in checks if check.severity >= RETRY)


def _read(data: Optional[bytes]) -> Optional[UnfitHost]:
    try:
        found: Dict[str, Any] = json.loads(data or b"")
        return UnfitHost(
            str(found["host"]), str(found["why"]), bool(found.get("is_for_good", True)),
            str(found.get("setup", "")),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError):
        return None


def _order(name: str) -> List[int]:
    """The attempt and node in a key `ATTEMPT-NODE`, as numbers."""
    return [int(part) if part.isdigit() else 0 for part in name.split("-")]


def _name(host: str) -> str:
    """A host's id as part of a key."""
    return "h-" + _UNSAFE.sub("-", host)[:120]
