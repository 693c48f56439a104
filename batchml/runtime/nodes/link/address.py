"""Who a node is among the nodes of its run, and the address by which the others reach it.

Source: Amazon ECS Developer Guide, "Amazon ECS task metadata endpoint version 4".
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from urllib.parse import urlsplit

from batchml.runtime.nodes.link.connection import candidate_ports
from batchml.runtime.nodes.link.uplink import MainNode
from batchml.runtime.protocol.launch import TOKEN
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.credentials import fetch_url

# --- interfaces -----------------------------------------------------------------------------------
# The network interfaces of this machine. Imports nothing heavy: every run counts their traffic.
#
# Source: netdevice(7).


_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def interface_of(address: str) -> str:
    """The network interface that has an address; empty where none is found.

    Without its name gloo takes the address of the host name, which in containers is often
    127.0.0.1.
    """
    try:
        import socket

        wanted, near = socket.inet_aton(address), ""
        for name, own, mask in interfaces():
            if own == wanted:
                return name
            if all((a ^ b) & m == 0 for a, b, m in zip(own, wanted, mask)):  # noqa: B905
                near = name  # a second address of it, as all of 127.0.0.0/8 are
        return near
    except (ImportError, OSError):
        return ""


def interfaces() -> List[Tuple[str, bytes, bytes]]:
    """Name, address and mask of each interface with an address. Raises ImportError, OSError."""
    import fcntl
    import socket
    import struct

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                own = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(asker.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # it has no such address
            found.append((name, own, mask))
    return found


# --- address --------------------------------------------------------------------------------------


LOOPBACK = "127.0.0.1"
OWN_ADDRESS = "BATCHML_NODE_ADDRESS"
_NODES = "AWS_BATCH_JOB_NUM_NODES"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"  # not set on the main node
_SOMEWHERE = ("10.255.255.255", "192.0.2.1")  # nothing is sent there: the kernel picks a route

Get = Callable[[str], Any]  # url -> the JSON document there


class RunIdentity(NamedTuple):
    """What all nodes of a run have in common."""

    job: str
    attempt: int
    token: str
    key: str


class NodePosition(NamedTuple):
    """A node among the nodes of a multi-node job, as AWS Batch numbers them."""

    node: int  # 0: the main node
    nodes: int
    main: str  # its address; empty on the main node
    identity: RunIdentity

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> NodePosition:
        """Nodes are in the order of their index, but the main node is the first in any case."""
        number = int(environ.get("AWS_BATCH_JOB_NODE_INDEX", "0"))
        main = int(environ.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0"))
        index = 0 if number == main else number + 1 if number < main else number
        env = RuntimeEnv.read(environ)
        job = env.run.partition("#")[0]
        return cls(
            index,
            int(environ.get(_NODES, "1")),
            environ.get(_MAIN_ADDRESS, ""),
            RunIdentity(job, env.attempt, environ.get(TOKEN, ""), env.key or job),
        )

    @property
    def main_node(self) -> MainNode:
        return MainNode(self.main, candidate_ports(self.identity.key), self.identity.token)


def has_main_elsewhere(environ: Mapping[str, str]) -> bool:
    """Whether this is a node of several, and not the main node."""
    return _MAIN_ADDRESS in environ


# --- The address of this node ---------------------------------------------------------------------


def own_address(environ: Mapping[str, str], get: Optional[Get] = None) -> str:
    """This node's address; empty where only this machine itself could use it.

    The first of: the address that the server set; for a job that has no nodes but meets other jobs,
    an address of the loopback network on this machine, or the one that ECS tells; the one that
    packets to the main node, or out of this host, would leave from; that of any interface.

    Each job on one machine gets its own loopback address, so that it cannot be reached from other
    machines, and so that Ray counts two of them as two nodes.
    """
    given = environ.get(OWN_ADDRESS, "")
    if given:
        return given
    if _NODES not in environ:
        if urlsplit(environ.get("BATCHML_ENDPOINT_URL", "")).hostname == LOOPBACK:
            return _loopback(environ)
        networks = container_metadata(environ, get).get("Networks") or [{}]
        found = networks[0].get("IPv4Addresses") or []  # none in the host's own network
        if found:
            return str(found[0])
    return _routed_address(environ.get(_MAIN_ADDRESS, ""))


def container_metadata(environ: Mapping[str, str], get: Optional[Get] = None) -> Dict[str, Any]:
    """What ECS tells about this container; empty where there is no ECS."""
    url = environ.get("ECS_CONTAINER_METADATA_URI_V4", "")
    if not url:
        return {}
    try:
        found = (get or _get)(url)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_reachable(address: str, main: str) -> bool:
    """Whether other nodes can use this address. Nodes on one machine can use its loopback's."""
    return not address.startswith("127.") or main.startswith("127.")


def _routed_address(main: str) -> str:
    """Connecting a datagram socket sends nothing: it asks the kernel for the route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        # An empty name, as on the main node, would lead to the loopback.
        for target in filter(None, (main, *_SOMEWHERE)):
            try:
                asker.connect((target, 9))
                found = str(asker.getsockname()[0])
            except OSError:
                continue
            if found != "0.0.0.0" and is_reachable(found, main):
                return found
    try:  # a network without a router has no route that leads out
        own = [socket.inet_ntoa(address) for _, address, _ in interfaces()]
    except (ImportError, OSError):
        return ""
    return next((each for each in own if is_reachable(each, main)), "")


def _loopback(environ: Mapping[str, str]) -> str:
    """An address derived from the attempt's id. The chance that two attempts get the same one is
    about one in sixteen million.
    """
    attempt = environ.get("BATCHML_TASK") or environ.get("AWS_BATCH_JOB_ID", str(os.getpid()))
    digest = hashlib.sha256(attempt.encode()).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def _get(url: str) -> Any:
    return json.loads(fetch_url("GET", url, {}, 2.0))


# --- Free ports ---------------------------------------------------------------------------------


def free_port(address: str) -> int:
    """A port of this address that nobody listens on now; Ray does not take 0 everywhere."""
    with socket.socket() as tried:
        tried.bind((address, 0))
        return int(tried.getsockname()[1])


def free_port_for(seed: str) -> int:
    """A port of this host that nobody listens on, on any address; drawn by `seed`.

    It lies below the ports that Linux gives to outgoing connections, so it stays free for the
    moment until rank 0 listens there.
    """
    chance = random.Random(seed)
    for number in (*(chance.randrange(20_000, 32_000) for _ in range(50)), 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", number))
                return int(tried.getsockname()[1])
            except OSError:
                continue
    raise OSError("no port is free")
