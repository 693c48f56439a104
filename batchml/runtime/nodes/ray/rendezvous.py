"""Where head and workers of a Ray gang find each other: two small values in the bucket or in the
workspace. `gang/head.json` says where the head is, `gang/ended.json` that it has ended for good.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Callable, Dict, NamedTuple, Optional
from urllib.parse import urlsplit

from batchml.runtime.protocol.launch import VCPUS
from batchml.runtime.storage.credentials import ask
from batchml.runtime.storage.store import BRIEF, Store, StoreError, open_store

PLACE = "BATCHML_GANG"  # an s3:// address; empty: the workspace
KEY = "BATCHML_GANG_KEY"  # of the head's submission

_FOLDERS = (".batchml", "gangs")  # of the workspace
_HEAD = "gang/head.json"
_ENDED = "gang/ended.json"


class Card(NamedTuple):
    """Where a head is, and what a worker has to be like to join it."""

    run: str  # the id of its job
    attempt: int
    address: str
    gcs_port: int
    control_port: int
    ray: str
    python: str
    at: float  # seconds since the epoch

    @property
    def gcs(self) -> str:
        return f"{self.address}:{self.gcs_port}"


class Meeting:
    """Every method raises StoreError where the place cannot be had."""

    def __init__(self, store: Store, workspace: str = "", key: str = "") -> None:
        self._store = store
        self._workspace, self._key = workspace, key

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Meeting:
        """Raises StoreError where nobody said where to meet."""
        place = environ.get(PLACE, "")
        workspace, key = environ.get("BATCHML_WORKSPACE", ""), environ.get(KEY, "")
        if not place and not (workspace and key):
            raise StoreError(
                f"head and workers have nowhere to meet: {PLACE} is not set, and neither are both "
                f"BATCHML_WORKSPACE and {KEY}. `batchml submit` sets them for a job with [[groups]]"
            )
        if place:
            return cls(open_store(place, environ, patience=BRIEF))
        folder = os.path.join(workspace, *_FOLDERS, key)
        return cls(open_store(folder, environ, patience=BRIEF), workspace, key)

    def head(self) -> Optional[Card]:
        found = self._read(_HEAD)
        if found is None:
            return None
        try:
            return Card(**found)
        except TypeError as error:
            raise StoreError(f"{_HEAD} is of another batchml: {error}") from error

    def publish(self, card: Card) -> None:
        """A head begins, or begins again after its host was lost."""
        self._make_folder()
        self._store.delete(_ENDED)
        self._store.put(_HEAD, json.dumps(card._asdict()).encode())

    def ended(self) -> Optional[int]:
        """The exit code of the gang's program, once there is nothing left to do for workers."""
        found = self._read(_ENDED)
        return None if found is None else int(found.get("code", 0))

    def end(self, code: int, at: float) -> None:
        self._make_folder()
        self._store.put(_ENDED, json.dumps({"code": code, "at": at}).encode())

    def _make_folder(self) -> None:
        """In the workspace, for all: the next gang may be of another image, and another user."""
        path = self._workspace
        for part in (*_FOLDERS, self._key, os.path.dirname(_HEAD)) if path else ():
            path = os.path.join(path, part)
            try:
                os.mkdir(path)
                os.chmod(path, 0o777)  # whatever the umask
            except OSError:
                continue  # it is there, or the store says why it cannot be

    def _read(self, key: str) -> Optional[Dict[str, Any]]:
        data = self._store.get(key)
        if data is None:
            return None
        try:
            found = json.loads(data)
        except ValueError as error:
            raise StoreError(f"{key} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise StoreError(f"{key} is not what a head writes")
        return found


# --- addresses ------------------------------------------------------------------------------------
# The address by which a node of a Ray gang is reached, and what else Ray has to know of its host.
#
# Source: Amazon ECS Developer Guide, "Amazon ECS task metadata endpoint version 4".


_SOMEWHERE = ("10.255.255.255", 1)  # nothing is sent there: the kernel only picks a way

Look = Callable[[str], Any]


def own_address(environ: Mapping[str, str], look: Optional[Look] = None) -> str:
    """Told by the server, by ECS, or by the kernel, which knows the way out of this host.

    Programs of one machine have an address of the loopback network each, so that nothing listens
    to other machines and two nodes are two to Ray.
    """
    told = environ.get("BATCHML_NODE_ADDRESS", "")
    if told:
        return told
    if urlsplit(environ.get("BATCHML_ENDPOINT_URL", "")).hostname == "127.0.0.1":
        return _loopback(environ)
    networks = metadata(environ, look).get("Networks") or [{}]
    found = networks[0].get("IPv4Addresses") or []  # none in the host's own network
    return str(found[0]) if found else _way_out()


def metadata(environ: Mapping[str, str], look: Optional[Look] = None) -> Dict[str, Any]:
    """What ECS says of this container; nothing where there is no ECS."""
    url = environ.get("ECS_CONTAINER_METADATA_URI_V4", "")
    if not url:
        return {}
    try:
        found = (look or _look)(url)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def count_vcpus(environ: Mapping[str, str], look: Optional[Look] = None) -> Optional[int]:
    """What the job asked for, which the cores of its host are not; None where nobody says it."""
    told = environ.get(VCPUS, "")
    if told.isdigit():
        return max(1, int(told))
    shares = (metadata(environ, look).get("Limits") or {}).get("CPU")  # 1024 of them are a vCPU
    return max(1, int(shares) // 1024) if isinstance(shares, (int, float)) and shares else None


def free_port(address: str) -> int:
    """A port that nobody has now; Ray does not take 0 everywhere."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def _loopback(environ: Mapping[str, str]) -> str:
    """Of this attempt, and of no other on this machine: one in sixteen million would be."""
    attempt = environ.get("BATCHML_TASK") or environ.get("AWS_BATCH_JOB_ID", str(os.getpid()))
    digest = hashlib.sha256(attempt.encode()).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def _way_out() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(_SOMEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(sock.getsockname()[0])


def _look(url: str) -> Any:
    return json.loads(ask("GET", url, {}, 2.0))
