"""The settings of a supervisor: its times, the meaning of a stop signal, the ranks' environment."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Mapping, Sequence
from typing import Dict, List, NamedTuple, Tuple

from batchml.runtime.nodes.launcher import ASKED, OWN_PYTHONPATH, UNFIT, VERDICT
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.launch import TOKEN, VCPUS

_LIMITS = "BATCHML_GANG_LIMITS"  # JSON: seconds of `SupervisorTimes`, for tests and slow networks

_UNREACHED = 5.0
_ONE_TRY = 0.5


class SupervisorTimes(NamedTuple):
    """Seconds."""

    beat: float = 2.0  # between two signs of life of a node
    silent: float = 15.0  # without one, until a node is lost
    regroup: float = 60.0  # until a node that fell silent is back
    gone: float = 10.0  # until a node whose connection was closed is back
    end_grace: float = 3.0  # from SIGTERM to SIGKILL for ranks that cannot save any more
    fetch_within: float = 600.0  # until the checkpoints of rank 0 are fetched

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SupervisorTimes:
        try:
            found = json.loads(environ.get(_LIMITS) or "{}")
            return cls(**{name: float(value) for name, value in found.items()})
        except (ValueError, TypeError, AttributeError):
            return cls()


class StopOrder(NamedTuple):
    """The exit code of a stopped run, the reason, and the seconds that the ranks have."""

    code: int
    why: str
    grace: float


def versions() -> Dict[str, str]:
    """The versions that all nodes need to have alike."""
    found = {"python": platform.python_version()}
    try:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found["torch"] = version("torch")
        except PackageNotFoundError:
            pass
    except ImportError:  # pragma: no cover
        pass
    return found


def quick_checks(environ: Mapping[str, str]) -> Dict[str, str]:
    """`environ` with quick health checks instead of deep ones: all other nodes wait meanwhile."""
    found = dict(environ)
    try:
        health = json.loads(environ.get("BATCHML_HEALTH") or "{}")
        if health.get("checks") == "deep":
            found["BATCHML_HEALTH"] = json.dumps({**health, "checks": "quick"})
    except (ValueError, AttributeError):
        pass
    return found


def ranks_grace(seconds: float) -> float:
    """The grace of the ranks: shorter than that after which the container is killed."""
    return max(seconds * 0.9 - 1.0, seconds / 2)


def report_limit(is_busy: bool, grace: float) -> float:
    """Seconds for which a stop waits for a main node that does not answer.

    A node on which nothing runs has nothing to save, so it waits for one try.
    """
    return min(_UNREACHED if is_busy else _ONE_TRY, grace)


def read_stop(environ: Mapping[str, str], number: int, grace: float) -> StopOrder:
    """The meaning of a stop signal: what the entry wrote down before it, or a plain stop.

    `grace`: seconds that the run has, unless the host has less.
    """
    try:
        with open(environ.get(VERDICT, "") + ASKED, encoding="utf-8") as file:
            found = json.load(file)
        within = min(grace, float(found["grace"]))
        return StopOrder(int(found["code"]), str(found["why"]), ranks_grace(within))
    except (OSError, ValueError, TypeError, KeyError):
        return StopOrder(STOPPED, f"stopped ({signal.Signals(number).name})", ranks_grace(grace))


def write_verdict(environ: Mapping[str, str], code: int, why: str, is_untold: bool) -> None:
    """Record that the runtime chose the exit code. `is_untold`: the main node does not know it."""
    path = environ.get(VERDICT)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"code": code, "why": why, "untold": is_untold}, file)


def command_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the ranks, without the variables between the entry and the supervisor."""
    found = {k: v for k, v in environ.items() if k not in (VERDICT, TOKEN, UNFIT)}
    own = found.pop(OWN_PYTHONPATH, None)
    if own is not None:
        found.pop("PYTHONPATH", None)
        if own:
            found["PYTHONPATH"] = own
    return found


# --- rank env -------------------------------------------------------------------------------------
# The environment variables of a rank: all that `torchrun` sets, and batchml's own.
#
# Source: `_start_workers` of torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13.


class RankLayout(NamedTuple):
    """The ranks of one node in a generation, among those of all nodes."""

    node: int
    nodes: int
    first: int  # the lowest rank on the node
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

    Variables that are only defaults keep the user's value.
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
