"""This machine as ECS tells of a host: the one container instance of the one cluster.

Source: ECS API Reference, ListContainerInstances and DescribeContainerInstances. What is registered
is what the server gives out; what remains is what no attempt holds.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from batchml.local.batch.state import CLUSTER, Machine, State, instance_arn
from batchml.local.home import Home, read_record
from batchml.local.server.protocol import Refused

if TYPE_CHECKING:
    from batchml.local.batch.state import Machine

THIS_MACHINE = "this-machine"
_UNITS = 1024  # of CPU, in ECS, for one vCPU
_ACTIVE = ("", "ACTIVE")  # of the states to ask for: without one, all


def list_container_instances(state: State, params: Mapping[str, Any]) -> dict[str, Any]:
    """This machine, unless hosts in another state are asked for."""
    _check_cluster(params)
    if params.get("filter"):
        raise Refused("InvalidParameterException", "filter is not served here.")
    wanted = params.get("status", "") in _ACTIVE
    return {"containerInstanceArns": [instance_arn()] if wanted else []}


def describe_container_instances(state: State, params: Mapping[str, Any]) -> dict[str, Any]:
    """What this machine has and what of it is left; others are failures, as in ECS."""
    _check_cluster(params)
    asked = params["containerInstances"]
    if not 1 <= len(asked) <= 100:
        raise Refused("InvalidParameterException", "Give 1 to 100 container instances.")
    ours = [each for each in asked if each in (instance_arn(), THIS_MACHINE)]
    failures = [{"arn": each, "reason": "MISSING"} for each in asked if each not in ours]
    return {"containerInstances": [_instance(state)] if ours else [], "failures": failures}


def _check_cluster(params: Mapping[str, Any]) -> None:
    if params.get("cluster", "").rpartition("/")[2] != CLUSTER:
        raise Refused("ClusterNotFoundException", "Cluster not found.")


def _instance(state: State) -> dict[str, Any]:
    tasks = [job for job in state.jobs.values() if job.attempt is not None and not job.is_multinode]
    return {
        "containerInstanceArn": instance_arn(),
        "status": "ACTIVE",
        "agentConnected": True,
        "runningTasksCount": len(tasks),
        "pendingTasksCount": 0,
        "registeredResources": _resources(state.machine),
        "remainingResources": _resources(state.free),
        "attributes": [{"name": "ecs.instance-type", "value": THIS_MACHINE}],
    }


def _resources(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "CPU", "type": "INTEGER", "integerValue": machine.vcpus * _UNITS},
        {"name": "MEMORY", "type": "INTEGER", "integerValue": machine.memory},
    ]
    if machine.gpus:
        found.append({"name": "GPU", "type": "STRINGSET", "stringSetValue": list(machine.gpus)})
    return found


# --- this machine ---------------------------------------------------------------------------------
# What this machine has to give to jobs.


KEPT = "executor.json"  # how the server is started next: executors/choice.py


class Believed(Struct, frozen=True):
    """What the server was told to believe of this machine; 0: what there is."""

    vcpus: int = 0


def read_machine(*, with_gpus: bool = True) -> "Machine":
    """What there is, as the server counts it; without `with_gpus` none are looked for."""
    from batchml.local.batch.state import Machine

    gpus = find_gpus() if with_gpus else ()
    return Machine(vcpus=count_vcpus(), memory=memory_mib(), gpus=gpus)


def believed_vcpus(home: Home) -> int:
    """Those that the server of this state folder gives out: `batchml local start --vcpus`."""
    told = read_record(home.local / KEPT, Believed)
    return told.vcpus if told and told.vcpus else count_vcpus()


def count_vcpus() -> int:
    """Those that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2


def find_gpus() -> tuple[str, ...]:
    """By UUID, where nvidia-smi names them. That takes its time."""
    import subprocess

    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
