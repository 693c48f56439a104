"""The network of a multi-node job in its definition: EFA devices, or TCP on purpose.

Sources: AWS Batch User Guide, "Elastic Fabric Adapter" (devices, permissions); AWS's sample of a
multi-node definition, awslabs/awsome-distributed-training (limits); aws/aws-ofi-nccl,
doc/efa-env-var.md (variables: those that the plugin sets itself are left to it).
"""

from typing import Any

from msgspec import Struct

from batchml.model.job import JobSpec
from batchml.runtime.protocol.launch import PLAIN
from batchml.runtime.protocol.variables import EFA

_DEVICE = "/dev/infiniband/uverbs"  # and a number from 0
_STACK = 67_108_864  # bytes
_FILES = 1_024_000
_UNLIMITED = -1

# Without it a data loader that forks may fail: "Cannot allocate memory".
_LIBFABRIC = {"FI_EFA_USE_HUGE_PAGE": "0"}
# As AWS Neuron's guides for several trn1 hosts have them.
_NEURON = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
# Otherwise NCCL looks for its plugin under a name that depends on its version.
_NCCL_EFA = {"NCCL_NET_PLUGIN": "ofi", "NCCL_TUNER_PLUGIN": "ofi"}
_NCCL_TCP = {"NCCL_NET": "Socket"}
# The interface of ECS has only an address for its own host.
_NCCL_START = {"NCCL_SOCKET_IFNAME": "^lo,docker,ecs"}


class NetworkProperties(Struct, frozen=True):
    """The devices, limits and variables of a container; empty ones stay out of the request."""

    devices: tuple[dict[str, Any], ...] = ()
    ulimits: tuple[dict[str, Any], ...] = ()
    environment: dict[str, str] = {}


def network_properties(spec: JobSpec, devices: int | None) -> NetworkProperties:
    """The properties of a job on hosts with this number of EFA devices; None: it is not known."""
    if spec.nodes == 1 or devices is None:
        return NetworkProperties()
    variables: dict[str, str] = {}
    if spec.resources.gpu_count:
        variables |= _NCCL_EFA if devices else _NCCL_TCP
        if spec.launch.kind == PLAIN:  # others know the interface that the nodes share
            variables |= _NCCL_START
    if not devices:
        return NetworkProperties(environment=variables)
    if spec.resources.neurons:
        variables |= _NEURON
    return NetworkProperties(
        tuple(_device(number) for number in range(devices)),
        (
            _limit("memlock", _UNLIMITED),  # EFA reads and writes memory that stays in place
            _limit("stack", _STACK),
            _limit("nofile", _FILES),
        ),
        {EFA: str(devices), **_LIBFABRIC, **variables},
    )


def _device(number: int) -> dict[str, Any]:
    path = f"{_DEVICE}{number}"
    return {
        "hostPath": path, "containerPath": path, "permissions": ["READ", "WRITE", "MKNOD"],
    }  # fmt: skip


def _limit(name: str, value: int) -> dict[str, Any]:
    return {"name": name, "softLimit": value, "hardLimit": value}
