"""The settings of a supervisor: its times, the meaning of a stop signal, the ranks' environment."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Mapping, Sequence
from typing import Dict, NamedTuple, Tuple

from batchml.runtime.health.efa import sys_folder
from batchml.runtime.health.neurons import asked_neurons, chip_numbers, core_count
from batchml.runtime.nodes.launcher import ASKED, OWN_PYTHONPATH, UNFIT, VERDICT
from batchml.runtime.nodes.link.address import interface_variables
from batchml.runtime.processors import with_processors
from batchml.runtime.protocol.exit_codes import STOPPED
from batchml.runtime.protocol.launch import GPUS, TOKEN
from batchml.runtime.protocol.variables import number_of
from batchml.runtime.storage.files import write_atomically

_LIMITS = "BATCHML_GANG_LIMITS"  # JSON: seconds of `SupervisorTimes`, for tests and slow networks

# seconds for which a stop waits for a main node that does not answer
_WAIT_WITH_RANKS = 5.0
_WAIT_WITHOUT_RANKS = 0.5  # long enough for one try to connect


class SupervisorTimes(NamedTuple):
    """The times of a supervisor, in seconds."""

    beat: float = 2.0  # between two signs of life of a node
    silent: float = 15.0  # without a sign of life, until a node is lost
    regroup: float = 60.0  # until a node that fell silent is connected again
    gone: float = 10.0  # until a node whose connection was closed is connected again
    end_grace: float = 3.0  # from SIGTERM to SIGKILL for ranks that cannot save any more
    fetch_within: float = 600.0  # until the checkpoints of rank 0 are fetched
    alone: float = 60.0  # until ranks that are not connected to each other are reported
    spares: float = 60.0  # from the start of ranks to that of the first spare; 0: in any case

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SupervisorTimes:
        try:
            found = json.loads(environ.get(_LIMITS) or "{}")
            return cls(**{name: float(found[name]) for name in cls._fields if name in found})
        except (ValueError, TypeError, AttributeError):
            return cls()


class StopOrder(NamedTuple):
    """How a stopped run ends."""

    code: int
    why: str
    grace: float  # seconds that the ranks have, from SIGTERM to SIGKILL


def versions() -> Dict[str, str]:
    """The versions that must be the same on all nodes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    try:
        found["torch"] = version("torch")
    except PackageNotFoundError:
        pass
    return found


def without_deep_checks(environ: Mapping[str, str]) -> Dict[str, str]:
    """`environ` with quick health checks instead of deep ones, because all other nodes wait."""
    found = dict(environ)
    try:
        health = json.loads(environ.get("BATCHML_HEALTH") or "{}")
        if health.get("checks") == "deep":
            found["BATCHML_HEALTH"] = json.dumps({**health, "checks": "quick"})
    except (ValueError, AttributeError):
        pass
    return found


def ranks_grace(seconds: float) -> float:
    """The grace of the ranks, shorter than the `seconds` after which the container is killed."""
    return max(seconds * 0.9 - 1.0, seconds / 2)


def report_limit(is_busy: bool, grace: float) -> float:
    """Seconds for which a stop waits for a main node that does not answer, at most `grace`.

    `is_busy`: ranks run on this node, and may have something to save.
    """
    return min(_WAIT_WITH_RANKS if is_busy else _WAIT_WITHOUT_RANKS, grace)


def read_stop(environ: Mapping[str, str], number: int, grace: float) -> StopOrder:
    """The meaning of a stop signal: the order that the entry wrote before it sent the signal, or a
    plain stop.

    `grace`: seconds that the run has, unless the host has less.
    """
    try:
        with open(environ.get(VERDICT, "") + ASKED, encoding="utf-8") as file:
            found = json.load(file)
        within = min(grace, float(found["grace"]))
        return StopOrder(int(found["code"]), str(found["why"]), ranks_grace(within))
    except (OSError, ValueError, TypeError, KeyError):
        return StopOrder(STOPPED, f"stopped ({signal.Signals(number).name})", ranks_grace(grace))


def write_verdict(environ: Mapping[str, str], code: int, why: str, is_untold: bool = False) -> None:
    """Record for the entry that the runtime chose the exit code, and not the program.

    `is_untold`: the main node does not know of this end. If the record cannot be written, as on a
    full disk, the log says so, and the exit code stands by itself.
    """
    path = environ.get(VERDICT)
    if path:
        document = {"code": code, "why": why, **({"untold": True} if is_untold else {})}
        try:
            write_atomically(path, json.dumps(document).encode())
        except OSError as error:
            line = f"batchml: the reason of exit code {code} is not recorded: {error}\n"
            os.write(1, line.encode())


