"""Who a node is among the nodes of its run, and the address by which the others reach it.

Source: Amazon ECS Developer Guide, "Amazon ECS task metadata endpoint version 4".
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import struct
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
from urllib.parse import urlsplit

from batchml.runtime.host_metadata import fetch_url
from batchml.runtime.nodes.link.connection import candidate_ports
from batchml.runtime.nodes.link.uplink import MainNode
from batchml.runtime.protocol.launch import TOKEN
from batchml.runtime.protocol.variables import RuntimeEnv

# --- Network interfaces of this machine -----------------------------------------------------------
# Source: netdevice(7).


_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address; empty if none is found."""
    try:
        searched, same_network = socket.inet_aton(address), ""
        for name, own, mask in interfaces():
            if own == searched:
                return name
            if all((a ^ b) & m == 0 for a, b, m in zip(own, searched, mask)):  # noqa: B905
                same_network = name  # the interface may have several addresses, as `lo` 127.0.0.0/8
        return same_network
    except (ImportError, OSError):
        return ""


def interfaces() -> List[Tuple[str, bytes, bytes]]:
    """Name, address and mask of each interface with IPv4. Raises ImportError and OSError."""
    import fcntl  # only Linux and macOS have it

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                own = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                mask = fcntl.ioctl(probe.fileno(), _SIOCGIFNETMASK, request)[20:24]
            except OSError:
                continue  # the interface has no IPv4 address
            found.append((name, own, mask))
    return found


def interface_variables(name: str) -> Dict[str, str]:
    """The variables by which gloo and NCCL use this network interface; none for an empty name.

    Without them gloo takes the address of the host name, which in containers is often 127.0.0.1.
    """
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}


# --- The position of this node in its run ---------------------------------------------------------


LOOPBACK = "127.0.0.1"
OWN_ADDRESS = "BATCHML_NODE_ADDRESS"
_NODES = "AWS_BATCH_JOB_NUM_NODES"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"  # not set on the main node
# addresses outside of this host. Nothing is sent to them; the kernel is asked for a route
_OUTSIDE = ("10.255.255.255", "192.0.2.1")

Get = Callable[[str], Any]  # url -> the JSON document there


class RunIdentity(NamedTuple):
    """The values that all nodes of a run have in common."""

    job: str  # the id of the multi-node job, without the number of the node
    attempt: int
    token: str  # the secret of the run
    key: str  # of its submission; the main node's ports follow from it


class NodePosition(NamedTuple):
    """A node among the nodes of a multi-node job, as AWS Batch numbers them."""

    node: int  # 0: the main node
    nodes: int
    main: str  # the address of the main node; empty on the main node itself
    identity: RunIdentity

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> NodePosition:
        """Read AWS Batch's variables. The main node becomes node 0, whatever its index; the others
        keep their order.
        """
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
    """Whether the run has several nodes, and this is not the main node."""
    return _MAIN_ADDRESS in environ


# --- The address of this node ---------------------------------------------------------------------


def own_address(environ: Mapping[str, str], get: Optional[Get] = None) -> str:
    """The address by which other nodes reach this node; empty if it has none.

    The first that exists of:
    - the address that the embedded server set;
    - for a single-node job of a group run: an address of the loopback network if all jobs run on
      this machine, else the address that ECS reports;
    - the address from which packets to the main node, or out of this host, would leave;
    - the address of any network interface.

    Each job on one machine gets its own loopback address, so that other machines cannot reach the
    job, and so that Ray counts two jobs as two nodes.
    """
    address = environ.get(OWN_ADDRESS, "")
    if address:
        return address
    if _NODES not in environ:
        if urlsplit(environ.get("BATCHML_ENDPOINT_URL", "")).hostname == LOOPBACK:
            return _loopback(environ)
        networks = container_metadata(environ, get).get("Networks") or [{}]
        found = networks[0].get("IPv4Addresses") or []  # ECS reports none with host networking
        if found:
            return str(found[0])
    return _routed_address(environ.get(_MAIN_ADDRESS, ""))


def container_metadata(environ: Mapping[str, str], get: Optional[Get] = None) -> Dict[str, Any]:
    """ECS's metadata of this container; empty outside of ECS."""
    url = environ.get("ECS_CONTAINER_METADATA_URI_V4", "")
    if not url:
        return {}
    try:
        found = (get or _get)(url)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_reachable(address: str, main: str) -> bool:
    """Whether other nodes can use this address.

    A loopback address serves only nodes on one machine: then the main node has one, too.
    """
    return not address.startswith("127.") or main.startswith("127.")


def _routed_address(main: str) -> str:
    """The address from which packets to the main node, or out of this host, would leave.

    Connecting a datagram socket sends nothing: it only asks the kernel for the route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # `main` is empty on the main node; an empty target would mean the loopback network.
        for target in filter(None, (main, *_OUTSIDE)):
            try:
                probe.connect((target, 9))
                found = str(probe.getsockname()[0])
            except OSError:
                continue
            if found != "0.0.0.0" and is_reachable(found, main):
                return found
    try:  # a network without a router has no route out of it
        addresses = [socket.inet_ntoa(address) for _, address, _ in interfaces()]
    except (ImportError, OSError):
        return ""
    return next((address for address in addresses if is_reachable(address, main)), "")


def _loopback(environ: Mapping[str, str]) -> str:
    """An address derived from the attempt's id. The chance that two attempts get the same one is
    about one in sixteen million.
    """
    attempt = environ.get("BATCHML_TASK") or environ.get("AWS_BATCH_JOB_ID", str(os.getpid()))
    digest = hashlib.sha256(attempt.encode()).digest()
    return f"127.{1 + digest[0] % 254}.{digest[1]}.{1 + digest[2] % 254}"


def _get(url: str) -> Any:
    return json.loads(fetch_url("GET", url, {}, 2.0))


# --- Free ports -----------------------------------------------------------------------------------


def free_port(address: str, *preferred: int) -> int:
    """The first of the preferred ports on which nobody listens at this address, else any such port.

    For programs that do not accept port 0. `address`: "" stands for all addresses of this host.
    """
    for number in (*preferred, 0):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((address, number))
                return int(candidate.getsockname()[1])
            except OSError:
                continue
    raise OSError("no port of this machine is free")


def free_port_for(seed: str) -> int:
    """A free port of this host on all its addresses; the same seed prefers the same ports.

    The port is below those that Linux gives to outgoing connections, so it stays free for the
    moment until rank 0 listens on it.
    """
    chance = random.Random(seed)
    return free_port("", *(chance.randrange(20_000, 32_000) for _ in range(50)))
