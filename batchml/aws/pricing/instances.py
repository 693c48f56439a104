"""The size of EC2 instance types: vCPUs, memory, GPUs."""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from batchml.aws.errors import translate_errors
from batchml.aws.pricing.prices import ClientFactory, paginate

# Names that AWS Batch accepts as instance types, and replaces by types: CreateComputeEnvironment.
CHOSEN_BY_BATCH = ("optimal", "default_x86_64", "default_arm64")


class InstanceType(Struct, frozen=True):
    name: str
    vcpus: int
    memory_mib: int
    gpus: int  # NVIDIA GPUs, which a container can be given
    arch: str


class InstanceTypes(Struct, frozen=True):
    """The types of each name (a type or a family), or the reason why they are unknown."""

    types: Mapping[str, tuple[InstanceType, ...]] = {}
    unknown: Mapping[str, str] = {}


def fetch_instance_types(
    session: ClientFactory, region: str, names: Iterable[str]
) -> dict[str, tuple[InstanceType, ...]]:
    """The types of each name, the smallest first. Raises what `translate_errors` does."""
    patterns = [name if "." in name else f"{name}.*" for name in names]
    request = {"Filters": [{"Name": "instance-type", "Values": patterns}]}
    with translate_errors("ec2:DescribeInstanceTypes"):
        found = [
            _to_instance_type(entry)
            for page in paginate(session, "ec2", "describe_instance_types", request)
            for entry in page["InstanceTypes"]
        ]
    return {
        name: tuple(sorted((each for each in found if _is_of(each.name, name)), key=_by_size))
        for name in names
    }


def _to_instance_type(entry: Mapping[str, Any]) -> InstanceType:
    gpus = entry.get("GpuInfo", {}).get("Gpus", ())
    architectures = entry["ProcessorInfo"]["SupportedArchitectures"]
    return InstanceType(
        name=entry["InstanceType"],
        vcpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_mib=entry["MemoryInfo"]["SizeInMiB"],
        gpus=sum(gpu.get("Count", 0) for gpu in gpus if gpu.get("Manufacturer") == "NVIDIA"),
        arch="arm64" if "arm64" in architectures else "x86_64",
    )


def _is_of(instance_type: str, name: str) -> bool:
    return name in (instance_type, instance_type.partition(".")[0])


def _by_size(instance: InstanceType) -> tuple[int, str]:
    return instance.vcpus, instance.name
