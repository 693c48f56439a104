"""Fit a job to this machine: reduce its resources to those that the machine has."""

from msgspec import Struct
from msgspec.structs import replace

from batchml.errors import ConfigError
from batchml.model.group import min_workers, resources_of
from batchml.model.job import JobSpec, Resources


class Capacity(Struct, frozen=True):
    """The resources of this machine. Memory in MiB."""

    vcpus: int
    memory_mib: int
    gpus: int


class FittedJob(Struct, frozen=True):
    """A job that fits, and descriptions of what was reduced."""

    spec: JobSpec
    cuts: tuple[str, ...]


def fit_job(spec: JobSpec, capacity: Capacity) -> FittedJob:
    """Reduce the resources of a job to those of the machine: all its nodes run there at once.

    Raises ConfigError for more nodes than there are vCPUs.
    """
    if spec.nodes > max(1, capacity.vcpus):
        raise ConfigError(
            spec.name,
            [
                f"nodes: {spec.nodes} at once, and this machine has "
                f"{_count(capacity.vcpus, 'vCPU')}: each node takes at least one. Ask for fewer, "
                f"or let them share: batchml local stop, then batchml local start "
                f"--vcpus {spec.nodes}."
            ],
        )
    wanted, nodes = spec.resources, spec.nodes
    cuts: list[str] = []
    vcpus = min(wanted.vcpus, capacity.vcpus // nodes)
    if vcpus < wanted.vcpus:
        cuts.append(f"{_count(vcpus, 'vCPU')} instead of {wanted.vcpus}")
    memory, most = wanted.memory, capacity.memory_mib // nodes
    if wanted.memory_mib > most:
        memory = f"{most} MiB"
        cuts.append(f"{_gib(most)} of memory instead of {_gib(wanted.memory_mib)}")
    gpus = min(wanted.gpus, capacity.gpus // nodes)
    if gpus < wanted.gpus:
        cuts.append(f"{_count(gpus, 'GPU') if gpus else 'no GPU'} instead of {wanted.gpus}")
    if nodes > 1:
        cuts = [f"{cut} on each node" for cut in cuts]
    resources = replace(wanted, vcpus=vcpus, memory=memory, gpus=gpus)
    return FittedJob(replace(spec, resources=resources), tuple(cuts))


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def fit_groups(spec: JobSpec, capacity: Capacity) -> FittedJob:
    """Reduce the resources of groups until all of them run on one machine at once.

    Each container keeps at least one vCPU and an equal part of the memory. Where even then not all
    fit, as many as possible run at once; the others follow. Raises ConfigError where the head and
    its `min` workers do not fit.
    """
    needed = 1 + sum(min_workers(group) for group in spec.groups[1:])
    if needed > capacity.vcpus:
        raise ConfigError(
            spec.name,
            [
                f"groups: the head and the workers that it waits for are {needed} containers, and "
                f"this machine has {capacity.vcpus} vCPUs. Ask for fewer, set min = 0, or let them "
                f"share: batchml local stop, then batchml local start --vcpus {needed}."
            ],
        )
    total = min(capacity.vcpus, sum(group.count for group in spec.groups))
    most = Capacity(capacity.vcpus // total, capacity.memory_mib // total, capacity.gpus)
    groups, cuts = [], list[str]()
    wanted = [(group, resources_of(spec, group)) for group in spec.groups]
    share_out = (
        sum(group.count * each.vcpus for group, each in wanted) > capacity.vcpus
        or sum(group.count * each.memory_mib for group, each in wanted) > capacity.memory_mib
    )
    for group, asked in wanted:
        given = _limit(asked, most) if share_out else asked
        if given.gpus > capacity.gpus:
            given = replace(given, gpus=capacity.gpus)
        if given != asked:
            cuts.append(f"{group.name} with {_describe(given)} instead of {_describe(asked)}")
        groups.append(replace(group, resources=given))
    return FittedJob(replace(spec, groups=tuple(groups)), tuple(cuts))


def _limit(asked: Resources, most: Capacity) -> Resources:
    memory = asked.memory if asked.memory_mib <= most.memory_mib else f"{most.memory_mib} MiB"
    return replace(asked, vcpus=min(asked.vcpus, most.vcpus), memory=memory)


def _describe(resources: Resources) -> str:
    gpus = f", {resources.gpus} GPU" if resources.gpus else ""
    return f"{resources.vcpus} vCPU, {resources.memory_mib} MiB{gpus}"


def check_uncut(fitted: FittedJob) -> None:
    """Raise ConfigError when anything was reduced (`--strict-resources`)."""
    if fitted.cuts:
        name = fitted.spec.name
        raise ConfigError(
            name, [f"resources: this machine would give {cut}." for cut in fitted.cuts]
        )
