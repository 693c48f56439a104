"""The Elastic Fabric Adapter (EFA) of an environment's hosts, or why they have none.

Sources: EC2 User Guide, "Elastic Fabric Adapter" and "Maximize network bandwidth" (interfaces by
network card); AWS Batch User Guide, "Elastic Fabric Adapter" and "Multi-node parallel jobs" (on
demand only). The AMIs of Amazon ECS have no EFA software: their recipe is aws/amazon-ecs-ami.
"""

from collections.abc import Iterator
from typing import NamedTuple

from batchml.model.environment import Compute, Environment
from batchml.runtime.protocol.instance_types import (
    InstanceDevices,
    devices_of,
    family_accelerator,
    family_types,
)

# Types whose first network card has no EFA, so that their interfaces begin at the second one.
_FIRST_CARD_WITHOUT = ("p6-b300.48xlarge",)
_ULTRASERVERS = "p6e-"  # hosts that come as a rack, with IMEX domains

_NONE = "no Elastic Fabric Adapter"


class FabricLayout(NamedTuple):
    """The EFA interfaces of a host: this many, one on each network card from `first` on."""

    interfaces: int
    first: int


def fabric_layout(compute: Compute, ami: str) -> FabricLayout | None:
    """The EFA interfaces of each host of a compute environment; None if EFA is off.

    `ami`: of the environment. `efa = true` with an obstacle is a mistake of the file, so here it is
    off.
    """
    if not compute.efa or any(efa_obstacles(compute, ami)):
        return None
    return _layout(_known(compute)[0])


def efa_obstacles(compute: Compute, ami: str) -> Iterator[str]:
    """Why the hosts of a compute environment can have no EFA, with what to do about it."""
    yield from _type_obstacles(compute)
    if compute.spot:
        yield (
            "is for multi-node jobs, which AWS Batch never places on spot hosts. Remove spot = "
            "true, or efa."
        )
    if not ((compute.ami or ami).startswith("ami-") or compute.bootstrap):
        is_x86 = not (compute.is_arm or compute.has_neurons)
        if is_x86 and (compute.ami or ami) == "build":  # config/accelerators.py refuses the others
            return
        advice = 'Set ami = "build", name' if _our_ami_supports(compute) else "Name"
        yield (
            f"AWS's AMI has no EFA driver. {advice} an AMI with the driver, or let a bootstrap "
            "script install it."
        )


def _our_ami_supports(compute: Compute) -> bool:
    """Whether the AMI that batchml builds, for x86 with NVIDIA's driver, supports all hosts."""
    chips = [each for each in map(family_accelerator, compute.instance_types) if each is not None]
    return not (
        compute.is_arm
        or compute.has_neurons
        or any(each.needs_nvlsm or each.last_cuda is not None for each in chips)
    )


def _type_obstacles(compute: Compute) -> Iterator[str]:
    for name in compute.instance_types:
        devices = devices_of(name)
        if name.startswith(_ULTRASERVERS):
            yield f"{name} is part of an UltraServer, which batchml does not set up."
        elif devices is None:
            alike = [each.instance_type for each in family_types(name) if each.efa_cards]
            others = f" Of {name}, these have EFA: {', '.join(alike)}." if alike else ""
            yield (
                f"the network cards of {name} are not known: name instance types, no families."
                f"{others}"
            )
        elif not devices.efa_cards:
            family = name.partition(".")[0]
            alike = [each.instance_type for each in family_types(family) if each.efa_cards]
            others = f" These have: {', '.join(alike)}." if alike else ""
            yield f"{name} has {_NONE}.{others}"
    layouts = {_layout(each): each for each in _known(compute) if each.efa_cards}
    if len(layouts) > 1:
        counts = ", ".join(
            f"{each.instance_type} has {each.efa_cards}" for each in layouts.values()
        )
        yield (
            "the hosts of a compute environment with EFA must have equally many interfaces "
            f"({counts}). Give each type a compute environment and a queue of its own."
        )


def _known(compute: Compute) -> list[InstanceDevices]:
    found = (devices_of(name) for name in compute.instance_types)
    return [each for each in found if each is not None]


def _layout(devices: InstanceDevices) -> FabricLayout:
    first = 1 if devices.instance_type in _FIRST_CARD_WITHOUT else 0
    return FabricLayout(devices.efa_cards, first)


# --- Queues ---------------------------------------------------------------------------------------


def efa_of_queue(environment: Environment, queue: str) -> int:
    """The number of EFA devices of each host of a queue of batchml.toml.

    It is 0 if the hosts of its compute environments have different numbers: the definition of a
    multi-node job names the devices, and a container does not start where one is missing.
    """
    counts = set(_counts(environment, queue).values())
    return counts.pop() if len(counts) == 1 else 0


def _counts(environment: Environment, queue: str) -> dict[str, int]:
    described = {
        name: environment.compute[name]
        for name in environment.queues[queue].compute
        if name in environment.compute
    }
    layouts = {name: fabric_layout(each, environment.ami) for name, each in described.items()}
    return {name: layout.interfaces if layout else 0 for name, layout in layouts.items()}


# --- In words -------------------------------------------------------------------------------------


class FabricLine(NamedTuple):
    """A sentence about EFA. `is_used`: whether the hosts or runs that it is about use EFA."""

    text: str
    is_used: bool


def describe_fabric(environment: Environment) -> Iterator[FabricLine]:
    """A line for each compute environment with the key `efa`, and for queues of unlike hosts."""
    for name, compute in environment.compute.items():
        layout = fabric_layout(compute, environment.ami)
        if layout is not None:
            rates = {f"{each.gbps:,.0f} Gbps" for each in _known(compute) if each.gbps}
            rate = f", {' or '.join(sorted(rates))}" if rates else ""
            text = (
                f"each host of compute {name} has {layout.interfaces} EFA "
                f"interface{'s'[: layout.interfaces != 1]}{rate}; all hosts are in one zone"
            )
            yield FabricLine(text, True)
        elif compute.efa:
            why = next(efa_obstacles(compute, environment.ami), "").rstrip(".")
            yield FabricLine(f'hosts of compute {name} have no EFA (efa = "auto"): {why}', False)
    for name in environment.queues:
        counts = _counts(environment, name)
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{each} has {count}" for each, count in counts.items())
            text = (
                f"multi-node runs in queue {name} do not use EFA, because its hosts have different "
                f"numbers of interfaces ({listed})"
            )
            yield FabricLine(text, False)


def describe_network(environment: Environment, queue: str, gpus: int) -> str:
    """What a multi-node run on a queue of AWS uses between its nodes; "" if it is not known."""
    if queue not in environment.queues:
        return ""
    count = efa_of_queue(environment, queue)
    if count:
        return f"EFA: each node has {count} device{'s'[: count != 1]}."
    if not gpus:
        return ""
    hosts = {name: environment.compute[name] for name in environment.queues[queue].compute}
    why = f"queue {queue} has {_NONE}"
    if len(set(_counts(environment, queue).values())) > 1:
        why = f"hosts of queue {queue} have different numbers of EFA interfaces"
    could = [
        name
        for name, each in hosts.items()
        if not (each.efa or each.spot or any(_type_obstacles(each)))
    ]
    more = ""
    if len(could) == len(hosts):
        more = f" Its hosts could have it: efa = true under compute.{could[0]} of batchml.toml."
    return f"Nodes talk over TCP (NCCL_NET=Socket): {why}.{more}"
