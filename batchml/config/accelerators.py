"""Rules for the accelerators of instance types: which batchml can use, and with which AMI.

Sources: docs/ami.md; NVIDIA, "Fabric Manager User Guide" (nvlsm); ECS Developer Guide, "Amazon ECS
task definitions for AWS Neuron machine learning workloads".
"""

import re
from collections.abc import Iterator

from batchml.errors import did_you_mean
from batchml.model.environment import Compute, Environment, is_neuron_type
from batchml.runtime.protocol.instance_types import (
    NEURON,
    NVIDIA,
    UNKNOWN,
    Accelerator,
    family_accelerator,
    family_types,
)

_USABLE = "Name types with NVIDIA GPUs, such as g6.xlarge, or Neuron chips, such as trn1.32xlarge"
# Source: EC2 User Guide, "Amazon EC2 instance type naming conventions".
_SIZE = r"nano|micro|small|medium|large|\d*xlarge|metal(-\d+xl)?"
_SIZES = ("medium", "large", "xlarge", *(f"{n}xlarge" for n in (2, 4, 8, 12, 16, 24, 48)), "metal")
_MAKERS = {"habana": "Habana", "qualcomm": "Qualcomm", "xilinx": "Xilinx"}


def accelerator_mistakes(name: str, compute: Compute) -> Iterator[str]:
    """The mistakes in the instance types and AMI of the compute environment `name`.

    Each is `.key: text`.
    """
    for each in dict.fromkeys(compute.instance_types):
        accelerator = family_accelerator(each)
        why = _unusable(each, accelerator) if accelerator is not None else ""
        why = why or _unknown_size(each, accelerator)
        if why:
            yield f".instance_types: {why}"
    with_neurons = [each for each in compute.instance_types if is_neuron_type(each)]
    others = [each for each in compute.instance_types if not is_neuron_type(each)]
    if with_neurons and others:
        yield (
            f".instance_types: {with_neurons[0]} needs the AMI for Neuron chips, {others[0]} "
            "another one. Put them into two compute environments."
        )
    if compute.ami == "build":
        yield from _build_mistakes(name, compute)


def _unknown_size(name: str, accelerator: Accelerator | None) -> str:
    """Why a type has no such size, as far as is known; "" for a family."""
    family, _, size = name.partition(".")
    known = [each.instance_type for each in family_types(family)] if accelerator else []
    if not size or (name in known if known else re.fullmatch(_SIZE, size)):
        return ""
    hint = did_you_mean(name, known or [f"{family}.{each}" for each in _SIZES])
    listed = f" It knows {', '.join(known)}." if known else ""
    return f"batchml does not know {name}.{hint}{listed}"


def _unusable(instance_type: str, accelerator: Accelerator) -> str:
    """Why jobs cannot use the accelerators of a type, and what to do; "" if they can."""
    maker = accelerator.maker
    if maker == UNKNOWN:
        return (
            f"batchml does not know the accelerators of {instance_type}. Update batchml, or name "
            "types that it knows, such as g6.xlarge, p5.48xlarge or trn1.32xlarge."
        )
    if maker == "amd":
        return (
            f"{instance_type} has AMD GPUs ({accelerator.name}), and the AMIs and images have "
            f"NVIDIA's driver and CUDA. {_USABLE}."
        )
    if maker not in (NVIDIA, NEURON):
        return (
            f"{instance_type} has accelerators of {_MAKERS[maker]} ({accelerator.name}), for which "
            f"batchml has neither an AMI nor an image. {_USABLE}."
        )
    family = instance_type.partition(".")[0]
    if maker == NVIDIA and not any(each.count for each in family_types(family)):
        return (
            f"{instance_type} has a part of a GPU ({accelerator.name}), which needs NVIDIA's GRID "
            "driver, and AWS Batch counts whole GPUs. Name types with whole ones, such as "
            "g6.xlarge."
        )
    if accelerator.name == "GB200":
        return (
            f"{instance_type} has Arm processors beside its GPUs, for which batchml has no image "
            "with CUDA. Name p6-b200.48xlarge or p5en.48xlarge."
        )
    return ""


def build_mistakes(environment: Environment) -> Iterator[str]:
    """The mistakes of an environment that uses the AMI that batchml builds.

    Those of a compute environment with an `ami` of its own are in `accelerator_mistakes`.
    """
    needs_internet = environment.builds_image and not environment.network.is_given
    if environment.compute and needs_internet and environment.network.egress == "endpoints":
        yield (
            'network.egress: building an AMI needs packages from the internet: set "nat", or '
            'ami = "ecs-gpu".'
        )
    for name, compute in environment.compute.items():
        if environment.ami == "build" and not compute.ami and compute.has_gpus:
            yield from (f"compute.{name}{text}" for text in _build_mistakes(name, compute))


def mount_mistakes(environment: Environment) -> Iterator[str]:
    """Compute environments whose hosts lack the folder that `driver-mount` mounts: docs/ami.md.

    A bootstrap script may make it, and an AMI of the user's own may have it.
    """
    if environment.gpu_mode != "driver-mount":
        return
    for name, compute in environment.compute.items():
        if (
            compute.has_gpus
            and not compute.bootstrap
            and ((compute.ami or environment.ami) == "ecs-gpu")
        ):
            yield (
                f'compute.{name}: gpu_access is "driver-mount", and AWS\'s AMI has no folder '
                '/opt/nvidia with the driver: the AMI of ami = "build" has. Set gpu_access = '
                '"toolkit", which works with both AMIs.'
            )


def _build_mistakes(name: str, compute: Compute) -> Iterator[str]:
    """The types of a compute environment that the AMI that batchml builds does not support."""
    instead = f'set ami = "ecs-gpu" in compute.{name}.'
    if compute.efa is True and not compute.bootstrap:  # AWS's AMI has no EFA driver
        instead = (
            f'set ami = "ecs-gpu" in compute.{name}, with a bootstrap script that installs EFA\'s '
            "driver or without efa."
        )
    with_neurons = [each for each in compute.instance_types if is_neuron_type(each)]
    if with_neurons:
        yield (
            f".ami: the AMI that batchml builds has NVIDIA's driver, and {with_neurons[0]} needs "
            "AWS's AMI for Neuron chips. Remove ami, and setup chooses that one."
        )
    for each in dict.fromkeys(compute.instance_types):
        accelerator = family_accelerator(each)
        if accelerator is None:
            continue
        if accelerator.last_cuda is not None:  # the AMI has NVIDIA's open kernel modules
            yield (
                ".instance_types: the driver of the AMI that batchml builds does not support "
                f"{each}: {instead}"
            )
        elif accelerator.needs_nvlsm and accelerator.name != "GB200":
            yield (
                f".instance_types: the GPUs of {each} need NVIDIA's nvlsm on the host, which the "
                f"AMI that batchml builds does not have: {instead}"
            )
