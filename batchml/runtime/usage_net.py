"""Bytes that a node has received and sent, where they can be told from those of others.

A container with a network of its own (AWS Batch gives each node of a multi-node job one, and so do
Docker's bridges and Fargate) counts its own. In the host's network, as AWS Batch's other jobs on
EC2 have it, counters are of all containers there: then nothing is told. What goes through EFA or
InfiniBand past the kernel is counted nowhere here. Source: proc(5), /proc/net/dev.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Callable, Dict, Optional, Tuple

DEV = "/proc/self/net/dev"
LOOPBACK = "lo"
# Interfaces that a host has which runs containers, and a container has not.
_OF_HOSTS = ("docker", "veth", "br-", "virbr", "cni", "podman", "flannel", "cali")

Traffic = Tuple[int, int]  # bytes received, bytes sent


def counters(text: str) -> Dict[str, Traffic]:
    """Interface -> bytes, of what the kernel writes in /proc/net/dev."""
    found = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and words[0].isdigit() and words[8].isdigit():
            found[name.strip()] = (int(words[0]), int(words[8]))
    return found


def interfaces(
    environ: Mapping[str, str],
    is_entry: bool,
    text: str,
    owner: Callable[[str], str],
) -> Optional[Tuple[str, ...]]:
    """Those whose bytes are this node's alone; None where they cannot be told apart.

    `owner` names the interface of an address. `text` is /proc/net/dev.
    """
    names = [name for name in counters(text) if name != LOOPBACK]
    address = environ.get("BATCHML_NODE_ADDRESS", "")
    if address:  # of the embedded server: in a namespace of its own, or one of many on lo
        found = owner(address)
        return (found,) if found in names else None
    if "AWS_BATCH_JOB_NODE_INDEX" in environ or (is_entry and not _is_host(names)):
        return tuple(names) or None
    return None


def _is_host(names: "list[str]") -> bool:
    return any(name.startswith(_OF_HOSTS) for name in names)


def total(text: str, chosen: "Optional[Tuple[str, ...]]") -> Optional[Traffic]:
    """Bytes of these interfaces together."""
    if chosen is None:
        return None
    found = counters(text)
    known = [found[name] for name in chosen if name in found]
    return (sum(each[0] for each in known), sum(each[1] for each in known)) if known else None
