"""The environment variables of a rank: all that `torchrun` sets, and batchml's own.

Source: `_start_workers` of torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Dict, List, NamedTuple, Tuple

from batchml.runtime.protocol.launch import VCPUS


class RankLayout(NamedTuple):
    """The ranks of one node in a generation, among those of all nodes."""

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
    interface: str = ""  # that has the node's address
    members: Tuple[Tuple[str, int], ...] = ()  # of all nodes: address, ranks
    control_port: int = 0  # on which the main node listens for supervisors


def rank_environment(
    environ: Mapping[str, str], layout: RankLayout, local: int, files: Mapping[str, str]
) -> Dict[str, str]:
    """The environment of the node's rank number `local`. `files`: variables of this rank alone.

    For settings that are a matter of taste the value of the user wins.
    """
    rank = layout.first + local
    facts = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": layout.world,
        "LOCAL_WORLD_SIZE": layout.here,
        "GROUP_RANK": layout.node,
        "GROUP_WORLD_SIZE": layout.nodes,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": layout.world,
        "TORCHELASTIC_RESTART_COUNT": layout.restarts,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": layout.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    return {
        **node_environment(environ, layout), **{k: str(v) for k, v in facts.items()}, **files
    }  # fmt: skip


def node_environment(environ: Mapping[str, str], layout: RankLayout) -> Dict[str, str]:
    """The variables that all ranks of a node share."""
    taste = {
        "OMP_NUM_THREADS": str(max(1, layout.cores // layout.here)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",  # what is printed is a sign of life
    }
    if layout.interface:
        taste["GLOO_SOCKET_IFNAME"] = taste["NCCL_SOCKET_IFNAME"] = layout.interface
    facts = {
        "NODE_RANK": layout.node,
        "NNODES": layout.nodes,
        "MASTER_ADDR": layout.master,
        "MASTER_PORT": layout.port,
        "BATCHML_GENERATION": layout.generation,
    }
    return {**taste, **environ, **{k: str(v) for k, v in facts.items()}}


def prepend_path(environ: Mapping[str, str], name: str, folder: str) -> str:
    """The value of a variable that lists folders, with one more before all others."""
    given = environ.get(name, "")
    return os.pathsep.join([folder, given] if given else [folder])


def count_processes(requested: int, environ: Mapping[str, str], devices: Sequence[str]) -> int:
    """The ranks of a node: the number requested, else one for each GPU, else one.

    `devices`: the names in /dev. NVIDIA_VISIBLE_DEVICES names the GPUs that the container sees.
    """
    if requested:
        return requested
    visible = environ.get("CUDA_VISIBLE_DEVICES") or environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    there = sum(name.startswith("nvidia") and name[6:].isdigit() for name in devices)
    if visible in ("", "void", "none") or not there:
        return 1
    return there if visible == "all" else max(1, len([x for x in visible.split(",") if x.strip()]))


def count_cores(environ: Mapping[str, str], root: str = "/sys/fs/cgroup") -> int:
    """The cores of this node, at least 1: the job's vCPUs, but no more than the machine has.

    AWS Batch lets a container use idle cores of its host beyond its vCPUs, until another container
    takes them. Threads that count on those cores would then wait for each other.
    """
    vcpus = environ.get(VCPUS, "")
    there = _cores_here(root)
    return max(1, min(int(vcpus), there)) if vcpus.isdigit() else there


def _cores_here(root: str) -> int:
    count = float(len(os.sched_getaffinity(0)))
    quota = _numbers(f"{root}/cpu.max") or (
        _numbers(f"{root}/cpu/cpu.cfs_quota_us") + _numbers(f"{root}/cpu/cpu.cfs_period_us")
    )
    if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
        count = min(count, quota[0] / quota[1])
    return max(1, int(count))


def _numbers(path: str) -> List[float]:
    try:
        with open(path, encoding="ascii") as file:
            return [float(word) for word in file.read().split() if word != "max"]
    except (OSError, ValueError):
        return []
