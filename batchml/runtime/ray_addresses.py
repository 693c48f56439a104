"""The address by which a node of a Ray gang is reached, and what else Ray has to know of its host.

Source: Amazon ECS Developer Guide, "Amazon ECS task metadata endpoint version 4".
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Callable, Dict, Optional
from urllib.parse import urlsplit

from batchml.runtime.credentials import ask
from batchml.runtime.launch import VCPUS

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
