"""What a rank finds in its environment: all that `torchrun` sets, and ours. Pure, but for looks
at the machine at the end.

Source: `_start_workers` of torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Dict, List, NamedTuple, Tuple

from batchml.runtime.protocol.launch import VCPUS

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h


class Place(NamedTuple):
    """Of a node's ranks in a generation."""

    node: int
    nodes: int
    first: int  # rank of the node
    here: int  # ranks on this node
    world: int
    master: str
    port: int
    generation: int
    restarts: int
    run: str
    cores: int = 1
    interface: str = ""  # that owns the node's address


def rank_environment(
    environ: Mapping[str, str], place: Place, local: int, files: Mapping[str, str]
) -> Dict[str, str]:
    """The environment of the node's rank number `local`. `files`: more of this rank alone.

    Facts are ours; for what is a matter of taste, a value of the user's wins.
    """
    rank = place.first + local
    taste = {
        "OMP_NUM_THREADS": str(max(1, place.cores // place.here)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",  # what is printed is a sign of life
    }
    if place.interface:
        taste["GLOO_SOCKET_IFNAME"] = taste["NCCL_SOCKET_IFNAME"] = place.interface
    facts = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": place.world,
        "LOCAL_WORLD_SIZE": place.here,
        "GROUP_RANK": place.node,
        "GROUP_WORLD_SIZE": place.nodes,
        "NODE_RANK": place.node,
        "NNODES": place.nodes,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": place.world,
        "MASTER_ADDR": place.master,
        "MASTER_PORT": place.port,
        "TORCHELASTIC_RESTART_COUNT": place.restarts,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": place.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "BATCHML_GENERATION": place.generation,
    }
    return {**taste, **environ, **{k: str(v) for k, v in facts.items()}, **files}


def with_path(environ: Mapping[str, str], name: str, folder: str) -> str:
    """A variable that is a list of folders, with one before all others."""
    given = environ.get(name, "")
    return os.pathsep.join([folder, given] if given else [folder])


def processes_here(asked: int, environ: Mapping[str, str], devices: Sequence[str]) -> int:
    """Ranks of a node: as many as asked for, else one per GPU, else one.

    `devices`: the names in /dev. The container sees what NVIDIA_VISIBLE_DEVICES names.
    """
    if asked:
        return asked
    visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    there = sum(name.startswith("nvidia") and name[6:].isdigit() for name in devices)
    if visible in ("", "void", "none") or not there:
        return 1
    return there if visible == "all" else max(1, len([x for x in visible.split(",") if x.strip()]))


def cores_here(environ: Mapping[str, str], root: str = "/sys/fs/cgroup") -> int:
    """Cores that are this node's, at least 1: what the job asked for, but no more than there are.

    AWS Batch lets a container use idle cores of its host beyond its vCPUs. Those are for others to
    take: threads that count on them wait for each other when they do.
    """
    told = environ.get(VCPUS, "")
    there = _cores_there(root)
    return max(1, min(int(told), there)) if told.isdigit() else there


def _cores_there(root: str) -> int:
    count = float(len(os.sched_getaffinity(0)))
    quota = _numbers(f"{root}/cpu.max") or (
        _numbers(f"{root}/cpu/cpu.cfs_quota_us") + _numbers(f"{root}/cpu/cpu.cfs_period_us")
    )
    if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
        count = min(count, quota[0] / quota[1])
    return max(1, int(count))


def _numbers(path: str) -> "list[float]":
    try:
        with open(path, encoding="ascii") as file:
            return [float(word) for word in file.read().split() if word != "max"]
    except (OSError, ValueError):
        return []


def interface_of(address: str) -> str:
    """The network interface that owns an address; empty where none is found.

    Without its name gloo takes what the host name resolves to, which in containers is often
    127.0.0.1. Source: netdevice(7).
    """
    try:
        import socket

        wanted, near = socket.inet_aton(address), ""
        for name, own, mask in _interfaces():
            if own == wanted:
                return name
            if all((a ^ b) & m == 0 for a, b, m in zip(own, wanted, mask)):  # noqa: B905
                near = name  # a second address of it, as all of 127.0.0.0/8 are
        return near
    except (ImportError, OSError):
        return ""


def _interfaces() -> List[Tuple[str, bytes, bytes]]:
    """Name, address and mask of each that has one. Raises ImportError and OSError."""
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


def own_address(environ: Mapping[str, str], main: str) -> str:
    """This node's address: the one that it was given, else the one that packets would leave from,
    else that of any interface. Empty where only this machine itself could use it.

    Nothing is sent: connecting a datagram socket only asks for the way.
    """
    given = environ.get("BATCHML_NODE_ADDRESS", "")
    if given:
        return given
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        # An empty name, as on the main node, would lead to the loopback.
        for target in filter(None, (main, "10.255.255.255", "192.0.2.1")):
            try:
                asker.connect((target, 9))
                found = str(asker.getsockname()[0])
            except OSError:
                continue
            if found != "0.0.0.0" and is_shared(found, main):
                return found
    try:  # no way leads out of a network that has no router
        own = [socket.inet_ntoa(address) for _, address, _ in _interfaces()]
    except (ImportError, OSError):
        return ""
    return next((each for each in own if is_shared(each, main)), "")


def is_shared(address: str, main: str) -> bool:
    """Whether other nodes can use this address. Those of one machine can use its loopback's."""
    return not address.startswith("127.") or main.startswith("127.")