def command_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """The environment of the ranks, without the variables that only the supervisor needs."""
    found = {k: v for k, v in environ.items() if k not in (VERDICT, TOKEN, UNFIT)}
    python_path = found.pop(OWN_PYTHONPATH, None)
    if python_path:
        found["PYTHONPATH"] = python_path
    elif python_path is not None:
        found.pop("PYTHONPATH", None)
    return found


# --- The environment of a rank --------------------------------------------------------------------
# All variables that `torchrun` sets, and batchml's own.
#
# Source: `_start_workers` of torch/distributed/elastic/agent/server/local_elastic_agent.py, 2.13.


class RankLayout(NamedTuple):
    """The ranks of one node in a generation, among the ranks of all nodes."""

    node: int
    nodes: int
    first: int  # the lowest rank on this node
    here: int  # the number of ranks on this node
    world: int  # the number of ranks on all nodes
    master: str  # the address of rank 0
    port: int  # on which rank 0 listens
    generation: int
    restarts: int  # generations before this one in this attempt
    run: str  # the id of the multi-node job
    processors: int = 1  # of this node
    interface: str = ""  # the network interface that has this node's address
    members: Tuple[Tuple[str, int], ...] = ()  # address and number of ranks of each node
    control_port: int = 0  # on which the main node listens for supervisors
    next_port: int = 0  # `port` of the next generation, unless it is taken by then


def next_layout(layout: RankLayout) -> RankLayout:
    """The layout of the generation after this one, if all goes as usual."""
    return layout._replace(
        generation=layout.generation + 1, restarts=layout.restarts + 1, port=layout.next_port
    )


def rank_environment(
    environ: Mapping[str, str], layout: RankLayout, local: int, files: Mapping[str, str]
) -> Dict[str, str]:
    """The environment of a rank. `local`: its number on the node. `files`: variables that name its
    files.

    The user's value wins for a variable that has only a default.
    """
    rank = layout.first + local
    variables = {
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
        **node_environment(environ, layout), **{k: str(v) for k, v in variables.items()}, **files
    }  # fmt: skip


def node_environment(environ: Mapping[str, str], layout: RankLayout) -> Dict[str, str]:
    """The variables that all ranks of a node share."""
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTHONUNBUFFERED": "1",  # printed lines are signs of life
        **interface_variables(layout.interface),
    }
    variables = {
        "NODE_RANK": layout.node,
        "NNODES": layout.nodes,
        "MASTER_ADDR": layout.master,
        "MASTER_PORT": layout.port,
        "BATCHML_GENERATION": layout.generation,
    }
    own = with_processors(environ, max(1, layout.processors // layout.here))
    return {**defaults, **own, **{k: str(v) for k, v in variables.items()}}


def prepend_path(environ: Mapping[str, str], name: str, folder: str) -> str:
    """The value of a variable that lists folders, such as PATH, with `folder` put first."""
    return os.pathsep.join(filter(None, (folder, environ.get(name, ""))))


def count_processes(requested: int, environ: Mapping[str, str], devices: Sequence[str]) -> int:
    """The number of ranks of a node: the number requested, else one for each GPU or NeuronCore.

    Else one. `devices`: the names in /dev.
    """
    if requested:
        return requested
    chips = chip_numbers(devices)[: asked_neurons(environ)]
    cores = sum(core_count(sys_folder(environ), chip) for chip in chips)
    return max(1, count_gpus(environ, devices), cores)


def count_gpus(environ: Mapping[str, str], devices: Sequence[str]) -> int:
    """The number of GPUs that programs see: CUDA_VISIBLE_DEVICES wins, else NVIDIA_VISIBLE_DEVICES.

    `devices`: the names in /dev.
    """
    own, given = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    visible = given if own is None else own
    count = sum(name.startswith("nvidia") and name[6:].isdigit() for name in devices)
    asked = number_of(environ.get(GPUS), 0)
    if asked and count and own is None:
        return min(asked, count)  # a privileged container sees more
    if visible in ("", "void", "none", "-1"):
        return 0
    named = count if visible == "all" else sum(bool(x.strip()) for x in visible.split(","))
    return named if count else 0
